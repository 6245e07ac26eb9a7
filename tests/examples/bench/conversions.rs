//! The offline commands: convert, verify, open.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fsdp::checkpoint::save;
use fsdp::formats::checkpoint::open;
use fsdp::formats::reader::OpenOptions;
use fsdp::prelude::*;
use fsdp::tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp::tools::verify::{Level, VerifyOptions, verify};
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};

use crate::figures::{Case, Figures, Pairs};
use crate::model::{Training, on_ranks};
use crate::{Bench, limits};

const RANKS: usize = 4;

pub(crate) fn run(bench: &Bench<'_>, figures: &mut Figures) -> Result<()> {
    let dcp = bench.directory.join("dcp");
    let bytes = on_ranks(RANKS, |group| {
        let training = Training::new(group, bench.size, FsdpConfig::default())?;
        Ok(save(
            &dcp,
            &training.state()?,
            training.group(),
            &SaveOptions::default(),
        )?
        .total_bytes)
    })?;
    let safetensors = bench.directory.join("model.safetensors");
    let other = bench.directory.join("other");
    let torch = bench.directory.join("torch.pt");
    let convert_to = |source: &Path, destination: &Path, target: OutputFormat| -> Result<()> {
        let source = open(source, OpenOptions::default())?;
        convert(&*source, destination, target, ConvertOptions::default())?;
        Ok(())
    };
    let threads = fsdp::formats::internals::default_threads();
    let write = || limits::write(&raw(bench), bytes as usize, threads, true);
    measure(
        bench,
        figures,
        "DCP to safetensors",
        bytes,
        ("raw write, fsync", &write),
        Some(&safetensors),
        &|| convert_to(&dcp, &safetensors, OutputFormat::SafetensorsFile),
    )?;
    measure(
        bench,
        figures,
        "safetensors to DCP",
        bytes,
        ("raw write, fsync", &write),
        Some(&other),
        &|| convert_to(&safetensors, &other, OutputFormat::Dcp { ranks: 2 }),
    )?;
    measure(
        bench,
        figures,
        "reshard 4 to 2",
        bytes,
        ("raw write, fsync", &write),
        Some(&other),
        &|| convert_to(&dcp, &other, OutputFormat::Dcp { ranks: 2 }),
    )?;
    // In memory there is no room for all of them at once.
    remove(&other)?;
    measure(
        bench,
        figures,
        "DCP to torch",
        bytes,
        ("raw write, fsync", &write),
        Some(&torch),
        &|| convert_to(&dcp, &torch, OutputFormat::Torch),
    )?;
    let read = || limits::read(&safetensors, bytes as usize, threads);
    measure(
        bench,
        figures,
        "verify hashes",
        bytes,
        ("raw read, fresh memory", &read),
        None,
        &|| {
            let report = verify(
                &*open(&dcp, OpenOptions::default())?,
                Level::Hashes,
                VerifyOptions::default(),
            )?;
            ensure!(
                report.problems.is_empty(),
                "a fresh checkpoint has problems"
            );
            Ok(())
        },
    )
}

/// Times something of this process, in pairs with its limit, each of which comes first in half of
/// the pairs. What both have written is removed before each of them, outside of the time: to give
/// pages back takes long, and pages that have just been given back are quicker to get again.
fn measure(
    bench: &Bench<'_>,
    figures: &mut Figures,
    name: &str,
    bytes: u64,
    (limit_name, limit): (&str, &dyn Fn() -> Result<Duration>),
    destination: Option<&Path>,
    run: &dyn Fn() -> Result<()>,
) -> Result<()> {
    let mut peak = 0;
    // The first time is not counted: it reads files that are not in the cache yet, and memory that
    // was never used.
    clear(bench, destination)?;
    timed(run, &mut peak)?;
    let mut pairs = Pairs::default();
    for index in 0..bench.runs {
        clear(bench, destination)?;
        if index % 2 == 0 {
            let limit = limit()?;
            clear(bench, destination)?;
            pairs.push(timed(run, &mut peak)?, limit);
        } else {
            let time = timed(run, &mut peak)?;
            clear(bench, destination)?;
            pairs.push(time, limit()?);
        }
    }
    // The checkpoint stays, because the next case may read it.
    if destination.is_some_and(|destination| !destination.exists()) {
        run()?;
    }
    remove(&raw(bench))?;
    let case = bench.case(name, 1, bytes, pairs.seconds(), pairs.limit(limit_name));
    figures.push(Case {
        peak_bytes: Some(peak),
        ..case
    });
    Ok(())
}

/// Runs something once. Returns its time, and raises `peak` to the most heap that was in use
/// meanwhile.
fn timed(run: &dyn Fn() -> Result<()>, peak: &mut u64) -> Result<Duration> {
    let before = live_bytes();
    reset_peak();
    let start = Instant::now();
    run()?;
    let time = start.elapsed();
    *peak = (*peak).max(peak_bytes().saturating_sub(before) as u64);
    Ok(time)
}

/// Returns the path of the file that raw writes make.
fn raw(bench: &Bench<'_>) -> PathBuf {
    bench.directory.join("raw")
}

/// Removes what a case and its limit have written.
fn clear(bench: &Bench<'_>, destination: Option<&Path>) -> Result<()> {
    remove(&raw(bench))?;
    destination.map_or(Ok(()), remove)
}

/// Removes a checkpoint of one file, with what lies beside it, or of a directory.
fn remove(checkpoint: &Path) -> Result<()> {
    let (Some(directory), Some(name)) = (checkpoint.parent(), checkpoint.file_stem()) else {
        return Ok(());
    };
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let belongs = entry
            .file_name()
            .to_string_lossy()
            .starts_with(&*name.to_string_lossy());
        match entry.file_type()?.is_dir() {
            _ if !belongs => {}
            true => std::fs::remove_dir_all(entry.path())?,
            false => std::fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}
