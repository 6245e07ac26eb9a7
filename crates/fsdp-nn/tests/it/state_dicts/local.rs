//! The optimizer's own state dict: torch's local form.

use candle_core::{DType, Device, Tensor};
use fsdp_layout::PlainValue;
use fsdp_nn::torch::{OptimStateError, StateDictOptions, get_optimizer_state_dict};
use fsdp_nn::{NnError, Optimizer, ParamGroup, ShardingStrategy};
use fsdp_state::{StateDict, StateValue};

use crate::state_dicts::common::*;

fn params(state: &StateDict) -> Vec<PlainValue> {
    let Some(StateValue::List(groups)) = state.get("param_groups") else {
        panic!("groups")
    };
    let params = |group: &StateValue| {
        group
            .as_dict()
            .unwrap()
            .get("params")
            .unwrap()
            .as_plain()
            .unwrap()
            .clone()
    };
    groups.iter().map(params).collect()
}

fn ids(ids: &[i64]) -> PlainValue {
    PlainValue::List(ids.iter().map(|&id| PlainValue::Int(id)).collect())
}

fn dims(state: &StateDict, id: &str) -> Vec<usize> {
    state
        .dict("state")
        .unwrap()
        .dict(id)
        .unwrap()
        .get("exp_avg")
        .unwrap()
        .as_tensor()
        .unwrap()
        .dims()
        .to_vec()
}

/// Mini7 over two ranks: the golden shards of torch.
#[test]
fn ids_are_positions_and_tensors_are_flat_pieces() {
    ranks(2, |group| {
        for (use_orig_params, of_rank) in [
            (false, [vec![Some(20)], vec![Some(20)]]),
            (
                true,
                [
                    vec![Some(7), Some(15), None, None, None],
                    vec![None, None, Some(5), Some(10), Some(2)],
                ],
            ),
        ] {
            let model = model(&group, &mini7(), full_shard(2, use_orig_params));
            let mut optimizer = optimizer(model.parameters(), &mini7(), &adam(), false);
            train(&model, &mut [&mut optimizer], 0..2);
            let state = optimizer.state_dict().unwrap();
            let expected = &of_rank[group.rank()];
            assert_eq!(
                params(&state),
                [ids(&(0..expected.len() as i64).collect::<Vec<_>>())]
            );
            for (id, numel) in expected.iter().enumerate() {
                let id = id.to_string();
                match numel {
                    Some(numel) => assert_eq!(dims(&state, &id), [*numel]),
                    None => assert!(
                        !state.dict("state").unwrap().contains_key(&id),
                        "nothing of {id} is here"
                    ),
                }
            }
            if !use_orig_params && group.rank() == 1 {
                let flat = state
                    .dict("state")
                    .unwrap()
                    .dict("0")
                    .unwrap()
                    .get("exp_avg_sq")
                    .unwrap();
                assert_eq!(
                    flat.as_tensor().unwrap().to_vec1::<f32>().unwrap()[19],
                    0.0,
                    "right padding"
                );
            }
        }
    });
}

#[test]
fn whole_parameters_keep_their_shapes_and_flat_ones_do_not() {
    ranks(2, |group| {
        for (use_orig_params, shape) in [(true, vec![5, 3]), (false, vec![39])] {
            let layout = Layout {
                world: 2,
                strategy: ShardingStrategy::NoShard,
                use_orig_params,
            };
            let model = model(&group, &mini7(), layout);
            let mut optimizer = optimizer(model.parameters(), &mini7(), &adam(), false);
            train(&model, &mut [&mut optimizer], 0..1);
            let id = if use_orig_params { "1" } else { "0" };
            assert_eq!(dims(&optimizer.state_dict().unwrap(), id), shape);
        }
    });
}

#[test]
fn ids_count_over_groups_and_empty_groups_have_none() {
    ranks(2, |group| {
        let model = model(&group, &dummy(), full_shard(2, false));
        let mut optimizer = optimizer(model.parameters(), &dummy(), &adam(), true);
        train(&model, &mut [&mut optimizer], 0..1);
        let state = optimizer.state_dict().unwrap();
        assert_eq!(params(&state), [ids(&[0]), ids(&[1, 2]), ids(&[])]);
        let named = optimizer.named_state_dict().unwrap();
        let names: Vec<&str> = named.dict("state").unwrap().keys().collect();
        assert_eq!(
            names,
            ["_flat_param", "net1._flat_param", "net2._flat_param"]
        );
    });
}

#[test]
fn a_state_dict_goes_into_a_fresh_optimizer_and_training_goes_on() {
    for (name, spec) in models() {
        for layout in layouts() {
            for algorithm in algorithms() {
                let both = ranks(layout.world, |group| {
                    let trained = model(&group, &spec, layout);
                    let mut a = optimizer(trained.parameters(), &spec, &algorithm, true);
                    train(&trained, &mut [&mut a], 0..2);
                    let saved = a.state_dict().unwrap();
                    let other = model(&group, &spec, layout);
                    let mut b = optimizer(other.parameters(), &spec, &algorithm, true);
                    b.load_state_dict(&saved).unwrap();
                    assert_same(&b.state_dict().unwrap(), &saved, name);
                    train(&trained, &mut [&mut a], 2..4);
                    train(&other, &mut [&mut b], 2..4);
                    assert_same(
                        &b.state_dict().unwrap(),
                        &a.state_dict().unwrap(),
                        &format!("{name}, {layout:?}"),
                    );
                });
                drop(both);
                if layout.world > 3 {
                    break;
                }
            }
        }
    }
}

#[test]
fn reading_changes_nothing() {
    ranks(2, |group| {
        let model = model(&group, &dummy(), full_shard(2, true));
        let mut optimizer = optimizer(model.parameters(), &dummy(), &adam(), false);
        assert!(
            optimizer
                .state_dict()
                .unwrap()
                .dict("state")
                .unwrap()
                .is_empty()
        );
        assert!(optimizer.is_fresh());
        train(&model, &mut [&mut optimizer], 0..1);
        let before = optimizer.state_dict().unwrap();
        train(&model, &mut [&mut optimizer], 1..2);
        let after = optimizer.state_dict().unwrap();
        assert!(
            difference(&before.into(), &after.into(), "").is_some(),
            "a state dict is a copy"
        );
    });
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() {
    ranks(2, |group| {
        let model = model(&group, &mini7(), full_shard(2, false));
        let parameters = model.parameters();
        let mut optimizer = optimizer(parameters, &mini7(), &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        let saved = optimizer.state_dict().unwrap();
        let zeros = |shape: &[usize], dtype| {
            Some(StateValue::from(
                Tensor::zeros(shape, dtype, &Device::Cpu).unwrap(),
            ))
        };
        let Some(StateValue::List(groups)) = saved.get("param_groups") else {
            panic!("groups")
        };
        let two_groups = StateValue::List(vec![groups[0].clone(), groups[0].clone()]);
        let mut longer = groups[0].clone();
        if let StateValue::Dict(group) = &mut longer {
            group.insert("params", ids(&[0, 1]));
        }
        let mut without_rate = groups[0].clone();
        if let StateValue::Dict(group) = &mut without_rate {
            assert!(group.remove("lr").is_some());
        }
        let cases = [
            (
                edit(
                    &saved,
                    &["param_groups"],
                    Some(StateValue::List(vec![without_rate])),
                ),
                "`optim_state_dict` must have the keys \"param_groups.0.lr\"",
            ),
            (
                edit(&saved, &["param_groups"], Some(two_groups)),
                "loaded state dict has a different number of parameter groups",
            ),
            (
                edit(
                    &saved,
                    &["param_groups"],
                    Some(StateValue::List(vec![longer])),
                ),
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            ),
            (
                edit(&saved, &["state", "0", "exp_avg"], zeros(&[19], DType::F32)),
                "tensor optimizer state does not have same shape as its parameter: [19] [20]",
            ),
            (
                edit(
                    &saved,
                    &["state", "0", "exp_avg"],
                    zeros(&[20], DType::BF16),
                ),
                "state `exp_avg` of parameter `_flat_param` is",
            ),
            (
                edit(&saved, &["state", "0", "step"], None),
                "missing optimizer state `step`",
            ),
            (
                edit(&saved, &["state", "0", "exp_avg_sq"], None),
                "missing optimizer state `exp_avg_sq`",
            ),
            (
                edit(&saved, &["state", "0"], Some(1.0.into())),
                "invalid parameter keys: [\"0\"]",
            ),
            (
                edit(&saved, &["state", "5"], Some(StateDict::new().into())),
                "the state dict has state of parameter `5`",
            ),
            (
                edit(&saved, &["state"], None),
                "`optim_state_dict` must have the keys \"state\"",
            ),
            (
                edit(&saved, &["param_groups"], None),
                "`optim_state_dict` must have the keys \"param_groups\"",
            ),
        ];
        for (wrong, message) in cases {
            let error = text(optimizer.load_state_dict(&wrong));
            assert!(error.starts_with(message), "{error}\ninstead of\n{message}");
            assert_same(&optimizer.state_dict().unwrap(), &saved, "unchanged");
        }
    });
}

#[test]
fn groups_and_parameters_are_matched_by_position() {
    ranks(1, |group| {
        let model = model(&group, &dummy(), PLAIN);
        let parameters = model.parameters();
        let mut names: Vec<&str> = parameters.fqns().collect();
        let make = |names: &[&str]| {
            Optimizer::with_groups(
                parameters,
                vec![ParamGroup::new(sgd(0.9), names.iter().copied())],
            )
            .unwrap()
        };
        let mut a = make(&names);
        train(&model, &mut [&mut a], 0..1);
        names.reverse();
        let mut b = make(&names);
        let error = b.load_state_dict(&a.state_dict().unwrap()).unwrap_err();
        assert!(
            matches!(
                error,
                NnError::OptimState {
                    error: OptimStateError::WrongShape { .. },
                    ..
                }
            ),
            "{error}"
        );
        // By names it is matched too: positions in the groups, whatever the keys.
        let error = b
            .load_state_dict(&a.named_state_dict().unwrap())
            .unwrap_err();
        assert!(
            matches!(
                error,
                NnError::OptimState {
                    error: OptimStateError::WrongShape { .. },
                    ..
                }
            ),
            "{error}"
        );
    });
}

/// torch's local dicts have nothing of parameters that a rank has no elements of.
#[test]
fn without_word_of_them_empty_pieces_have_the_entries_of_the_rest_of_their_group() {
    let spec = uneven();
    ranks(5, |group| {
        let model = model(&group, &spec, full_shard(5, true));
        let mut optimizer = optimizer(model.parameters(), &spec, &sgd(0.9), false);
        train(&model, &mut [&mut optimizer], 0..1);
        let options = StateDictOptions {
            full_state_dict: true,
            ..StateDictOptions::default()
        };
        let before = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
        let mut local = optimizer.state_dict().unwrap();
        local.remove("state_of_empty_pieces");
        optimizer.load_state_dict(&local).unwrap();
        let after = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
        assert_same(&after, &before, "momentum");
    });
}
