//! The speed and the memory use of the offline commands: inspect, verify, convert, reshard.
//!
//! `offline [--json] [--runs N] [--mib N] [--binary target/release/fsdp]`: medians over N runs on a
//! checkpoint of so many MiB; with the binary, the time of whole processes of `fsdp inspect`
//! besides.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use fsdp_formats::checkpoint::open;
use fsdp_formats::internals::lay_out_tensor;
use fsdp_formats::metadata::{
    Chunk, Entry, METADATA_FILE, Metadata, StorageInfo, TensorEntry, TensorProperties, encode,
};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::Durable;
use fsdp_layout::{DType, TensorBox};
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::verify::{Level, VerifyOptions, add_integrity, verify};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Options {
    json: bool,
    runs: usize,
    mib: u64,
    binary: Option<PathBuf>,
}

fn options() -> Result<Options> {
    let mut options = Options {
        json: false,
        runs: 5,
        mib: 256,
        binary: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("an option has no value");
        match argument.as_str() {
            "--json" => options.json = true,
            "--runs" => options.runs = value()?.parse::<usize>()?.max(1),
            "--mib" => options.mib = value()?.parse()?,
            "--binary" => options.binary = Some(value()?.into()),
            other => return Err(format!("what is `{other}`?").into()),
        }
    }
    Ok(options)
}

/// Makes a DCP directory of one rank with tensors of zeros, of these many rows of 4 KiB each.
fn make(directory: &Path, rows: impl Iterator<Item = u64>) -> Result<()> {
    let staging = Durable::new().prepare(directory, true)?;
    let mut metadata = Metadata::default();
    let mut items = Vec::new();
    let mut at = 0;
    for (index, rows) in rows.enumerate() {
        let shape = vec![rows as usize, 1024];
        let item = lay_out_tensor(DType::F32, &shape)?;
        let (relative_path, length) = ("__0_0.distcp".to_owned(), item.length());
        let stored = StorageInfo {
            relative_path,
            offset: at,
            length,
            transforms: Vec::new(),
        };
        let chunks = vec![Chunk {
            bounds: TensorBox::whole(&shape),
            stored: Some(stored),
        }];
        let tensor = TensorEntry {
            properties: TensorProperties::new(DType::F32),
            shape,
            chunks,
        };
        metadata.entries.insert(
            format!("model.blocks.{index}.weight"),
            Entry::Tensor(tensor),
        );
        items.push((at, item));
        at += length;
    }
    let file = staging.create("__0_0.distcp", at)?;
    for (at, item) in items {
        file.write_at(at, &item.head(0))?;
        file.write_at(
            at + item.storage_offset(0) + item.storage_length(0),
            &item.tail(&[0]),
        )?;
    }
    file.finish()?;
    Ok(staging.commit(METADATA_FILE, &encode(&metadata))?)
}

struct Measured {
    name: &'static str,
    bytes: u64,
    seconds: f64,
    /// The peak of the heap; `None` for a process of its own.
    peak: Option<usize>,
}

fn measure(
    name: &'static str,
    bytes: u64,
    runs: usize,
    mut run: impl FnMut() -> Result<()>,
) -> Result<Measured> {
    let mut seconds = Vec::new();
    let live = live_bytes();
    reset_peak();
    for _ in 0..runs {
        let start = Instant::now();
        run()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(Measured {
        name,
        bytes,
        seconds: seconds[runs / 2],
        peak: Some(peak_bytes().saturating_sub(live)),
    })
}

fn main() -> Result<()> {
    let Options {
        json,
        runs,
        mib,
        binary,
    } = options()?;
    let work = tempfile::tempdir()?;
    let place = |name: &str| work.path().join(name);
    let (small, many, large) = (place("small"), place("many"), place("large"));
    make(&small, std::iter::repeat_n(1, 50))?;
    make(&many, std::iter::repeat_n(1, 100_000))?;
    let rows = (mib << 8) / 32;
    make(&large, std::iter::repeat_n(rows.max(1), 32))?;
    add_integrity(&large, None)?;
    let bytes = rows.max(1) * 4096 * 32;
    let metadata = |directory: &Path| {
        directory
            .join(METADATA_FILE)
            .metadata()
            .map(|metadata| metadata.len())
    };

    let mut measured = Vec::new();
    for (name, directory) in [
        ("inspect, 50 tensors, process", &small),
        ("inspect, 100000 tensors, process", &many),
    ] {
        let Some(binary) = &binary else { continue };
        let mut found = measure(name, metadata(directory)?, runs, || {
            let status = Command::new(binary)
                .arg("inspect")
                .arg(directory)
                .stdout(Stdio::null())
                .status()?;
            if status.success() {
                Ok(())
            } else {
                Err("`fsdp inspect` failed".into())
            }
        })?;
        found.peak = None;
        measured.push(found);
    }
    for (name, directory) in [
        ("open, 50 tensors", &small),
        ("open, 100000 tensors", &many),
    ] {
        measured.push(measure(name, metadata(directory)?, runs, || {
            open(directory, OpenOptions::default())?;
            Ok(())
        })?);
    }
    measured.push(measure("verify, hashes", bytes, runs, || {
        let report = verify(
            &*open(&large, OpenOptions::default())?,
            Level::Hashes,
            VerifyOptions::default(),
        )?;
        if report.is_ok() {
            Ok(())
        } else {
            Err("it does not verify".into())
        }
    })?);
    let (file, back, resharded) = (
        place("model.safetensors"),
        place("back"),
        place("resharded"),
    );
    for (name, from, to, target) in [
        (
            "convert, DCP to safetensors",
            &large,
            &file,
            OutputFormat::SafetensorsFile,
        ),
        (
            "convert, safetensors to DCP",
            &file,
            &back,
            OutputFormat::Dcp { ranks: 1 },
        ),
        (
            "reshard, 1 rank to 4",
            &large,
            &resharded,
            OutputFormat::Dcp { ranks: 4 },
        ),
    ] {
        measured.push(measure(name, bytes, runs, || {
            let options = ConvertOptions {
                overwrite: true,
                ..ConvertOptions::default()
            };
            convert(&*open(from, OpenOptions::default())?, to, target, options)?;
            Ok(())
        })?);
    }
    report(&measured, json);
    Ok(())
}

#[expect(clippy::print_stdout, reason = "figures are this program's data")]
fn report(measured: &[Measured], json: bool) {
    if json {
        let rows: Vec<serde_json::Value> = measured
            .iter()
            .map(|Measured { name, bytes, seconds, peak }| {
                serde_json::json!({ "name": name, "bytes": bytes, "seconds": seconds, "peak_bytes": peak })
            })
            .collect();
        println!("{}", serde_json::json!({ "schema": 1, "measured": rows }));
        return;
    }
    for Measured {
        name,
        bytes,
        seconds,
        peak,
    } in measured
    {
        let peak = peak.map_or_else(String::new, |peak| {
            format!(", peak {:.1} MiB", peak as f64 / f64::from(1 << 20))
        });
        let rate = *bytes as f64 / seconds / f64::from(1 << 20);
        println!("{name:<34} {seconds:>9.4} s, {rate:>8.0} MiB/s{peak}");
    }
}
