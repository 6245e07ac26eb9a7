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
use self::simulation::{Summary, locked, simulate};

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
    /// The number of threads [default: one for each core]
    #[arg(long, value_name = "T")]
    threads: Option<usize>,
    /// Print each operation
    #[arg(long)]
    trace: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.trace {
        let lines = tracing_subscriber::fmt()
            .without_time()
            .with_target(false)
            .with_ansi(false);
        lines
            .with_max_level(tracing::Level::TRACE)
            .with_env_filter("simulate=trace")
            .init();
    }
    let seeds = arguments.seed..arguments.seed.saturating_add(arguments.seeds);
    if arguments.flaws {
        for flaw in Flaw::ALL {
            let found = seeds
                .clone()
                .find_map(|seed| Some((seed, simulate(seed, Some(flaw)).err()?)));
            let Some((seed, error)) = found else {
                bail!("{flaw:?} was not found")
            };
            println!("{flaw:?}: seed {seed}: {error:#}");
        }
        return Ok(());
    }
    let start = Instant::now();
    let threads = arguments
        .threads
        .or_else(|| Some(thread::available_parallelism().ok()?.get()))
        .unwrap_or(1);
    let (next, totals) = (AtomicU64::new(seeds.start), Mutex::new(Summary::default()));
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(seed) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|seed| *seed < seeds.end)
                {
                    match simulate(seed, None) {
                        Ok(summary) => {
                            let mut totals = locked(&totals);
                            totals.operations += summary.operations;
                            totals.links += summary.links;
                            totals.struck += summary.struck;
                        }
                        Err(error) => {
                            println!("seed {seed}: {error:#}");
                            locked(&failed).push(seed);
                        }
                    }
                }
            });
        }
    });
    let minutes = start.elapsed().as_secs_f64() / 60.0;
    let Summary {
        operations,
        links,
        struck,
        ..
    } = *locked(&totals);
    println!(
        "{} simulations, {operations} operations, {links} linked files, {struck} crashes, {:.0} a minute",
        arguments.seeds,
        arguments.seeds as f64 / minutes
    );
    let failed = locked(&failed);
    if !failed.is_empty() {
        bail!(
            "{} simulations failed; `--seeds 1 --seed {}` repeats one of them",
            failed.len(),
            failed[0]
        );
    }
    Ok(())
}
