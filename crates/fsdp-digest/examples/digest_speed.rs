//! The speed of a digest, of bytes in memory and in the cache, beside that of a copy of as many
//! bytes: `cargo run --release -p fsdp-digest --example digest_speed`.
#![expect(clippy::print_stdout, reason = "it prints its figures")]

use std::hint::black_box;
use std::time::Instant;

use fsdp_digest::Sum;

const BYTES: usize = 256 << 20;
/// Bytes that stay in the second-level cache, as those that a save has hashed.
const CACHED: usize = 1 << 20;
const RUNS: usize = 7;

fn main() {
    let bytes: Vec<u8> = (0..BYTES).map(|index| ((index * 31) >> 3) as u8).collect();
    let mut copy = vec![0u8; BYTES];
    let (mut digests, mut copies) = (Vec::new(), Vec::new());
    let mut cached = Vec::new();
    for _ in 0..RUNS {
        digests.push(seconds(|| {
            let mut sum = Sum::default();
            sum.add_bytes(0, black_box(&bytes));
            black_box(sum);
        }));
        cached.push(seconds(|| {
            let mut sum = Sum::default();
            (0..BYTES / CACHED).for_each(|_| sum.add_bytes(0, black_box(&bytes[..CACHED])));
            black_box(sum);
        }));
        copies.push(seconds(|| {
            black_box(&mut copy).copy_from_slice(black_box(&bytes))
        }));
    }
    for (name, mut times) in [
        ("digest", digests),
        ("digest in the cache", cached),
        ("memcpy", copies),
    ] {
        times.sort_by(f64::total_cmp);
        println!(
            "{name}: {:.1} GB/s (median of {RUNS}, one thread)",
            BYTES as f64 / times[RUNS / 2] / 1e9
        );
    }
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}
