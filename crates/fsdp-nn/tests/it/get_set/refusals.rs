//! State that cannot be set: one error on every rank that names it, and nothing is changed.

use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::RawTensor;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_nn::algorithm::{AdafactorOptions, Algorithm};
use fsdp_nn::torch::{
    OptimStateError, StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
    get_state_dict, set_model_state_dict, set_optimizer_state_dict, set_state_dict,
};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ParamGroup, ShardingStrategy,
};
use fsdp_state::{StateDict, StateError, StateValue, get_element_mut};

use crate::get_set::common::*;

/// A model and an optimizer that has stepped.
fn trained(group: &ProcessGroup, use_orig_params: bool) -> (Model, Optimizer) {
    let model = model(
        group.clone(),
        config(
            group.world_size(),
            ShardingStrategy::FullShard,
            use_orig_params,
            1,
        ),
    );
    let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
    step(&model, &mut [&mut optimizer], 0);
    (model, optimizer)
}

fn full_options() -> StateDictOptions {
    StateDictOptions {
        full_state_dict: true,
        ..options()
    }
}

fn dict<'a>(state: &'a mut StateDict, path: &[PathPart]) -> &'a mut StateDict {
    match get_element_mut(state, &KeyPath(path.to_vec())) {
        Some(StateValue::Dict(dict)) => dict,
        other => panic!("{path:?}: {other:?}"),
    }
}

fn key(key: &str) -> PathPart {
    PathPart::Key(key.to_owned())
}

/// The first saved group.
fn first_group(state: &mut StateDict) -> &mut StateDict {
    dict(state, &[key("param_groups"), PathPart::Index(0)])
}

fn tensor(values: &[f32], shape: &[usize]) -> StateValue {
    Tensor::from_slice(values, shape, &Device::Cpu)
        .unwrap()
        .into()
}

/// Sets a dict into a trained optimizer, which must fail on every rank with one error and change
/// nothing.
fn refused(
    world: usize,
    use_orig_params: bool,
    options: &StateDictOptions,
    edit: impl Fn(&mut StateDict, usize) + Sync,
) -> Vec<NnError> {
    let errors = run_local(world, |group| {
        let (model, mut optimizer) = trained(&group, use_orig_params);
        let get = StateDictOptions {
            broadcast_from_rank0: false,
            ..options.clone()
        };
        let mut state = get_optimizer_state_dict(model.parameters(), &[&optimizer], &get).unwrap();
        step(&model, &mut [&mut optimizer], 1);
        let before = gathered_bits(&model, &[&optimizer]);
        edit(&mut state, group.rank());
        let set =
            set_optimizer_state_dict(&state, model.parameters(), &mut [&mut optimizer], options);
        assert_eq!(gathered_bits(&model, &[&optimizer]), before);
        set.unwrap_err()
    })
    .unwrap();
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    errors
}

#[test]
fn a_dict_that_only_rank_0_has_is_one_error_on_every_rank() {
    for full_state_dict in [false, true] {
        let errors = run_local(2, |group| {
            let get = StateDictOptions {
                full_state_dict,
                ..options()
            };
            let (model, mut optimizer) = trained(&group, true);
            let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &get).unwrap();
            step(&model, &mut [&mut optimizer], 1);
            let before = gathered_bits(&model, &[&optimizer]);
            let nothing = StateDict::new();
            let mut errors = Vec::new();
            for strict in [true, false] {
                for (m, o) in [(&m, &o), (&m, &nothing), (&nothing, &o)] {
                    let (m, o) = if group.rank() == 0 {
                        (m, o)
                    } else {
                        (&nothing, &nothing)
                    };
                    let options = StateDictOptions {
                        strict,
                        ..get.clone()
                    };
                    let set =
                        set_state_dict(m, o, model.parameters(), &mut [&mut optimizer], &options);
                    errors.push(set.unwrap_err().to_string());
                }
            }
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            errors
        })
        .unwrap();
        assert_eq!(errors[0], errors[1]);
    }
}

#[test]
fn an_optimizer_dict_that_lacks_a_part_never_resets_what_is_there() {
    for use_orig_params in [true, false] {
        for options in [
            options(),
            full_options(),
            StateDictOptions {
                broadcast_from_rank0: true,
                ..full_options()
            },
        ] {
            type Edit = fn(&mut StateDict);
            let edits: [(&str, Edit); 4] = [
                ("param_groups", |state| *state = StateDict::new()),
                ("state", |state| drop(state.remove("state"))),
                ("param_groups", |state| drop(state.remove("param_groups"))),
                ("a.weight", |state| {
                    drop(state.insert("state", StateDict::new()))
                }),
            ];
            for (name, edit) in edits {
                let errors = refused(3, use_orig_params, &options, |state, _| edit(state));
                assert!(
                    errors[0].to_string().contains(name),
                    "{name}: {}",
                    errors[0]
                );
            }
        }
    }
}

#[test]
fn a_malformed_step_is_named_and_refused() {
    for use_orig_params in [true, false] {
        for options in [
            options(),
            StateDictOptions {
                strict: false,
                ..options()
            },
            StateDictOptions {
                broadcast_from_rank0: true,
                ..full_options()
            },
        ] {
            for step in [
                tensor(&[-1.0], &[]),
                tensor(&[f32::NAN], &[]),
                tensor(&[f32::INFINITY], &[]),
                (-1.0).into(),
                "three".into(),
                tensor(&[1.0, 2.0], &[2]),
                StateValue::List(vec![1.0.into(), 2.0.into()]),
            ] {
                let errors = refused(2, use_orig_params, &options, |state, _| {
                    // A FlatParameter's parameters share their step.
                    for fqn in ["a.weight", "a.bias"] {
                        dict(state, &[key("state"), key(fqn)]).insert("step", step.clone());
                    }
                });
                for error in errors {
                    let NnError::OptimState {
                        error: OptimStateError::MalformedStep { fqn, .. },
                        ranks,
                    } = &error
                    else {
                        panic!("{step:?}: {error}")
                    };
                    let names = if use_orig_params {
                        &["a.weight", "a.bias"][..]
                    } else {
                        &["a._flat_param"]
                    };
                    assert!(names.contains(&fqn.as_str()), "{error}");
                    assert!(ranks.is_empty(), "all ranks met it");
                }
            }
        }
    }
}

#[test]
fn a_malformed_step_on_one_rank_is_every_ranks_error() {
    let errors = refused(3, true, &options(), |state, rank| {
        if rank == 1 {
            dict(state, &[key("state"), key("a.bias")]).insert("step", tensor(&[-1.0], &[]));
        }
    });
    let NnError::OptimState {
        error: OptimStateError::MalformedStep { fqn, found },
        ranks,
    } = &errors[0]
    else {
        panic!("{}", errors[0])
    };
    assert_eq!(
        (fqn.as_str(), found.as_str(), &ranks[..]),
        ("a.bias", "-1", &[1][..])
    );
}

#[test]
fn a_group_without_its_learning_rate_is_missing_it() {
    for options in [options(), full_options()] {
        let errors = refused(2, true, &options, |state, _| {
            drop(first_group(state).remove("lr"))
        });
        let NnError::State(StateError::Incompatible { report, .. }) = &errors[0] else {
            panic!("{}", errors[0])
        };
        assert_eq!(report.missing, ["param_groups.0.lr"]);
    }
}

#[test]
fn whole_tensors_that_differ_between_ranks_are_named() {
    let errors = refused(3, true, &full_options(), |state, rank| {
        if rank == 2 {
            let entries = dict(state, &[key("state"), key("a.weight")]);
            let moment = entries.get("exp_avg").unwrap().as_tensor().unwrap();
            let mut values = moment.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values[50] = f32::from_bits(values[50].to_bits() ^ 1);
            entries.insert("exp_avg", tensor(&values, &[9, 6]));
        }
    });
    let NnError::State(StateError::DifferingOnRanks {
        key,
        rank,
        reference,
        ..
    }) = &errors[0]
    else {
        panic!("{}", errors[0])
    };
    assert_eq!(
        (key.as_str(), *rank, *reference),
        ("optim.state.a.weight.exp_avg", 2, 0)
    );
    run_local(2, |group| {
        let (model, _) = trained(&group, true);
        let mut m = get_model_state_dict(model.parameters(), &full_options()).unwrap();
        let before = bits(&m);
        if group.rank() == 1 {
            m.insert("b.bias", tensor(&[9.0; 6], &[6]));
        }
        let error = set_model_state_dict(&m, model.parameters(), &full_options()).unwrap_err();
        assert!(
            matches!(&error, NnError::State(StateError::DifferingOnRanks { key, rank: 1, .. }) if key == "model.b.bias"),
            "{error}"
        );
        assert_eq!(bits(&get_model_state_dict(model.parameters(), &full_options()).unwrap()), before);
        // Buffers are each rank's own.
        let mut m = get_model_state_dict(model.parameters(), &full_options()).unwrap();
        m.insert("steps", tensor(&[group.rank() as f32], &[]));
        set_model_state_dict(&m, model.parameters(), &full_options()).unwrap();
        let (steps, _) = &model.parameters().buffers()["steps"];
        assert_eq!(steps.to_scalar::<f32>().unwrap(), group.rank() as f32);
    })
    .unwrap();
}

#[test]
fn an_optimizer_of_another_model_is_foreign() {
    run_local(2, |group| {
        let (model, mut optimizer) = trained(&group, true);
        let (other, mut foreign) = trained(&group, true);
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let error =
            get_optimizer_state_dict(model.parameters(), &[&optimizer, &foreign], &options())
                .unwrap_err();
        assert!(matches!(error, NnError::ForeignOptimizer), "{error}");
        step(&model, &mut [&mut optimizer], 1);
        let before = (
            gathered_bits(&model, &[&optimizer]),
            gathered_bits(&other, &[&foreign]),
        );
        let set = set_state_dict(
            &m,
            &o,
            model.parameters(),
            &mut [&mut optimizer, &mut foreign],
            &options(),
        );
        let error = set.unwrap_err().to_string();
        assert!(
            error.contains(&NnError::ForeignOptimizer.to_string()),
            "{error}"
        );
        assert_eq!(
            (
                gathered_bits(&model, &[&optimizer]),
                gathered_bits(&other, &[&foreign])
            ),
            before
        );
    })
    .unwrap();
}

/// Two names of the model that become one in a dict, and two of a dict that become one in the
/// model.
#[test]
fn names_that_renaming_makes_equal_are_refused() {
    run_local(2, |group| {
        let (model, mut optimizer) = trained(&group, true);
        let parameters = model.parameters();
        let pair = |model: &str, dict: &str| (model.to_owned(), dict.to_owned());
        let onto_one = StateDictOptions {
            fqn_renames: vec![pair("a", "x"), pair("b", "x")],
            ..options()
        };
        for flatten_optimizer_state_dict in [false, true] {
            let options = StateDictOptions {
                flatten_optimizer_state_dict,
                ..onto_one.clone()
            };
            let is_named = |error: &NnError| {
                let NnError::State(StateError::DuplicateKey { key }) = error else {
                    panic!("{error}")
                };
                assert!(["x.weight", "x.bias"].contains(&key.as_str()), "{error}");
            };
            is_named(&get_model_state_dict(parameters, &options).unwrap_err());
            is_named(&get_optimizer_state_dict(parameters, &[&optimizer], &options).unwrap_err());
        }
        for flatten_optimizer_state_dict in [false, true] {
            let plain = StateDictOptions {
                flatten_optimizer_state_dict,
                ..options()
            };
            let renamed = StateDictOptions {
                fqn_renames: vec![pair("a", "x")],
                ..plain.clone()
            };
            let (mut m, mut o) = get_state_dict(parameters, &[&optimizer], &plain).unwrap();
            let (m_renamed, o_renamed) =
                get_state_dict(parameters, &[&optimizer], &renamed).unwrap();
            let before = gathered_bits(&model, &[&optimizer]);
            m.insert("x.weight", m_renamed.get("x.weight").unwrap().clone());
            let error = set_model_state_dict(&m, parameters, &renamed).unwrap_err();
            assert!(error.to_string().contains("a.weight"), "{error}");
            if flatten_optimizer_state_dict {
                o.extend(
                    o_renamed
                        .iter()
                        .filter(|(key, _)| key.contains("x.weight"))
                        .map(|(k, v)| (k.clone(), v.clone())),
                );
            } else {
                let state = o_renamed
                    .dict("state")
                    .unwrap()
                    .get("x.weight")
                    .unwrap()
                    .clone();
                dict(&mut o, &[key("state")]).insert("x.weight", state);
            }
            let set = set_optimizer_state_dict(&o, parameters, &mut [&mut optimizer], &renamed);
            let error = set.unwrap_err();
            assert!(error.to_string().contains("a.weight"), "{error}");
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
        }
    })
    .unwrap();
}

#[test]
fn a_buffer_that_is_not_contiguous_is_named() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            let value = Tensor::arange(0f32, 6f32, &Device::Cpu)?.reshape((2, 3))?;
            scope.buffer("transposed", value.t()?, true);
            candle_nn::linear(3, 2, scope.vb())
        })
        .unwrap();
        let parameters = model.parameters();
        let saved = get_model_state_dict(parameters, &options()).unwrap();
        let of = |state: &StateDict| {
            state
                .get("transposed")
                .unwrap()
                .as_tensor()
                .unwrap()
                .to_vec2::<f32>()
                .unwrap()
        };
        assert_eq!(of(&saved), [[0., 3.], [1., 4.], [2., 5.]]);
        let mut changed = saved.clone();
        changed.insert(
            "transposed",
            Tensor::zeros((3, 2), DType::F32, &Device::Cpu).unwrap(),
        );
        for strict in [true, false] {
            let error = set_model_state_dict(
                &changed,
                parameters,
                &StateDictOptions {
                    strict,
                    ..options()
                },
            )
            .unwrap_err();
            assert!(
                matches!(error, NnError::State(StateError::Incompatible { .. })),
                "{error}"
            );
            let message = error.to_string();
            assert!(
                message.contains("transposed") && message.contains("not contiguous"),
                "{message}"
            );
        }
        assert_eq!(
            of(&get_model_state_dict(parameters, &options()).unwrap()),
            of(&saved)
        );
    })
    .unwrap();
}

/// A user's state has no place in the flat format.
#[test]
fn state_that_a_flat_dict_cannot_hold_is_named() {
    run_local(2, |group| {
        let (model, mut optimizer) = trained(&group, true);
        let mut local = optimizer.state_dict().unwrap();
        dict(&mut local, &[key("state")]).insert("mine", PlainValue::Int(3));
        optimizer.load_state_dict(&local).unwrap();
        let flat = StateDictOptions {
            flatten_optimizer_state_dict: true,
            ..options()
        };
        let error = get_optimizer_state_dict(model.parameters(), &[&optimizer], &flat).unwrap_err();
        assert!(error.to_string().contains("mine"), "{error}");
    })
    .unwrap();
}

#[test]
fn one_ranks_malformed_dict_is_every_ranks_error() {
    run_local(3, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let before = gathered_bits(&model, &[&optimizer]);
        let mut o =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        if group.rank() == 2 {
            o.insert("param_groups", 3i64);
        }
        let error =
            set_optimizer_state_dict(&o, model.parameters(), &mut [&mut optimizer], &options())
                .unwrap_err();
        assert!(error.to_string().contains("param group"), "{error}");
        let mut m = StateDict::new();
        m.insert(
            "a._flat_param",
            Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap(),
        );
        let error = set_model_state_dict(&m, model.parameters(), &options()).unwrap_err();
        assert!(error.to_string().contains("a._flat_param"), "{error}");
        assert_eq!(gathered_bits(&model, &[&optimizer]), before);
    })
    .unwrap();
}

/// Two optimizers that would write under one key: nothing of either is lost in silence.
#[test]
fn two_optimizers_with_state_under_one_key_are_refused() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let over = |fqns: &[&str]| {
            let part = ParamGroup::new(adamw(), fqns.iter().copied());
            Optimizer::with_groups(model.parameters(), vec![part]).unwrap()
        };
        let get = |a: &Optimizer, b: &Optimizer| {
            let error =
                get_optimizer_state_dict(model.parameters(), &[a, b], &options()).unwrap_err();
            let NnError::State(StateError::DuplicateKey { key }) = error else {
                panic!("{error}")
            };
            key
        };
        assert_eq!(
            get(&over(&["a.weight", "b.bias"]), &over(&["b.bias"])),
            "b.bias"
        );
        let (mut a, mut b) = (over(&["a.weight"]), over(&["b.weight"]));
        for optimizer in [&mut a, &mut b] {
            let mut local = optimizer.state_dict().unwrap();
            dict(&mut local, &[key("state")]).insert("mine", 1.0);
            optimizer.load_state_dict(&local).unwrap();
        }
        assert_eq!(get(&a, &b), "mine");
    })
    .unwrap();
}

/// One rank that cannot give a whole dict does not leave the others waiting.
#[test]
fn what_one_rank_cannot_give_is_every_ranks_error() {
    let errors = run_local(2, |group| {
        let (model, mut optimizer) = trained(&group, true);
        if group.rank() == 1 {
            let mut local = optimizer.state_dict().unwrap();
            dict(&mut local, &[key("state")]).insert("mine", 1.0);
            optimizer.load_state_dict(&local).unwrap();
        }
        let flat = StateDictOptions {
            flatten_optimizer_state_dict: true,
            ..full_options()
        };
        let error = get_optimizer_state_dict(model.parameters(), &[&optimizer], &flat).unwrap_err();
        // The group still works.
        get_model_state_dict(model.parameters(), &full_options()).unwrap();
        error.to_string()
    })
    .unwrap();
    assert!(
        errors[0] == errors[1] && errors[0].contains("mine"),
        "{errors:?}"
    );
}

#[test]
fn tensors_in_groups_and_in_containers_of_state_are_refused() {
    for options in [
        options(),
        full_options(),
        StateDictOptions {
            broadcast_from_rank0: true,
            ..full_options()
        },
    ] {
        let errors = refused(2, true, &options, |state, rank| {
            if rank == 0 || !options.broadcast_from_rank0 {
                first_group(state).insert("scales", tensor(&[1.0, 2.0, 3.0], &[3]));
            }
        });
        assert!(errors[0].to_string().contains("scales"), "{}", errors[0]);
        let errors = refused(2, true, &options, |state, rank| {
            if rank == 0 || !options.broadcast_from_rank0 {
                let history = StateValue::List(vec![tensor(&[1.0, 2.0], &[2])]);
                dict(state, &[key("state"), key("a.weight")]).insert("history", history);
            }
        });
        assert!(errors[0].to_string().contains("history"), "{}", errors[0]);
    }
}

#[test]
fn state_of_a_dtype_that_candle_lacks_is_refused_unless_it_is_one_value() {
    let errors = refused(2, true, &options(), |state, _| {
        let warm = RawTensor::new(fsdp_layout::DType::Bool, vec![3], vec![1, 0, 1]).unwrap();
        dict(state, &[key("state"), key("a.weight")]).insert("warm", warm);
    });
    assert!(errors[0].to_string().contains("warm"), "{}", errors[0]);
    run_local(2, |group| {
        let (model, mut optimizer) = trained(&group, true);
        let mut state =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let warm = RawTensor::new(fsdp_layout::DType::Bool, vec![], vec![1]).unwrap();
        dict(&mut state, &[key("state"), key("a.weight")]).insert("warm", warm);
        set_optimizer_state_dict(
            &state,
            model.parameters(),
            &mut [&mut optimizer],
            &options(),
        )
        .unwrap();
        let mut again =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let entry = dict(&mut again, &[key("state"), key("a.weight")])
            .get("warm")
            .cloned();
        assert!(
            matches!(&entry, Some(StateValue::Plain(PlainValue::Tensor(warm))) if warm.data == [1]),
            "{entry:?}"
        );
    })
    .unwrap();
}

/// A checkpoint of a killed conversion, say: the step is there, the averages are not.
#[test]
fn averages_of_adafactor_that_are_missing_or_of_another_shape_are_named() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let adafactor = Algorithm::Adafactor(AdafactorOptions::default());
        let mut optimizer = Optimizer::new(model.parameters(), adafactor).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let saved =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let before = gathered_bits(&model, &[&optimizer]);
        for (fqn, name) in [
            ("a.weight", "row_var"),
            ("a.weight", "col_var"),
            ("a.bias", "variance"),
        ] {
            for change in [None, Some(tensor(&[1.0, 2.0], &[2]))] {
                let mut state = saved.copy().unwrap();
                let entries = dict(&mut state, &[key("state"), key(fqn)]);
                assert!(entries.remove(name).is_some());
                if let Some(value) = change {
                    entries.insert(name, value);
                }
                let set = set_optimizer_state_dict(
                    &state,
                    model.parameters(),
                    &mut [&mut optimizer],
                    &options(),
                );
                let error = set.unwrap_err().to_string();
                assert!(error.contains(&format!("{fqn}.{name}")), "{error}");
                assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            }
        }
    })
    .unwrap();
}

/// Sharded values have no hash that ranks compare: with other names on some ranks each parameter
/// would be a mixture.
#[test]
fn ranks_that_set_with_other_names_are_told_so() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
            Ok((scope.vb().get(4, "a")?, scope.vb().get(4, "b")?))
        });
        let model = model.unwrap();
        let parameters = model.parameters();
        let renamed = |a: &str, b: &str| {
            vec![
                ("a".to_owned(), a.to_owned()),
                ("b".to_owned(), b.to_owned()),
            ]
        };
        let renames = [renamed("x", "y"), renamed("y", "x")];
        let options = |rank: usize| StateDictOptions {
            fqn_renames: renames[rank].clone(),
            ..options()
        };
        let state = get_model_state_dict(parameters, &options(0)).unwrap();
        let error = set_model_state_dict(&state, parameters, &options(group.rank())).unwrap_err();
        assert!(
            matches!(
                error,
                NnError::State(StateError::ArgumentMismatch {
                    rank: 1,
                    reference: 0,
                    ..
                })
            ),
            "{error}"
        );
    })
    .unwrap();
}

#[test]
fn a_submodule_that_the_model_does_not_have_is_named() {
    run_local(2, |group| {
        let (model, _) = trained(&group, true);
        let parameters = model.parameters();
        for full_state_dict in [false, true] {
            let known = ["a", "head", "steps", "a.bias"].map(str::to_owned).to_vec();
            let options = |submodules| StateDictOptions {
                full_state_dict,
                submodules,
                strict: false,
                ..options()
            };
            let state = get_model_state_dict(parameters, &options(known)).unwrap();
            assert_eq!(state.keys().collect::<Vec<_>>().len(), 4, "{state:?}");
            let unknown = options(vec!["a".to_owned(), "c".to_owned()]);
            for error in [
                get_model_state_dict(parameters, &unknown)
                    .map(drop)
                    .unwrap_err(),
                set_model_state_dict(&state, parameters, &unknown)
                    .map(drop)
                    .unwrap_err(),
            ] {
                assert!(error.to_string().contains("submodule `c`"), "{error}");
            }
        }
    })
    .unwrap();
}

/// One rank was started with another configuration, say. The others must not wait for it.
#[test]
fn options_that_contradict_each_other_on_one_rank_are_every_ranks_error() {
    let errors = run_local(2, |group| {
        let (model, mut optimizer) = trained(&group.with_deadline(Duration::from_secs(10)), true);
        let parameters = model.parameters();
        let (m, o) = get_state_dict(parameters, &[&optimizer], &full_options()).unwrap();
        let on_rank_1 =
            |wrong: StateDictOptions, right| if group.rank() == 1 { wrong } else { right };
        let no_prefixes = StateDictOptions {
            keep_submodule_prefixes: false,
            ..full_options()
        };
        let no_prefixes = on_rank_1(no_prefixes, full_options());
        let from_rank0 = StateDictOptions {
            broadcast_from_rank0: true,
            ..full_options()
        };
        let not_full = StateDictOptions {
            full_state_dict: false,
            ..from_rank0.clone()
        };
        let (not_full, not_from_rank0) = (
            on_rank_1(not_full.clone(), from_rank0),
            on_rank_1(not_full, options()),
        );
        let mut errors = vec![
            get_model_state_dict(parameters, &no_prefixes)
                .map(drop)
                .unwrap_err(),
            get_optimizer_state_dict(parameters, &[&optimizer], &no_prefixes)
                .map(drop)
                .unwrap_err(),
        ];
        for options in [no_prefixes, not_full, not_from_rank0] {
            let set = set_state_dict(&m, &o, parameters, &mut [&mut optimizer], &options);
            errors.push(set.map(drop).unwrap_err());
        }
        errors.iter().map(ToString::to_string).collect::<Vec<_>>()
    })
    .unwrap();
    let problems = [
        "exactly one submodule",
        "exactly one submodule",
        "exactly one submodule",
        "must be true",
        "must be true",
    ];
    for (error, problem) in errors[0].iter().zip(problems) {
        assert!(
            error.contains("rank 1") && error.contains(problem),
            "{error}"
        );
    }
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn ranks_to_keep_a_sharded_state_dict_on_are_refused() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let options = StateDictOptions {
            keep_on: Some(fsdp_state::KeepOn::Ranks(vec![0])),
            ..StateDictOptions::default()
        };
        let error = get_model_state_dict(model.parameters(), &options).unwrap_err();
        assert!(error.to_string().contains("keep_on"), "{error}");
    })
    .unwrap();
}
