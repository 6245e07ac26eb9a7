//! Hostile and damaged files: a typed error or a plain reading each time, no panic, nothing outside
//! the directory, and at most 64 MiB of memory. A case that hangs is stopped by the test runner.

#![expect(
    clippy::disallowed_methods,
    reason = "tests damage checkpoints by hand"
)]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod bombs;
mod campaign;
mod crafted;
mod damage;
mod random;
mod repeats;
mod seeds;
#[path = "../../../fsdp-formats/tests/common/state.rs"]
mod state;
#[path = "../../../../fuzz/src/lib.rs"]
#[expect(
    unreachable_pub,
    reason = "the same file is the library of the fuzz targets"
)]
mod targets;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fsdp_formats::checkpoint::Checkpoint;
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::tensor_parallel::{Rules, TensorParallelPlan};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The most that any hostile input may make us allocate.
const LIMIT: usize = 64 << 20;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// Writes the parts of two tensor-parallel ranks: halves of what has an even size, and copies of
/// the rest.
fn write_parts(source: &dyn Checkpoint, to: &Path) {
    let rules = source.metadata().tensors().map(|(fqn, tensor)| {
        let how = match tensor.shape[..] {
            [rows, _] if rows.is_multiple_of(4) => "packed_colwise",
            [rows] | [rows, _] if rows.is_multiple_of(2) => "colwise",
            [_, columns] if columns.is_multiple_of(2) => "rowwise",
            _ => "replicate",
        };
        format!("{fqn}={how}")
    });
    // A key may be the end of another one: the longer goes first.
    let mut rules: Vec<String> = rules.collect();
    rules.sort_by_key(|rule| std::cmp::Reverse(rule.len()));
    let rules = Rules::new(&rules, [].into()).unwrap();
    let plan = TensorParallelPlan::new(source.metadata(), &rules, 2).unwrap();
    let options = ConvertOptions {
        tensor_parallel: Some(&plan),
        ..ConvertOptions::default()
    };
    convert(
        source,
        to,
        OutputFormat::SafetensorsDirectory {
            max_file_bytes: 1000,
        },
        options,
    )
    .unwrap();
}

/// Runs a case, and asserts on the memory that it took.
fn bounded<T>(case: impl FnOnce() -> T) -> T {
    bounded_beyond(0, case)
}

/// Runs a case on files of so many bytes, which may be in memory besides.
fn bounded_beyond<T>(files: usize, case: impl FnOnce() -> T) -> T {
    // One case at a time: the allocator counts for the whole process.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = live_bytes();
    reset_peak();
    let outcome = case();
    let taken = peak_bytes().saturating_sub(before);
    assert!(taken <= LIMIT + files, "the case took {} MiB", taken >> 20);
    outcome
}
