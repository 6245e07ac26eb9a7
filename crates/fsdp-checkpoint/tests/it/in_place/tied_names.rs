//! Checkpoints of models whose weights were not tied, loaded where they are one tensor: values that
//! differ are an error that names both, and nothing changes.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use fsdp_checkpoint::{
    LoadOptions, SaveOptions, Stateful as _, TrainState, from_checkpoint, load_in_place, save,
    state_digest,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_formats::checkpoint::open;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::writer::WriteOptions;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{AveragedModel, FsdpConfig, FullyShardedDataParallel, Optimizer, Scope};
use fsdp_state::{StateDict, StateValue};

const SHAPE: (usize, usize) = (5, 3);

fn build(scope: &Scope) -> candle_core::Result<Tensor> {
    scope.tie("head.weight", "embedding.weight");
    let init = Init::Const(7.0);
    let embedding = scope.vb().get_with_hints(SHAPE, "embedding.weight", init)?;
    scope.vb().get(SHAPE, "head.weight")?;
    Ok(embedding)
}

fn tied_run(group: &ProcessGroup) -> TrainState<Tensor> {
    let config = FsdpConfig::default();
    let model = FullyShardedDataParallel::new(group.clone(), config, build).unwrap();
    let adam = Algorithm::Adam(AdamOptions::default());
    let optimizer = Optimizer::new(model.parameters(), adam).unwrap();
    let mut run = TrainState::new(model, vec![optimizer]);
    run.average = Some(AveragedModel::new(run.model.parameters(), 0.5).unwrap());
    run
}

fn build_dict<'a>(entries: impl IntoIterator<Item = (&'a str, StateValue)>) -> StateDict {
    entries.into_iter().collect()
}

fn filled(value: f32) -> StateValue {
    Tensor::full(value, SHAPE, &Device::Cpu).unwrap().into()
}

fn moments(value: f32, step: f32) -> StateDict {
    build_dict([
        ("step", Tensor::new(step, &Device::Cpu).unwrap().into()),
        ("exp_avg", filled(value)),
        ("exp_avg_sq", filled(value)),
    ])
}

/// The state of a run in which both names have a value of their own.
struct Saved {
    weights: [f32; 2],
    moments: [f32; 2],
    steps: [f32; 2],
    averages: [f32; 2],
}

const EQUAL: Saved = Saved {
    weights: [1.0; 2],
    moments: [2.0; 2],
    steps: [3.0; 2],
    averages: [4.0; 2],
};

const NAMES: [&str; 2] = ["embedding.weight", "head.weight"];

fn saved_state(group: &ProcessGroup, saved: &Saved) -> StateDict {
    let mut state = tied_run(group).state_dict().unwrap();
    let model = NAMES.into_iter().zip(saved.weights.map(filled));
    state.insert("model", StateValue::Dict(build_dict(model)));
    let states = NAMES
        .into_iter()
        .zip(saved.moments.iter().zip(saved.steps))
        .map(|(name, (value, step))| (name, StateValue::Dict(moments(*value, step))));
    if let Some(StateValue::Dict(optim)) = state.get_mut("optim") {
        optim.insert("state", StateValue::Dict(build_dict(states)));
    }
    if let Some(StateValue::Dict(average)) = state.get_mut("average") {
        for (name, value) in NAMES.into_iter().zip(saved.averages) {
            average.insert(format!("module.{name}"), filled(value));
        }
    }
    state
}

#[test]
fn names_of_one_parameter_with_different_values_are_an_error_in_every_load() {
    let cases = [
        ("equal", EQUAL, None),
        (
            "weights",
            Saved {
                weights: [1.0, 1.5],
                ..EQUAL
            },
            Some("model."),
        ),
        (
            "moments",
            Saved {
                moments: [2.0, 2.5],
                ..EQUAL
            },
            Some("state."),
        ),
        (
            "steps",
            Saved {
                steps: [3.0, 4.0],
                ..EQUAL
            },
            Some("step"),
        ),
        (
            "averages",
            Saved {
                averages: [4.0, 4.5],
                ..EQUAL
            },
            Some("average.module."),
        ),
    ];
    for digests in [true, false] {
        for (what, saved, named) in &cases {
            for (ranks, strict, staged) in [(1, true, false), (2, false, true), (3, true, true)] {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("checkpoint");
                let what = format!("{what}, digests {digests}, {ranks} ranks, strict {strict}");
                let errors = run_local(ranks, |group| {
                    let options = SaveOptions {
                        write: WriteOptions {
                            digests,
                            ..WriteOptions::default()
                        },
                        ..SaveOptions::default()
                    };
                    save(
                        path.as_path(),
                        &saved_state(&group, saved),
                        &group,
                        &options,
                    )
                    .unwrap();
                    let mut run = tied_run(&group);
                    let before = state_digest(&run, &group).unwrap();
                    let options = LoadOptions {
                        strict,
                        staged,
                        ..LoadOptions::default()
                    };
                    let checkpoint = open(path.as_path(), OpenOptions::default()).unwrap();
                    let outcome = run.load_state_dict(&*checkpoint, &group, &options);
                    let is_unchanged = state_digest(&run, &group).unwrap() == before;
                    assert_eq!(outcome.is_err(), is_unchanged, "{what}: {outcome:?}");
                    outcome.err().map(|error| error.to_string())
                })
                .unwrap();
                for error in &errors {
                    match (error, named) {
                        (None, None) => {}
                        (Some(error), Some(named)) => assert!(
                            NAMES.iter().all(|name| error.contains(name)) && error.contains(named),
                            "{what}: {error}"
                        ),
                        _ => panic!("{what}: {error:?}"),
                    }
                    assert_eq!(error, &errors[0], "{what}");
                }
            }
        }
    }
}

#[test]
fn one_name_of_a_tied_parameter_is_enough_and_a_model_is_built_from_equal_ones_only() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        for (case, weights, is_right) in [
            ("first", vec![(NAMES[0], 1.0)], true),
            ("second", vec![(NAMES[1], 1.0)], true),
            ("equal", vec![(NAMES[0], 1.0), (NAMES[1], 1.0)], true),
            ("other", vec![(NAMES[0], 1.0), (NAMES[1], 1.5)], false),
        ] {
            let path = dir.path().join(case);
            let weights = weights
                .into_iter()
                .map(|(name, value)| (name, filled(value)));
            let state = build_dict([("model", StateValue::Dict(build_dict(weights)))]);
            save(path.as_path(), &state, &group, &SaveOptions::default()).unwrap();
            let options = fsdp_checkpoint::FromCheckpointOptions::default();
            let config = FsdpConfig::default();
            let model = from_checkpoint(group.clone(), config, path.as_path(), &options, build);
            assert_eq!(model.is_ok(), is_right, "{case}");
            if let Err(error) = model {
                let error = error.to_string();
                assert!(NAMES.iter().all(|name| error.contains(name)), "{error}");
                assert!(error.contains("--exclude"), "{error}");
            }
        }
    })
    .unwrap();
}

/// The values may be converted first: what counts is what the one tensor would become.
#[test]
fn names_of_other_dtypes_are_compared_as_the_tensor_would_hold_them() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        for (case, second, is_right) in [("equal", 1.5, true), ("other", 1.25, false)] {
            let path = dir.path().join(case);
            let second = Tensor::full(second, SHAPE, &Device::Cpu).unwrap();
            let second = second.to_dtype(DType::BF16).unwrap();
            let saved = build_dict([("a", filled(1.5)), ("b", second.into())]);
            save(path.as_path(), &saved, &group, &SaveOptions::default()).unwrap();
            let tied = Tensor::zeros(SHAPE, DType::F32, &Device::Cpu).unwrap();
            let mut live = build_dict(["a", "b"].map(|name| (name, tied.clone().into())));
            let options = LoadOptions {
                cast: true,
                ..LoadOptions::default()
            };
            let outcome = load_in_place(path.as_path(), &mut live, &group, &options);
            assert_eq!(outcome.is_ok(), is_right, "{case}: {outcome:?}");
        }
    })
    .unwrap();
}
