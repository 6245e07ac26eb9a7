//! Measures what collectives beside the computation save: steps on two ranks behind a simulated
//! link on which communication takes half as long as the computation.
//!
//! `RAYON_NUM_THREADS=1 cargo run --release -p fsdp-nn --example prefetch`: each rank computes on
//! one core.
//!
//! With the feature `nccl`, and started by a launcher, ranks are on GPUs: `fsdp launch --nproc 2 --
//! prefetch`. Their link is that of the machine. `prefetch WIDTH ROWS` chooses the size of a unit
//! and of the input.
#![expect(clippy::print_stdout, reason = "an example that reports to a person")]

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear_no_bias};
use fsdp_comm::{LocalRanks, ProcessGroup, SimulatedLink};
use fsdp_nn::{
    BackwardPrefetch, FsdpConfig, FullyShardedDataParallel, NnError, ShardingStrategy, Unit,
};

const UNITS: usize = 10;
const RANKS: usize = 2;
/// How often each step is timed, after two steps that do not count.
const ROUNDS: usize = 7;

type Model = FullyShardedDataParallel<Vec<Unit<Linear>>>;

/// The size of the model.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// The rows and columns of each unit.
    width: usize,
    /// The rows of the input.
    rows: usize,
}

impl Size {
    /// Reads the arguments of the program.
    fn from_arguments() -> Result<Size, std::num::ParseIntError> {
        let mut arguments = std::env::args().skip(1);
        let mut next = |default: usize| {
            let argument = arguments.next();
            argument.map_or(Ok(default), |argument| argument.parse())
        };
        Ok(Size {
            width: next(512)?,
            rows: next(1024)?,
        })
    }
}

fn model(group: &ProcessGroup, width: usize, config: FsdpConfig) -> Result<Model, NnError> {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..UNITS)
            .map(|index| {
                scope
                    .pp(index)
                    .unit(|scope| linear_no_bias(width, width, scope.vb()))
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
    input.device().synchronize()?;
    let taken = begun.elapsed();
    model.parameters().zero_grad();
    let slowest = model.group().all_gather_object(&taken.as_secs_f64())?;
    Ok(Duration::from_secs_f64(
        slowest.into_iter().fold(0.0, f64::max),
    ))
}

/// Returns the median step of each configuration, taken in turns. Those without communication say
/// so.
fn median_steps(
    group: &ProcessGroup,
    size: Size,
    configs: &[(FsdpConfig, bool)],
) -> Result<Vec<Duration>, NnError> {
    let device = &configs[0].0.device;
    let input = Tensor::ones((size.rows, size.width), DType::F32, device)?;
    let models = configs
        .iter()
        .map(|(config, _)| model(group, size.width, config.clone()))
        .collect::<Result<Vec<_>, _>>()?;
    for (model, (_, communicates)) in models.iter().zip(configs) {
        model.set_requires_gradient_sync(*communicates);
    }
    let mut taken = vec![Vec::new(); models.len()];
    // The order of the units is known from the third step on.
    for round in 0..ROUNDS + 2 {
        for (model, taken) in models.iter().zip(&mut taken) {
            let step = step(model, &input)?;
            taken.extend(Some(step).filter(|_| round > 1));
        }
    }
    taken.iter_mut().for_each(|taken| taken.sort_unstable());
    Ok(taken.into_iter().map(|taken| taken[ROUNDS / 2]).collect())
}

/// Returns what [`median_steps`] does on ranks that are threads.
fn measure(
    link: Option<SimulatedLink>,
    size: Size,
    configs: &[(FsdpConfig, bool)],
) -> Result<Vec<Duration>, NnError> {
    let ranks = LocalRanks {
        world_size: RANKS,
        link,
        ..LocalRanks::default()
    };
    let outcomes = ranks.run(|group| median_steps(&group, size, configs))?;
    outcomes.into_iter().next().unwrap_or(Ok(Vec::new()))
}

/// The names of [`configs`].
const NAMES: [&str; 4] = [
    "computation alone",
    "without prefetch",
    "prefetch, Pre",
    "prefetch, Post",
];

/// Returns the options to compare, with `true` for those that communicate.
fn configs(device: &Device) -> [(FsdpConfig, bool); NAMES.len()] {
    let without = FsdpConfig {
        device: device.clone(),
        ..FsdpConfig::default()
    };
    let alone = FsdpConfig {
        strategy: ShardingStrategy::NoShard,
        ..without.clone()
    };
    let ahead = |backward_prefetch| FsdpConfig {
        backward_prefetch: Some(backward_prefetch),
        forward_prefetch: true,
        ..without.clone()
    };
    let (pre, post) = (ahead(BackwardPrefetch::Pre), ahead(BackwardPrefetch::Post));
    [(alone, false), (without, true), (pre, true), (post, true)]
}

/// Prints the steps of [`configs`].
fn report(taken: &[Duration]) {
    for (name, taken_by) in NAMES.iter().zip(taken) {
        let ratio = taken_by.as_secs_f64() / taken[0].as_secs_f64();
        println!("{name:>20}: {taken_by:.1?} a step, {ratio:.2} x the computation alone");
    }
}

/// Measures on ranks that are threads.
fn on_cpus(size: Size) -> Result<(), NnError> {
    let Size { width, rows } = size;
    let configs = configs(&Device::Cpu);
    let computation = measure(None, size, &configs[..1])?[0];
    // Each step gathers all units twice and reduces them once. A rank gets the other's half each
    // time.
    let (collectives, bytes) = (3 * UNITS, 3 * UNITS * width * width * 4 / RANKS);
    let latency = Duration::from_micros(100);
    let transfer = computation.as_secs_f64() / 2.0 - (latency * collectives as u32).as_secs_f64();
    let link = SimulatedLink {
        latency,
        bytes_per_second: (bytes as f64 / transfer) as u64,
    };
    println!(
        "{UNITS} units of {width} x {width}, {rows} rows, {RANKS} ranks; the computation takes {computation:.1?} a step"
    );
    println!(
        "a link of {:.1} MB/s: communication takes half of that",
        link.bytes_per_second as f64 / 1e6
    );
    report(&measure(Some(link), size, &configs)?);
    Ok(())
}

/// Measures on the GPUs of ranks that a launcher has started.
#[cfg(feature = "nccl")]
fn on_gpus(size: Size) -> Result<(), NnError> {
    use fsdp_comm::{BackendKind, init_process_group};
    use fsdp_flat::storage::cuda::{Streams, open};

    let group = init_process_group(BackendKind::Nccl)?;
    let ordinal = group.device().map_or(0, |device| device.ordinal());
    let taken = median_steps(&group, size, &configs(&open(ordinal, Streams::PerThread)?))?;
    if group.rank() == 0 {
        let Size { width, rows } = size;
        println!("{UNITS} units of {width} x {width}, {rows} rows, on GPUs");
        report(&taken);
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let size = Size::from_arguments()?;
    #[cfg(feature = "nccl")]
    if std::env::var_os("WORLD_SIZE").is_some() {
        return Ok(on_gpus(size)?);
    }
    Ok(on_cpus(size)?)
}
