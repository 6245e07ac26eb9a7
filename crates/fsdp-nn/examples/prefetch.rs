//! Measures what collectives beside the computation save: steps on two ranks behind a simulated
//! link on which communication takes half as long as the computation.
//!
//! `cargo run --release -p fsdp-nn --example prefetch`: the ranks are processes, each on a core of
//! its own. (Ranks that are threads would wait for each other in candle's operations, of which a
//! process runs one at a time.)
//!
//! With the feature `nccl`, and started by a launcher, ranks are on GPUs: `fsdp launch --nproc 2 --
//! prefetch`. Their link is that of the machine. `prefetch WIDTH ROWS` chooses the size of a unit
//! and of the input.
#![expect(clippy::print_stdout, reason = "an example that reports to a person")]

use std::error::Error;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Tensor};
use fsdp_comm::{Environment, ProcessGroup, SimulatedLink, TcpOptions};
use fsdp_nn::{
    BackwardPrefetch, FsdpConfig, FullyShardedDataParallel, NnError, ShardingStrategy, Unit,
};

const UNITS: usize = 12;
const RANKS: usize = 2;
/// The variable that tells the process of a rank its link: the latency in nanoseconds and the bytes
/// a second, or nothing for none.
const LINK: &str = "PREFETCH_LINK";
/// How often each step is timed, after two steps that do not count.
const ROUNDS: usize = 7;

type Model = FullyShardedDataParallel<Vec<Unit<Layer>>>;

/// A matrix product and GELU, in one operation.
struct Layer {
    weight: Tensor,
    bias: Tensor,
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        fsdp_ops::linear_gelu_erf(x, &self.weight, &self.bias)
    }
}

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
            rows: next(4096)?,
        })
    }
}

fn model(group: &ProcessGroup, width: usize, config: FsdpConfig) -> Result<Model, NnError> {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..UNITS)
            .map(|index| {
                scope.pp(index).unit(|scope| {
                    Ok(Layer {
                        weight: scope.vb().get((width, width), "weight")?,
                        bias: scope.vb().get(width, "bias")?,
                    })
                })
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
            .try_fold(input.clone(), |x, layer| layer.forward(&x))?
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

/// Measures on ranks that are processes.
fn on_cpus(size: Size) -> Result<(), Box<dyn Error>> {
    let Size { width, rows } = size;
    let computation = Duration::from_nanos(run_ranks(size, "")?.trim().parse()?);
    // Each step gathers all units twice and reduces them once. A rank gets the other's half each
    // time.
    let (collectives, bytes) = (3 * UNITS, 3 * UNITS * width * width * 4 / RANKS);
    let latency = Duration::from_micros(100);
    let transfer = computation.as_secs_f64() / 2.0 - (latency * collectives as u32).as_secs_f64();
    let bytes_per_second = bytes as f64 / transfer;
    println!(
        "{UNITS} units of {width} x {width}, {rows} rows, {RANKS} ranks; the computation takes {computation:.1?} a step"
    );
    println!(
        "a link of {:.1} MB/s: communication takes half of that",
        bytes_per_second / 1e6
    );
    let link = format!("{} {}", latency.as_nanos(), bytes_per_second as u64);
    print!("{}", run_ranks(size, &link)?);
    Ok(())
}

/// Runs this program once for each rank, and returns what rank 0 prints.
fn run_ranks(size: Size, link: &str) -> Result<String, Box<dyn Error>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args([size.width.to_string(), size.rows.to_string()])
            .env(LINK, link)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("FSDP_JOB_ID", port.to_string())
            .env("RAYON_NUM_THREADS", "1")
            // glibc shall keep what is freed. Else a model whose tensors have a few megabytes
            // spends much of each step on getting the same memory again.
            .env("MALLOC_MMAP_THRESHOLD_", (1 << 30).to_string())
            .env("MALLOC_TRIM_THRESHOLD_", (1u64 << 40).to_string())
            .stdout(Stdio::piped())
            .spawn()
    };
    let ranks: Vec<_> = (0..RANKS).map(start).collect::<Result<_, _>>()?;
    let mut printed = String::new();
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("rank {rank} ends with {}", output.status).into());
        }
        printed += &String::from_utf8(output.stdout)?;
    }
    Ok(printed)
}

/// Keeps this process on one of the cores that it may use.
#[cfg(target_os = "linux")]
fn stay_on_core(number: usize) -> std::io::Result<()> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    let usable = sched_getaffinity(None)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&core| usable.is_set(core))
        .collect();
    let mut chosen = CpuSet::new();
    chosen.set(cores[number % cores.len()]);
    Ok(sched_setaffinity(None, &chosen)?)
}

/// Measures as one of the ranks that [`run_ranks`] starts, and prints the outcome on rank 0:
/// without a link the nanoseconds of the computation alone.
fn as_rank(size: Size, link: &str) -> Result<(), Box<dyn Error>> {
    let environment = Environment::from_env()?;
    #[cfg(target_os = "linux")]
    stay_on_core(environment.rank)?;
    let mut numbers = link.split_whitespace().map(str::parse::<u64>);
    let link = match (numbers.next(), numbers.next()) {
        (Some(latency), Some(bytes_per_second)) => Some(SimulatedLink {
            latency: Duration::from_nanos(latency?),
            bytes_per_second: bytes_per_second?,
        }),
        _ => None,
    };
    let options = TcpOptions {
        link,
        ..TcpOptions::default()
    };
    let group = options.connect(&environment)?;
    let configs = configs(&Device::Cpu);
    let configs = if link.is_some() {
        &configs[..]
    } else {
        &configs[..1]
    };
    let taken = median_steps(&group, size, configs)?;
    match (group.rank(), link) {
        (0, None) => println!("{}", taken[0].as_nanos()),
        (0, Some(_)) => report(&taken),
        _ => {}
    }
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

fn main() -> Result<(), Box<dyn Error>> {
    let size = Size::from_arguments()?;
    if let Ok(link) = std::env::var(LINK) {
        return as_rank(size, &link);
    }
    #[cfg(feature = "nccl")]
    if std::env::var_os("WORLD_SIZE").is_some() {
        return Ok(on_gpus(size)?);
    }
    on_cpus(size)
}
