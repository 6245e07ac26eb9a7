//! Model state dicts of the three types, saved and loaded in any layout.

use candle_core::{DType, Tensor};
use fsdp_layout::TensorBox;
use fsdp_nn::torch::{
    StateDictConfig, StateDictSettings, StateDictType, load_state_dict, state_dict, state_dict_into,
};
use fsdp_nn::{NnError, ShardingStrategy};
use fsdp_state::{StateDict, StateError, all_gather_sharded_tensor};

use crate::state_dicts::common::*;

fn rank0_only() -> StateDictSettings {
    let config = StateDictConfig::Full {
        offload_to_cpu: true,
        rank0_only: true,
    };
    StateDictSettings::new(StateDictType::Full, Some(config), None).unwrap()
}

/// Zeros in place of all values.
fn zeroed(state: &StateDict) -> StateDict {
    let zero = |tensor: &Tensor| tensor.zeros_like().unwrap();
    state
        .iter()
        .map(|(name, value)| (name.clone(), zero(value.as_tensor().unwrap()).into()))
        .collect()
}

#[test]
fn a_full_state_dict_is_the_unsharded_models_in_every_layout() {
    for (name, spec) in models() {
        let expected = reference(&spec, &adam(), false, DType::F32, 0).0;
        for layout in layouts() {
            ranks(layout.world, |group| {
                let model = model(&group, &spec, layout);
                let what = format!("{name}, {layout:?}");
                assert_same(&state_dict(model.parameters()).unwrap(), &expected, &what);
                let rank0 = model
                    .parameters()
                    .state_dict_type(rank0_only(), || state_dict(model.parameters()))
                    .unwrap();
                match group.rank() {
                    0 => assert_same(&rank0, &expected, &what),
                    _ => assert!(rank0.is_empty(), "{what}"),
                }
            });
        }
    }
}

#[test]
fn sharded_state_dicts_are_this_ranks_boxes_of_the_full_one() {
    for (name, spec) in models() {
        for layout in layouts() {
            ranks(layout.world, |group| {
                let model = model(&group, &spec, layout);
                let parameters = model.parameters();
                let full = state_dict(parameters).unwrap();
                let sharded = parameters
                    .state_dict_type(StateDictSettings::from(StateDictType::Sharded), || {
                        state_dict(parameters)
                    })
                    .unwrap();
                for (fqn, value) in &sharded {
                    if let Some(tensor) = value.as_sharded() {
                        assert_eq!(tensor.boxes(), parameters.boxes(fqn).unwrap());
                    }
                }
                assert_same(
                    &whole(&group, &sharded),
                    &full,
                    &format!("{name}, {layout:?}"),
                );
            });
        }
    }
}

/// Saved in one layout, loaded into a model with other values in another: the identity, for every
/// pair of layouts.
#[test]
fn any_layout_loads_what_any_layout_saved() {
    let types = [
        StateDictSettings::from(StateDictType::Full),
        rank0_only(),
        StateDictSettings::from(StateDictType::Sharded),
    ];
    let models = models();
    for (i, from) in layouts().into_iter().enumerate() {
        let (name, spec) = &models[i % models.len()];
        let expected = reference(spec, &adam(), false, DType::F32, 0).0;
        for settings in types {
            let saved = ranks(from.world, |group| {
                let model = model(&group, spec, from);
                let parameters = model.parameters();
                parameters
                    .state_dict_type(settings, || state_dict(parameters))
                    .unwrap()
            });
            for to in layouts() {
                ranks(to.world, |group| {
                    let model = model_of(&group, spec, to, DType::F32, 2);
                    let parameters = model.parameters();
                    let mine = match settings.state_dict_type() {
                        StateDictType::Sharded => redealt(&saved, group.rank(), to.world),
                        _ if settings == rank0_only() && group.rank() > 0 => StateDict::new(),
                        _ => saved[0].clone(),
                    };
                    let before = mine.clone();
                    let load = || load_state_dict(&mine, parameters, true).unwrap();
                    assert!(parameters.state_dict_type(settings, load).is_clean());
                    assert_same(&mine, &before, "the caller's dict");
                    let what = format!("{name}, {from:?} to {to:?}, {settings:?}");
                    assert_same(&state_dict(parameters).unwrap(), &expected, &what);
                });
            }
        }
    }
}

#[test]
fn dtypes_are_kept() {
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        let spec = uneven();
        let expected = reference(&spec, &sgd(0.5), false, dtype, 2).0;
        for layout in [full_shard(3, true), full_shard(3, false)] {
            ranks(layout.world, |group| {
                let model = model_of(&group, &spec, layout, dtype, 1);
                let mut optimizer = optimizer(model.parameters(), &spec, &sgd(0.5), false);
                train(&model, &mut [&mut optimizer], 0..2);
                assert_same(
                    &state_dict(model.parameters()).unwrap(),
                    &expected,
                    &format!("{dtype:?}, {layout:?}"),
                );
            });
        }
    }
}

/// Mutation guard: no public function returns a view of live memory.
#[test]
fn state_dicts_own_their_memory() {
    for layout in [
        full_shard(2, true),
        full_shard(2, false),
        Layout {
            strategy: ShardingStrategy::NoShard,
            ..full_shard(2, true)
        },
    ] {
        for state_dict_type in [
            StateDictType::Full,
            StateDictType::Sharded,
            StateDictType::Local,
        ] {
            if state_dict_type == StateDictType::Local
                && layout.strategy == ShardingStrategy::NoShard
            {
                continue;
            }
            ranks(layout.world, |group| {
                let spec = composite();
                let model = model(&group, &spec, layout);
                let parameters = model.parameters();
                let mut optimizer = optimizer(parameters, &spec, &sgd(0.0), false);
                let get = || {
                    parameters
                        .state_dict_type(StateDictSettings::from(state_dict_type), || {
                            state_dict(parameters)
                        })
                        .unwrap()
                };
                let (before, again) = (get(), get());
                train(&model, &mut [&mut optimizer], 0..1);
                assert_same(&before, &again, "two reads before the step");
                let after = get();
                assert!(
                    difference(&before.into(), &after.into(), "").is_some(),
                    "the step changed nothing?"
                );
            });
        }
    }
}

#[test]
fn all_names_of_a_tied_parameter_are_saved_and_either_loads() {
    let expected = reference(&tied(), &adam(), false, DType::F32, 0).0;
    assert!(expected.contains_key("embedding.weight") && expected.contains_key("decoder.weight"));
    for missing in ["embedding.weight", "decoder.weight"] {
        ranks(3, |group| {
            let model = model_of(&group, &tied(), full_shard(3, true), DType::F32, 9);
            let saved = edit(&expected, &[missing], None);
            let report = load_state_dict(&saved, model.parameters(), true).unwrap();
            assert!(report.is_clean());
            assert_same(&state_dict(model.parameters()).unwrap(), &expected, missing);
        });
    }
}

/// The state dict of a model whose weights were not tied, whole on every rank, on one, and cut in
/// other boxes for each name.
#[test]
fn names_of_a_tied_parameter_with_other_values_are_an_error_that_names_both() {
    let names = ["embedding.weight", "decoder.weight"];
    let expected = reference(&tied(), &adam(), false, DType::F32, 0).0;
    let cut = |tensor: &Tensor, rows: std::ops::Range<usize>| {
        let bounds = TensorBox::new(vec![rows.start, 0], vec![rows.len(), 3]);
        let tensor = tensor.narrow(0, rows.start, rows.len()).unwrap();
        let shards = vec![fsdp_flat::LocalShard { bounds, tensor }];
        fsdp_flat::ShardedTensor::new(DType::F32, vec![6, 3], shards).unwrap()
    };
    for difference in [0.0, 1.0] {
        let first = expected.get(names[0]).unwrap().as_tensor().unwrap();
        let second = (first + difference).unwrap();
        for settings in [
            StateDictSettings::from(StateDictType::Full),
            rank0_only(),
            StateDictSettings::from(StateDictType::Sharded),
        ] {
            let what = format!("{settings:?}, {difference}");
            let messages = ranks(2, |group| {
                let rank = group.rank();
                let model = model_of(&group, &tied(), full_shard(2, true), DType::F32, 9);
                let parameters = model.parameters();
                let before = state_dict(parameters).unwrap();
                let mut saved = expected.clone();
                if settings.state_dict_type() == StateDictType::Sharded {
                    let rows = [[0..3, 3..6], [0..1, 1..6]].map(|rows| rows[rank].clone());
                    saved.insert(names[0], cut(first, rows[0].clone()));
                    saved.insert(names[1], cut(&second, rows[1].clone()));
                } else {
                    saved.insert(names[1], second.clone());
                }
                let outcome = parameters
                    .state_dict_type(settings, || load_state_dict(&saved, parameters, true));
                let after = state_dict(parameters).unwrap();
                if outcome.is_err() {
                    assert_same(&after, &before, &what);
                } else {
                    assert_same(&after, &expected, &what);
                }
                outcome.err().map(|error| error.to_string())
            });
            for message in &messages {
                assert_eq!(message, &messages[0], "{what}");
                assert_eq!(message.is_some(), difference > 0.0, "{what}: {message:?}");
                let text = message
                    .as_deref()
                    .unwrap_or("embedding.weight decoder.weight");
                assert!(names.iter().all(|name| text.contains(name)), "{text}");
            }
        }
    }
}

#[test]
fn only_persistent_buffers_are_saved_and_they_load() {
    ranks(2, |group| {
        let model = model(&group, &composite(), full_shard(2, true));
        let parameters = model.parameters();
        let saved = state_dict(parameters).unwrap();
        assert!(
            saved.contains_key("mean")
                && saved.contains_key("u1.buffer")
                && !saved.contains_key("scratch")
        );
        load_state_dict(&zeroed(&saved), parameters, true).unwrap();
        let (mean, _) = &parameters.buffers()["mean"];
        assert_eq!(mean.to_vec1::<f32>().unwrap(), [0.; 5]);
        load_state_dict(&saved, parameters, true).unwrap();
        assert_eq!(mean.to_vec1::<f32>().unwrap(), [1., 2., 3., 4., 5.]);
        assert_same(
            &state_dict(parameters).unwrap(),
            &saved,
            "after the round trip",
        );
    });
}

/// Missing, unexpected and mismatched names: the same error on every rank, and nothing has changed.
#[test]
fn what_does_not_fit_changes_nothing_on_any_rank() {
    let settings = [
        StateDictSettings::from(StateDictType::Full),
        rank0_only(),
        StateDictSettings::from(StateDictType::Sharded),
    ];
    for settings in settings {
        let wrong = Tensor::zeros((4, 9), DType::F32, &candle_core::Device::Cpu).unwrap();
        let cast = Tensor::zeros(4, DType::F64, &candle_core::Device::Cpu).unwrap();
        for (path, value) in [
            ("l1.weight", None),
            ("abc", Some(cast.clone().into())),
            ("l1.weight", Some(wrong.into())),
            ("l1.bias", Some(cast.into())),
        ] {
            let errors = ranks(3, |group| {
                let model = model(&group, &composite(), full_shard(3, false));
                let parameters = model.parameters();
                let before = state_dict(parameters).unwrap();
                let saved = edit(&zeroed(&before), &[path], value.clone());
                let saved = if settings == rank0_only() && group.rank() > 0 {
                    StateDict::new()
                } else {
                    saved
                };
                let error = parameters
                    .state_dict_type(settings, || load_state_dict(&saved, parameters, true))
                    .unwrap_err();
                assert!(
                    matches!(error, NnError::State(StateError::Incompatible { .. })),
                    "{error}"
                );
                assert_same(
                    &state_dict(parameters).unwrap(),
                    &before,
                    "after a failed load",
                );
                error.to_string()
            });
            assert!(
                errors
                    .iter()
                    .all(|error| *error == errors[0] && error.contains(path)),
                "{errors:?}"
            );
        }
    }
}

#[test]
fn missing_and_unexpected_names_are_reported_once_if_not_strict() {
    ranks(2, |group| {
        let model = model(&group, &nested(), full_shard(2, true));
        let parameters = model.parameters();
        let before = state_dict(parameters).unwrap();
        let saved = edit(
            &edit(&before, &["block1.bias"], None),
            &["extra"],
            Some(1.0.into()),
        );
        let report = load_state_dict(&saved, parameters, false).unwrap();
        assert_eq!(report.missing, ["block1.bias"]);
        assert_eq!(report.unexpected, ["extra"]);
        assert_same(&state_dict(parameters).unwrap(), &before, "values stay");
    });
}

fn local() -> StateDictSettings {
    StateDictSettings::from(StateDictType::Local)
}

#[test]
fn a_local_state_dict_has_one_unpadded_flat_parameter_a_unit() {
    for (use_orig_params, numel) in [(false, 39), (true, 46)] {
        ranks(2, |group| {
            let model = model(&group, &mini7(), full_shard(2, use_orig_params));
            let parameters = model.parameters();
            let state = parameters
                .state_dict_type(local(), || state_dict(parameters))
                .unwrap();
            assert_eq!(state.keys().collect::<Vec<_>>(), ["_flat_param"]);
            let flat = state.get("_flat_param").unwrap().as_sharded().unwrap();
            assert_eq!(flat.shape(), [numel]);
            let cut = if use_orig_params { 23 } else { 20 };
            let range = if group.rank() == 0 {
                0..cut
            } else {
                cut..numel
            };
            assert_eq!(
                flat.boxes(),
                [TensorBox::new(vec![range.start], vec![range.len()])]
            );
        });
    }
    ranks(2, |group| {
        let model = model(&group, &nested(), full_shard(2, false));
        let parameters = model.parameters();
        let state = parameters
            .state_dict_type(local(), || state_dict(parameters))
            .unwrap();
        assert!(
            state.contains_key("_flat_param")
                && state.contains_key("block2.1.bias_module0._flat_param")
        );
        assert_eq!(state.len(), 6 + 1);
    });
}

#[test]
fn a_rank_whose_shard_is_padding_has_no_local_shard() {
    ranks(5, |group| {
        let model = model(&group, &tied(), full_shard(5, false));
        let parameters = model.parameters();
        let state = parameters
            .state_dict_type(local(), || state_dict(parameters))
            .unwrap();
        // 6 elements over 5 ranks: 2, 2, 2, 0, 0.
        let bias = state
            .get("decoder._flat_param")
            .unwrap()
            .as_sharded()
            .unwrap();
        assert_eq!(bias.shards().len(), usize::from(group.rank() < 3));
    });
}

#[test]
fn local_state_dicts_of_four_ranks_reload_on_two() {
    for use_orig_params in [true, false] {
        for (name, spec) in models() {
            let expected = reference(&spec, &adam(), false, DType::F32, 0).0;
            // The shards of four ranks, as whole flat tensors.
            let saved = ranks(4, |group| {
                let model = model(&group, &spec, full_shard(4, use_orig_params));
                let parameters = model.parameters();
                let state = parameters
                    .state_dict_type(local(), || state_dict(parameters))
                    .unwrap();
                let gathered: StateDict = state
                    .iter()
                    .map(|(name, value)| match value.as_sharded() {
                        Some(flat) => (
                            name.clone(),
                            all_gather_sharded_tensor(flat, &group, None)
                                .unwrap()
                                .into(),
                        ),
                        None => (name.clone(), value.clone()),
                    })
                    .collect();
                // And back on the same ranks, from the boxes.
                let again = model_of(&group, &spec, full_shard(4, use_orig_params), DType::F32, 5);
                let report = again
                    .parameters()
                    .state_dict_type(local(), || {
                        load_state_dict(&state, again.parameters(), true)
                    })
                    .unwrap();
                assert!(report.is_clean());
                assert_same(
                    &crate::state_dicts::common::whole(
                        &group,
                        &state_dict(again.parameters()).unwrap(),
                    ),
                    &expected,
                    name,
                );
                gathered
            });
            ranks(2, |group| {
                let model = model_of(&group, &spec, full_shard(2, use_orig_params), DType::F32, 3);
                let parameters = model.parameters();
                parameters
                    .state_dict_type(local(), || load_state_dict(&saved[0], parameters, true))
                    .unwrap();
                assert_same(&state_dict(parameters).unwrap(), &expected, name);
            });
        }
    }
}

#[test]
fn local_state_dicts_need_sharded_parameters_without_a_mesh() {
    for (layout, is_mesh) in [
        (
            Layout {
                strategy: ShardingStrategy::NoShard,
                ..full_shard(2, true)
            },
            false,
        ),
        (full_shard(1, true), false),
        (
            Layout {
                strategy: ShardingStrategy::HybridShard,
                ..full_shard(4, true)
            },
            true,
        ),
    ] {
        ranks(layout.world, |group| {
            let model = model(&group, &mini7(), layout);
            let parameters = model.parameters();
            parameters.state_dict_type(local(), || {
                let load =
                    load_state_dict(&StateDict::new(), parameters, true).map(|_| StateDict::new());
                for result in [state_dict(parameters), load] {
                    let message = text(result);
                    match is_mesh {
                        true => assert!(
                            message
                                .starts_with("DeviceMesh is not compatible with LOCAL_STATE_DICT")
                        ),
                        false => {
                            assert!(message.contains(
                                "can only be used when parameters are flatten and sharded"
                            ))
                        }
                    }
                }
            });
        });
    }
}

#[test]
fn a_plain_or_ddp_state_dict_loads_into_a_sharded_model_and_back() {
    let plain = reference(&dummy(), &adam(), false, DType::F32, 0).0;
    let ddp: StateDict = plain
        .iter()
        .map(|(name, value)| (format!("module.{name}"), value.clone()))
        .collect();
    let stripped =
        fsdp_nn::torch::consume_prefix_in_state_dict_if_present(&ddp, "module.").unwrap();
    let back = ranks(3, |group| {
        let model = model_of(&group, &dummy(), full_shard(3, true), DType::F32, 4);
        load_state_dict(&stripped, model.parameters(), true).unwrap();
        state_dict(model.parameters()).unwrap()
    });
    assert_same(&back[2], &plain, "through a sharded model");
}

#[test]
fn values_pass_a_sink_one_by_one_and_its_error_is_every_ranks() {
    ranks(3, |group| {
        let model = model(&group, &nested(), full_shard(3, true));
        let parameters = model.parameters();
        let full = state_dict(parameters).unwrap();
        parameters.state_dict_type(rank0_only(), || {
            let mut seen = StateDict::new();
            state_dict_into(parameters, |name, value| {
                seen.insert(name, value);
                Ok(())
            })
            .unwrap();
            match group.rank() {
                0 => assert_same(&seen, &full, "streamed"),
                _ => assert!(seen.is_empty()),
            }
            let failing = state_dict_into(parameters, |name, _| match name {
                "block1.bias" => Err(NnError::UnknownParameter {
                    fqn: "disk full".into(),
                }),
                _ => Ok(()),
            });
            let message = text(failing);
            assert!(
                message.contains("disk full") && message.contains("rank 0"),
                "{message}"
            );
        });
        // The group still works.
        assert_same(
            &state_dict(parameters).unwrap(),
            &full,
            "after a failed sink",
        );
    });
}

#[test]
fn frozen_parameters_are_in_the_model_state_dict() {
    let mut spec = dummy();
    spec.frozen = vec!["net1.weight", "net4.weight"];
    let expected = reference(&spec, &adam(), false, DType::F32, 2).0;
    assert!(expected.contains_key("net1.weight"));
    ranks(2, |group| {
        let model = model(&group, &spec, full_shard(2, true));
        let mut optimizer = optimizer(model.parameters(), &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        assert_same(
            &state_dict(model.parameters()).unwrap(),
            &expected,
            "frozen",
        );
    });
}
