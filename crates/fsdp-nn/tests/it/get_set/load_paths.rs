//! Loads of whole dicts, of sharded ones and of rank 0's: the same outcome on every rank, whatever
//! the dict holds.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{Operation, ProcessGroup, Traffic, run_local};
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_nn::torch::{
    OptimLoadOptions, OptimStateKeyType, optim_state_dict_to_load, rekey_optim_state_dict,
};
use fsdp_nn::torch::{
    StateDictOptions, get_optimizer_state_dict, get_state_dict, set_model_state_dict,
    set_optimizer_state_dict, set_state_dict,
};
use fsdp_nn::{FsdpConfig, NnError, Optimizer, ParamGroup, ShardingStrategy};
use fsdp_state::{StateDict, StateError, StateValue, get_element_mut};

use crate::get_set::common::*;

/// How a dict comes: sharded, whole on every rank, from rank 0, and the last in the flat format.
fn paths() -> [StateDictOptions; 4] {
    let full = StateDictOptions {
        full_state_dict: true,
        ..options()
    };
    let from_rank0 = StateDictOptions {
        broadcast_from_rank0: true,
        ..full.clone()
    };
    let flat = StateDictOptions {
        flatten_optimizer_state_dict: true,
        ..from_rank0.clone()
    };
    [options(), full, from_rank0, flat]
}

/// Returns the dict that this rank passes to a load: with `broadcast_from_rank0` all but rank 0
/// have nothing.
fn brought(group: &ProcessGroup, state: StateDict, options: &StateDictOptions) -> StateDict {
    match options.broadcast_from_rank0 && group.rank() > 0 {
        true => StateDict::new(),
        false => state,
    }
}

fn entry<'a>(state: &'a mut StateDict, fqn: &str) -> &'a mut StateDict {
    let path = KeyPath(vec![
        PathPart::Key("state".to_owned()),
        PathPart::Key(fqn.to_owned()),
    ]);
    match get_element_mut(state, &path) {
        Some(StateValue::Dict(entries)) => entries,
        other => panic!("{fqn}: {other:?}"),
    }
}

const FQNS: [&str; 6] = [
    "embedding.weight",
    "a.weight",
    "a.bias",
    "b.weight",
    "b.bias",
    "scale",
];

/// Five ranks, of which some own nothing of `scale`, `a.bias` and others: each parameter's own step
/// is known everywhere.
#[test]
fn every_rank_knows_every_step() {
    run_local(5, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        for options in paths() {
            let nested = StateDictOptions {
                flatten_optimizer_state_dict: false,
                broadcast_from_rank0: false,
                ..options.clone()
            };
            let mut saved =
                get_optimizer_state_dict(model.parameters(), &[&optimizer], &nested).unwrap();
            for (index, fqn) in FQNS.iter().enumerate() {
                entry(&mut saved, fqn).insert(
                    "step",
                    Tensor::new(index as f32 + 3.0, &Device::Cpu).unwrap(),
                );
            }
            let mut target = Optimizer::new(model.parameters(), adamw()).unwrap();
            let saved = brought(&group, saved, &options);
            set_optimizer_state_dict(&saved, model.parameters(), &mut [&mut target], &options)
                .unwrap();
            for (index, fqn) in FQNS.iter().enumerate() {
                let state = target.state_of(fqn).unwrap().unwrap();
                let step = state["step"]
                    .as_tensor()
                    .unwrap()
                    .to_scalar::<f32>()
                    .unwrap();
                assert_eq!(step, index as f32 + 3.0, "{fqn}");
                assert_eq!(
                    state["exp_avg"].as_sharded().unwrap().boxes(),
                    model.parameters().boxes(fqn).unwrap()
                );
            }
        }
    })
    .unwrap();
}

/// Sharded reads and loads into the same layout move nothing, whole dicts that all ranks have are
/// cut where they are, and what rank 0 alone has goes to each rank in its boxes: never more than
/// one collective for a tensor.
#[test]
fn no_more_moves_than_must() {
    let tensor_collectives = |traffic: &Traffic| {
        let all = [
            Operation::Broadcast,
            Operation::ScatterUneven,
            Operation::AllToAllUneven,
            Operation::AllGatherUneven,
        ];
        all.iter()
            .map(|operation| traffic.count(*operation))
            .sum::<u64>()
    };
    run_local(3, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        for options in paths() {
            let get = StateDictOptions {
                broadcast_from_rank0: false,
                ..options.clone()
            };
            let before = group.traffic();
            let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &get).unwrap();
            if !options.full_state_dict {
                assert_eq!(group.traffic().since(&before).tensor_bytes(), 0);
            }
            let (m, o) = (brought(&group, m, &options), brought(&group, o, &options));
            let before = group.traffic();
            set_state_dict(&m, &o, model.parameters(), &mut [&mut optimizer], &options).unwrap();
            let traffic = group.traffic().since(&before);
            if !options.broadcast_from_rank0 {
                assert_eq!(traffic.tensor_bytes(), 0);
                continue;
            }
            // Six parameters and two tensors of state for each; buffers of one element come with
            // the structure.
            assert!(
                tensor_collectives(&traffic) <= 3 * FQNS.len() as u64,
                "{traffic:?}"
            );
            let boxes = FQNS
                .iter()
                .flat_map(|fqn| model.parameters().boxes(fqn).unwrap());
            let mine = 3 * 4 * boxes.map(|bounds| bounds.numel() as u64).sum::<u64>();
            let received = if group.rank() == 0 { 0 } else { mine };
            assert!(
                traffic.tensor_bytes_received <= received,
                "{traffic:?}, {received}"
            );
        }
    })
    .unwrap();
}

/// Numbers, text, and tensors of shapes of their own, in both modes.
#[test]
fn state_of_any_shape_and_kind_comes_along_every_path() {
    for use_orig_params in [true, false] {
        run_local(4, |group| {
            let layout = config(4, ShardingStrategy::FullShard, use_orig_params, 1);
            let model = model(group.clone(), layout);
            let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            step(&model, &mut [&mut optimizer], 0);
            let full = StateDictOptions {
                full_state_dict: true,
                ..options()
            };
            let mut saved =
                get_optimizer_state_dict(model.parameters(), &[&optimizer], &full).unwrap();
            for fqn in FQNS {
                let entries = entry(&mut saved, fqn);
                entries.insert(
                    "row_factor",
                    Tensor::arange(0f32, 6f32, &Device::Cpu)
                        .unwrap()
                        .reshape((2, 3))
                        .unwrap(),
                );
                entries.insert("rms", Tensor::new(0.25f64, &Device::Cpu).unwrap());
                entries.insert("one", Tensor::new(&[7i64], &Device::Cpu).unwrap());
                entries.insert("mode", "fast");
                entries.insert("beta", 0.5);
            }
            for options in paths()
                .into_iter()
                .filter(|options| !options.flatten_optimizer_state_dict)
            {
                let mut target = Optimizer::new(model.parameters(), adamw()).unwrap();
                let brought = brought(&group, saved.clone(), &options);
                set_optimizer_state_dict(
                    &brought,
                    model.parameters(),
                    &mut [&mut target],
                    &options,
                )
                .unwrap();
                let again =
                    get_optimizer_state_dict(model.parameters(), &[&target], &full).unwrap();
                assert_eq!(bits(&again), bits(&saved), "{options:?}");
            }
        })
        .unwrap();
    }
}

/// Two optimizers, one of them with groups: several, one of them empty, and keys that no algorithm
/// knows.
#[test]
fn groups_of_two_optimizers_come_along_every_path() {
    run_local(4, |group| {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::HybridShard] {
            let make = |seed: u64, scale: f64| {
                let model = model(group.clone(), config(4, strategy, true, seed));
                let mut all = groups(0.1 * scale, 0.2 * scale);
                all[1] = ParamGroup::new(all[1].algorithm.clone(), ["scale"]);
                let first = Optimizer::with_groups(model.parameters(), all).unwrap();
                let rest = ParamGroup::new(adamw(), ["b.weight", "b.bias"]);
                let second = Optimizer::with_groups(model.parameters(), vec![rest]).unwrap();
                (model, first, second)
            };
            let (source, mut first, mut second) = make(1, 1.0);
            step(&source, &mut [&mut first, &mut second], 0);
            let expected = gathered_bits(&source, &[&first, &second]);
            for options in paths() {
                let get = StateDictOptions {
                    broadcast_from_rank0: false,
                    ..options.clone()
                };
                let (m, o) = get_state_dict(source.parameters(), &[&first, &second], &get).unwrap();
                let (target, mut a, mut b) = make(2, 3.0);
                if options.flatten_optimizer_state_dict {
                    // A flat dict has no place for groups without parameters.
                    a.groups_mut()[2].algorithm.set_lr(0.5).unwrap();
                }
                let (m, o) = (brought(&group, m, &options), brought(&group, o, &options));
                set_state_dict(&m, &o, target.parameters(), &mut [&mut a, &mut b], &options)
                    .unwrap();
                assert_eq!(
                    gathered_bits(&target, &[&a, &b]),
                    expected,
                    "{strategy}, {options:?}"
                );
            }
        }
    })
    .unwrap();
}

/// A tied parameter that is frozen: in the model under both names, in no optimizer state, and it
/// loads from either.
#[test]
fn tied_and_frozen_parameters_come_along_every_path() {
    run_local(3, |group| {
        let make = |seed| {
            let requires_grad = Arc::new(|fqn: &str| fqn != "embedding.weight");
            let config = FsdpConfig {
                requires_grad,
                ..config(3, ShardingStrategy::FullShard, true, seed)
            };
            let model = model(group.clone(), config);
            let optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            (model, optimizer)
        };
        let (source, mut optimizer) = make(1);
        step(&source, &mut [&mut optimizer], 0);
        let expected = gathered_bits(&source, &[&optimizer]);
        for options in paths() {
            let get = StateDictOptions {
                broadcast_from_rank0: false,
                ..options.clone()
            };
            for missing in ["embedding.weight", "head.weight"] {
                let (mut m, o) = get_state_dict(source.parameters(), &[&optimizer], &get).unwrap();
                assert!(m.remove(missing).is_some());
                let (target, mut loaded) = make(2);
                let (m, o) = (brought(&group, m, &options), brought(&group, o, &options));
                set_state_dict(&m, &o, target.parameters(), &mut [&mut loaded], &options).unwrap();
                assert_eq!(gathered_bits(&target, &[&loaded]), expected, "{options:?}");
            }
        }
    })
    .unwrap();
}

/// A fault in one rank's state dict is the same error on every rank, names the fault, and changes
/// nothing.
#[test]
fn what_one_rank_brings_wrong_is_the_same_error_on_every_rank() {
    for options in paths() {
        let errors = run_local(3, |group| {
            let model = sharded(&group, 1);
            let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            step(&model, &mut [&mut optimizer], 0);
            let before = gathered_bits(&model, &[&optimizer]);
            let wrong = if options.broadcast_from_rank0 { 0 } else { 2 };
            let get = StateDictOptions {
                broadcast_from_rank0: false,
                flatten_optimizer_state_dict: false,
                ..options.clone()
            };
            let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &get).unwrap();
            let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            let here = group.rank() == wrong;
            let mut errors = Vec::new();
            let mut edited = m.clone();
            if here {
                edited.insert("b.bias", zeros(&[7]));
            }
            let edited = brought(&group, edited, &options);
            errors.push(set_model_state_dict(&edited, model.parameters(), &options).unwrap_err());
            let edits: [&dyn Fn(&mut StateDict); 3] = [
                &|o| drop(entry(o, "a.bias").insert("exp_avg", zeros(&[3, 3]))),
                &|o| drop(entry(o, "a.bias").remove("exp_avg_sq")),
                &|o| drop(o.insert("param_groups", 3i64)),
            ];
            for edit in edits {
                let mut edited = o.clone();
                if here {
                    edit(&mut edited);
                }
                let edited = brought(&group, edited, &options);
                let set = set_optimizer_state_dict(
                    &edited,
                    model.parameters(),
                    &mut [&mut optimizer],
                    &options,
                );
                errors.push(set.unwrap_err());
            }
            for error in &errors[..3] {
                let NnError::State(error) = error else {
                    panic!("{error}")
                };
                match error {
                    // If rank 0's state dict is for all, a fault in it is an error of all.
                    StateError::Incompatible { .. } => {
                        assert!(options.broadcast_from_rank0, "{error}")
                    }
                    StateError::ValueMismatch {
                        rank: 2,
                        reference: 0,
                        ..
                    }
                    | StateError::KeyMismatch {
                        rank: 2,
                        reference: 0,
                        ..
                    } => {
                        assert!(!options.broadcast_from_rank0, "{error}");
                    }
                    error => panic!("{error}"),
                }
            }
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            errors.iter().map(ToString::to_string).collect::<Vec<_>>()
        })
        .unwrap();
        assert!(
            errors.iter().all(|of_rank| *of_rank == errors[0]),
            "{errors:?}"
        );
        let missing = if options.broadcast_from_rank0 {
            "missing"
        } else {
            "rank 2 has no"
        };
        for (error, words) in errors[0].iter().zip([
            ["b.bias", "float32 [7]", "float32 [6]"],
            ["a.bias.exp_avg", "float32 [3, 3]", "float32 [9]"],
            [missing, "a.bias.exp_avg_sq", ""],
            ["param_groups", "rank", ""],
        ]) {
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}

/// Dicts by ids are no dicts by names; they become such ones by `rekey_optim_state_dict`.
#[test]
fn dicts_by_ids_are_refused_until_they_are_rekeyed() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let expected = gathered_bits(&model, &[&optimizer]);
        let full = StateDictOptions {
            full_state_dict: true,
            ..options()
        };
        let named = get_optimizer_state_dict(model.parameters(), &[&optimizer], &full).unwrap();
        let names: Vec<String> = optimizer.fqns().map(str::to_owned).collect();
        let by_ids = rekey_optim_state_dict(&named, OptimStateKeyType::ParamId, &names).unwrap();
        let mut target = Optimizer::new(model.parameters(), adamw()).unwrap();
        let mut set = |state: &StateDict| {
            set_optimizer_state_dict(state, model.parameters(), &mut [&mut target], &full)
                .map(|_| ())
        };
        let error = set(&by_ids).unwrap_err().to_string();
        assert!(error.contains("rekey_optim_state_dict"), "{error}");
        set(&rekey_optim_state_dict(&by_ids, OptimStateKeyType::ParamName, &names).unwrap())
            .unwrap();
        assert_eq!(gathered_bits(&model, &[&target]), expected);
    })
    .unwrap();
}

/// Without groups, too: a key that is a number is an id, and no key of a user's own.
#[test]
fn state_under_numbers_that_name_no_parameter_is_refused() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let options = StateDictOptions {
            full_state_dict: true,
            strict: false,
            ..options()
        };
        let named = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
        let names: Vec<String> = optimizer.fqns().map(str::to_owned).collect();
        let mut by_ids =
            rekey_optim_state_dict(&named, OptimStateKeyType::ParamId, &names).unwrap();
        by_ids.remove("param_groups");
        let before = gathered_bits(&model, &[&optimizer]);
        let set =
            set_optimizer_state_dict(&by_ids, model.parameters(), &mut [&mut optimizer], &options);
        let error = set.unwrap_err().to_string();
        assert!(error.contains("rekey_optim_state_dict"), "{error}");
        let load = OptimLoadOptions::default();
        let error = optim_state_dict_to_load(&by_ids, model.parameters(), &mut optimizer, &load)
            .unwrap_err()
            .to_string();
        assert!(error.contains("rekey_optim_state_dict"), "{error}");
        let mut local = optimizer.named_state_dict().unwrap();
        let Some(StateValue::Dict(states)) = local.get_mut("state") else {
            panic!("{local:?}")
        };
        states.insert("77", 1.0);
        let error = optimizer.load_state_dict(&local).unwrap_err().to_string();
        assert!(error.contains("`77`"), "{error}");
        assert_eq!(gathered_bits(&model, &[&optimizer]), before);
    })
    .unwrap();
}

/// A flat dict that lacks a parameter's state or one entry of it, or names no parameter of the
/// model.
#[test]
fn a_flat_dict_that_lacks_something_names_it() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let flat = StateDictOptions { flatten_optimizer_state_dict: true, ..options() };
        let saved = get_optimizer_state_dict(model.parameters(), &[&optimizer], &flat).unwrap();
        assert!(saved.contains_key("state.a.bias.step") && saved.contains_key("param_groups.a.bias.lr"));
        let before = gathered_bits(&model, &[&optimizer]);
        let without = |prefix: &str| -> StateDict {
            let kept = saved.iter().filter(|(key, _)| !key.starts_with(prefix));
            kept.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        let mut unknown = saved.clone();
        unknown.insert("state.c.weight.step", 1.0);
        for (dict, word) in [
            (without("state.a.bias."), "`state.a.bias`"),
            (without("state.a.bias.exp_avg_sq"), "`state.a.bias.exp_avg_sq`"),
            (unknown, "`state.c.weight.step`"),
        ] {
            let set = set_optimizer_state_dict(&dict, model.parameters(), &mut [&mut optimizer], &flat);
            let error = set.unwrap_err().to_string();
            assert!(error.contains(word), "{word}: {error}");
        }
        assert_eq!(gathered_bits(&model, &[&optimizer]), before);
        let value = PlainValue::Float(0.01);
        assert!(matches!(saved.get("param_groups.scale.lr"), Some(StateValue::Plain(lr)) if lr.same_bits(&value)));
    })
    .unwrap();
}

/// Each rank takes its own scalars and hyperparameters, which must therefore be the same: one
/// error, whatever the format.
#[test]
fn ranks_with_other_scalars_are_told_which() {
    fn hyperparameter(o: &mut StateDict, key: &str) {
        let path = KeyPath(vec![
            PathPart::Key("param_groups".to_owned()),
            PathPart::Index(0),
        ]);
        let Some(StateValue::Dict(group)) = get_element_mut(o, &path) else {
            panic!("one group")
        };
        group.insert(
            key,
            0.75 - group
                .plain_at(&[key])
                .and_then(PlainValue::as_float)
                .unwrap_or_default(),
        );
    }
    type Edit = fn(&mut StateDict);
    let edits: [(&str, Edit); 4] = [
        ("state.{a}.step", |o| {
            let step = Tensor::new(5f32, &Device::Cpu).unwrap();
            ["a.weight", "a.bias"]
                .iter()
                .for_each(|fqn| drop(entry(o, fqn).insert("step", step.clone())));
        }),
        ("state.{a}.other", |o| {
            ["a.weight", "a.bias"]
                .iter()
                .for_each(|fqn| drop(entry(o, fqn).insert("other", true)));
        }),
        ("param_groups.a.bias.lr", |o| hyperparameter(o, "lr")),
        ("param_groups.a.bias.initial_lr", |o| {
            hyperparameter(o, "initial_lr")
        }),
    ];
    for use_orig_params in [true, false] {
        let errors = run_local(3, |group| {
            let model = model(
                group.clone(),
                config(3, ShardingStrategy::FullShard, use_orig_params, 1),
            );
            let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            step(&model, &mut [&mut optimizer], 0);
            let mut o =
                get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
            for fqn in ["a.weight", "a.bias"] {
                entry(&mut o, fqn).insert("other", false);
            }
            hyperparameter(&mut o, "initial_lr");
            set_optimizer_state_dict(&o, model.parameters(), &mut [&mut optimizer], &options())
                .unwrap();
            let before = gathered_bits(&model, &[&optimizer]);
            let mut errors = Vec::new();
            // The first by name, or of the FlatParameter.
            let first = if use_orig_params {
                "a.bias"
            } else {
                "a.weight"
            };
            for (name, edit) in &edits {
                let name = name.replace("{a}", first);
                for strict in [true, false] {
                    let mut edited = o.clone();
                    if group.rank() == 2 {
                        edit(&mut edited);
                    }
                    let options = StateDictOptions {
                        strict,
                        ..options()
                    };
                    let set = set_optimizer_state_dict(
                        &edited,
                        model.parameters(),
                        &mut [&mut optimizer],
                        &options,
                    );
                    let error = set.unwrap_err();
                    let NnError::State(StateError::DifferingOnRanks {
                        key,
                        rank,
                        reference,
                        ..
                    }) = &error
                    else {
                        panic!("{error}")
                    };
                    assert_eq!((key.as_str(), *rank, *reference), (name.as_str(), 2, 0));
                    errors.push(error.to_string());
                }
            }
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            set_optimizer_state_dict(&o, model.parameters(), &mut [&mut optimizer], &options())
                .unwrap();
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            errors
        })
        .unwrap();
        assert!(
            errors.iter().all(|of_rank| *of_rank == errors[0]),
            "{errors:?}"
        );
    }
}

/// torch takes the hyperparameters of the group's others, and says nothing. In the flat format it
/// fails on a key.
#[test]
fn a_parameter_that_no_saved_group_names_is_missing_unless_it_is_frozen() {
    run_local(2, |group| {
        for algorithm in [
            adamw(),
            Algorithm::Sgd(SgdOptions {
                lr: 0.25,
                ..SgdOptions::default()
            }),
        ] {
            let requires_grad = Arc::new(|fqn: &str| !fqn.starts_with("a."));
            let config = FsdpConfig {
                requires_grad,
                ..config(2, ShardingStrategy::FullShard, true, 1)
            };
            let model = model(group.clone(), config);
            let parameters = model.parameters();
            let mut optimizer = Optimizer::new(parameters, algorithm.clone()).unwrap();
            step(&model, &mut [&mut optimizer], 0);
            for flat in [false, true] {
                let options = StateDictOptions {
                    flatten_optimizer_state_dict: flat,
                    ..options()
                };
                let saved = get_optimizer_state_dict(parameters, &[&optimizer], &options).unwrap();
                let without = |fqn: &str| -> StateDict {
                    if flat {
                        let prefix = format!("param_groups.{fqn}.");
                        let kept = saved.iter().filter(|(key, _)| !key.starts_with(&prefix));
                        return kept
                            .map(|(key, value)| (key.clone(), value.clone()))
                            .collect();
                    }
                    let mut saved = saved.clone();
                    let path = [PathPart::Key("param_groups".to_owned()), PathPart::Index(0)];
                    let Some(StateValue::Dict(group)) =
                        get_element_mut(&mut saved, &KeyPath(path.to_vec()))
                    else {
                        panic!("one group")
                    };
                    let kept = FQNS
                        .iter()
                        .filter(|known| **known != fqn)
                        .map(|known| (*known).into())
                        .collect();
                    group.insert("params", PlainValue::List(kept));
                    saved
                };
                let mut set = |fqn: &str, strict: bool| {
                    let options = StateDictOptions {
                        strict,
                        ..options.clone()
                    };
                    set_optimizer_state_dict(
                        &without(fqn),
                        parameters,
                        &mut [&mut optimizer],
                        &options,
                    )
                };
                assert!(
                    set("a.bias", true).unwrap().is_clean(),
                    "a frozen one needs no group"
                );
                let missing = ["param_groups.0.params.b.bias".to_owned()];
                let error = set("b.bias", true).unwrap_err();
                let NnError::State(StateError::Incompatible { report, .. }) = &error else {
                    panic!("{error}")
                };
                assert_eq!(report.missing, missing);
                assert_eq!(set("b.bias", false).unwrap().missing, missing);
            }
        }
    })
    .unwrap();
}
