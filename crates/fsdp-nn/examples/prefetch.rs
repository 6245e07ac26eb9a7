//! Measures what collectives beside the computation save: steps on two ranks behind a simulated
//! link on which communication takes half as long as the computation.
//!
//! `RAYON_NUM_THREADS=1 cargo run --release -p fsdp-nn --example prefetch`: each rank computes on
//! one core.
#![expect(clippy::print_stdout, reason = "an example that reports to a person")]

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear_no_bias};
use fsdp_comm::{LocalRanks, ProcessGroup, SimulatedLink};
use fsdp_nn::{
    BackwardPrefetch, FsdpConfig, FullyShardedDataParallel, NnError, ShardingStrategy, Unit,
};

const UNITS: usize = 10;
const WIDTH: usize = 512;
const ROWS: usize = 1024;
const RANKS: usize = 2;
/// The times that each figure is taken, after one that does not count.
const ROUNDS: usize = 7;

type Model = FullyShardedDataParallel<Vec<Unit<Linear>>>;

fn model(group: &ProcessGroup, config: FsdpConfig) -> Result<Model, NnError> {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..UNITS)
            .map(|index| {
                scope
                    .pp(index)
                    .unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb()))
            })
            .collect()
    })
}

/// Runs a step without an optimizer, which all ranks begin together, and returns the time of the
/// slowest rank.
fn step(model: &Model, input: &Tensor) -> Result<Duration, NnError> {
    model.group().barrier()?;
    let begun = Instant::now();
    let loss = model.forward(|layers| {
        layers
            .iter()
            .try_fold(input.clone(), |x, layer| layer.forward(&x)?.relu())?
            .sqr()?
            .mean_all()
    })?;
    model.backward(&loss)?;
    let taken = begun.elapsed();
    model.parameters().zero_grad();
    let slowest = model.group().all_gather_object(&taken.as_secs_f64())?;
    Ok(Duration::from_secs_f64(
        slowest.into_iter().fold(0.0, f64::max),
    ))
}

/// Returns the median step of each configuration, taken in turns. Those without communication say
/// so.
fn measure(
    link: Option<SimulatedLink>,
    configs: &[(FsdpConfig, bool)],
) -> Result<Vec<Duration>, NnError> {
    let ranks = LocalRanks {
        world_size: RANKS,
        link,
        ..LocalRanks::default()
    };
    let outcomes = ranks.run(|group| -> Result<Vec<Duration>, NnError> {
        let input = Tensor::ones((ROWS, WIDTH), DType::F32, &Device::Cpu)?;
        let models = configs
            .iter()
            .map(|(config, _)| model(&group, config.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        for (model, (_, communicates)) in models.iter().zip(configs) {
            model.set_requires_gradient_sync(*communicates);
        }
        let mut taken = vec![Vec::new(); models.len()];
        for round in 0..=ROUNDS {
            for (model, taken) in models.iter().zip(&mut taken) {
                let step = step(model, &input)?;
                taken.extend(Some(step).filter(|_| round > 0));
            }
        }
        taken.iter_mut().for_each(|taken| taken.sort_unstable());
        Ok(taken.into_iter().map(|taken| taken[ROUNDS / 2]).collect())
    })?;
    outcomes.into_iter().next().unwrap_or(Ok(Vec::new()))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let alone = FsdpConfig {
        strategy: ShardingStrategy::NoShard,
        ..FsdpConfig::default()
    };
    let without = FsdpConfig::default();
    let ahead = |backward_prefetch| FsdpConfig {
        backward_prefetch: Some(backward_prefetch),
        forward_prefetch: true,
        ..FsdpConfig::default()
    };
    let computation = measure(None, &[(alone.clone(), false)])?[0];
    // Each step gathers all units twice and reduces them once. A rank gets the other's half each
    // time.
    let (collectives, bytes) = (3 * UNITS, 3 * UNITS * WIDTH * WIDTH * 4 / RANKS);
    let latency = Duration::from_micros(100);
    let transfer = computation.as_secs_f64() / 2.0 - (latency * collectives as u32).as_secs_f64();
    let link = SimulatedLink {
        latency,
        bytes_per_second: (bytes as f64 / transfer) as u64,
    };
    println!(
        "{UNITS} units of {WIDTH} x {WIDTH}, {ROWS} rows, {RANKS} ranks; the computation takes {computation:.1?} a step"
    );
    println!(
        "a link of {:.1} MB/s: communication takes half of that",
        link.bytes_per_second as f64 / 1e6
    );
    let configs = [
        (alone, false),
        (without, true),
        (ahead(BackwardPrefetch::Pre), true),
        (ahead(BackwardPrefetch::Post), true),
    ];
    let taken = measure(Some(link), &configs)?;
    for (name, taken_by) in [
        "computation alone",
        "without prefetch",
        "prefetch, Pre",
        "prefetch, Post",
    ]
    .iter()
    .zip(&taken)
    {
        let ratio = taken_by.as_secs_f64() / taken[0].as_secs_f64();
        println!("{name:>20}: {taken_by:.1?} a step, {ratio:.2} x the computation alone");
    }
    Ok(())
}
