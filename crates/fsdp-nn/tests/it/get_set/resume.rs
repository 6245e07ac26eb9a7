//! Runs that are set into fresh ones, and go on as if nothing had happened.

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::PlainValue;
use fsdp_nn::algorithm::{AdamOptions, Algorithm, SgdOptions};
use fsdp_nn::torch::{
    StateDictOptions, get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict,
    set_state_dict,
};
use fsdp_nn::{Optimizer, ParamGroup, ShardingStrategy};
use fsdp_state::{StateDict, StateValue, flatten_containers};

use crate::get_set::common::*;

fn layouts() -> [(ShardingStrategy, bool); 3] {
    [
        (ShardingStrategy::FullShard, true),
        (ShardingStrategy::FullShard, false),
        (ShardingStrategy::NoShard, true),
    ]
}

/// How a dict is got and set.
fn forms() -> [StateDictOptions; 3] {
    let full = StateDictOptions {
        full_state_dict: true,
        ..options()
    };
    [
        options(),
        full.clone(),
        StateDictOptions {
            broadcast_from_rank0: true,
            ..full
        },
    ]
}

/// Trains with `saved`, sets that into a fresh run with `live` (that has stepped, or not), and
/// compares both after more steps.
fn resumes(
    group: &ProcessGroup,
    saved: &Algorithm,
    live: &Algorithm,
    edit: impl Fn(&mut StateDict),
) {
    for (strategy, use_orig_params) in layouts() {
        for options in forms() {
            for steps_before in [0, 2] {
                let make = |seed| {
                    model(
                        group.clone(),
                        config(group.world_size(), strategy, use_orig_params, seed),
                    )
                };
                let (source, target) = (make(1), make(2));
                let mut optimizer = Optimizer::new(source.parameters(), saved.clone()).unwrap();
                let mut fresh = Optimizer::new(target.parameters(), live.clone()).unwrap();
                for seed in 0..3 {
                    step(&source, &mut [&mut optimizer], seed);
                }
                for seed in 0..steps_before {
                    step(&target, &mut [&mut fresh], seed + 7);
                }
                let get = StateDictOptions {
                    broadcast_from_rank0: false,
                    ..options.clone()
                };
                let (m, mut o) = get_state_dict(source.parameters(), &[&optimizer], &get).unwrap();
                edit(&mut o);
                let report =
                    set_state_dict(&m, &o, target.parameters(), &mut [&mut fresh], &options)
                        .unwrap();
                assert!(report.is_clean(), "{report:?}");
                assert_eq!(
                    gathered_bits(&target, &[&fresh]),
                    gathered_bits(&source, &[&optimizer]),
                    "{options:?}"
                );
                for seed in 3..6 {
                    step(&source, &mut [&mut optimizer], seed);
                    step(&target, &mut [&mut fresh], seed);
                }
                assert_eq!(
                    gathered_bits(&target, &[&fresh]),
                    gathered_bits(&source, &[&optimizer]),
                    "{options:?}"
                );
            }
        }
    }
}

/// Momentum begins with the first gradient, so that a fresh optimizer has no place for it yet.
#[test]
fn sgd_with_momentum_resumes_bit_for_bit() {
    let sgd = Algorithm::Sgd(SgdOptions {
        lr: 0.05,
        momentum: 0.9,
        ..SgdOptions::default()
    });
    run_local(3, |group| {
        resumes(&group, &sgd, &sgd, |_| ());
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), sgd.clone()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let o = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        assert!(
            o.dict("state")
                .unwrap()
                .dict("a.weight")
                .unwrap()
                .contains_key("momentum_buffer")
        );
    })
    .unwrap();
}

/// The saved group decides about `amsgrad`, as in torch.
#[test]
fn amsgrad_is_that_of_the_saved_group() {
    let adam = |amsgrad| {
        Algorithm::AdamW(AdamOptions {
            lr: 0.01,
            amsgrad,
            ..AdamOptions::adamw()
        })
    };
    run_local(2, |group| {
        for amsgrad in [true, false] {
            resumes(&group, &adam(amsgrad), &adam(!amsgrad), |_| ());
        }
    })
    .unwrap();
}

/// The groups of a dict, with their keys and parameters in the opposite order, and the opposite
/// order of groups.
fn reversed(state: &mut StateDict) {
    let Some(StateValue::List(groups)) = state.get_mut("param_groups") else {
        return;
    };
    groups.reverse();
    for group in groups {
        let StateValue::Dict(group) = group else {
            panic!("a group is a dict")
        };
        let mut entries: Vec<(String, StateValue)> = std::mem::take(group).into_iter().collect();
        entries.reverse();
        *group = entries.into_iter().collect();
        let Some(StateValue::Plain(PlainValue::List(params))) = group.get_mut("params") else {
            panic!("params")
        };
        params.reverse();
    }
}

/// torch writes the hyperparameters of each group in an order of its own; groups are matched by
/// names, not by order.
#[test]
fn the_order_of_keys_in_groups_does_not_matter() {
    run_local(2, |group| {
        resumes(&group, &adamw(), &adamw(), reversed);
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::with_groups(model.parameters(), groups(0.1, 0.2)).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let expected = gathered_bits(&model, &[&optimizer]);
        let mut o =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        // Also where only some ranks have another order.
        if group.rank() == 1 {
            reversed(&mut o);
            let Some(StateValue::List(groups)) = o.get_mut("param_groups") else {
                panic!("groups")
            };
            groups.reverse();
        }
        let mut fresh = Optimizer::with_groups(model.parameters(), groups(0.3, 0.4)).unwrap();
        set_optimizer_state_dict(&o, model.parameters(), &mut [&mut fresh], &options()).unwrap();
        assert_eq!(gathered_bits(&model, &[&fresh]), expected);
    })
    .unwrap();
}

#[test]
fn two_optimizers_over_disjoint_parameters_resume_also_with_an_empty_group() {
    run_local(2, |group| {
        for options in forms() {
            let make = |model: &Model, scale: f64| {
                let sgd = |lr, fqns: &[&str]| {
                    let sgd = SgdOptions {
                        lr,
                        momentum: 0.9,
                        ..SgdOptions::default()
                    };
                    ParamGroup::new(Algorithm::Sgd(sgd), fqns.iter().copied())
                };
                let first = vec![
                    sgd(0.01 * scale, &["a.weight", "a.bias"]),
                    sgd(0.5 * scale, &[]),
                ];
                let second =
                    ParamGroup::new(adamw(), ["embedding.weight", "b.weight", "b.bias", "scale"]);
                let first = Optimizer::with_groups(model.parameters(), first).unwrap();
                (
                    first,
                    Optimizer::with_groups(model.parameters(), vec![second]).unwrap(),
                )
            };
            let (source, target) = (sharded(&group, 1), sharded(&group, 2));
            let ((mut a, mut b), (mut c, mut d)) = (make(&source, 1.0), make(&target, 2.0));
            step(&source, &mut [&mut a, &mut b], 0);
            let get = StateDictOptions {
                broadcast_from_rank0: false,
                ..options.clone()
            };
            let (m, o) = get_state_dict(source.parameters(), &[&a, &b], &get).unwrap();
            let report =
                set_state_dict(&m, &o, target.parameters(), &mut [&mut c, &mut d], &options)
                    .unwrap();
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(c.groups()[1].algorithm.lr(), 0.5);
            step(&source, &mut [&mut a, &mut b], 1);
            step(&target, &mut [&mut c, &mut d], 1);
            assert_eq!(
                gathered_bits(&target, &[&c, &d]),
                gathered_bits(&source, &[&a, &b])
            );
        }
    })
    .unwrap();
}

/// Numbers, text, tensors, lists and dicts under a key that is no parameter's.
#[test]
fn state_under_a_users_key_survives() {
    run_local(2, |group| {
        for options in forms() {
            let (source, target) = (sharded(&group, 1), sharded(&group, 2));
            let mut optimizer = Optimizer::new(source.parameters(), adamw()).unwrap();
            step(&source, &mut [&mut optimizer], 0);
            let mut local = optimizer.state_dict().unwrap();
            let Some(StateValue::Dict(states)) = local.get_mut("state") else {
                panic!("state")
            };
            let mut mine = StateDict::new();
            mine.insert("rate", 0.25);
            mine.insert(
                "table",
                Tensor::arange(0f32, 6f32, &Device::Cpu)
                    .unwrap()
                    .reshape((2, 3))
                    .unwrap(),
            );
            mine.insert("half", Tensor::ones(3, DType::BF16, &Device::Cpu).unwrap());
            states.insert("mine", mine);
            states.insert("word", "fast");
            states.insert("one", Tensor::new(7i64, &Device::Cpu).unwrap());
            states.insert("list", StateValue::List(vec![1.5.into(), "x".into()]));
            optimizer.load_state_dict(&local).unwrap();
            let get = StateDictOptions {
                broadcast_from_rank0: false,
                ..options.clone()
            };
            let (m, o) = get_state_dict(source.parameters(), &[&optimizer], &get).unwrap();
            assert!(
                o.dict("state")
                    .unwrap()
                    .dict("mine")
                    .unwrap()
                    .contains_key("table")
            );
            let mut fresh = Optimizer::new(target.parameters(), adamw()).unwrap();
            let report =
                set_state_dict(&m, &o, target.parameters(), &mut [&mut fresh], &options).unwrap();
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(
                gathered_bits(&target, &[&fresh]),
                gathered_bits(&source, &[&optimizer]),
                "{options:?}"
            );
        }
    })
    .unwrap();
}

/// Names that differ between dict and model are turned in both directions, also where two change
/// places; and keys that no algorithm knows stay.
#[test]
fn renamed_modules_and_unknown_group_keys_come_back() {
    let pair = |model: &str, dict: &str| (model.to_owned(), dict.to_owned());
    for (renames, a) in [
        (vec![pair("a", "enc.0"), pair("scale", "gain")], "enc.0"),
        (vec![pair("a", "b"), pair("b", "a")], "b"),
    ] {
        run_local(2, |group| {
            for options in forms() {
                for flatten_optimizer_state_dict in [false, true] {
                    let fqn_renames = renames.clone();
                    let options = StateDictOptions {
                        fqn_renames,
                        flatten_optimizer_state_dict,
                        ..options.clone()
                    };
                    let (source, target) = (sharded(&group, 1), sharded(&group, 2));
                    let mut optimizer =
                        Optimizer::with_groups(source.parameters(), groups(0.1, 0.2)).unwrap();
                    step(&source, &mut [&mut optimizer], 0);
                    let get = StateDictOptions {
                        broadcast_from_rank0: false,
                        ..options.clone()
                    };
                    let (m, o) = get_state_dict(source.parameters(), &[&optimizer], &get).unwrap();
                    let shape = |value: &StateValue| match value {
                        StateValue::Tensor(tensor) => tensor.dims().to_vec(),
                        StateValue::Sharded(tensor) => tensor.shape().to_vec(),
                        other => panic!("a {}", other.kind()),
                    };
                    assert_eq!(shape(m.get(&format!("{a}.weight")).unwrap()), [9, 6]);
                    let leaves = flatten_containers(&o).unwrap().values;
                    let prefix = if flatten_optimizer_state_dict {
                        format!("{a}.bias")
                    } else {
                        "0".to_owned()
                    };
                    assert!(
                        leaves.contains_key(&format!("param_groups.{prefix}.initial_lr")),
                        "{leaves:?}"
                    );
                    let mut fresh =
                        Optimizer::with_groups(target.parameters(), groups(0.3, 0.4)).unwrap();
                    // A flat dict has no place for groups without parameters; these keep what they
                    // have.
                    let report =
                        set_state_dict(&m, &o, target.parameters(), &mut [&mut fresh], &options)
                            .unwrap();
                    assert!(report.is_clean(), "{report:?}");
                    assert_eq!(
                        fresh.groups()[1].extra,
                        [("initial_lr".to_owned(), PlainValue::Float(0.4))]
                    );
                    assert_eq!(fresh.groups()[0].algorithm.lr(), 0.1);
                    let found = gathered_bits(&target, &[&fresh]);
                    assert_eq!(found, gathered_bits(&source, &[&optimizer]), "{options:?}");
                }
            }
        })
        .unwrap();
    }
}
