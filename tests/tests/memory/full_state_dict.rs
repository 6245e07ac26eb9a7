//! The memory that a full state dict takes on the ranks that do not keep it, saved and loaded.

use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear_no_bias};
use fsdp::nn::algorithm::{AdamOptions, Algorithm};
use fsdp::nn::torch::{
    StateDictConfig, StateDictOptions, StateDictSettings, StateDictType, load_state_dict,
    optim_state_dict, optim_state_dict_into, scatter_full_optim_state_dict, set_model_state_dict,
    set_optimizer_state_dict, state_dict, state_dict_into,
};
use fsdp::nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, Unit};
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};

const RANKS: usize = 4;
const UNITS: usize = 16;
const WIDTH: usize = 512;
/// Each unit is one square weight: the largest tensor, 1 MiB.
const TENSOR: usize = 4 * WIDTH * WIDTH;
/// Names, boxes, messages between ranks: what is no tensor, per rank.
const BOOKKEEPING: usize = 192 << 10;

fn rank0_only() -> StateDictSettings {
    let model = StateDictConfig::Full {
        offload_to_cpu: true,
        rank0_only: true,
    };
    let optim = StateDictConfig::Full {
        offload_to_cpu: true,
        rank0_only: true,
    };
    StateDictSettings::new(StateDictType::Full, Some(model), Some(optim)).unwrap()
}

#[test]
fn only_the_keeper_needs_memory_for_a_full_state_dict_saved_or_loaded() {
    let _alone = crate::alone();
    let measured = Mutex::new(Vec::new());
    for use_orig_params in [true, false] {
        fsdp::comm::run_local(RANKS, |group| {
            let config = FsdpConfig {
                use_orig_params,
                ..FsdpConfig::default()
            };
            let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
                let units = (0..UNITS).map(|i| {
                    scope
                        .pp(i)
                        .unit(|scope| linear_no_bias(WIDTH, WIDTH, scope.vb()))
                });
                units.collect::<candle_core::Result<Vec<Unit<Linear>>>>()
            })
            .unwrap();
            let parameters = model.parameters();
            let mut optimizer =
                Optimizer::new(parameters, Algorithm::Adam(AdamOptions::default())).unwrap();
            let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu).unwrap();
            let run = |units: &Vec<Unit<Linear>>| {
                units
                    .iter()
                    .try_fold(x.clone(), |h, unit| unit.forward(&h)?.tanh())
            };
            let loss = model
                .forward(|units| run(units)?.sqr()?.mean_all())
                .unwrap();
            model.backward(&loss).unwrap();
            drop(loss);
            optimizer.step().unwrap();
            parameters.zero_grad();
            // All ranks' bytes are counted together. `limit` is what the call may take on all of
            // them.
            let measure = |what: &str, limit: usize, call: &mut dyn FnMut()| {
                group.barrier().unwrap();
                let before = live_bytes();
                group.barrier().unwrap();
                reset_peak();
                group.barrier().unwrap();
                call();
                group.barrier().unwrap();
                let peak = peak_bytes() - before;
                group.barrier().unwrap();
                let limit = limit + RANKS * BOOKKEEPING;
                if group.rank() == 0 {
                    measured.lock().unwrap().push(format!(
                        "{what}: {} KiB of {} KiB",
                        peak >> 10,
                        limit >> 10
                    ));
                }
                assert!(
                    peak <= limit,
                    "{what}, use_orig_params {use_orig_params}: {peak} bytes, limit {limit}"
                );
            };
            // The ranks that keep nothing may have one tensor each.
            let others = (RANKS - 1) * TENSOR;
            let model_bytes = UNITS * TENSOR;
            let optim_bytes = 2 * UNITS * TENSOR;
            let (full_model, full_optim) = parameters.state_dict_type(rank0_only(), || {
                // The keeper has the result, and while a unit is gathered its flat form.
                measure("model", model_bytes + TENSOR + others, &mut || {
                    assert_eq!(
                        state_dict(parameters).unwrap().len(),
                        if group.rank() == 0 { UNITS } else { 0 }
                    );
                });
                measure("optimizer", optim_bytes + TENSOR + others, &mut || {
                    let state = optim_state_dict(None, parameters, &optimizer).unwrap();
                    assert_eq!(state.is_empty(), group.rank() > 0);
                });
                // A sink that forgets what it gets: no rank has more than a unit and its flat form.
                measure("model to a sink", 2 * TENSOR + others, &mut || {
                    state_dict_into(parameters, |_, _| Ok(())).unwrap();
                });
                measure("optimizer to a sink", 2 * TENSOR + others, &mut || {
                    optim_state_dict_into(None, parameters, &optimizer, |_, _, _| Ok(())).unwrap();
                });
                (
                    state_dict(parameters).unwrap(),
                    optim_state_dict(None, parameters, &optimizer).unwrap(),
                )
            });
            // Loading what rank 0 has: each rank its shard of the result, and one tensor on its
            // way.
            let full_optim_here = (group.rank() == 0).then_some(&full_optim);
            let on_the_way = RANKS * TENSOR;
            measure(
                "scatter of the optimizer",
                optim_bytes + on_the_way,
                &mut || {
                    let local =
                        scatter_full_optim_state_dict(full_optim_here, parameters, &optimizer)
                            .unwrap();
                    assert!(!local.dict("state").unwrap().is_empty());
                },
            );
            parameters.state_dict_type(rank0_only(), || {
                measure("load of the model", model_bytes + on_the_way, &mut || {
                    assert!(
                        load_state_dict(&full_model, parameters, true)
                            .unwrap()
                            .is_clean()
                    );
                });
            });
            let options = StateDictOptions {
                full_state_dict: true,
                broadcast_from_rank0: true,
                ..StateDictOptions::default()
            };
            measure(
                "set_model_state_dict from rank 0",
                model_bytes + on_the_way,
                &mut || {
                    assert!(
                        set_model_state_dict(&full_model, parameters, &options)
                            .unwrap()
                            .is_clean()
                    );
                },
            );
            measure(
                "set_optimizer_state_dict from rank 0",
                optim_bytes + on_the_way,
                &mut || {
                    let optimizers = &mut [&mut optimizer];
                    assert!(
                        set_optimizer_state_dict(&full_optim, parameters, optimizers, &options)
                            .unwrap()
                            .is_clean()
                    );
                },
            );
        })
        .unwrap();
    }
    println_measured(&measured.into_inner().unwrap());
}

/// The figures, for `--nocapture`.
#[expect(
    clippy::print_stdout,
    reason = "a test's figures are for whoever asks for them"
)]
fn println_measured(lines: &[String]) {
    lines.iter().for_each(|line| println!("{line}"));
}
