//! How long the optimizer state of 4 ranks takes to save and to load, beside a plain copy of the
//! same bytes; and how much memory.
//!
//! `cargo run --release -p fsdp-nn --example optim_state_dict [-- --json]`: 256 MiB of AdamW state
//! on 4 ranks that are threads. Each time is the median of five; the ratio is to one memcpy of all
//! the state into fresh memory in the same run. The peak is what all ranks together allocate above
//! the state itself (and, for a load, above the dict that is loaded), results included. With
//! `--json` the output is an array of cases: `name`, `bytes` (of state), `seconds`, `ratio`,
//! `peak_bytes`.

#![expect(clippy::print_stdout, reason = "a bench's figures are its output")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::torch::{
    OptimLoadOptions, StateDictSettings, StateDictType, full_optim_state_dict, optim_state_dict,
    optim_state_dict_to_load, scatter_full_optim_state_dict,
};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ShardedParameters, Unit};
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};
use serde_json::json;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const RANKS: usize = 4;
const UNITS: usize = 8;
/// One unit is a square weight of 16 MiB; AdamW keeps two such tensors for it.
const WIDTH: usize = 2048;
const STATE_BYTES: usize = 2 * UNITS * WIDTH * WIDTH * 4;
const RUNS: usize = 5;

/// The time and memory of one case.
struct Figure {
    name: &'static str,
    seconds: f64,
    peak_bytes: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let copies = (0..RUNS).map(|_| memcpy()).collect::<Vec<_>>();
    let copy = Figure {
        name: "memcpy into fresh memory",
        seconds: median(copies),
        peak_bytes: STATE_BYTES,
    };
    let figures = run_local(RANKS, measure)?
        .into_iter()
        .next()
        .ok_or("no ranks")??;
    let figures: Vec<Figure> = std::iter::once(copy).chain(figures).collect();
    let seconds = figures[0].seconds;
    if std::env::args().any(|argument| argument == "--json") {
        let case = |figure: &Figure| {
            let Figure {
                name,
                seconds: of_case,
                peak_bytes,
            } = figure;
            let ratio = of_case / seconds;
            json!({ "name": name, "bytes": STATE_BYTES, "seconds": of_case, "ratio": ratio, "peak_bytes": peak_bytes })
        };
        println!(
            "{}",
            serde_json::to_string_pretty(&figures.iter().map(case).collect::<Vec<_>>())?
        );
        return Ok(());
    }
    println!(
        "{} MiB of state, {RANKS} ranks, median of {RUNS}",
        STATE_BYTES >> 20
    );
    println!(
        "{:<44} {:>9} {:>8} {:>8} {:>9}",
        "", "seconds", "GB/s", "memcpy x", "peak MiB"
    );
    for Figure {
        name,
        seconds: of_case,
        peak_bytes,
    } in &figures
    {
        let (speed, ratio) = (STATE_BYTES as f64 / of_case / 1e9, of_case / seconds);
        println!(
            "{name:<44} {of_case:>9.4} {speed:>8.2} {ratio:>8.2} {:>9}",
            peak_bytes >> 20
        );
    }
    Ok(())
}

fn memcpy() -> f64 {
    let from = vec![1u8; STATE_BYTES];
    let start = Instant::now();
    let to = std::hint::black_box(from.clone());
    let seconds = start.elapsed().as_secs_f64();
    drop(to);
    seconds
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Runs a call on all ranks several times, and drops what it returns after the clock and the
/// allocator were read.
fn time<T>(
    group: &ProcessGroup,
    name: &'static str,
    mut call: impl FnMut() -> Result<T, NnError>,
) -> Result<Figure, NnError> {
    let (mut seconds, mut most) = (Vec::new(), 0);
    for _ in 0..RUNS {
        group.barrier()?;
        let before = live_bytes();
        if group.rank() == 0 {
            reset_peak();
        }
        group.barrier()?;
        let start = Instant::now();
        let result = call()?;
        group.barrier()?;
        seconds.push(start.elapsed().as_secs_f64());
        most = most.max(peak_bytes().saturating_sub(before));
        group.barrier()?;
        drop(result);
    }
    Ok(Figure {
        name,
        seconds: median(seconds),
        peak_bytes: most,
    })
}

fn measure(group: ProcessGroup) -> Result<Vec<Figure>, NnError> {
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        let units = (0..UNITS).map(|i| {
            scope
                .pp(i)
                .unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb()))
        });
        units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
    })?;
    let parameters = model.parameters();
    let mut optimizer = Optimizer::new(parameters, Algorithm::AdamW(AdamOptions::adamw()))?;
    let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu)?;
    let loss = model.forward(|units| {
        units
            .iter()
            .try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh())?
            .mean_all()
    })?;
    model.backward(&loss)?;
    optimizer.step()?;
    drop(loss);
    parameters.zero_grad();

    let mut figures = Vec::new();
    for (kind, save, load) in [
        (
            StateDictType::Sharded,
            "optim_state_dict, Sharded",
            "optim_state_dict_to_load, Sharded",
        ),
        (
            StateDictType::Full,
            "optim_state_dict, Full (on every rank)",
            "optim_state_dict_to_load, Full",
        ),
    ] {
        parameters.state_dict_type(StateDictSettings::from(kind), || -> Result<(), NnError> {
            figures.push(time(&group, save, || {
                optim_state_dict(None, parameters, &optimizer)
            })?);
            let state = optim_state_dict(None, parameters, &optimizer)?;
            let options = OptimLoadOptions::default();
            figures.push(time(&group, load, || {
                optim_state_dict_to_load(&state, parameters, &mut optimizer, &options)
            })?);
            Ok(())
        })?;
    }
    figures.extend(from_and_to_rank_0(&group, parameters, &optimizer)?);
    Ok(figures)
}

fn from_and_to_rank_0(
    group: &ProcessGroup,
    parameters: &ShardedParameters,
    optimizer: &Optimizer,
) -> Result<[Figure; 2], NnError> {
    let save = || full_optim_state_dict(None, parameters, optimizer, true);
    let saved = time(group, "full_optim_state_dict, rank 0 only", save)?;
    let state = save()?;
    let full = (group.rank() == 0).then_some(&state);
    let load = || scatter_full_optim_state_dict(full, parameters, optimizer);
    Ok([saved, time(group, "scatter_full_optim_state_dict", load)?])
}
