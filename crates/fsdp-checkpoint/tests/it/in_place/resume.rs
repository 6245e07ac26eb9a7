//! Resuming into the memory of a model and a fresh optimizer gives what resuming through fresh
//! tensors gives.

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, StateDictOptions,
    Stateful as _, TrainState, load_whole, save, set_state_dict,
};
use fsdp_comm::run_local;
use fsdp_flat::storage::HostBytes;
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_nn::algorithm::{
    AdafactorOptions, AdagradOptions, AdamOptions, Algorithm, ScheduleFreeOptions, SgdOptions,
};
use fsdp_nn::sampler::{SamplerOptions, ShardedSampler};
use fsdp_nn::{
    AveragedModel, Decay, FsdpConfig, FullyShardedDataParallel, GradScaler, GradScalerOptions,
    Optimizer, Schedule, ShardingStrategy,
};
use fsdp_state::{
    GatherOptions, StateDict, StateError, StateValue, flatten_containers, gather_state_dict,
};

use crate::in_place::training::{Run, adamw, evaluate, new_run, new_run_with, step};

pub(crate) fn algorithms() -> [Algorithm; 6] {
    let training = ScheduleFreeOptions {
        lr: 0.01,
        train_mode: true,
        ..ScheduleFreeOptions::default()
    };
    [
        Algorithm::ScheduleFreeAdamW(training),
        Algorithm::AdamW(AdamOptions {
            lr: 0.01,
            amsgrad: true,
            ..AdamOptions::adamw()
        }),
        Algorithm::Adam(AdamOptions {
            lr: 0.01,
            ..AdamOptions::default()
        }),
        // With dampening a first step and a later one with a buffer of zeros differ.
        Algorithm::Sgd(SgdOptions {
            lr: 0.01,
            momentum: 0.9,
            dampening: 0.5,
            ..SgdOptions::default()
        }),
        Algorithm::Sgd(SgdOptions {
            lr: 0.01,
            ..SgdOptions::default()
        }),
        Algorithm::Adagrad(AdagradOptions {
            lr: 0.01,
            initial_accumulator_value: 0.5,
            ..AdagradOptions::default()
        }),
    ]
}

/// Loads a checkpoint straight into the live run, or into whole state dicts that are then set: both
/// must give the same.
fn resume(path: &Path, run: &mut Run, in_place: bool) {
    let group = run.model.group().clone();
    if in_place {
        let mut checkpointer =
            Checkpointer::new(path, &group, CheckpointerOptions::default()).unwrap();
        let report = checkpointer.load(path, run).unwrap();
        assert!(report.is_clean(), "{report:?}");
        return;
    }
    let whole = load_whole(path, &[], &LoadOptions::default()).unwrap();
    let part = |key: &str| whole.dict(key).cloned().unwrap_or_default();
    let mut optim = part("optim");
    if !optim.contains_key("state") {
        // An empty dict leaves no trace in a checkpoint: SGD without momentum has no state.
        optim.insert("state", StateDict::new());
    }
    let mut optimizers: Vec<&mut Optimizer> = run.optimizers.iter_mut().collect();
    let options = StateDictOptions::default();
    set_state_dict(
        &part("model"),
        &optim,
        run.model.parameters(),
        &mut optimizers,
        &options,
    )
    .unwrap();
}

pub(crate) fn bits(run: &Run) -> Vec<String> {
    let state = run.state_dict().unwrap();
    let whole = gather_state_dict(&state, run.model.group(), &GatherOptions::default()).unwrap();
    let leaves = flatten_containers(&whole).unwrap().values.into_iter();
    leaves
        .map(|(key, value)| match value {
            StateValue::Tensor(tensor) => {
                let bytes = HostBytes::read(&tensor.contiguous().unwrap())
                    .unwrap()
                    .to_vec();
                format!("{key} {:?} {bytes:?}", tensor.dims())
            }
            other => format!("{key} {other:?}"),
        })
        .collect()
}

#[test]
fn it_goes_on_as_after_a_load_into_fresh_tensors() {
    let dir = tempfile::tempdir().unwrap();
    for (index, algorithm) in algorithms().iter().enumerate() {
        for saved_flat in [false, true] {
            let path = dir.path().join(format!("{index}-{saved_flat}"));
            let saved = run_local(2, |group| {
                let mut run = new_run(&group, !saved_flat, algorithm, 1);
                (0..2).for_each(|seed| _ = step(&mut run, seed));
                save(
                    path.as_path(),
                    &run.state_dict().unwrap(),
                    &group,
                    &SaveOptions::default(),
                )
                .unwrap();
                bits(&run)
            })
            .unwrap();
            for (world, flat) in [(1, false), (2, true), (3, false), (5, false)] {
                run_local(world, |group| {
                    let outcome = |in_place: bool| {
                        let mut run = new_run(&group, !flat, algorithm, 2);
                        resume(&path, &mut run, in_place);
                        let resumed = bits(&run);
                        (2..4).for_each(|seed| _ = step(&mut run, seed));
                        (resumed, bits(&run))
                    };
                    let (in_place, fresh) = (outcome(true), outcome(false));
                    assert_eq!(in_place, fresh, "{algorithm:?} {saved_flat} {world} {flat}");
                    assert_eq!(
                        in_place.0, saved[0],
                        "{algorithm:?} {saved_flat} {world} {flat}"
                    );
                })
                .unwrap();
            }
        }
    }
}

/// The losses go on as if nothing had happened, also where state begins with the first step
/// (momentum).
#[test]
fn a_resumed_run_has_the_losses_of_one_that_was_never_stopped() {
    let dir = tempfile::tempdir().unwrap();
    for (index, algorithm) in algorithms().iter().enumerate() {
        let path = dir.path().join(index.to_string());
        run_local(2, |group| {
            let mut run = new_run(&group, true, algorithm, 1);
            (0..3).for_each(|seed| _ = step(&mut run, seed));
            let mut checkpointer =
                Checkpointer::new(path.as_path(), &group, CheckpointerOptions::default()).unwrap();
            checkpointer.save(3, &run).unwrap();
            let expected: Vec<f32> = (3..6).map(|seed| step(&mut run, seed)).collect();
            let mut resumed = new_run(&group, true, algorithm, 2);
            let (latest, report) = checkpointer.load_latest(&mut resumed).unwrap().unwrap();
            assert!(report.is_clean() && latest.step == 3, "{report:?}");
            let losses: Vec<f32> = (3..6).map(|seed| step(&mut resumed, seed)).collect();
            assert_eq!(losses, expected, "{algorithm:?}");
        })
        .unwrap();
    }
}

/// A forward may leave gathered copies of the weights; what comes after a load must not compute
/// with them.
#[test]
fn weights_that_an_evaluation_has_gathered_are_not_used_after_a_load() {
    let dir = tempfile::tempdir().unwrap();
    for strategy in [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
    ] {
        let path = dir.path().join(format!("{strategy:?}"));
        run_local(2, |group| {
            let mut run = new_run_with(&group, strategy, &adamw(), 1);
            let mut checkpointer =
                Checkpointer::new(path.as_path(), &group, CheckpointerOptions::default()).unwrap();
            checkpointer.save(0, &run).unwrap();
            let expected = evaluate(&run);
            step(&mut run, 0);
            assert_ne!(evaluate(&run), expected);
            checkpointer.load(0, &mut run).unwrap();
            assert_eq!(evaluate(&run), expected, "{strategy:?}");
        })
        .unwrap();
    }
}

/// Checks that a load of step 1 fails because something does not fit, and changes nothing. Returns
/// the message.
fn refused(checkpointer: &mut Checkpointer, run: &mut Run) -> String {
    let before = bits(run);
    let error = checkpointer.load(1, run).unwrap_err();
    assert!(
        matches!(
            error,
            CheckpointError::State(StateError::Incompatible { .. })
        ),
        "{error:?}"
    );
    assert_eq!(bits(run), before);
    error.to_string()
}

#[test]
fn values_beside_model_and_optimizer_come_back_and_what_differs_is_an_error_that_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        let schedule: StateDict = [("warmup", 10i64.into()), ("name", "cosine".into())]
            .into_iter()
            .collect();
        run.values.insert("schedule", schedule);
        run.values.insert(
            "generator",
            Tensor::new(&[3u32, 1, 4], &Device::Cpu).unwrap(),
        );
        checkpointer.save(1, &run).unwrap();

        let mut resumed = new_run(&group, true, &adamw(), 2);
        resumed.values.insert(
            "generator",
            Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap(),
        );
        checkpointer.load(1, &mut resumed).unwrap();
        assert_eq!(
            resumed
                .values
                .plain_at(&["schedule", "name"])
                .and_then(PlainValue::as_str),
            Some("cosine")
        );
        let generator = resumed
            .values
            .get("generator")
            .and_then(StateValue::as_tensor)
            .unwrap();
        assert_eq!(generator.to_vec1::<u32>().unwrap(), [3, 1, 4]);
        assert_eq!(bits(&resumed).len(), bits(&run).len());

        // A value that the checkpoint lacks, and a tensor that the run has no place for.
        for change in [
            (|run: &mut Run| drop(run.values.insert("epoch", 1i64))) as fn(&mut Run),
            |run: &mut Run| drop(run.values.remove("generator")),
        ] {
            let mut other = new_run(&group, true, &adamw(), 2);
            other.values.insert(
                "generator",
                Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap(),
            );
            change(&mut other);
            refused(&mut checkpointer, &mut other);
        }
    })
    .unwrap();
}

/// In files of flat keys they would be the model's and the optimizers' own.
#[test]
fn values_under_names_of_the_model_or_the_optimizers_cannot_be_saved() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        for key in ["model.note", "optim.note", "model", "optim"] {
            // Without optimizers nothing else has the key `optim`.
            for has_optimizers in [true, false] {
                let mut run = new_run(&group, true, &adamw(), 1);
                if !has_optimizers {
                    run.optimizers.clear();
                }
                run.values.insert(key, 1i64);
                let error = checkpointer.save(1, &run).unwrap_err().to_string();
                assert!(error.contains(&format!("cannot save `{key}`")), "{error}");
            }
        }
        let mut run = new_run(&group, true, &adamw(), 1);
        run.values.insert("models.note", 1i64);
        checkpointer.save(1, &run).unwrap();
        assert!(
            checkpointer
                .load(1, &mut new_run(&group, true, &adamw(), 2))
                .unwrap()
                .is_clean()
        );
    })
    .unwrap();
}

/// Steps of a run whose batches a sampler deals, at the rates of a schedule, with a scaler. Returns
/// the samples of all ranks in each step.
pub(crate) fn train_on(run: &mut Run, steps: Range<u64>) -> Vec<Vec<u64>> {
    let group = run.model.group().clone();
    let schedule = Schedule {
        decay: Decay::Cosine,
        warmup: 3,
        steps: 12,
    };
    let mut seen = Vec::new();
    for number in steps {
        let mine = run
            .sampler
            .as_mut()
            .unwrap()
            .next_batch(group.rank(), group.world_size());
        schedule.apply(&mut run.optimizers[0], number).unwrap();
        step(run, number as usize);
        let scaler = run.scaler.as_mut().unwrap();
        scaler.unscale(run.model.parameters()).unwrap();
        scaler.update().unwrap();
        seen.push(group.all_gather_object(&mine).unwrap().concat());
    }
    seen
}

/// Gives a run a sampler and a scaler.
pub(crate) fn with_parts(mut run: Run, samples: u64) -> Run {
    let options = SamplerOptions {
        samples,
        batch: 6,
        seed: 3,
        ..SamplerOptions::default()
    };
    run.sampler = Some(ShardedSampler::new(options).unwrap());
    let growing = GradScalerOptions {
        growth_interval: 4,
        ..GradScalerOptions::default()
    };
    run.scaler = Some(GradScaler::new(growing).unwrap());
    run
}

#[test]
fn sampler_scaler_and_schedule_go_on_at_another_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let run_on = |world: usize, steps: Range<u64>| {
        let outcomes = run_local(world, |group| {
            let mut checkpointer =
                Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
            let mut run = with_parts(new_run(&group, true, &adamw(), 1), 17);
            if steps.start > 0 {
                let report = checkpointer.load(steps.start, &mut run).unwrap();
                assert!(report.is_clean() && run.values.is_empty(), "{report:?}");
            }
            let seen = train_on(&mut run, steps.clone());
            if steps.start > 0 || steps.end < 9 {
                checkpointer.save(steps.end, &run).unwrap();
            }
            (
                seen,
                run.scaler.unwrap().get_scale(),
                run.optimizers[0].groups()[0].algorithm.lr(),
            )
        });
        outcomes.unwrap().remove(0)
    };
    let whole = run_on(1, 0..9);
    let mut seen = run_on(3, 0..2).0;
    seen.extend(run_on(2, 2..5).0);
    let (last, scale, lr) = run_on(4, 5..9);
    seen.extend(last);
    assert_eq!((seen, scale, lr), whole);
}

#[test]
fn an_average_of_weights_goes_on_at_another_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let of_average = |run: &mut Run| {
        run.average.as_mut().unwrap().swap().unwrap();
        let found = evaluate(run);
        run.average.as_mut().unwrap().swap().unwrap();
        found
    };
    let expected = run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        let mut average = AveragedModel::new(run.model.parameters(), 0.5).unwrap();
        for number in 0..4 {
            step(&mut run, number);
            average.update().unwrap();
        }
        // While the model has it, it would be saved as the weights.
        average.swap().unwrap();
        let error = checkpointer.save(4, &run).unwrap_err().to_string();
        assert!(error.contains("has the average of its weights"), "{error}");
        average.swap().unwrap();
        run.average = Some(average);
        checkpointer.save(4, &run).unwrap();
        (evaluate(&run), of_average(&mut run))
    });
    let (weights, average) = expected.unwrap().remove(0);
    assert_ne!(weights, average);
    for world in [1, 3] {
        run_local(world, |group| {
            let mut checkpointer =
                Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
            let mut run = new_run(&group, true, &adamw(), 2);
            run.average = Some(AveragedModel::new(run.model.parameters(), 0.5).unwrap());
            checkpointer.load(4, &mut run).unwrap();
            assert_eq!(run.average.as_ref().unwrap().n_averaged(), 4);
            assert_eq!((evaluate(&run), of_average(&mut run)), (weights, average));
        })
        .unwrap();
    }
}

/// torch's averaged models have copies of the buffers, as they were at the last update.
#[test]
fn buffers_come_from_their_names_in_the_model_and_not_from_those_in_its_average() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("saved");
    run_local(2, |group| {
        let build = || {
            let model =
                FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                    scope.buffer(
                        "statistics",
                        Tensor::zeros(3, DType::F32, &Device::Cpu)?,
                        true,
                    );
                    candle_nn::linear(3, 2, scope.vb())
                });
            let mut run = TrainState::new(model.unwrap(), Vec::new());
            run.average = Some(AveragedModel::new(run.model.parameters(), 0.5).unwrap());
            run
        };
        let mut saved = build().state_dict().unwrap();
        for (key, name, value) in [
            ("model", "statistics", 1f32),
            ("average", "module.statistics", 2.0),
        ] {
            let Some(StateValue::Dict(part)) = saved.get_mut(key) else {
                panic!("no {key}")
            };
            part.insert(name, Tensor::full(value, 3, &Device::Cpu).unwrap());
        }
        save(path.as_path(), &saved, &group, &SaveOptions::default()).unwrap();
        for staged in [false, true] {
            let mut run = build();
            let load = LoadOptions {
                staged,
                ..LoadOptions::default()
            };
            let options = CheckpointerOptions {
                load,
                ..CheckpointerOptions::default()
            };
            let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
            checkpointer.load(path.as_path(), &mut run).unwrap();
            let (statistics, _) = &run.model.parameters().buffers()["statistics"];
            assert_eq!(
                statistics.to_vec1::<f32>().unwrap(),
                [1.0; 3],
                "staged {staged}"
            );
        }
    })
    .unwrap();
}

#[test]
fn the_sampler_of_another_data_set_refuses_a_load_that_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = with_parts(new_run(&group, true, &adamw(), 1), 17);
        train_on(&mut run, 0..2);
        checkpointer.save(2, &run).unwrap();
        // One rank has another data set than the run that was saved.
        let mut other = with_parts(
            new_run(&group, true, &adamw(), 2),
            if group.rank() == 1 { 18 } else { 17 },
        );
        let before = (bits(&other), other.sampler.clone(), other.scaler.clone());
        let error = checkpointer.load(2, &mut other).unwrap_err().to_string();
        assert!(
            error.contains("`samples` = 17") && error.contains("18"),
            "{error}"
        );
        assert!((bits(&other), other.sampler.clone(), other.scaler.clone()) == before);
    })
    .unwrap();
}

#[test]
fn a_load_without_optimizers_keeps_nothing_of_theirs() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        for (number, algorithm) in algorithms().iter().enumerate() {
            let mut run = new_run(&group, true, algorithm, 1);
            step(&mut run, 0);
            checkpointer.save(number as u64, &run).unwrap();
            let mut evaluated = new_run(&group, true, algorithm, 2);
            let optimizers = std::mem::take(&mut evaluated.optimizers);
            // A run without optimizers has no place for their state.
            let error = checkpointer
                .load(number as u64, &mut evaluated)
                .unwrap_err();
            assert!(
                matches!(
                    error,
                    CheckpointError::State(StateError::Incompatible { .. })
                ),
                "{error:?}"
            );
            let load = LoadOptions {
                strict: false,
                ..LoadOptions::default()
            };
            let options = CheckpointerOptions {
                load,
                ..CheckpointerOptions::default()
            };
            let mut not_strict = Checkpointer::new(dir.path(), &group, options).unwrap();
            let report = not_strict.load(number as u64, &mut evaluated).unwrap();
            assert!(
                report
                    .unexpected
                    .iter()
                    .any(|key| key.contains("param_groups")),
                "{report:?}"
            );
            assert!(evaluated.values.is_empty(), "{:?}", evaluated.values);
            assert_eq!(evaluate(&evaluated), evaluate(&run));
            // With an optimizer again it can be saved.
            evaluated.optimizers = optimizers;
            checkpointer.save(100 + number as u64, &evaluated).unwrap();
        }
    })
    .unwrap();
}

#[test]
fn a_value_that_does_not_fit_one_rank_is_every_ranks_error() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        run.values.insert(
            "generator",
            Tensor::new(&[3u32, 1, 4], &Device::Cpu).unwrap(),
        );
        checkpointer.save(1, &run).unwrap();
        run.values.insert(
            "generator",
            Tensor::zeros(3 + group.rank(), DType::U32, &Device::Cpu).unwrap(),
        );
        let error = checkpointer.load(1, &mut run).unwrap_err().to_string();
        assert!(
            error.contains("rank 1") && error.contains("generator"),
            "{error}"
        );
        group.barrier().unwrap();
    })
    .unwrap();
}

#[test]
fn a_cast_that_one_rank_alone_allows_is_every_ranks_error() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let load = LoadOptions {
            cast: group.rank() == 0,
            ..LoadOptions::default()
        };
        let options = CheckpointerOptions {
            load,
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        run.values.insert(
            "generator",
            Tensor::new(&[3u32, 1, 4], &Device::Cpu).unwrap(),
        );
        checkpointer.save(1, &run).unwrap();
        run.values.insert(
            "generator",
            Tensor::zeros(3, DType::I64, &Device::Cpu).unwrap(),
        );
        let error = checkpointer.load(1, &mut run).unwrap_err().to_string();
        assert!(
            error.contains("rank 1") && error.contains("generator"),
            "{error}"
        );
        group.barrier().unwrap();
    })
    .unwrap();
}

/// PyTorch programs often save the number of steps as a tensor.
#[test]
fn a_tensor_of_one_element_becomes_a_number_where_the_run_has_a_plain_value() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        let largest = (1i64 << 62) + 1;
        run.values
            .insert("step", Tensor::new(largest, &Device::Cpu).unwrap());
        run.values
            .insert("best", Tensor::new(&[0.25f32], &Device::Cpu).unwrap());
        run.values
            .insert("new", Tensor::new(7u8, &Device::Cpu).unwrap());
        checkpointer.save(1, &run).unwrap();
        run.values = [("step", 0i64.into()), ("best", 0.0.into())]
            .into_iter()
            .collect();
        let report = checkpointer.load(1, &mut run).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(
            run.values.plain_at(&["step"]),
            Some(&PlainValue::Int(largest))
        );
        assert_eq!(
            run.values.plain_at(&["best"]),
            Some(&PlainValue::Float(0.25))
        );
        assert!(
            matches!(run.values.get("new"), Some(StateValue::Tensor(_))),
            "{:?}",
            run.values
        );
    })
    .unwrap();
}

#[test]
fn tensors_under_a_key_for_each_rank_come_back() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let key = format!("generator.rank{}", group.rank());
        let mut run = new_run(&group, true, &adamw(), 1);
        run.values.insert(
            key.as_str(),
            Tensor::full(group.rank() as u32 + 7, 3, &Device::Cpu).unwrap(),
        );
        checkpointer.save(1, &run).unwrap();
        run.values.insert(
            key.as_str(),
            Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap(),
        );
        let report = checkpointer.load(1, &mut run).unwrap();
        assert!(report.is_clean(), "{report:?}");
        let found = run
            .values
            .get(&key)
            .and_then(StateValue::as_tensor)
            .unwrap();
        assert_eq!(
            found.to_vec1::<u32>().unwrap(),
            [group.rank() as u32 + 7; 3]
        );
        // A tensor that no rank has a place for is still an error of a strict load.
        run.values
            .insert("more", Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap());
        checkpointer.save(2, &run).unwrap();
        run.values.remove("more");
        let error = checkpointer.load(2, &mut run).unwrap_err().to_string();
        assert!(
            error.contains("more") && !error.contains("generator"),
            "{error}"
        );
    })
    .unwrap();
}

/// Adafactor's averages are no part of its schema: their shapes depend on the parameter's.
#[test]
fn averages_of_rows_columns_and_single_elements_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let algorithm = Algorithm::Adafactor(AdafactorOptions {
        lr: 0.05,
        ..AdafactorOptions::default()
    });
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        let path = dir.path().join(format!("{strategy:?}"));
        run_local(2, |group| {
            let mut run = new_run_with(&group, strategy, &algorithm, 1);
            (0..3).for_each(|seed| _ = step(&mut run, seed));
            let mut checkpointer =
                Checkpointer::new(path.as_path(), &group, CheckpointerOptions::default()).unwrap();
            checkpointer.save(3, &run).unwrap();
            let mut resumed = new_run_with(&group, strategy, &algorithm, 2);
            checkpointer.load(3, &mut resumed).unwrap();
            (3..5).for_each(|seed| _ = (step(&mut run, seed), step(&mut resumed, seed)));
            assert_eq!(bits(&resumed), bits(&run), "{strategy:?}");
        })
        .unwrap();
    }
}

#[test]
fn a_value_that_is_not_contiguous_is_found_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        run.values
            .insert("x", Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap());
        checkpointer.save(1, &run).unwrap();
        let mut other = new_run(&group, true, &adamw(), 2);
        other.values.insert(
            "x",
            Tensor::zeros((2, 3), DType::F32, &Device::Cpu)
                .unwrap()
                .t()
                .unwrap(),
        );
        refused(&mut checkpointer, &mut other);
    })
    .unwrap();
}

#[test]
fn a_scaler_that_cannot_go_on_is_found_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let path = dir.path().join("saved");
        let run = with_parts(new_run(&group, true, &adamw(), 1), 17);
        let mut state = run.state_dict().unwrap();
        let Some(StateValue::Dict(scaler)) = state.get_mut("scaler") else {
            panic!("no scaler")
        };
        scaler.insert("scale", Tensor::new(2f32, &Device::Cpu).unwrap());
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        let mut other = with_parts(new_run(&group, true, &adamw(), 2), 17);
        let before = bits(&other);
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let error = checkpointer
            .load(path.as_path(), &mut other)
            .unwrap_err()
            .to_string();
        assert!(error.contains("scale"), "{error}");
        assert_eq!(bits(&other), before);
    })
    .unwrap();
}

#[test]
fn an_average_that_cannot_go_on_is_found_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let path = dir.path().join("saved");
        let averaged = |seed| {
            let mut run = new_run(&group, true, &adamw(), seed);
            run.average = Some(AveragedModel::new(run.model.parameters(), 0.9).unwrap());
            run
        };
        let mut state = averaged(1).state_dict().unwrap();
        let Some(StateValue::Dict(average)) = state.get_mut("average") else {
            panic!("no average")
        };
        average.insert("n_averaged", Tensor::new(-3i64, &Device::Cpu).unwrap());
        save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
        let mut other = averaged(2);
        let before = bits(&other);
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let error = checkpointer
            .load(path.as_path(), &mut other)
            .unwrap_err()
            .to_string();
        assert!(error.contains("n_averaged"), "{error}");
        assert_eq!(bits(&other), before);
    })
    .unwrap();
}

/// The number of updates is a plain value, which the run would take by itself. A later average
/// would go on from it.
#[test]
fn of_an_average_that_the_run_has_no_place_for_nothing_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let load = LoadOptions {
            strict: false,
            ..LoadOptions::default()
        };
        let options = CheckpointerOptions {
            load,
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        let mut average = AveragedModel::new(run.model.parameters(), 0.5).unwrap();
        average.update().unwrap();
        run.average = Some(average);
        run.values.insert("epoch", 4i64);
        checkpointer.save(1, &run).unwrap();
        let mut other = new_run(&group, true, &adamw(), 2);
        let report = checkpointer.load(1, &mut other).unwrap();
        assert!(
            report.unexpected.contains(&"average.n_averaged".to_owned()),
            "{report:?}"
        );
        assert!(other.values.keys().eq(["epoch"]), "{:?}", other.values);
    })
    .unwrap();
}

/// torch's averages list tied weights under both names, and other programs' under one of them.
#[test]
fn an_average_of_tied_weights_goes_on_from_any_of_their_names() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let build = |value: f64| {
            let model =
                FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                    scope.tie("head.weight", "embedding.weight");
                    let embedding = scope.vb().get_with_hints(
                        (4, 3),
                        "embedding.weight",
                        Init::Const(value),
                    )?;
                    Ok((embedding, scope.vb().get((4, 3), "head.weight")?))
                });
            let mut run = TrainState::new(model.unwrap(), Vec::new());
            run.average = Some(AveragedModel::new(run.model.parameters(), 0.5).unwrap());
            run
        };
        let mut run = build(2.0);
        run.average.as_mut().unwrap().update().unwrap();
        let names = ["module.embedding.weight", "module.head.weight"];
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        for (step, left_out) in [(1, None), (2, Some(names[0])), (3, Some(names[1]))] {
            let mut state = run.state_dict().unwrap();
            let Some(StateValue::Dict(average)) = state.get_mut("average") else {
                panic!("no average")
            };
            assert!(
                names.iter().all(|name| average.contains_key(name)),
                "{average:?}"
            );
            left_out.map(|name| average.remove(name));
            checkpointer.save(step, &state).unwrap();
            let mut other = build(1.0);
            let report = checkpointer.load(step, &mut other).unwrap();
            assert!(report.is_clean(), "{report:?}");
            let mut average = other.average.take().unwrap();
            assert_eq!(average.n_averaged(), 1);
            average.swap().unwrap();
            let whole = other.model.parameters().summon_full_params().unwrap();
            let (_, weight) = whole.iter().next().unwrap();
            assert_eq!(
                weight.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                [2.0; 12],
                "without {left_out:?}"
            );
        }
    })
    .unwrap();
}

#[test]
fn shards_of_a_value_that_are_not_contiguous_are_found_before_anything_changes() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        // Each rank has two of four columns.
        let columns = |value: f32| {
            let whole = Tensor::full(value, (3, 4), &Device::Cpu).unwrap();
            let bounds = TensorBox::new(vec![0, 2 * group.rank()], vec![3, 2]);
            let tensor = whole.narrow(1, 2 * group.rank(), 2).unwrap();
            ShardedTensor::new(DType::F32, vec![3, 4], vec![LocalShard { bounds, tensor }]).unwrap()
        };
        for staged in [false, true] {
            let load = LoadOptions {
                staged,
                ..LoadOptions::default()
            };
            let options = CheckpointerOptions {
                load,
                ..CheckpointerOptions::default()
            };
            let path = dir.path().join(format!("{staged}"));
            let mut checkpointer = Checkpointer::new(path.as_path(), &group, options).unwrap();
            let mut run = new_run(&group, true, &adamw(), 1);
            run.values.insert("columns", columns(1.0));
            checkpointer.save(1, &run).unwrap();
            let mut other = new_run(&group, true, &adamw(), 2);
            other.values.insert("columns", columns(2.0));
            refused(&mut checkpointer, &mut other);
        }
    })
    .unwrap();
}

#[test]
fn containers_come_in_place_of_values_that_stand_for_nothing_yet() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = new_run(&group, true, &adamw(), 1);
        let best: StateDict = [("loss", 0.5.into()), ("step", 7i64.into())]
            .into_iter()
            .collect();
        let epoch =
            |number: i64| StateValue::Dict([("epoch", number.into())].into_iter().collect());
        run.values.insert("best", best);
        run.values
            .insert("history", StateValue::List(vec![epoch(1), epoch(2)]));
        checkpointer.save(1, &run).unwrap();

        let mut fresh = new_run(&group, true, &adamw(), 2);
        fresh.values.insert("best", PlainValue::None);
        fresh.values.insert("history", PlainValue::List(Vec::new()));
        let report = checkpointer.load(1, &mut fresh).unwrap();
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(bits(&fresh), bits(&run));

        // A value that stands for something is not replaced by a container.
        let mut other = new_run(&group, true, &adamw(), 2);
        other.values.insert("best", 3i64);
        let error = refused(&mut checkpointer, &mut other);
        assert!(error.contains("best.loss"), "{error}");
    })
    .unwrap();
}
