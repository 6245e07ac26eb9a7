//! How long the optimizer state of 4 ranks takes to save and to load, beside a plain copy of the same bytes.
//!
//! `cargo run --release -p fsdp-nn --example optim_state_dict`: 256 MiB of AdamW state on 4 ranks that are threads.
//! Each figure is the median of five; the ratio is to one memcpy of all the state into fresh memory in the same run.

#![expect(clippy::print_stdout, reason = "a bench's figures are its output")]

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::fsdp_state::{
    OptimLoadOptions, StateDictSettings, StateDictType, optim_state_dict, optim_state_dict_to_load,
};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, Unit};

const RANKS: usize = 4;
const UNITS: usize = 8;
/// One unit is a square weight of 16 MiB; AdamW keeps two such tensors for it.
const WIDTH: usize = 2048;
const STATE_BYTES: usize = 2 * UNITS * WIDTH * WIDTH * 4;
const RUNS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let copy = median((0..RUNS).map(|_| memcpy()).collect());
    println!("{} MiB of state, {RANKS} ranks, median of {RUNS}", STATE_BYTES >> 20);
    println!("{:<44} {:>9} {:>8} {:>8}", "", "seconds", "GB/s", "memcpy x");
    print("memcpy into fresh memory", copy, copy);
    let figures = run_local(RANKS, measure)?.into_iter().next().ok_or("no ranks")??;
    for (name, seconds) in figures {
        print(name, seconds, copy);
    }
    Ok(())
}

fn print(name: &str, seconds: f64, copy: f64) {
    let speed = STATE_BYTES as f64 / seconds / 1e9;
    println!("{name:<44} {seconds:>9.4} {speed:>8.2} {:>8.2}", seconds / copy);
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

fn measure(group: ProcessGroup) -> Result<Vec<(&'static str, f64)>, NnError> {
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        let units = (0..UNITS).map(|i| scope.pp(i).unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb())));
        units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
    })?;
    let parameters = model.parameters();
    let mut optimizer = Optimizer::new(parameters, Algorithm::AdamW(AdamOptions::adamw()))?;
    let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu)?;
    let loss =
        model.forward(|units| units.iter().try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh())?.mean_all())?;
    model.backward(&loss)?;
    optimizer.step()?;
    parameters.zero_grad();

    let mut figures = Vec::new();
    for (kind, save, load) in [
        (StateDictType::Sharded, "optim_state_dict, Sharded", "optim_state_dict_to_load, Sharded"),
        (StateDictType::Full, "optim_state_dict, Full (on every rank)", "optim_state_dict_to_load, Full"),
    ] {
        let (mut saves, mut loads) = (Vec::new(), Vec::new());
        parameters.state_dict_type(StateDictSettings::of(kind), || -> Result<(), NnError> {
            for _ in 0..RUNS {
                group.barrier()?;
                let start = Instant::now();
                let state = optim_state_dict(parameters, &optimizer, None)?;
                group.barrier()?;
                saves.push(start.elapsed().as_secs_f64());
                let start = Instant::now();
                let loaded =
                    optim_state_dict_to_load(parameters, &mut optimizer, &state, &OptimLoadOptions::default())?;
                group.barrier()?;
                loads.push(start.elapsed().as_secs_f64());
                drop(loaded);
            }
            Ok(())
        })?;
        figures.extend([(save, median(saves)), (load, median(loads))]);
    }
    Ok(figures)
}
