//! Runs simulations of saves, one seed after the other: `cargo xtask simulate`.

#![expect(clippy::print_stdout, reason = "the figures are its output")]
#![expect(unreachable_pub, reason = "its modules are those of the test too")]

mod simulation;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Parser;

use self::simulation::flaw::Flaw;
use self::simulation::simulate;

#[derive(Parser)]
#[command(about = "Deterministic simulations of saves on a disk that forgets")]
struct Arguments {
    /// The number of simulations
    #[arg(long, value_name = "N", default_value_t = 2000)]
    seeds: u64,
    /// The seed of the first one
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Look for each of the bugs that are put in on purpose, instead
    #[arg(long)]
    flaws: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let seeds = arguments.seed..arguments.seed.saturating_add(arguments.seeds);
    if arguments.flaws {
        for flaw in Flaw::ALL {
            let found = seeds.clone().find_map(|seed| Some((seed, simulate(seed, Some(flaw)).err()?)));
            let Some((seed, error)) = found else { bail!("{flaw:?} was not found") };
            println!("{flaw:?}: seed {seed}: {error:#}");
        }
        return Ok(());
    }
    let start = Instant::now();
    let (next, operations, struck) = (AtomicU64::new(seeds.start), AtomicU64::new(0), AtomicU64::new(0));
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds.end) {
                    match simulate(seed, None) {
                        Ok(summary) => {
                            operations.fetch_add(summary.operations, Ordering::Relaxed);
                            struck.fetch_add(summary.struck, Ordering::Relaxed);
                        }
                        Err(error) => {
                            println!("seed {seed}: {error:#}");
                            failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(seed);
                        }
                    }
                }
            });
        }
    });
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    println!(
        "{} simulations, {} operations, {} crashes, {:.0} a minute",
        arguments.seeds,
        operations.into_inner(),
        struck.into_inner(),
        arguments.seeds as f64 / minutes
    );
    let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !failed.is_empty() {
        bail!("{} simulations failed; `--seeds 1 --seed {}` repeats one of them", failed.len(), failed[0]);
    }
    Ok(())
}
