//! Optimizer state by the model's names: the unsharded optimizer's, whatever the layout.

use candle_core::{DType, Device, Tensor};
use fsdp_layout::PlainValue;
use fsdp_nn::torch::{
    OptimStateError, StateDictConfig, StateDictSettings, StateDictType, full_optim_state_dict,
    map_param_key_to_optim_keys, optim_state_dict, optim_state_dict_into, sharded_optim_state_dict,
    unflatten_optim_state,
};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ParamGroup, ShardingStrategy,
};
use fsdp_state::{StateDict, StateValue};

use crate::state_dicts::common::*;

pub(crate) fn optim_rank0_only() -> StateDictSettings {
    let config = StateDictConfig::Full {
        offload_to_cpu: true,
        rank0_only: true,
    };
    StateDictSettings::new(StateDictType::Full, None, Some(config)).unwrap()
}

#[test]
fn a_full_optim_state_dict_is_the_unsharded_optimizers_in_every_layout() {
    for (index, (name, spec)) in models().into_iter().enumerate() {
        for (offset, layout) in layouts().into_iter().enumerate() {
            let algorithm = &algorithms()[(index + offset) % algorithms().len()];
            for groups in [false, true] {
                let expected = sorted_params(&reference(&spec, algorithm, groups, DType::F32, 3).1);
                ranks(layout.world, |group| {
                    let model = model(&group, &spec, layout);
                    let parameters = model.parameters();
                    let mut optimizer = optimizer(parameters, &spec, algorithm, groups);
                    train(&model, &mut [&mut optimizer], 0..3);
                    let what = format!("{name}, {layout:?}, {}, groups {groups}", algorithm.name());
                    let full = optim_state_dict(None, parameters, &optimizer).unwrap();
                    assert_same(&sorted_params(&full), &expected, &what);
                    let sharded = sharded_optim_state_dict(None, parameters, &optimizer).unwrap();
                    for (fqn, state) in sharded.dict("state").unwrap() {
                        for (_, value) in state.as_dict().unwrap() {
                            if let Some(tensor) = value.as_sharded() {
                                assert_eq!(
                                    tensor.boxes(),
                                    parameters.boxes(fqn).unwrap(),
                                    "{what}"
                                );
                            }
                        }
                    }
                    assert_same(&sorted_params(&whole(&group, &sharded)), &expected, &what);
                    let rank0 = full_optim_state_dict(None, parameters, &optimizer, true).unwrap();
                    match group.rank() {
                        0 => assert_same(&sorted_params(&rank0), &expected, &what),
                        _ => assert!(rank0.is_empty(), "{what}"),
                    }
                });
            }
        }
    }
}

#[test]
fn half_precision_and_double_states_are_bit_equal() {
    let spec = uneven();
    for dtype in [DType::BF16, DType::F16, DType::F64] {
        let expected = reference(&spec, &sgd(0.9), false, dtype, 3).1;
        for layout in [
            full_shard(4, true),
            full_shard(4, false),
            Layout {
                strategy: ShardingStrategy::HybridShard,
                ..full_shard(4, true)
            },
        ] {
            ranks(layout.world, |group| {
                let model = model_of(&group, &spec, layout, dtype, 1);
                let mut optimizer = optimizer(model.parameters(), &spec, &sgd(0.9), false);
                train(&model, &mut [&mut optimizer], 0..3);
                let full = optim_state_dict(None, model.parameters(), &optimizer).unwrap();
                assert_same(&full, &expected, &format!("{dtype:?}, {layout:?}"));
            });
        }
    }
}

/// An optimizer whose parameters come in another order on odd ranks.
fn reversed_on_odd_ranks(model: &Model, spec: &Spec, rank: usize) -> Optimizer {
    let mut names: Vec<String> = spec
        .params
        .iter()
        .map(|(unit, name, _)| full_name(unit, name))
        .collect();
    if rank % 2 == 1 {
        names.reverse();
    }
    Optimizer::with_groups(model.parameters(), vec![ParamGroup::new(adam(), names)]).unwrap()
}

#[test]
fn optimizers_may_hold_their_parameters_in_another_order_on_each_rank() {
    let spec = nested();
    let expected = sorted_params(&reference(&spec, &adam(), false, DType::F32, 2).1);
    for layout in [full_shard(3, true), full_shard(3, false)] {
        ranks(3, |group| {
            let model = model(&group, &spec, layout);
            let mut optimizer = reversed_on_odd_ranks(&model, &spec, group.rank());
            train(&model, &mut [&mut optimizer], 0..2);
            let full = optim_state_dict(None, model.parameters(), &optimizer).unwrap();
            assert_same(&sorted_params(&full), &expected, &format!("{layout:?}"));
            let local = optimizer.state_dict().unwrap();
            let loaded =
                fsdp_nn::torch::shard_full_optim_state_dict(&full, model.parameters(), &optimizer)
                    .unwrap();
            assert_same(&loaded, &local, "and back");
        });
    }
}

/// An optimizer without the last unit's parameters on one rank.
fn lacking_on(model: &Model, spec: &Spec, lacks: bool) -> Optimizer {
    let last = spec.params.last().unwrap().0;
    let kept = spec
        .params
        .iter()
        .filter(|(unit, ..)| !lacks || *unit != last);
    let names: Vec<String> = kept.map(|(unit, name, _)| full_name(unit, name)).collect();
    Optimizer::with_groups(model.parameters(), vec![ParamGroup::new(adam(), names)]).unwrap()
}

#[test]
fn state_that_a_rank_lacks_is_the_same_error_on_all_ranks() {
    let mut spec = dummy();
    spec.params.rotate_right(1);
    for use_orig_params in [false, true] {
        let errors = ranks(3, |group| {
            let model = model(&group, &spec, full_shard(3, use_orig_params));
            let mut optimizer = lacking_on(&model, &spec, group.rank() == 1);
            train(&model, &mut [&mut optimizer], 0..1);
            let error = optim_state_dict(None, model.parameters(), &optimizer).unwrap_err();
            match (&error, use_orig_params) {
                (
                    NnError::OptimState {
                        error: OptimStateError::MissingOnRanks { missing },
                        ..
                    },
                    false,
                ) => {
                    assert_eq!(
                        missing[..],
                        [(1, vec!["net2.weight".to_owned(), "net2.bias".to_owned()])]
                    );
                }
                (
                    NnError::OptimState {
                        error: OptimStateError::NotOnAllRanks { .. },
                        ..
                    },
                    true,
                ) => {}
                _ => panic!("{error}"),
            }
            error.to_string()
        });
        assert!(errors.iter().all(|error| *error == errors[0]));
        assert!(
            use_orig_params
                || errors[0].starts_with(
                    "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's \
                     optimizer but some ranks are missing some of those states"
                ),
            "{}",
            errors[0]
        );
    }
}

#[test]
fn keys_follow_rank_0_or_are_merged() {
    let spec = dummy();
    ranks(2, |group| {
        let flat = model(&group, &spec, full_shard(2, false));
        let optimizer_flat = reversed_on_odd_ranks(&flat, &spec, group.rank());
        let mut optimizer_flat = optimizer_flat;
        train(&flat, &mut [&mut optimizer_flat], 0..1);
        let local = optimizer_flat.state_dict().unwrap();
        let (keys, mine) = map_param_key_to_optim_keys(&local, &optimizer_flat, false).unwrap();
        let names: Vec<&str> = keys
            .iter()
            .map(|key| key.unflat_param_names[0].as_str())
            .collect();
        assert_eq!(names, ["net1.weight", "net2.weight", "net4.weight"]);
        let id = if group.rank() == 0 { "0" } else { "2" };
        assert_eq!(mine[&keys[0]], id);
        let orig = model(&group, &spec, full_shard(2, true));
        let mut optimizer = reversed_on_odd_ranks(&orig, &spec, group.rank());
        train(&orig, &mut [&mut optimizer], 0..1);
        let (keys, mine) =
            map_param_key_to_optim_keys(&optimizer.state_dict().unwrap(), &optimizer, true)
                .unwrap();
        assert_eq!(keys.len(), 5);
        assert!(keys.is_sorted());
        // Rank 0's shard ends before the last biases; each rank has keys for what is on it alone.
        let here = orig
            .parameters()
            .fqns()
            .filter(|fqn| !orig.parameters().boxes(fqn).unwrap().is_empty())
            .count();
        assert_eq!(mine.len(), here);
        assert!(group.rank() == 1 || here < 5);
    });
}

/// Rank 0 is that of the model's group: groups without global rank 0 work.
#[test]
fn a_group_without_global_rank_0_works() {
    let spec = dummy();
    let expected = reference(&spec, &adam(), false, DType::F32, 2).1;
    for use_orig_params in [true, false] {
        ranks(3, |group| {
            let Some(sub) = group.subgroup(&[1, 2]).unwrap() else {
                return;
            };
            let model = model(&sub, &spec, full_shard(2, use_orig_params));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), false);
            train(&model, &mut [&mut optimizer], 0..2);
            let rank0 = full_optim_state_dict(None, parameters, &optimizer, true).unwrap();
            match sub.rank() {
                0 => assert_same(&rank0, &expected, "rank 0 of the group"),
                _ => assert!(rank0.is_empty()),
            }
            let full = (sub.rank() == 0).then_some(&rank0);
            let loaded =
                fsdp_nn::torch::scatter_full_optim_state_dict(full, parameters, &optimizer)
                    .unwrap();
            assert_same(&loaded, &optimizer.state_dict().unwrap(), "scattered");
        });
    }
}

#[test]
fn a_given_local_state_dict_by_ids_or_names_counts_instead_of_the_live_state() {
    let spec = nested();
    for use_orig_params in [true, false] {
        ranks(2, |group| {
            let model = model(&group, &spec, full_shard(2, use_orig_params));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), true);
            train(&model, &mut [&mut optimizer], 0..2);
            let full = optim_state_dict(None, parameters, &optimizer).unwrap();
            let (ids, names) = (
                optimizer.state_dict().unwrap(),
                optimizer.named_state_dict().unwrap(),
            );
            let before = ids.clone();
            train(&model, &mut [&mut optimizer], 2..3);
            for local in [&ids, &names] {
                let saved = optim_state_dict(Some(local), parameters, &optimizer).unwrap();
                assert_same(&saved, &full, "from a local state dict");
            }
            assert_same(&ids, &before, "the caller's dict");
            let without_groups = edit(&ids, &["param_groups"], None);
            let saved = optim_state_dict(Some(&without_groups), parameters, &optimizer).unwrap();
            assert_same(
                &saved,
                &edit(&full, &["param_groups"], None),
                "without groups",
            );
        });
    }
}

/// Mutation guard: in torch all parameters of a FlatParameter share one `step`, and on the CPU each
/// state of an original parameter holds the last state's values.
#[test]
fn every_value_has_memory_of_its_own() {
    let spec = dummy();
    for layout in [
        full_shard(2, false),
        full_shard(2, true),
        PLAIN,
        Layout {
            strategy: ShardingStrategy::NoShard,
            ..full_shard(2, false)
        },
    ] {
        for sharded in [false, true] {
            ranks(layout.world, |group| {
                let model = model(&group, &spec, layout);
                let parameters = model.parameters();
                let mut optimizer = optimizer(parameters, &spec, &adam(), false);
                train(&model, &mut [&mut optimizer], 0..2);
                let get = || match sharded {
                    true => sharded_optim_state_dict(None, parameters, &optimizer).unwrap(),
                    false => optim_state_dict(None, parameters, &optimizer).unwrap(),
                };
                let (state, untouched) = (get(), get());
                let live = optimizer.state_dict().unwrap();
                // Overwrite all of one parameter's state; nothing else changes, nor does the
                // optimizer.
                let overwrite = |tensor: &Tensor| {
                    let mut bytes =
                        fsdp_flat::storage::HostBytesMut::write(&tensor.clone()).unwrap();
                    bytes.fill(0x55);
                    bytes.finish().unwrap();
                };
                let mut overwritten = 0;
                for (_, value) in state.dict("state").unwrap().dict("net1.weight").unwrap() {
                    match value {
                        StateValue::Tensor(tensor) => overwrite(tensor),
                        StateValue::Sharded(tensor) => {
                            tensor
                                .shards()
                                .iter()
                                .for_each(|shard| overwrite(&shard.tensor));
                        }
                        _ => continue,
                    }
                    overwritten += 1;
                }
                assert_eq!(overwritten, 3);
                let rest = |state: &StateDict| edit(state, &["state", "net1.weight"], None);
                assert_same(&rest(&state), &rest(&untouched), "the other parameters");
                assert_same(&optimizer.state_dict().unwrap(), &live, "the optimizer");
                let of = |name: &str| {
                    untouched
                        .dict("state")
                        .unwrap()
                        .dict("net1.weight")
                        .unwrap()
                        .get(name)
                        .unwrap()
                        .clone()
                };
                assert!(difference(&of("exp_avg"), &of("exp_avg_sq"), "").is_some());
            });
        }
    }
}

#[test]
fn parameters_without_state_are_left_out() {
    let mut spec = dummy();
    spec.unused = vec!["net2"];
    let expected = reference(&spec, &adam(), false, DType::F32, 2).1;
    assert!(!expected.dict("state").unwrap().contains_key("net2.weight"));
    for layout in [full_shard(2, true), full_shard(2, false)] {
        ranks(2, |group| {
            let model = model(&group, &spec, layout);
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), false);
            let fresh = optim_state_dict(None, parameters, &optimizer).unwrap();
            assert!(fresh.dict("state").unwrap().is_empty(), "not stepped yet");
            train(&model, &mut [&mut optimizer], 0..2);
            let full = optim_state_dict(None, parameters, &optimizer).unwrap();
            assert_same(&full, &expected, &format!("{layout:?}"));
            // An unused unit's absence is no error on the way back.
            let loaded =
                fsdp_nn::torch::shard_full_optim_state_dict(&full, parameters, &optimizer).unwrap();
            assert_same(&loaded, &optimizer.state_dict().unwrap(), "and back");
        });
    }
}

#[test]
fn parameters_that_no_optimizer_holds_are_no_error() {
    let spec = dummy();
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let parameters = model.parameters();
        let biases = ["net1.bias", "net2.bias"];
        let mut optimizer =
            Optimizer::with_groups(parameters, vec![ParamGroup::new(adam(), biases)]).unwrap();
        train(&model, &mut [&mut optimizer], 0..2);
        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
        let mut names: Vec<&str> = full.dict("state").unwrap().keys().collect();
        names.sort_unstable();
        assert_eq!(names, biases);
        let loaded =
            fsdp_nn::torch::shard_full_optim_state_dict(&full, parameters, &optimizer).unwrap();
        assert_same(&loaded, &optimizer.state_dict().unwrap(), "and back");
    });
}

#[test]
fn frozen_parameters_in_a_unit_have_no_state() {
    let mut spec = dummy();
    spec.frozen = vec!["net1.weight", "net4.weight"];
    let expected = reference(&spec, &adam(), false, DType::F32, 2).1;
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
        assert_same(&full, &expected, "frozen");
        assert!(!full.dict("state").unwrap().contains_key("net1.weight"));
        assert!(full.dict("state").unwrap().contains_key("net1.bias"));
        let loaded =
            fsdp_nn::torch::shard_full_optim_state_dict(&full, parameters, &optimizer).unwrap();
        assert_same(&loaded, &optimizer.state_dict().unwrap(), "and back");
    });
}

/// A local state dict with values that no schema names: numbers, text, tensors of other shapes, and
/// unknown keys.
pub(crate) fn with_extra_entries(state: &StateDict) -> StateDict {
    let mut state = state.clone();
    let factored = Tensor::arange(0f32, 6f32, &Device::Cpu)
        .unwrap()
        .reshape((2, 3, 1))
        .unwrap();
    for part in ["state", "state_of_empty_pieces"] {
        let Some(StateValue::Dict(states)) = state.get_mut(part) else {
            continue;
        };
        for (_, entries) in states.iter_mut() {
            if let StateValue::Dict(entries) = entries {
                entries.insert("val", 2.5);
                entries.insert("mode", "fast");
                entries.insert("none", PlainValue::None);
                entries.insert("row_factor", factored.clone());
                entries.insert("count", Tensor::new(7i64, &Device::Cpu).unwrap());
            }
        }
    }
    if let Some(StateValue::Dict(states)) = state.get_mut("state") {
        states.insert(
            "user",
            [("hits", StateValue::from(3i64))]
                .into_iter()
                .collect::<StateDict>(),
        );
        states.insert("table", Tensor::new(&[1u8, 2, 3], &Device::Cpu).unwrap());
    }
    state
}

#[test]
fn scalars_text_odd_shapes_and_user_state_are_carried() {
    let spec = uneven();
    for layout in [full_shard(4, true), full_shard(4, false), PLAIN] {
        ranks(layout.world, |group| {
            let model = model(&group, &spec, layout);
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), false);
            train(&model, &mut [&mut optimizer], 0..2);
            let local = with_extra_entries(&optimizer.state_dict().unwrap());
            optimizer.load_state_dict(&local).unwrap();
            assert_same(
                &optimizer.state_dict().unwrap(),
                &local,
                "kept by the optimizer",
            );
            let full = optim_state_dict(None, parameters, &optimizer).unwrap();
            let states = full.dict("state").unwrap();
            for fqn in parameters.fqns() {
                let state = states.dict(fqn).unwrap();
                assert_eq!(
                    state.get("val").unwrap().as_plain().unwrap().as_float(),
                    Some(2.5)
                );
                assert_eq!(
                    state.get("mode").unwrap().as_plain().unwrap().as_str(),
                    Some("fast")
                );
                assert_eq!(
                    state.get("row_factor").unwrap().as_tensor().unwrap().dims(),
                    [2, 3, 1]
                );
                assert_eq!(
                    state
                        .get("count")
                        .unwrap()
                        .as_tensor()
                        .unwrap()
                        .to_scalar::<i64>()
                        .unwrap(),
                    7
                );
            }
            assert_eq!(
                states.plain_at(&["user", "hits"]).unwrap().as_int(),
                Some(3)
            );
            assert!(states.get("table").unwrap().as_tensor().is_some());
            // All of it comes back, also from rank 0 alone and from boxes.
            let loaded =
                fsdp_nn::torch::shard_full_optim_state_dict(&full, parameters, &optimizer).unwrap();
            assert_same(&loaded, &local, "from every rank");
            let of_rank0 = (group.rank() == 0).then_some(&full);
            let loaded =
                fsdp_nn::torch::scatter_full_optim_state_dict(of_rank0, parameters, &optimizer)
                    .unwrap();
            assert_same(&loaded, &local, "from rank 0");
            let sharded = sharded_optim_state_dict(None, parameters, &optimizer).unwrap();
            let loaded =
                fsdp_nn::torch::flatten_sharded_optim_state_dict(&sharded, parameters, &optimizer)
                    .unwrap();
            assert_same(&loaded, &local, "from boxes");
        });
    }
}

/// Mutation guard: what a rank without elements of a parameter says about it does not count.
#[test]
fn scalars_must_agree_on_the_ranks_that_have_elements_and_only_there() {
    let spec = tied();
    ranks(5, |group| {
        let model = model(&group, &spec, full_shard(5, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        let local = optimizer.state_dict().unwrap();
        let has_bias = !parameters.boxes("decoder.bias").unwrap().is_empty();
        assert_eq!(local.dict("state").unwrap().contains_key("1"), has_bias);
        let step = |value: f32| StateValue::from(Tensor::new(value, &Device::Cpu).unwrap());
        // A rank that has nothing of the parameter may say what it likes.
        let mut empty_says = local.clone();
        if !has_bias && let Some(StateValue::Dict(states)) = empty_says.get_mut("state") {
            states.insert(
                "1",
                [("step", step(99.0))].into_iter().collect::<StateDict>(),
            );
        }
        let full = optim_state_dict(Some(&empty_says), parameters, &optimizer).unwrap();
        let saved = full
            .dict("state")
            .unwrap()
            .dict("decoder.bias")
            .unwrap()
            .get("step")
            .unwrap()
            .clone();
        assert_eq!(saved.as_tensor().unwrap().to_scalar::<f32>().unwrap(), 2.0);
        // One that has elements may not.
        let wrong = match group.rank() {
            1 => edit(&local, &["state", "1", "step"], Some(step(3.0))),
            _ => local.clone(),
        };
        let message = text(optim_state_dict(Some(&wrong), parameters, &optimizer));
        assert!(
            message.starts_with(
                "rank 1 has different values for `step` of parameters [\"decoder.bias\"]: 3"
            ),
            "{message}"
        );
    });
}

#[test]
fn one_flat_parameters_state_is_that_of_its_parameters() {
    let spec = mini7();
    let expected = reference(&spec, &adam(), false, DType::F32, 2).1;
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, false));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        let local = optimizer.state_dict().unwrap();
        let fqns: Vec<&str> = parameters.fqns().collect();
        let flat = local.dict("state").unwrap().dict("0").unwrap();
        let states = unflatten_optim_state(flat, parameters, &optimizer, &fqns).unwrap();
        for (fqn, state) in fqns.iter().zip(&states) {
            assert_same(
                state,
                expected.dict("state").unwrap().dict(fqn).unwrap(),
                fqn,
            );
        }
        // And back: right padding is zero, and padding never shows.
        let by_name: StateDict = fqns
            .iter()
            .zip(states)
            .map(|(fqn, state)| (*fqn, state.into()))
            .collect();
        let again = fsdp_nn::torch::flatten_optim_state(&by_name, &optimizer, &fqns).unwrap();
        assert_same(&again, flat, "flattened again");
        let error = text(unflatten_optim_state(
            flat,
            parameters,
            &optimizer,
            &fqns[1..],
        ));
        assert!(
            error.contains("are not the parameters of one FlatParameter"),
            "{error}"
        );
    });
}

/// The parameter that is declared first has the id 0.
#[test]
fn a_parameter_whose_name_is_a_number_is_not_taken_for_an_id() {
    ranks(2, |group| {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            Ok((scope.vb().get(4, "1")?, scope.vb().get(4, "0")?))
        });
        let model = model.unwrap();
        let parameters = model.parameters();
        let mut optimizer = Optimizer::new(parameters, adam()).unwrap();
        let loss = model.forward(|(a, b)| (a + b)?.sqr()?.sum_all()).unwrap();
        model.backward(&loss).unwrap();
        optimizer.step().unwrap();
        let local = optimizer.state_dict().unwrap();
        let flat = local
            .dict("state")
            .unwrap()
            .dict("0")
            .cloned()
            .unwrap_or_default();
        let found = unflatten_optim_state(&flat, parameters, &optimizer, &["1"])
            .unwrap()
            .remove(0);
        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
        assert_same(
            &found,
            full.dict("state").unwrap().dict("1").unwrap(),
            "the parameter `1`",
        );
    });
}

#[test]
fn values_pass_a_sink_and_its_error_is_every_ranks() {
    let spec = nested();
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
        parameters.state_dict_type(optim_rank0_only(), || {
            let mut seen = 0;
            let rest = optim_state_dict_into(None, parameters, &optimizer, |fqn, name, value| {
                let expected = full
                    .dict("state")
                    .unwrap()
                    .dict(fqn)
                    .unwrap()
                    .get(name)
                    .unwrap();
                assert!(difference(&value, expected, name).is_none());
                seen += 1;
                Ok(())
            })
            .unwrap();
            assert_eq!(seen, if group.rank() == 0 { 12 * 3 } else { 0 });
            assert_eq!(rest.contains_key("param_groups"), group.rank() == 0);
            let failed =
                optim_state_dict_into(None, parameters, &optimizer, |_, name, _| match name {
                    "exp_avg_sq" => Err(NnError::UnknownParameter {
                        fqn: "disk full".into(),
                    }),
                    _ => Ok(()),
                });
            assert!(text(failed).contains("disk full"));
        });
        let again = optim_state_dict(None, parameters, &optimizer).unwrap();
        assert_same(&again, &full, "after a failed sink");
    });
}

#[test]
fn an_optimizer_of_another_model_is_refused() {
    ranks(2, |group| {
        let (a, b) = (
            model(&group, &dummy(), full_shard(2, true)),
            model(&group, &dummy(), full_shard(2, true)),
        );
        let optimizer = optimizer(a.parameters(), &dummy(), &adam(), false);
        assert!(text(optim_state_dict(None, b.parameters(), &optimizer)).contains("another model"));
    });
}
