//! Runs that are at the edge of what a load knows: ranks that have stepped differently, averages
//! that a checkpoint lacks, state of another algorithm, parameters whose names are numbers or that
//! have no elements, ranks that load different steps, gradients from before a load.

use candle_core::{Device, Tensor};
use candle_nn::Init;
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, Stateful as _, TrainState, save,
};
use fsdp_comm::run_local;
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_nn::{AveragedModel, FsdpConfig, FullyShardedDataParallel, Optimizer, ShardingStrategy};
use fsdp_state::{StateDict, flatten_state_dict};

use crate::in_place::resume::bits;
use crate::in_place::training::{Model, adamw, forward, new_run, new_run_with, step};

fn not_strict() -> CheckpointerOptions {
    CheckpointerOptions {
        load: LoadOptions {
            strict: false,
            ..LoadOptions::default()
        },
        ..CheckpointerOptions::default()
    }
}

#[test]
fn ranks_that_have_stepped_differently_cannot_save() {
    for strategy in [ShardingStrategy::NoShard, ShardingStrategy::FullShard] {
        let dir = tempfile::tempdir().unwrap();
        run_local(2, |group| {
            let mut run = new_run_with(&group, strategy, &adamw(), 1);
            step(&mut run, 1);
            let mut checkpointer =
                Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
            checkpointer.save(1, &run).unwrap();
            let x = Tensor::ones((2, 5), candle_core::DType::F32, &Device::Cpu).unwrap();
            let loss = run.model.forward(|m| {
                use candle_nn::Module as _;
                m.1.forward(&m.0.forward(&x)?)?
                    .broadcast_mul(&m.2)?
                    .sqr()?
                    .mean_all()
            });
            run.model.backward(&loss.unwrap()).unwrap();
            // One rank steps once more.
            for _ in 0..=group.rank() {
                run.optimizers[0].step().unwrap();
            }
            let error = checkpointer.save(2, &run).unwrap_err().to_string();
            assert!(
                error.contains("optim.state.") && error.contains(".step"),
                "{error}"
            );
            assert!(error.contains("rank 1"), "{error}");
        })
        .unwrap();
    }
}

#[test]
fn an_average_that_the_checkpoint_lacks_begins_at_the_loaded_weights() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let averaged = |seed| {
            let mut run = new_run(&group, true, &adamw(), seed);
            run.average = Some(AveragedModel::new(run.model.parameters(), 0.9).unwrap());
            run
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, not_strict()).unwrap();
        let mut plain = new_run(&group, true, &adamw(), 1);
        step(&mut plain, 1);
        checkpointer.save(1, &plain).unwrap();
        for updates in [0, 2] {
            let mut other = averaged(2);
            for _ in 0..updates {
                other.average.as_mut().unwrap().update().unwrap();
            }
            let report = checkpointer.load(1, &mut other).unwrap();
            let lacks = |name: &String| name.starts_with("average.module.");
            assert!(report.missing.iter().any(lacks), "{report:?}");
            let mut average = other.average.take().unwrap();
            assert_eq!(average.n_averaged(), 0);
            // The average is what the loaded weights are.
            average.swap().unwrap();
            let swapped = other.model.parameters().summon_full_params().unwrap();
            let whole = plain.model.parameters().summon_full_params().unwrap();
            for ((name, value), (_, expected)) in swapped.iter().zip(whole.iter()) {
                let values = |tensor: &Tensor| -> Vec<f32> {
                    tensor.flatten_all().unwrap().to_vec1().unwrap()
                };
                assert_eq!(values(value), values(expected), "{name}");
            }
        }
    })
    .unwrap();
}

#[test]
fn state_of_another_algorithm_is_left_out_and_named() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        for use_orig_params in [true, false] {
            let mut run = new_run(&group, use_orig_params, &adamw(), 1);
            step(&mut run, 1);
            let path = dir.path().join(use_orig_params.to_string());
            let state = run.state_dict().unwrap();
            save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
            let sgd = Algorithm::Sgd(SgdOptions {
                momentum: 0.9,
                ..SgdOptions::default()
            });
            let mut other = new_run(&group, use_orig_params, &sgd, 2);
            let mut checkpointer = Checkpointer::new(dir.path(), &group, not_strict()).unwrap();
            let report = checkpointer.load(path.as_path(), &mut other).unwrap();
            for name in ["step", "exp_avg", "exp_avg_sq"] {
                let key = format!("state.a.weight.{name}");
                assert!(report.unexpected.contains(&key), "{report:?}");
            }
            step(&mut other, 2);
            let saved = flatten_state_dict(&other.state_dict().unwrap()).unwrap();
            let mut keys = saved.values.keys();
            let foreign = keys.find(|key| key.contains("exp_avg") || key.ends_with(".step"));
            assert_eq!(foreign, None);
        }
    })
    .unwrap();
}

#[test]
fn parameters_whose_names_are_numbers_come_back_in_every_form_of_keys() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let build = |seed: u64| {
            let config = FsdpConfig {
                seed,
                ..FsdpConfig::default()
            };
            let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
                let init = Init::Randn {
                    mean: 0.0,
                    stdev: 1.0,
                };
                let get = |name: &str| scope.vb().get_with_hints((3, 2), name, init);
                Ok(vec![get("1")?, get("0")?, get("10.0")?])
            })
            .unwrap();
            let optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            TrainState::new(model, vec![optimizer])
        };
        let mut run = build(1);
        let loss = run.model.forward(|weights| {
            let sums = weights.iter().map(|weight| weight.sqr()?.sum_all());
            sums.reduce(|a, b| a? + b?).unwrap()
        });
        run.model.backward(&loss.unwrap()).unwrap();
        run.optimizers[0].step().unwrap();
        run.model.parameters().zero_grad();
        let nested = run.state_dict().unwrap();
        let flat: StateDict = flatten_state_dict(&nested)
            .unwrap()
            .values
            .into_iter()
            .collect();
        for (name, state) in [("nested", nested), ("flat", flat)] {
            let path = dir.path().join(name);
            save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
            let mut other = build(2);
            let mut checkpointer =
                Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
            let report = checkpointer.load(path.as_path(), &mut other).unwrap();
            assert!(report.is_clean(), "{name}: {report:?}");
            let all_bits = |run: &TrainState<Vec<Tensor>>| {
                let state = flatten_state_dict(&run.state_dict().unwrap()).unwrap();
                format!("{:?}", fsdp_checkpoint::state_digest(run, &group).unwrap())
                    + &format!("{:?}", state.values.keys().collect::<Vec<_>>())
            };
            assert_eq!(all_bits(&other), all_bits(&run), "{name}");
        }
    })
    .unwrap();
}

#[test]
fn a_parameter_without_elements_in_a_unit_saves_and_loads() {
    for use_orig_params in [true, false] {
        for ranks in [1, 2, 3] {
            let dir = tempfile::tempdir().unwrap();
            run_local(ranks, |group| {
                let build = |seed: u64| {
                    let config = FsdpConfig {
                        seed,
                        use_orig_params,
                        ..FsdpConfig::default()
                    };
                    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
                        scope.pp("u").unit(|scope| {
                            let init = Init::Randn {
                                mean: 0.0,
                                stdev: 1.0,
                            };
                            let get = |shape: (usize, usize), name: &str| {
                                scope.vb().get_with_hints(shape, name, init)
                            };
                            Ok(vec![get((0, 3), "empty")?, get((2, 3), "full")?])
                        })
                    })
                    .unwrap();
                    let optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
                    TrainState::new(model, vec![optimizer])
                };
                let mut run = build(1);
                for _ in 0..2 {
                    let loss = run.model.forward(|unit| {
                        unit.run(|weights| {
                            weights[1].sqr()?.sum_all()? + weights[0].sqr()?.sum_all()?
                        })
                    });
                    run.model.backward(&loss.unwrap()).unwrap();
                    run.optimizers[0].step().unwrap();
                    run.model.parameters().zero_grad();
                }
                let mut checkpointer =
                    Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
                checkpointer.save(1, &run).unwrap();
                let mut other = build(2);
                let report = checkpointer.load(1, &mut other).unwrap();
                assert!(report.is_clean(), "{report:?}");
                let digest = |run| fsdp_checkpoint::state_digest(run, &group).unwrap();
                assert_eq!(
                    digest(&other),
                    digest(&run),
                    "{use_orig_params}, {ranks} ranks"
                );
            })
            .unwrap();
        }
    }
}

/// Weights of two steps must not be mixed, whatever tells them apart.
#[test]
fn ranks_that_load_different_steps_all_get_an_error_that_changes_nothing() {
    for digests in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let messages = run_local(3, |group| {
            let mut options = CheckpointerOptions::default();
            options.save.write.digests = digests;
            let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
            // It has no optimizer, whose steps would differ.
            let mut run = new_run(&group, true, &adamw(), 1);
            let optimizers = std::mem::take(&mut run.optimizers);
            checkpointer.save(1, &run).unwrap();
            run.optimizers = optimizers;
            step(&mut run, 0);
            run.optimizers.clear();
            checkpointer.save(2, &run).unwrap();
            let before = bits(&run);
            let own_step = if group.rank() == 1 { 1 } else { 2u64 };
            let error = checkpointer.load(own_step, &mut run).unwrap_err();
            assert_eq!(bits(&run), before);
            checkpointer.load(1, &mut run).unwrap();
            error.to_string()
        })
        .unwrap();
        for message in &messages {
            assert!(message.contains("rank 1"), "{message}");
            assert_eq!(message, &messages[0]);
        }
    }
}

/// A run that goes back because of a bad batch may have its gradients still.
#[test]
fn gradients_of_the_weights_before_a_load_are_in_no_later_step() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut run = new_run(&group, true, &adamw(), 1);
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer.save(0, &run).unwrap();
        let expected = (step(&mut run, 0), step(&mut run, 1));
        run.model
            .backward(&(forward(&run, 2) * 1e9).unwrap())
            .unwrap();
        let unreduced = |model: &Model| model.backward(&(forward(&run, 3) * 1e9).unwrap());
        run.model.no_sync(unreduced).unwrap();
        checkpointer.load(0, &mut run).unwrap();
        assert_eq!((step(&mut run, 0), step(&mut run, 1)), expected);
    })
    .unwrap();
}
