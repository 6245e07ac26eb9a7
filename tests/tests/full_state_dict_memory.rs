//! How much memory a full state dict takes on the ranks that do not keep it, measured by a counting allocator: this
//! binary has no other test.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use fsdp::nn::algorithm::{AdamOptions, Algorithm};
use fsdp::nn::fsdp_state::{
    FullOptimStateDictConfig, FullStateDictConfig, OptimStateDictConfig, StateDictConfig, StateDictSettings,
    StateDictType, optim_state_dict, optim_state_dict_into, state_dict, state_dict_into,
};
use fsdp::nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, Unit};
use fsdp_tests::counting_allocator::{CountingAllocator, live_bytes, peak_bytes, reset_peak};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const RANKS: usize = 4;
const UNITS: usize = 16;
const WIDTH: usize = 256;
/// Each unit is one square weight: the largest tensor.
const TENSOR: usize = 4 * WIDTH * WIDTH;
/// Names, boxes, messages between ranks: what is no tensor, per rank.
const BOOKKEEPING: usize = 192 << 10;

fn rank0_only() -> StateDictSettings {
    let model = FullStateDictConfig { offload_to_cpu: true, rank0_only: true };
    let optim = FullOptimStateDictConfig { offload_to_cpu: true, rank0_only: true };
    let (model, optim) = (StateDictConfig::Full(model), OptimStateDictConfig::Full(optim));
    StateDictSettings::new(StateDictType::Full, Some(model), Some(optim)).unwrap()
}

#[test]
fn only_the_keeper_needs_memory_for_a_full_state_dict() {
    let measured = Mutex::new(Vec::new());
    for use_orig_params in [true, false] {
        fsdp::comm::run_local(RANKS, |group| {
            let config = FsdpConfig { use_orig_params, ..FsdpConfig::default() };
            let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
                let units = (0..UNITS).map(|i| scope.pp(i).unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb())));
                units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
            })
            .unwrap();
            let parameters = model.parameters();
            let mut optimizer = Optimizer::new(parameters, Algorithm::Adam(AdamOptions::default())).unwrap();
            let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu).unwrap();
            let run = |units: &Vec<Unit<Linear>>| units.iter().try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh());
            let loss = model.forward(|units| run(units)?.sqr()?.mean_all()).unwrap();
            model.backward(&loss).unwrap();
            drop(loss);
            optimizer.step().unwrap();
            parameters.zero_grad();
            // All ranks' bytes are counted together: what the call may take on the keeper and on the three others.
            let measure = |what: &str, keeper: usize, call: &dyn Fn()| {
                group.barrier().unwrap();
                let before = live_bytes();
                group.barrier().unwrap();
                reset_peak();
                group.barrier().unwrap();
                call();
                group.barrier().unwrap();
                let peak = peak_bytes() - before;
                group.barrier().unwrap();
                let limit = keeper + (RANKS - 1) * TENSOR + RANKS * BOOKKEEPING;
                if group.rank() == 0 {
                    measured.lock().unwrap().push(format!("{what}: {} KiB of {} KiB", peak >> 10, limit >> 10));
                }
                assert!(peak <= limit, "{what}, use_orig_params {use_orig_params}: {peak} bytes, limit {limit}");
            };
            parameters.state_dict_type(rank0_only(), || {
                // The keeper has the result, and while a unit is gathered its flat form.
                measure("model", (UNITS + 1) * TENSOR, &|| {
                    assert_eq!(state_dict(parameters).unwrap().len(), if group.rank() == 0 { UNITS } else { 0 });
                });
                measure("optimizer", (2 * UNITS + 1) * TENSOR, &|| {
                    let state = optim_state_dict(parameters, &optimizer, None).unwrap();
                    assert_eq!(state.is_empty(), group.rank() > 0);
                });
                // A sink that forgets what it gets: no rank has more than a unit and its flat form.
                measure("model to a sink", 2 * TENSOR, &|| state_dict_into(parameters, |_, _| Ok(())).unwrap());
                measure("optimizer to a sink", 2 * TENSOR, &|| {
                    optim_state_dict_into(parameters, &optimizer, None, |_, _, _| Ok(())).unwrap();
                });
            });
        })
        .unwrap();
    }
    println_measured(&measured.into_inner().unwrap());
}

/// The figures, for `--nocapture`.
#[expect(clippy::print_stdout, reason = "a test's figures are for whoever asks for them")]
fn println_measured(lines: &[String]) {
    lines.iter().for_each(|line| println!("{line}"));
}
