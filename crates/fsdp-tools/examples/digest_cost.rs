//! The share of digests in the time of saves and loads, and the time in which two checkpoints are
//! compared by them: `digest_cost [--json] [--runs N] [--mib N] [--directory DIR]`.
//!
//! One rank saves tensors of so many MiB together and loads them again, with digests and without,
//! by turns; medians over N runs of each. The directory is best on tmpfs, where nothing else takes
//! time.

use std::borrow::Cow;
use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::plan::{Deduplicate, LoadRequest, LocalPlan, plan_save};
use fsdp_formats::reader::{CheckpointReader, Destination, ReadOptions};
use fsdp_formats::storage::Durable;
use fsdp_formats::writer::{PayloadSource, RankItems, WriteOptions, finish, write_rank};
use fsdp_layout::{DType, PlainValue, TensorBox};
use fsdp_tools::diff::diff_digests;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Bytes of a tensor.
const TENSOR: usize = 64 << 20;
const ROWS: usize = TENSOR / 4096;

/// The same bytes for every tensor.
struct State(Vec<u8>);

impl PayloadSource for State {
    fn payload(
        &self,
        _: &str,
        _: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> std::result::Result<(), FileError>,
    ) -> std::result::Result<(), FileError> {
        sink(&self.0[range.start as usize..range.end as usize])
    }

    fn value(&self, fqn: &str) -> std::result::Result<Cow<'_, PlainValue>, FileError> {
        Err(FileError::not_stored(fqn))
    }
}

fn save(path: &Path, state: &State, plan: &LocalPlan, digests: bool) -> Result<()> {
    let plans = [plan.clone()];
    let global = plan_save(&plans, Deduplicate::default())?;
    let staging = Durable::new().prepare(path, true)?;
    let options = WriteOptions {
        digests,
        ..WriteOptions::default()
    };
    let items = RankItems {
        rank: 0,
        plan,
        selection: &global.selections[0],
        source: state,
    };
    let written = write_rank(&staging, &items, &options, None)?;
    finish(staging, global.metadata, &[written], None)?;
    Ok(())
}

fn load(path: &Path, buffers: &mut [Vec<u8>], digest: bool) -> Result<()> {
    let checkpoint = CheckpointReader::open(path)?;
    let destinations = buffers.iter_mut().enumerate().map(|(index, buffer)| {
        let shape = vec![ROWS, 1024];
        let boxes = vec![TensorBox::whole(&shape)];
        let request = LoadRequest {
            fqn: name(index),
            dtype: DType::F32,
            shape,
            boxes,
        };
        Destination::new(request, vec![buffer])
    });
    let done = checkpoint.read(
        destinations.collect(),
        ReadOptions {
            digest,
            ..ReadOptions::default()
        },
    )?;
    if done.sums.is_empty() == digest {
        Err("no sums, or unasked ones".into())
    } else {
        Ok(())
    }
}

fn name(index: usize) -> String {
    format!("model.blocks.{index}.weight")
}

fn seconds(f: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns how much longer the second of two takes, as a fraction: the median over pairs that ran
/// one after the other.
fn share(without: &[f64], with: &[f64]) -> f64 {
    median(
        without
            .iter()
            .zip(with)
            .map(|(without, with)| with / without - 1.0)
            .collect(),
    )
}

#[expect(clippy::print_stdout, reason = "it prints its figures")]
fn main() -> Result<()> {
    let (mut json, mut runs, mut mib, mut directory) = (false, 7, 2048, PathBuf::from("/dev/shm"));
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or("an option has no value");
        match argument.as_str() {
            "--json" => json = true,
            "--runs" => runs = value()?.parse::<usize>()?.max(1),
            "--mib" => mib = value()?.parse::<usize>()?,
            "--directory" => directory = value()?.into(),
            other => return Err(format!("what is `{other}`?").into()),
        }
    }
    let parent = tempfile::tempdir_in(directory)?;
    let path = parent.path().join("checkpoint");
    let tensors = (mib << 20).div_ceil(TENSOR);
    let state = State((0..TENSOR).map(|index| ((index * 31) >> 3) as u8).collect());
    let mut plan = LocalPlan::default();
    for index in 0..tensors {
        plan.add_tensor(
            name(index),
            None,
            DType::F32,
            vec![ROWS, 1024],
            vec![TensorBox::whole(&[ROWS, 1024])],
        );
    }
    let mut buffers = vec![vec![1u8; TENSOR]; tensors];
    // The first save finds nothing to replace, so it is not counted.
    save(&path, &state, &plan, true)?;
    let mut times = [const { Vec::new() }; 4];
    for run in 0..runs {
        // Each is first as often as the other, as memory that was given back a moment ago is faster
        // than other memory.
        let mut order = [(false, 0), (true, 1)];
        order.rotate_left(run % 2);
        for (digests, index) in order {
            times[index].push(seconds(|| save(&path, &state, &plan, digests))?);
            times[index + 2].push(seconds(|| load(&path, &mut buffers, digests))?);
        }
    }
    // Two checkpoints that differ in nothing, compared from opening on.
    let other = parent.path().join("other");
    save(&other, &state, &plan, true)?;
    save(&path, &state, &plan, true)?;
    let compared = (0..runs).map(|_| {
        seconds(|| {
            let (first, second) = (
                CheckpointReader::open(&path)?,
                CheckpointReader::open(&other)?,
            );
            let mut differences = 0;
            let by_digests = diff_digests(&first, &second, &mut |_, _| differences += 1)?;
            if by_digests && differences == 0 {
                Ok(())
            } else {
                Err("they should be equal".into())
            }
        })
    });
    let diff = median(compared.collect::<Result<_>>()?);
    let [save_share, load_share] = [0, 2].map(|first| share(&times[first], &times[first + 1]));
    let [save_without, save_with, load_without, load_with] = times.map(median);
    if json {
        println!(
            "[{{\"save_with\":{save_with},\"save_without\":{save_without},\"save_share\":{save_share},\"load_with\":{load_with},\"load_without\":{load_without},\"load_share\":{load_share},\"diff\":{diff}}}]"
        );
        return Ok(());
    }
    for (name, with, without, share) in [
        ("save", save_with, save_without, save_share),
        ("load", load_with, load_without, load_share),
    ] {
        let percent = share * 100.0;
        println!(
            "{name}: {with:.3} s with digests, {without:.3} s without: {percent:+.1} % (median of the pairs)"
        );
    }
    println!("diff: {:.1} ms", diff * 1e3);
    Ok(())
}
