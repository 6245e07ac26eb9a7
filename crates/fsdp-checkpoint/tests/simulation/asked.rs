//! Runs the simulations that `cargo xtask simulate` asks for in environment variables.

#![expect(clippy::print_stdout, reason = "the figures are its output")]

use std::env;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use super::flaw::Flaw;
use super::simulate::{Summary, locked, simulate};

/// Runs simulations of `FSDP_SIMULATION_SEEDS` seeds from `FSDP_SIMULATION_SEED` on. If
/// `FSDP_SIMULATION_FLAWS` is set, each of the bugs that are put in on purpose is looked for
/// instead. If `FSDP_SIMULATION_TRACE` is set, each operation is printed.
pub(crate) fn run() -> Result<()> {
    if env::var_os("FSDP_SIMULATION_TRACE").is_some() {
        tracing_subscriber::fmt()
            .without_time()
            .with_target(false)
            .with_ansi(false)
            .with_max_level(tracing::Level::TRACE)
            .with_env_filter("simulation=trace")
            .init();
    }
    let first = number("FSDP_SIMULATION_SEED")?;
    let seeds = first..first.saturating_add(number("FSDP_SIMULATION_SEEDS")?);
    if env::var_os("FSDP_SIMULATION_FLAWS").is_some() {
        find_flaws(seeds)
    } else {
        run_all(seeds)
    }
}

fn number(variable: &str) -> Result<u64> {
    let text = env::var(variable).with_context(|| format!("`{variable}` is not set"))?;
    text.parse()
        .with_context(|| format!("`{variable}` is not a number: `{text}`"))
}

/// Looks for each flaw, and prints the first seed that finds it.
fn find_flaws(seeds: Range<u64>) -> Result<()> {
    for flaw in Flaw::ALL {
        let found = seeds
            .clone()
            .find_map(|seed| Some((seed, simulate(seed, Some(flaw)).err()?)));
        let Some((seed, error)) = found else {
            bail!("{flaw:?} was not found")
        };
        println!("{flaw:?}: seed {seed}: {error:#}");
    }
    Ok(())
}

/// Runs the simulations of all seeds, on a thread for each core, and prints what they did.
fn run_all(seeds: Range<u64>) -> Result<()> {
    let start = Instant::now();
    let next = AtomicU64::new(seeds.start);
    let totals = Mutex::new(Summary::default());
    let failed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        break;
                    }
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
    let count = seeds.end - seeds.start;
    let Summary {
        operations,
        links,
        struck,
        ..
    } = *locked(&totals);
    println!(
        "{count} simulations, {operations} operations, {links} linked files, {struck} crashes, {:.0} a minute",
        count as f64 / minutes
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
