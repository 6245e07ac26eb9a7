//! State by names to the local state of any layout, and training that goes on as if nothing had
//! happened.

use candle_core::{DType, Device, Tensor};
use fsdp_layout::PlainValue;
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::torch::{
    OptimLoadOptions, StateDictSettings, StateDictType, flatten_optim_state_dict,
    flatten_sharded_optim_state_dict, load_state_dict, optim_state_dict, optim_state_dict_to_load,
    scatter_full_optim_state_dict, shard_full_optim_state_dict, sharded_optim_state_dict,
    state_dict,
};
use fsdp_nn::{Algorithm, Optimizer, ParamGroup};
use fsdp_state::StateValue;

use crate::state_dicts::common::*;
use crate::state_dicts::optim_save::optim_rank0_only;

const LOAD: OptimLoadOptions = OptimLoadOptions {
    is_named_optimizer: false,
    load_directly: false,
    allow_missing_state: false,
};
const DIRECTLY: OptimLoadOptions = OptimLoadOptions {
    load_directly: true,
    ..LOAD
};

/// From whole tensors everywhere, from rank 0 alone, from boxes: each time what the optimizer had.
#[test]
fn every_source_gives_the_local_state_back_in_every_layout() {
    for (index, (name, spec)) in models().into_iter().enumerate() {
        for (offset, layout) in layouts().into_iter().enumerate() {
            let algorithm = &algorithms()[(index + offset) % algorithms().len()];
            let groups = offset % 2 == 0;
            ranks(layout.world, |group| {
                let model = model(&group, &spec, layout);
                let parameters = model.parameters();
                let mut optimizer = optimizer(parameters, &spec, algorithm, groups);
                train(&model, &mut [&mut optimizer], 0..2);
                let local = optimizer.state_dict().unwrap();
                let what = format!("{name}, {layout:?}, {}", algorithm.name());
                let full = optim_state_dict(None, parameters, &optimizer).unwrap();
                let before = full.clone();
                let loaded = shard_full_optim_state_dict(&full, parameters, &optimizer).unwrap();
                assert_same(&loaded, &local, &what);
                let of_rank0 = (group.rank() == 0).then_some(&full);
                let loaded =
                    scatter_full_optim_state_dict(of_rank0, parameters, &optimizer).unwrap();
                assert_same(&loaded, &local, &what);
                let sharded = sharded_optim_state_dict(None, parameters, &optimizer).unwrap();
                let loaded =
                    flatten_sharded_optim_state_dict(&sharded, parameters, &optimizer).unwrap();
                assert_same(&loaded, &local, &what);
                let named =
                    flatten_optim_state_dict(Some(&full), parameters, &optimizer, false).unwrap();
                assert_same(&named, &optimizer.named_state_dict().unwrap(), &what);
                assert_same(&full, &before, "the caller's dict");
            });
        }
    }
}

/// A checkpoint of the unsharded model goes into any layout, and training goes on bit for bit.
#[test]
fn training_goes_on_where_it_was_in_any_layout() {
    for (index, (name, spec)) in models().into_iter().enumerate() {
        for (offset, layout) in layouts().into_iter().enumerate() {
            let algorithm = &algorithms()[(index + offset) % algorithms().len()];
            let (saved_model, saved_optim) = reference(&spec, algorithm, false, DType::F32, 2);
            let (later_model, later_optim) = reference(&spec, algorithm, false, DType::F32, 5);
            ranks(layout.world, |group| {
                let model = model_of(&group, &spec, layout, DType::F32, 77);
                let parameters = model.parameters();
                let mut optimizer = optimizer(parameters, &spec, algorithm, false);
                let what = format!("{name}, {layout:?}, {}", algorithm.name());
                load_state_dict(&saved_model, parameters, true).unwrap();
                let directly = offset % 2 == 0;
                let options = if directly { &DIRECTLY } else { &LOAD };
                let local =
                    optim_state_dict_to_load(&saved_optim, parameters, &mut optimizer, options)
                        .unwrap();
                if !directly {
                    let begins_with_state = matches!(algorithm, Algorithm::Adagrad(_));
                    assert!(optimizer.is_fresh() || begins_with_state);
                    optimizer.load_state_dict(&local).unwrap();
                }
                train(&model, &mut [&mut optimizer], 2..5);
                assert_same(&state_dict(parameters).unwrap(), &later_model, &what);
                let full = optim_state_dict(None, parameters, &optimizer).unwrap();
                assert_same(&sorted_params(&full), &sorted_params(&later_optim), &what);
            });
        }
    }
}

/// Boxes saved by one layout into other units and another mode, on the same ranks.
#[test]
fn sharded_state_moves_between_units_and_modes() {
    let expected = sorted_params(&reference(&nested(), &adam(), false, DType::F32, 2).1);
    for world in [2, 3, 5] {
        for (from_mode, to_mode) in [(true, true), (true, false), (false, true), (false, false)] {
            ranks(world, |group| {
                let from = model(&group, &nested(), full_shard(world, from_mode));
                let mut source = optimizer(from.parameters(), &nested(), &adam(), false);
                train(&from, &mut [&mut source], 0..2);
                let sharded = sharded_optim_state_dict(None, from.parameters(), &source).unwrap();
                let to = model(&group, &nested_alt(), full_shard(world, to_mode));
                let parameters = to.parameters();
                let mut target = optimizer(parameters, &nested_alt(), &adam(), false);
                optim_state_dict_to_load(&sharded, parameters, &mut target, &DIRECTLY).unwrap();
                let full = optim_state_dict(None, parameters, &target).unwrap();
                assert_same(
                    &sorted_params(&full),
                    &expected,
                    &format!("{world}, {from_mode} to {to_mode}"),
                );
            });
        }
    }
}

/// Boxes saved by one layout into any other: the identity, for every pair of layouts.
#[test]
fn any_layout_loads_the_sharded_state_of_any_layout() {
    let models = models();
    for (i, from) in layouts().into_iter().enumerate() {
        let (name, spec) = &models[i % models.len()];
        let algorithm = &algorithms()[i % algorithms().len()];
        let expected = sorted_params(&reference(spec, algorithm, true, DType::F32, 2).1);
        let saved = ranks(from.world, |group| {
            let model = model(&group, spec, from);
            let mut optimizer = optimizer(model.parameters(), spec, algorithm, true);
            train(&model, &mut [&mut optimizer], 0..2);
            sharded_optim_state_dict(None, model.parameters(), &optimizer).unwrap()
        });
        for to in layouts() {
            ranks(to.world, |group| {
                let model = model(&group, spec, to);
                let parameters = model.parameters();
                let mut optimizer = optimizer(parameters, spec, algorithm, true);
                let mine = redealt(&saved, group.rank(), to.world);
                optim_state_dict_to_load(&mine, parameters, &mut optimizer, &DIRECTLY).unwrap();
                let full = optim_state_dict(None, parameters, &optimizer).unwrap();
                assert_same(
                    &sorted_params(&full),
                    &expected,
                    &format!("{name}, {from:?} to {to:?}"),
                );
            });
        }
    }
}

/// Parameters of which this rank has nothing know their own step after every kind of load, also
/// where others of their group were stepped more or less often, or where the rank has nothing of
/// the whole group.
#[test]
fn ranks_without_elements_know_the_step_after_a_load() {
    for algorithm in algorithms()
        .into_iter()
        .filter(|algorithm| algorithm.state_entries().any(|e| e.name == "step"))
    {
        for (name, spec) in [
            ("tied", tied()),
            ("uneven", uneven()),
            ("with_scalar", with_scalar()),
        ] {
            let mut saved = reference(&spec, &algorithm, true, DType::F32, 3).1;
            let fqns: Vec<String> = spec
                .params
                .iter()
                .map(|(unit, name, _)| full_name(unit, name))
                .collect();
            for (index, fqn) in fqns.iter().enumerate() {
                let step = Tensor::new(3.0 + index as f32, &Device::Cpu).unwrap();
                saved = edit(&saved, &["state", fqn, "step"], Some(step.into()));
            }
            ranks(5, |group| {
                let model = model(&group, &spec, full_shard(5, true));
                let parameters = model.parameters();
                let check = |optimizer: &Optimizer, more: f32, what: &str| {
                    for (index, fqn) in fqns.iter().enumerate() {
                        let what = format!("{what}, {name}.{fqn}, {}", algorithm.name());
                        let state = optimizer
                            .state_of(fqn)
                            .unwrap()
                            .unwrap_or_else(|| panic!("{what}: no state"));
                        let step = state["step"]
                            .as_tensor()
                            .unwrap()
                            .to_scalar::<f32>()
                            .unwrap();
                        assert_eq!(step, 3.0 + index as f32 + more, "{what}");
                        for (_, value) in state.iter().filter(|(name, _)| *name != "step") {
                            assert_eq!(
                                value.as_sharded().unwrap().boxes(),
                                parameters.boxes(fqn).unwrap()
                            );
                        }
                    }
                };
                let fresh = || optimizer(parameters, &spec, &algorithm, true);
                let of_rank0 = (group.rank() == 0).then_some(&saved);
                let named = OptimLoadOptions {
                    is_named_optimizer: true,
                    ..LOAD
                };
                let mut direct = fresh();
                optim_state_dict_to_load(&saved, parameters, &mut direct, &DIRECTLY).unwrap();
                check(&direct, 0.0, "directly");
                let sharded = sharded_optim_state_dict(None, parameters, &direct).unwrap();
                for (what, local) in [
                    (
                        "to_load",
                        optim_state_dict_to_load(&saved, parameters, &mut fresh(), &LOAD).unwrap(),
                    ),
                    (
                        "named",
                        optim_state_dict_to_load(&saved, parameters, &mut fresh(), &named).unwrap(),
                    ),
                    (
                        "full",
                        shard_full_optim_state_dict(&saved, parameters, &fresh()).unwrap(),
                    ),
                    (
                        "scattered",
                        scatter_full_optim_state_dict(of_rank0, parameters, &fresh()).unwrap(),
                    ),
                    (
                        "sharded",
                        flatten_sharded_optim_state_dict(&sharded, parameters, &fresh()).unwrap(),
                    ),
                    (
                        "by names",
                        flatten_optim_state_dict(Some(&saved), parameters, &fresh(), false)
                            .unwrap(),
                    ),
                    ("state_dict", direct.state_dict().unwrap()),
                    ("named_state_dict", direct.named_state_dict().unwrap()),
                ] {
                    let mut optimizer = fresh();
                    optimizer.load_state_dict(&local).unwrap();
                    check(&optimizer, 0.0, what);
                    train(&model, &mut [&mut optimizer], 3..4);
                    check(&optimizer, 1.0, what);
                }
            });
        }
    }
}

/// torch's local dicts have nothing of parameters that a rank has no elements of: the others of
/// their group tell.
#[test]
fn without_word_of_them_empty_pieces_count_as_stepped_like_the_rest_of_their_group() {
    let spec = uneven();
    let saved = reference(&spec, &adam(), false, DType::F32, 3).1;
    ranks(5, |group| {
        let model = model(&group, &spec, full_shard(5, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        let mut local = shard_full_optim_state_dict(&saved, parameters, &optimizer).unwrap();
        let has_empty = spec
            .params
            .iter()
            .any(|(unit, name, _)| parameters.boxes(&full_name(unit, name)).unwrap().is_empty());
        assert_eq!(local.remove("state_of_empty_pieces").is_some(), has_empty);
        optimizer.load_state_dict(&local).unwrap();
        for (unit, name, _) in &spec.params {
            let state = optimizer.state_of(&full_name(unit, name)).unwrap().unwrap();
            assert_eq!(
                state["step"]
                    .as_tensor()
                    .unwrap()
                    .to_scalar::<f32>()
                    .unwrap(),
                3.0
            );
        }
    });
}

#[test]
fn settings_decide_who_brings_the_state() {
    let spec = dummy();
    ranks(2, |group| {
        let model = model(&group, &spec, full_shard(2, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let local = optimizer.state_dict().unwrap();
        let settings = [
            StateDictSettings::from(StateDictType::Full),
            optim_rank0_only(),
            StateDictSettings::from(StateDictType::Sharded),
            StateDictSettings::from(StateDictType::Local),
        ];
        for settings in settings {
            parameters.state_dict_type(settings, || {
                let saved = optim_state_dict(None, parameters, &optimizer).unwrap();
                assert_eq!(
                    saved.is_empty(),
                    settings == optim_rank0_only() && group.rank() == 1
                );
                let loaded =
                    optim_state_dict_to_load(&saved, parameters, &mut optimizer, &LOAD).unwrap();
                assert_same(&loaded, &local, &format!("{settings:?}"));
            });
        }
    });
}

/// Mutation guard: torch maps groups by position, and ignores hyperparameters of groups that meet.
#[test]
fn groups_go_by_name_and_conflicts_are_errors() {
    ranks(2, |group| {
        let model = model(&group, &dummy(), full_shard(2, true));
        let parameters = model.parameters();
        let with_lr = |lr| {
            Algorithm::Adam(AdamOptions {
                lr,
                ..AdamOptions::default()
            })
        };
        let groups = |order: [usize; 2]| {
            let all = [
                vec!["net1.weight", "net1.bias"],
                vec!["net2.weight", "net2.bias", "net4.weight"],
            ];
            order
                .map(|index| ParamGroup::new(with_lr([0.1, 0.2][index]), all[index].clone()))
                .to_vec()
        };
        let mut source = Optimizer::with_groups(parameters, groups([0, 1])).unwrap();
        train(&model, &mut [&mut source], 0..1);
        let saved = optim_state_dict(None, parameters, &source).unwrap();
        let mut swapped = Optimizer::with_groups(parameters, groups([1, 0])).unwrap();
        for group in swapped.groups_mut() {
            group.algorithm.set_lr(9.0).unwrap();
        }
        optim_state_dict_to_load(&saved, parameters, &mut swapped, &DIRECTLY).unwrap();
        assert_eq!(
            swapped
                .groups()
                .iter()
                .map(|group| group.algorithm.lr())
                .collect::<Vec<_>>(),
            [0.2, 0.1]
        );
        let again = optim_state_dict(None, parameters, &swapped).unwrap();
        assert_same(
            again.dict("state").unwrap(),
            saved.dict("state").unwrap(),
            "state",
        );
        // One group for all: the two that were saved do not agree.
        let mut one = Optimizer::new(parameters, with_lr(1.0)).unwrap();
        let error = optim_state_dict_to_load(&saved, parameters, &mut one, &DIRECTLY).unwrap_err();
        assert!(
            error.to_string().contains("different hyperparameters"),
            "{error}"
        );
        assert!(one.is_fresh());
        assert_eq!(one.groups()[0].algorithm.lr(), 1.0);
    });
}

#[test]
fn extra_group_keys_and_empty_groups_survive() {
    ranks(2, |group| {
        let model = model(&group, &dummy(), full_shard(2, false));
        let parameters = model.parameters();
        let mut source = optimizer(parameters, &dummy(), &adam(), true);
        train(&model, &mut [&mut source], 0..1);
        source.groups_mut()[2].algorithm.set_lr(0.125).unwrap();
        let saved = optim_state_dict(None, parameters, &source).unwrap();
        let mut target = optimizer(parameters, &dummy(), &sgd_like_adam(), true);
        target.groups_mut()[1].extra.clear();
        optim_state_dict_to_load(&saved, parameters, &mut target, &DIRECTLY).unwrap();
        assert_eq!(
            target.groups()[1].extra,
            [("initial_lr".to_owned(), PlainValue::Float(0.5))]
        );
        assert_eq!(target.groups()[2].algorithm.lr(), 0.125);
        assert_same(
            &target.state_dict().unwrap(),
            &source.state_dict().unwrap(),
            "local state",
        );
    });
}

fn sgd_like_adam() -> Algorithm {
    Algorithm::Adam(AdamOptions {
        lr: 3.0,
        weight_decay: 0.5,
        ..AdamOptions::default()
    })
}

#[test]
fn two_stateless_optimizers_over_one_model_load_their_own_parts() {
    ranks(2, |group| {
        let model = model(&group, &dummy(), full_shard(2, true));
        let parameters = model.parameters();
        let parts = [
            vec!["net1.weight", "net1.bias"],
            vec!["net2.weight", "net2.bias", "net4.weight"],
        ];
        let mut optimizers = parts.map(|part| {
            Optimizer::with_groups(parameters, vec![ParamGroup::new(sgd(0.0), part)]).unwrap()
        });
        let [a, b] = &mut optimizers;
        train(&model, &mut [&mut *a, &mut *b], 0..1);
        for optimizer in &mut optimizers {
            let saved = optim_state_dict(None, parameters, optimizer).unwrap();
            optim_state_dict_to_load(&saved, parameters, optimizer, &DIRECTLY).unwrap();
        }
    });
}

#[test]
fn without_param_groups_there_are_none_and_nothing_can_be_loaded_directly() {
    ranks(2, |group| {
        let model = model(&group, &dummy(), full_shard(2, false));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &dummy(), &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let local = optimizer.state_dict().unwrap();
        let saved = edit(
            &optim_state_dict(None, parameters, &optimizer).unwrap(),
            &["param_groups"],
            None,
        );
        let loaded = optim_state_dict_to_load(&saved, parameters, &mut optimizer, &LOAD).unwrap();
        assert_same(
            &loaded,
            &edit(&local, &["param_groups"], None),
            "without groups",
        );
        let error =
            optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("`optim_state_dict` must have the keys \"param_groups\""),
            "{error}"
        );
        assert_same(&optimizer.state_dict().unwrap(), &local, "unchanged");
    });
}

/// A new parameter in a unit of its own is fine; one among parameters that have state is not.
#[test]
fn parameters_that_the_checkpoint_does_not_know() {
    let saved = reference(&dummy(), &adam(), false, DType::F32, 2).1;
    for use_orig_params in [false, true] {
        for (unit, fits) in [("extra", true), ("net1", false)] {
            let mut grown = dummy();
            grown.params.push((unit, "unmanaged", vec![5, 5]));
            ranks(2, |group| {
                let model = model(&group, &grown, full_shard(2, use_orig_params));
                let parameters = model.parameters();
                let mut optimizer = optimizer(parameters, &grown, &adam(), false);
                let loaded =
                    optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY);
                let fqn = full_name(unit, "unmanaged");
                match (fits, use_orig_params) {
                    (true, _) => {
                        loaded.unwrap();
                        train(&model, &mut [&mut optimizer], 2..3);
                        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
                        let step = |fqn: &str| {
                            let state = full.dict("state").unwrap().dict(fqn).unwrap();
                            state
                                .get("step")
                                .unwrap()
                                .as_tensor()
                                .unwrap()
                                .to_scalar::<f32>()
                                .unwrap()
                        };
                        assert_eq!((step(&fqn), step("net1.bias")), (1.0, 3.0));
                    }
                    (false, false) => {
                        let message = text(loaded);
                        assert!(
                            message.starts_with(
                                "all unflattened parameters comprising a single flat parameter must have scalar state"
                            ),
                            "{message}"
                        );
                    }
                    (false, true) => {
                        let message = text(loaded);
                        assert!(
                            message.starts_with(
                                "missing optimizer state for parameter `net1.unmanaged`"
                            ),
                            "{message}"
                        );
                        assert!(optimizer.is_fresh());
                        let allowed = OptimLoadOptions {
                            allow_missing_state: true,
                            ..DIRECTLY
                        };
                        optim_state_dict_to_load(&saved, parameters, &mut optimizer, &allowed)
                            .unwrap();
                        train(&model, &mut [&mut optimizer], 2..3);
                    }
                }
            });
        }
    }
}

/// torch's rank 0 fails where the state has a number, and the others do not.
#[test]
fn rank0_only_state_may_have_numbers() {
    let spec = dummy();
    for use_orig_params in [true, false] {
        ranks(3, |group| {
            let model = model(&group, &spec, full_shard(3, use_orig_params));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), false);
            train(&model, &mut [&mut optimizer], 0..1);
            let mut saved = optim_state_dict(None, parameters, &optimizer).unwrap();
            for fqn in parameters.fqns() {
                saved = edit(&saved, &["state", fqn, "val"], Some(2.5.into()));
            }
            let saved = (group.rank() == 0).then_some(&saved);
            let loaded = scatter_full_optim_state_dict(saved, parameters, &optimizer).unwrap();
            for (_, state) in loaded.dict("state").unwrap() {
                let value = state
                    .as_dict()
                    .unwrap()
                    .get("val")
                    .unwrap()
                    .as_plain()
                    .unwrap()
                    .as_float();
                assert_eq!(value, Some(2.5));
            }
        });
    }
}

#[test]
fn tied_parameters_load_their_state_from_either_name() {
    let saved = reference(&tied(), &adam(), false, DType::F32, 2).1;
    assert!(
        !saved.dict("state").unwrap().contains_key("decoder.weight"),
        "one name in the optimizer's dict"
    );
    let mut renamed = saved.clone();
    if let Some(StateValue::Dict(states)) = renamed.get_mut("state") {
        let state = states.remove("embedding.weight").unwrap();
        states.insert("decoder.weight", state);
    }
    ranks(2, |group| {
        let model = model(&group, &tied(), full_shard(2, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &tied(), &adam(), false);
        for settings in [StateDictSettings::default(), optim_rank0_only()] {
            parameters.state_dict_type(settings, || {
                optim_state_dict_to_load(&renamed, parameters, &mut optimizer, &DIRECTLY).unwrap();
            });
            let full = optim_state_dict(None, parameters, &optimizer).unwrap();
            assert_same(&full, &saved, "under the alias");
        }
    });
}

/// Two parameters of the model that was saved are one here.
#[test]
fn state_of_both_names_of_a_tied_parameter_must_be_the_same() {
    let saved = reference(&tied(), &adam(), false, DType::F32, 2).1;
    for (entry, value) in [
        ("", None),
        ("step", Some(Tensor::new(9f32, &Device::Cpu).unwrap())),
        (
            "exp_avg",
            Some(Tensor::ones((6, 3), DType::F32, &Device::Cpu).unwrap()),
        ),
    ] {
        let mut both = saved.clone();
        if let Some(StateValue::Dict(states)) = both.get_mut("state") {
            let Some(StateValue::Dict(mut state)) = states.get("embedding.weight").cloned() else {
                panic!("no state")
            };
            value.map(|value| state.insert(entry, value));
            states.insert("decoder.weight", StateValue::Dict(state));
        }
        ranks(2, |group| {
            let model = model(&group, &tied(), full_shard(2, true));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &tied(), &adam(), false);
            for settings in [StateDictSettings::default(), optim_rank0_only()] {
                let outcome = parameters.state_dict_type(settings, || {
                    optim_state_dict_to_load(&both, parameters, &mut optimizer, &DIRECTLY)
                });
                match outcome {
                    Ok(_) => assert!(entry.is_empty()),
                    Err(error) => {
                        let error = error.to_string();
                        let names = ["embedding.weight", "decoder.weight", entry];
                        assert!(names.iter().all(|name| error.contains(name)), "{error}");
                        assert!(!entry.is_empty(), "{error}");
                    }
                }
            }
        });
    }
}

#[test]
fn different_steps_of_parameters_are_fine_with_original_parameters() {
    let spec = dummy();
    let saved = reference(&spec, &adam(), false, DType::F32, 2).1;
    let step = StateValue::from(Tensor::new(5f32, &Device::Cpu).unwrap());
    let saved = edit(&saved, &["state", "net1.bias", "step"], Some(step));
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap();
        assert_same(
            &optim_state_dict(None, parameters, &optimizer).unwrap(),
            &saved,
            "steps of their own",
        );
    });
}

/// Momentum begins with the first gradient: a FlatParameter's parameters without any have zeros.
#[test]
fn missing_momentum_is_zero_wherever_in_the_flat_parameter_it_is_missing() {
    let spec = mini7();
    let saved = reference(&spec, &sgd(0.9), false, DType::F32, 2).1;
    for missing in ["sc", "l1.bias", "l2.bias"] {
        ranks(2, |group| {
            let model = model(&group, &spec, full_shard(2, false));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &sgd(0.9), false);
            let saved = edit(&saved, &["state", missing], None);
            optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap();
            let full = optim_state_dict(None, parameters, &optimizer).unwrap();
            let buffer = |fqn: &str| {
                let state = full.dict("state").unwrap().dict(fqn).unwrap();
                bytes(state.get("momentum_buffer").unwrap().as_tensor().unwrap())
            };
            assert!(buffer(missing).iter().all(|byte| *byte == 0));
            assert!(buffer("l1.weight").iter().any(|byte| *byte != 0));
        });
    }
}

#[test]
fn a_named_optimizer_gets_names() {
    let spec = nested();
    ranks(2, |group| {
        let model = model(&group, &spec, full_shard(2, false));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let saved = optim_state_dict(None, parameters, &optimizer).unwrap();
        let named = OptimLoadOptions {
            is_named_optimizer: true,
            ..DIRECTLY
        };
        let loaded = optim_state_dict_to_load(&saved, parameters, &mut optimizer, &named).unwrap();
        assert!(
            loaded
                .dict("state")
                .unwrap()
                .contains_key("block2.1._flat_param")
        );
        assert_same(&loaded, &optimizer.named_state_dict().unwrap(), "names");
        optimizer.load_state_dict(&loaded).unwrap();
        assert_same(
            &optim_state_dict(None, parameters, &optimizer).unwrap(),
            &saved,
            "loaded by names",
        );
    });
}

/// Original parameters without momentum begin with the first gradient, as in torch.
#[test]
fn missing_momentum_of_an_original_parameter_begins_with_the_first_gradient() {
    let spec = mini7();
    let saved = edit(
        &reference(&spec, &sgd(0.9), false, DType::F32, 2).1,
        &["state", "l1.bias"],
        None,
    );
    ranks(2, |group| {
        let model = model(&group, &spec, full_shard(2, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &sgd(0.9), false);
        optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap();
        assert_same(
            &optim_state_dict(None, parameters, &optimizer).unwrap(),
            &saved,
            "nothing is made up",
        );
        train(&model, &mut [&mut optimizer], 2..3);
        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
        assert!(full.dict("state").unwrap().contains_key("l1.bias"));
    });
}
