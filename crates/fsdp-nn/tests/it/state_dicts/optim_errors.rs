//! Saved state that cannot be right: each wrong state dict is one typed error, on every rank, and
//! changes nothing.

use candle_core::{DType, Device, Tensor};
use fsdp_flat::RawTensor;
use fsdp_layout::PlainValue;
use fsdp_nn::NnError;
use fsdp_nn::torch::{
    OptimLoadOptions, OptimStateError, flatten_optim_state, optim_state_dict,
    optim_state_dict_to_load, scatter_full_optim_state_dict, shard_orig_param_state,
    sharded_optim_state_dict,
};
use fsdp_state::{StateDict, StateError, StateValue};

use crate::state_dicts::common::*;

const DIRECTLY: OptimLoadOptions = OptimLoadOptions {
    is_named_optimizer: false,
    load_directly: true,
    allow_missing_state: false,
};

fn zeros(shape: &[usize], dtype: DType) -> Option<StateValue> {
    Some(Tensor::zeros(shape, dtype, &Device::Cpu).unwrap().into())
}

fn step(value: f32) -> Option<StateValue> {
    Some(Tensor::new(value, &Device::Cpu).unwrap().into())
}

/// Loads a wrong dict in all ways; returns the error, which must be the same on all ranks.
fn error_of(saved: &StateDict, use_orig_params: bool) -> OptimStateError {
    let spec = mini7();
    let errors = ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, use_orig_params));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let local = optimizer.state_dict().unwrap();
        let before = saved.clone();
        let error =
            optim_state_dict_to_load(saved, parameters, &mut optimizer, &DIRECTLY).unwrap_err();
        let of_rank0 = (group.rank() == 0).then_some(saved);
        let scattered =
            scatter_full_optim_state_dict(of_rank0, parameters, &optimizer).unwrap_err();
        assert_same(&optimizer.state_dict().unwrap(), &local, "the optimizer");
        assert_same(saved, &before, "the caller's dict");
        match (error, scattered) {
            (
                NnError::OptimState { error, ranks },
                NnError::OptimState {
                    error: scattered, ..
                },
            ) => {
                assert_eq!(error, scattered);
                assert_eq!(ranks, [] as [usize; 0], "all ranks met it");
                error
            }
            (error, scattered) => panic!("{error}; {scattered}"),
        }
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

/// torch's table of errors of a FlatParameter, by what is wrong: the message's beginning.
#[test]
fn wrong_state_of_a_flat_parameter_is_named() {
    let full = reference(&mini7(), &adam(), false, DType::F32, 2).1;
    let edit = |path: &[&str], value| edit(&full, path, value);
    let scalar = "all unflattened parameters comprising a single flat parameter must have scalar state with the same \
                  value and dtype but got values";
    let table: Vec<(StateDict, &str)> = vec![
        (
            edit(&["state", "l1.bias", "other"], Some(1.0.into())),
            "differing optimizer state names for the unflattened parameters",
        ),
        (
            edit(&["state", "l1.bias", "exp_avg"], None),
            "differing optimizer state names for the unflattened parameters",
        ),
        (
            edit(&["state", "l1.bias", "step"], Some(2.0.into())),
            "differing optimizer state types for state `step`",
        ),
        (
            edit(&["state", "l1.bias", "exp_avg"], step(1.0)),
            "differing optimizer state types for state `exp_avg`",
        ),
        (
            edit(&["state", "l1.bias", "exp_avg"], zeros(&[5], DType::F64)),
            "all unflattened parameters comprising a single flat parameter must have positive-dimension tensor state with \
             the same dtype but got dtypes",
        ),
        (
            edit(
                &["state", "l1.weight", "exp_avg"],
                zeros(&[3, 5], DType::F32),
            ),
            "tensor optimizer state does not have same shape as its parameter: [3, 5] [5, 3]",
        ),
        (edit(&["state", "l1.bias", "step"], step(9.0)), scalar),
        (
            edit(
                &["state", "l1.bias", "step"],
                Some(Tensor::new(2f64, &Device::Cpu).unwrap().into()),
            ),
            scalar,
        ),
        // Mutation guard: torch drops the whole FlatParameter in silence if its first parameter has
        // no state.
        (edit(&["state", "sc"], None), scalar),
        (edit(&["state", "l2.bias"], None), scalar),
        (
            edit(&["state"], None),
            "`optim_state_dict` must have the keys \"state\" to be a valid optimizer state dict",
        ),
    ];
    for (saved, message) in table {
        let error = error_of(&saved, false);
        assert!(
            error.to_string().starts_with(message),
            "{error}\ninstead of\n{message}"
        );
    }
}

#[test]
fn numbers_that_differ_within_a_flat_parameter_are_named() {
    let mut saved = reference(&mini7(), &adam(), false, DType::F32, 2).1;
    for (index, fqn) in ["sc", "l1.weight", "l1.bias", "l2.weight", "l2.bias"]
        .into_iter()
        .enumerate()
    {
        saved = edit(
            &saved,
            &["state", fqn, "val"],
            Some((index as f64 / 4.0).into()),
        );
    }
    let error = error_of(&saved, false);
    let OptimStateError::DifferingScalars { name, values, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(name, "val");
    assert_eq!(values.len(), 5);
    // The same numbers are fine with original parameters.
    ranks(2, |group| {
        let model = model(&group, &mini7(), full_shard(2, true));
        let mut optimizer = optimizer(model.parameters(), &mini7(), &adam(), false);
        optim_state_dict_to_load(&saved, model.parameters(), &mut optimizer, &DIRECTLY).unwrap();
    });
}

/// Mutation guard: with original parameters torch checks neither shapes nor presence.
#[test]
fn wrong_state_of_an_original_parameter_is_named() {
    let full = reference(&mini7(), &adam(), false, DType::F32, 2).1;
    let wrong = |found: &[usize], name: &str| OptimStateError::WrongShape {
        fqn: "l1.weight".into(),
        name: name.into(),
        found: found.to_vec(),
        expected: vec![5, 3],
    };
    for shape in [&[3, 5][..], &[15], &[6, 3], &[4, 3]] {
        let saved = edit(
            &full,
            &["state", "l1.weight", "exp_avg_sq"],
            zeros(shape, DType::F32),
        );
        assert_eq!(error_of(&saved, true), wrong(shape, "exp_avg_sq"));
    }
    for missing in ["sc", "l2.bias"] {
        let error = error_of(&edit(&full, &["state", missing], None), true);
        assert!(
            matches!(&error, OptimStateError::MissingState { fqn, .. } if fqn == missing),
            "{error}"
        );
    }
    for name in ["step", "exp_avg"] {
        let error = error_of(&edit(&full, &["state", "l1.bias", name], None), true);
        assert_eq!(
            error,
            OptimStateError::MissingEntry {
                fqn: "l1.bias".into(),
                name: name.into()
            }
        );
    }
    let error = error_of(
        &edit(
            &full,
            &["state", "l1.bias", "exp_avg"],
            zeros(&[5], DType::F64),
        ),
        true,
    );
    assert!(
        matches!(error, OptimStateError::WrongDType { .. }),
        "nothing is cast unasked: {error}"
    );
    let error = error_of(
        &edit(&full, &["state", "l1.bias", "exp_avg"], Some(1.0.into())),
        true,
    );
    assert!(
        matches!(error, OptimStateError::DifferingTypes { .. }),
        "{error}"
    );
}

#[test]
fn groups_that_name_unknown_parameters_or_ids_are_refused() {
    let full = reference(&mini7(), &adam(), false, DType::F32, 2).1;
    let with_params = |params: Vec<PlainValue>| {
        let mut saved = full.clone();
        if let Some(StateValue::List(groups)) = saved.get_mut("param_groups")
            && let StateValue::Dict(group) = &mut groups[0]
        {
            group.insert("params", PlainValue::List(params));
        }
        saved
    };
    for use_orig_params in [true, false] {
        let error = error_of(
            &with_params(vec!["sc".into(), "stranger".into()]),
            use_orig_params,
        );
        assert_eq!(
            error,
            OptimStateError::UnknownParam {
                index: 0,
                key: "stranger".into()
            }
        );
        let error = error_of(&with_params(vec![PlainValue::Int(0)]), use_orig_params);
        assert!(
            error
                .to_string()
                .starts_with("invalid parameter keys: [\"0\"]"),
            "{error}"
        );
        assert!(
            error.to_string().contains("rekey_optim_state_dict"),
            "{error}"
        );
    }
}

/// One rank's dict is wrong: every rank gets that error, with the rank.
#[test]
fn one_ranks_error_is_every_ranks() {
    let full = reference(&mini7(), &adam(), false, DType::F32, 2).1;
    for use_orig_params in [true, false] {
        let errors = ranks(4, |group| {
            let spec = mini7();
            let model = model(&group, &spec, full_shard(4, use_orig_params));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), false);
            let saved = match group.rank() {
                2 => edit(
                    &full,
                    &["state", "l2.weight", "exp_avg"],
                    zeros(&[2, 6], DType::F32),
                ),
                _ => full.clone(),
            };
            text(optim_state_dict_to_load(
                &saved,
                parameters,
                &mut optimizer,
                &DIRECTLY,
            ))
        });
        assert!(errors.iter().all(|error| *error == errors[0]));
        assert!(
            errors[0].contains("`exp_avg`") && errors[0].contains("`l2.weight`"),
            "{}",
            errors[0]
        );
        assert!(errors[0].ends_with("(on rank 2)"), "{}", errors[0]);
    }
}

/// Ranks without elements of a parameter get its state from the others, which candle can only hold
/// in dtypes that it has.
#[test]
fn state_that_other_ranks_cannot_hold_is_every_ranks_error() {
    let spec = mini7();
    let errors = ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let mut optimizer = optimizer(model.parameters(), &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let mut local = optimizer.state_dict().unwrap();
        if local.dict("state").unwrap().contains_key("0") {
            let mask = RawTensor::new(fsdp_layout::DType::Bool, vec![3], vec![1, 0, 1]).unwrap();
            local = edit(&local, &["state", "0", "mask"], Some(mask.into()));
        }
        text(optim_state_dict(
            Some(&local),
            model.parameters(),
            &optimizer,
        ))
    });
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(
        errors[0].contains("optimizer state `mask` of parameter `sc`"),
        "{}",
        errors[0]
    );
}

#[test]
fn one_unit_or_parameter_can_be_converted_by_itself() {
    let full = reference(&mini7(), &adam(), false, DType::F32, 2).1;
    let states = full.dict("state").unwrap();
    ranks(3, |group| {
        let spec = mini7();
        let flat = model(&group, &spec, full_shard(3, false));
        let mut trained = optimizer(flat.parameters(), &spec, &adam(), false);
        train(&flat, &mut [&mut trained], 0..2);
        let fqns: Vec<&str> = flat.parameters().fqns().collect();
        let local = trained.state_dict().unwrap();
        let flattened = flatten_optim_state(states, &trained, &fqns).unwrap();
        assert_same(
            &flattened,
            local.dict("state").unwrap().dict("0").unwrap(),
            "the FlatParameter",
        );
        assert!(
            flatten_optim_state(&StateDict::new(), &trained, &fqns)
                .unwrap()
                .is_empty()
        );
        assert!(text(flatten_optim_state(states, &trained, &fqns[..2])).contains("FlatParameter"));

        let orig = model(&group, &spec, full_shard(3, true));
        let mut trained = optimizer(orig.parameters(), &spec, &adam(), false);
        train(&orig, &mut [&mut trained], 0..2);
        let local = trained.state_dict().unwrap();
        for (id, fqn) in fqns.iter().enumerate() {
            let piece = shard_orig_param_state(states.dict(fqn).unwrap(), &trained, fqn).unwrap();
            match local.dict("state").unwrap().dict(&id.to_string()) {
                Some(expected) => assert_same(&piece, expected, fqn),
                None => assert!(piece.is_empty(), "{fqn} has no elements here"),
            }
        }
        assert!(
            shard_orig_param_state(&StateDict::new(), &trained, "sc")
                .unwrap()
                .is_empty()
        );
        let wrong = edit(
            states.dict("sc").unwrap(),
            &["exp_avg"],
            zeros(&[8], DType::F32),
        );
        let message = text(shard_orig_param_state(&wrong, &trained, "sc"));
        assert!(
            message.starts_with(
                "tensor optimizer state does not have same shape as its parameter: [8] [7]"
            ),
            "{message}"
        );
    });
}

/// torch leaves zero-dimension parameters out of what a FlatParameter may lack state for.
#[test]
fn a_parameter_without_dimensions_must_have_its_state() {
    let full = reference(&with_scalar(), &sgd(0.9), false, DType::F32, 2).1;
    let saved = edit(&full, &["state", "u.scale"], None);
    ranks(2, |group| {
        let model = model(&group, &with_scalar(), full_shard(2, false));
        let mut optimizer = optimizer(model.parameters(), &with_scalar(), &sgd(0.9), false);
        let message = text(optim_state_dict_to_load(
            &saved,
            model.parameters(),
            &mut optimizer,
            &DIRECTLY,
        ));
        assert!(
            message.starts_with("flattening a zero-dimension parameter is not supported"),
            "{message}"
        );
    });
}

/// The key of the first value that differs between ranks, the rank that differs, and its value
/// there.
#[track_caller]
fn differing(error: &NnError) -> (&str, usize, &str) {
    let NnError::State(StateError::DifferingOnRanks {
        key, rank, found, ..
    }) = error
    else {
        panic!("{error}")
    };
    (key, *rank, found)
}

/// A state dict that only one rank cannot take changes no rank.
#[test]
fn an_error_while_loading_directly_changes_no_rank() {
    let spec = dummy();
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        let local = optimizer.state_dict().unwrap();
        let mut saved = optim_state_dict(None, parameters, &optimizer).unwrap();
        if group.rank() == 1 {
            saved = edit(&saved, &["state", "net2.bias", "exp_avg"], None);
        }
        let error =
            optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap_err();
        assert!(
            matches!(&error, NnError::OptimState { ranks, .. } if *ranks == [1]),
            "{error}"
        );
        assert_same(&optimizer.state_dict().unwrap(), &local, "unchanged");
        // Ranks with good dicts that differ.
        let mut saved = optim_state_dict(None, parameters, &optimizer).unwrap();
        if group.rank() == 2 {
            let step = StateValue::from(Tensor::new(5f32, &Device::Cpu).unwrap());
            saved = edit(&saved, &["state", "net2.bias", "step"], Some(step));
        }
        let error =
            optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap_err();
        assert_eq!(differing(&error), ("state.net2.bias.step", 2, "5.0"));
        assert_same(&optimizer.state_dict().unwrap(), &local, "unchanged");
        // So do ranks with other hyperparameters, and with tensors of another kind.
        let lr = 0.25 * (1 + group.rank()) as f64;
        optimizer.groups_mut()[0].algorithm.set_lr(lr).unwrap();
        let saved = optim_state_dict(None, parameters, &optimizer).unwrap();
        let error =
            optim_state_dict_to_load(&saved, parameters, &mut optimizer, &DIRECTLY).unwrap_err();
        // The group's first parameter by name.
        assert_eq!(
            differing(&error),
            ("param_groups.net1.bias.lr", 1, "Float(0.5)")
        );
        assert_eq!(optimizer.groups()[0].algorithm.lr(), lr);
        optimizer.groups_mut()[0].algorithm.set_lr(1.0).unwrap();
        let full = optim_state_dict(None, parameters, &optimizer).unwrap();
        let sharded = sharded_optim_state_dict(None, parameters, &optimizer).unwrap();
        let saved = if group.rank() == 2 { &sharded } else { &full };
        let error =
            optim_state_dict_to_load(saved, parameters, &mut optimizer, &DIRECTLY).unwrap_err();
        assert!(
            matches!(
                error,
                NnError::State(StateError::ValueMismatch {
                    rank: 2,
                    reference: 0,
                    ..
                })
            ),
            "{error}"
        );
    });
}

/// Otherwise some ranks would go on with the loaded state, and others with their own.
#[test]
fn ranks_that_load_with_other_options_are_told_so_and_nothing_is_loaded() {
    let spec = dummy();
    ranks(2, |group| {
        let model = model(&group, &spec, full_shard(2, true));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let saved = optim_state_dict(None, parameters, &optimizer).unwrap();
        train(&model, &mut [&mut optimizer], 1..2);
        let local = optimizer.state_dict().unwrap();
        let options = OptimLoadOptions {
            load_directly: group.rank() == 0,
            ..DIRECTLY
        };
        let error =
            optim_state_dict_to_load(&saved, parameters, &mut optimizer, &options).unwrap_err();
        assert!(
            error.to_string().contains("load_directly: false"),
            "{error}"
        );
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
        assert_same(&optimizer.state_dict().unwrap(), &local, "unchanged");
    });
}
