//! `get_state_dict` and `set_state_dict`: what they promise, case by case.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use fsdp_comm::run_local;
use fsdp_layout::PlainValue;
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_nn::torch::{
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict,
    set_model_state_dict, set_optimizer_state_dict, set_state_dict,
};
use fsdp_nn::{FsdpConfig, NnError, Optimizer, ParamGroup, ShardingStrategy};
use fsdp_state::{KeepOn, StateDict, StateError, StateValue};

use crate::get_set::common::*;

#[test]
fn getting_changes_nothing_even_before_the_first_step() {
    run_local(2, |group| {
        let reads = [
            options(),
            StateDictOptions {
                full_state_dict: true,
                ..options()
            },
            StateDictOptions {
                full_state_dict: true,
                cpu_offload: true,
                ..options()
            },
            StateDictOptions {
                flatten_optimizer_state_dict: true,
                cpu_offload: true,
                ..options()
            },
        ];
        let run = |read: bool| {
            let model = sharded(&group, 1);
            let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            for seed in 0..3 {
                for options in reads.iter().filter(|_| read) {
                    get_state_dict(model.parameters(), &[&optimizer], options).unwrap();
                }
                step(&model, &mut [&mut optimizer], seed);
            }
            gathered_bits(&model, &[&optimizer])
        };
        assert_eq!(run(true), run(false));
        let model = sharded(&group, 1);
        let optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        let state =
            get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let step = state
            .dict("state")
            .unwrap()
            .dict("a.bias")
            .unwrap()
            .get("step")
            .unwrap()
            .as_tensor()
            .unwrap()
            .clone();
        assert_eq!(step.to_scalar::<f32>().unwrap(), 0.0);
        assert!(optimizer.is_fresh());
    })
    .unwrap();
}

/// A load in place leaves a dict of views of the very state that it is set into.
#[test]
fn views_of_the_live_state_can_be_set_and_are_not_copied() {
    for (strategy, use_orig_params) in [
        (ShardingStrategy::FullShard, true),
        (ShardingStrategy::FullShard, false),
        (ShardingStrategy::NoShard, true),
        (ShardingStrategy::HybridShard, true),
    ] {
        run_local(2, |group| {
            let model = model(group.clone(), config(2, strategy, use_orig_params, 1));
            let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            step(&model, &mut [&mut optimizer], 0);
            let views = StateDictOptions {
                share_storage: true,
                ..options()
            };
            let piece = |optimizer: &Optimizer, fqn: &str| {
                optimizer.state_of(fqn).unwrap().unwrap()["exp_avg"]
                    .as_sharded()
                    .unwrap()
                    .clone()
            };
            let before = gathered_bits(&model, &[&optimizer]);
            let (m, mut o) = get_state_dict(model.parameters(), &[&optimizer], &views).unwrap();
            let (a, b) = (piece(&optimizer, "a.weight"), piece(&optimizer, "b.weight"));
            set_state_dict(
                &m,
                &o,
                model.parameters(),
                &mut [&mut optimizer],
                &options(),
            )
            .unwrap();
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            assert!(piece(&optimizer, "a.weight").is_same_view(&a));
            // One value is another one: it goes into the live memory, and where something else does
            // not fit nothing does.
            let doubled = a.map(|tensor| Ok((tensor * 2.0)?)).unwrap();
            let StateValue::Dict(states) = o.get_mut("state").unwrap() else {
                panic!("state is a dict")
            };
            let StateValue::Dict(of_a) = states.get_mut("a.weight").unwrap() else {
                panic!("state is a dict")
            };
            of_a.insert("exp_avg", doubled.clone());
            let mut wrong = o.clone();
            wrong.insert("param_groups", StateValue::List(Vec::new()));
            let StateValue::Dict(states) = wrong.get_mut("state").unwrap() else {
                panic!("state is a dict")
            };
            states.remove("b.weight");
            set_optimizer_state_dict(
                &wrong,
                model.parameters(),
                &mut [&mut optimizer],
                &options(),
            )
            .unwrap_err();
            assert_eq!(gathered_bits(&model, &[&optimizer]), before);
            set_optimizer_state_dict(&o, model.parameters(), &mut [&mut optimizer], &options())
                .unwrap();
            let values = |tensor: &fsdp_flat::ShardedTensor| {
                let shards = tensor.shards().iter();
                shards
                    .flat_map(|shard| {
                        shard
                            .tensor
                            .flatten_all()
                            .unwrap()
                            .to_vec1::<f32>()
                            .unwrap()
                    })
                    .collect::<Vec<_>>()
            };
            assert_eq!(values(&piece(&optimizer, "a.weight")), values(&doubled));
            assert!(
                piece(&optimizer, "a.weight").is_same_view(&a)
                    && piece(&optimizer, "b.weight").is_same_view(&b)
            );
        })
        .unwrap();
    }
}

#[test]
fn values_do_not_change_under_their_holder() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let before = (bits(&full(&group, &m)), bits(&full(&group, &o)));
        step(&model, &mut [&mut optimizer], 1);
        assert_eq!((bits(&full(&group, &m)), bits(&full(&group, &o))), before);
        let shared = StateDictOptions {
            share_storage: true,
            ..options()
        };
        let (m, _) = get_state_dict(model.parameters(), &[&optimizer], &shared).unwrap();
        let before = bits(&full(&group, &m));
        step(&model, &mut [&mut optimizer], 2);
        assert_ne!(bits(&full(&group, &m)), before);
    })
    .unwrap();
}

#[test]
fn all_names_of_tied_parameters_are_in_the_model_and_one_in_the_optimizer() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let mut keys: Vec<&str> = m.keys().collect();
        keys.sort_unstable();
        let expected = [
            "a.bias",
            "a.weight",
            "b.bias",
            "b.weight",
            "embedding.weight",
            "head.weight",
            "scale",
            "steps",
        ];
        assert_eq!(keys, expected);
        let mut keys: Vec<&str> = o.dict("state").unwrap().keys().collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "a.bias",
                "a.weight",
                "b.bias",
                "b.weight",
                "embedding.weight",
                "scale"
            ]
        );
        // Either name loads, in the model and in the optimizer.
        let expected = gathered_bits(&model, &[&optimizer]);
        let other = sharded(&group, 2);
        let mut other_optimizer = Optimizer::new(other.parameters(), adamw()).unwrap();
        let (mut m, mut o) = (m, o);
        m.remove("embedding.weight");
        let Some(StateValue::Dict(states)) = o.get_mut("state") else {
            panic!("state is a dict")
        };
        let state = states.remove("embedding.weight").unwrap();
        states.insert("head.weight", state);
        set_state_dict(
            &m,
            &o,
            other.parameters(),
            &mut [&mut other_optimizer],
            &options(),
        )
        .unwrap();
        assert_eq!(gathered_bits(&other, &[&other_optimizer]), expected);
    })
    .unwrap();
}

#[test]
fn full_state_dicts_are_whole_where_they_are_kept() {
    run_local(3, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let get = |options: StateDictOptions| {
            get_state_dict(model.parameters(), &[&optimizer], &options).unwrap()
        };
        let full_options = StateDictOptions {
            full_state_dict: true,
            ..options()
        };
        let (m, o) = get(full_options.clone());
        assert_eq!(
            m.get("a.weight").unwrap().as_tensor().unwrap().dims(),
            [9, 6]
        );
        // Tuples stay tuples.
        let Some(StateValue::List(groups)) = o.get("param_groups") else {
            panic!("a list of groups")
        };
        let betas = groups[0]
            .as_dict()
            .unwrap()
            .plain_at(&["betas"])
            .unwrap()
            .clone();
        assert_eq!(
            betas,
            PlainValue::Tuple(vec![PlainValue::Float(0.9), PlainValue::Float(0.999)])
        );
        let kept = |options: StateDictOptions| {
            let (m, o) = get(options);
            assert_eq!(m.is_empty(), o.is_empty());
            !m.is_empty()
        };
        assert_eq!(
            kept(StateDictOptions {
                cpu_offload: true,
                ..full_options.clone()
            }),
            group.rank() == 0
        );
        let on = StateDictOptions {
            keep_on: Some(KeepOn::Ranks(vec![0, 2])),
            ..full_options
        };
        assert_eq!(kept(on), group.rank() != 1);
        assert!(kept(StateDictOptions {
            cpu_offload: true,
            ..options()
        }));
    })
    .unwrap();
}

/// The key that one rank lacks and another has, and these ranks.
#[track_caller]
fn lacks(error: &NnError) -> (&str, usize, usize) {
    let NnError::State(StateError::KeyMismatch {
        key,
        rank,
        reference,
        ..
    }) = error
    else {
        panic!("{error}")
    };
    (key.strip_prefix("model.").unwrap(), *rank, *reference)
}

#[test]
fn names_that_differ_are_one_error_on_all_ranks_and_change_nothing() {
    run_local(3, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let target = sharded(&group, 2);
        let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
        let before = gathered_bits(&target, &[&target_optimizer]);
        let (mut unexpected, mut missing) = (m.clone(), m.clone());
        // Only one rank's dict is wrong.
        if group.rank() == 1 {
            unexpected.insert("abc", 1.0);
            missing.remove("b.bias");
        }
        for (dict, expected) in [(&unexpected, ("abc", 0, 1)), (&missing, ("b.bias", 1, 0))] {
            let error = set_state_dict(
                dict,
                &o,
                target.parameters(),
                &mut [&mut target_optimizer],
                &options(),
            )
            .unwrap_err();
            assert_eq!(lacks(&error), expected);
        }
        let mut wrong = m.clone();
        wrong.insert(
            "b.bias",
            Tensor::zeros(7, DType::F32, &Device::Cpu).unwrap(),
        );
        let loose = StateDictOptions {
            strict: false,
            ..options()
        };
        let error = set_model_state_dict(&wrong, target.parameters(), &loose).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("b.bias: saved float32 [7], current float32 [6]"),
            "{message}"
        );
        // A dtype is not cast behind the caller's back.
        wrong.insert(
            "b.bias",
            Tensor::zeros(6, DType::BF16, &Device::Cpu).unwrap(),
        );
        let error = set_model_state_dict(&wrong, target.parameters(), &loose).unwrap_err();
        assert!(error.to_string().contains("saved bfloat16 [6]"), "{error}");
        assert_eq!(gathered_bits(&target, &[&target_optimizer]), before);
        // Not strict either may one rank load what another lacks.
        let error = set_model_state_dict(&missing, target.parameters(), &loose).unwrap_err();
        assert_eq!(lacks(&error), ("b.bias", 1, 0));
        let error = set_model_state_dict(&unexpected, target.parameters(), &loose).unwrap_err();
        assert_eq!(lacks(&error), ("abc", 0, 1));
        assert_eq!(gathered_bits(&target, &[&target_optimizer]), before);
        // The keys that are there are loaded, and the report is the same on every rank.
        missing.remove("b.bias");
        let report = set_model_state_dict(&missing, target.parameters(), &loose).unwrap();
        assert_eq!(report.missing, ["b.bias"]);
        unexpected.insert("abc", 1.0);
        let error = set_model_state_dict(&unexpected, target.parameters(), &options()).unwrap_err();
        assert!(
            error.to_string().contains("unexpected key(s) `abc`"),
            "{error}"
        );
        let error = set_model_state_dict(&missing, target.parameters(), &options()).unwrap_err();
        assert!(
            error.to_string().contains("missing key(s) `b.bias`"),
            "{error}"
        );
        let report = set_model_state_dict(&unexpected, target.parameters(), &loose).unwrap();
        assert_eq!(
            (report.missing.len(), report.unexpected),
            (0, vec!["abc".to_owned()])
        );
        assert!(
            missing.contains_key("a.weight") && unexpected.contains_key("b.bias"),
            "the caller's dict is untouched"
        );
    })
    .unwrap();
}

#[test]
fn optimizer_state_that_is_missing_or_misshapen_is_refused_by_name() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let o = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        let target = sharded(&group, 2);
        let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
        step(&target, &mut [&mut target_optimizer], 5);
        let before = gathered_bits(&target, &[&target_optimizer]);
        let edited = |edit: &dyn Fn(&mut StateDict)| {
            let mut o = o.clone();
            let Some(StateValue::Dict(states)) = o.get_mut("state") else {
                panic!("state is a dict")
            };
            edit(states);
            o
        };
        let without_param = edited(&|states| drop(states.remove("a.bias")));
        let without_entry = edited(&|states| {
            let Some(StateValue::Dict(state)) = states.get_mut("a.bias") else {
                panic!()
            };
            state.remove("exp_avg");
        });
        let misshapen = edited(&|states| {
            let Some(StateValue::Dict(state)) = states.get_mut("a.bias") else {
                panic!()
            };
            state.insert(
                "exp_avg",
                Tensor::zeros((3, 3), DType::F32, &Device::Cpu).unwrap(),
            );
        });
        for (dict, word) in [
            (&without_param, "missing key(s) `state.a.bias`"),
            (&without_entry, "`state.a.bias.exp_avg`"),
            (&misshapen, "state.a.bias.exp_avg: saved"),
        ] {
            let error = set_optimizer_state_dict(
                dict,
                target.parameters(),
                &mut [&mut target_optimizer],
                &options(),
            )
            .unwrap_err();
            assert!(error.to_string().contains(word), "{error}");
        }
        assert_eq!(gathered_bits(&target, &[&target_optimizer]), before);
        let loose = StateDictOptions {
            strict: false,
            ..options()
        };
        let report = set_optimizer_state_dict(
            &without_param,
            target.parameters(),
            &mut [&mut target_optimizer],
            &loose,
        )
        .unwrap();
        assert_eq!(report.missing, ["state.a.bias"]);
    })
    .unwrap();
}

#[test]
fn rank_0_can_bring_everything() {
    for strategy in [
        ShardingStrategy::FullShard,
        ShardingStrategy::HybridShard,
        ShardingStrategy::NoShard,
    ] {
        run_local(4, |group| {
            let model = model(group.clone(), config(4, strategy, true, 1));
            let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
            step(&model, &mut [&mut optimizer], 0);
            let full_options = StateDictOptions {
                full_state_dict: true,
                cpu_offload: true,
                ..options()
            };
            for flat in [false, true] {
                let get = StateDictOptions {
                    flatten_optimizer_state_dict: flat,
                    ..full_options.clone()
                };
                let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &get).unwrap();
                assert_eq!(m.is_empty(), group.rank() != 0);
                let target = sharded(&group, 2);
                let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
                let broadcast = StateDictOptions {
                    full_state_dict: true,
                    broadcast_from_rank0: true,
                    ..options()
                };
                let set = |o: &StateDict, m: &StateDict, target_optimizer: &mut Optimizer| {
                    set_state_dict(
                        m,
                        o,
                        target.parameters(),
                        &mut [target_optimizer],
                        &broadcast,
                    )
                };
                set(&o, &m, &mut target_optimizer).unwrap();
                assert_eq!(
                    gathered_bits(&target, &[&target_optimizer]),
                    gathered_bits(&model, &[&optimizer])
                );
                // A key that is missing, or one too many, on rank 0 is the same error on every
                // rank.
                let before = gathered_bits(&target, &[&target_optimizer]);
                let (mut missing, mut unexpected) = (m.clone(), m.clone());
                missing.remove("a.weight");
                if group.rank() == 0 {
                    unexpected.insert("abc", Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap());
                }
                let error = set(&o, &missing, &mut target_optimizer)
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("missing key(s) `a.weight`"), "{error}");
                let error = set(&o, &unexpected, &mut target_optimizer)
                    .unwrap_err()
                    .to_string();
                assert!(error.contains("unexpected key(s) `abc`"), "{error}");
                assert_eq!(gathered_bits(&target, &[&target_optimizer]), before);
            }
        })
        .unwrap();
    }
    let contradicting = StateDictOptions {
        broadcast_from_rank0: true,
        ..options()
    };
    let error = get_model_state_dict(whole(1).parameters(), &contradicting).unwrap_err();
    assert_eq!(
        error.to_string(),
        "full_state_dict must be true when broadcast_from_rank0 is true"
    );
}

#[test]
fn any_layout_loads_any_other_without_files() {
    run_local(4, |group| {
        for (strategy, use_orig_params) in [
            (ShardingStrategy::FullShard, false),
            (ShardingStrategy::HybridShard, true),
            (ShardingStrategy::NoShard, false),
        ] {
            let source = model(group.clone(), config(4, strategy, use_orig_params, 1));
            let mut optimizer = Optimizer::new(source.parameters(), adamw()).unwrap();
            step(&source, &mut [&mut optimizer], 0);
            let (m, o) = get_state_dict(source.parameters(), &[&optimizer], &options()).unwrap();
            let expected = gathered_bits(&source, &[&optimizer]);
            let target = sharded(&group, 2);
            let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
            set_state_dict(
                &m,
                &o,
                target.parameters(),
                &mut [&mut target_optimizer],
                &options(),
            )
            .unwrap();
            assert_eq!(
                gathered_bits(&target, &[&target_optimizer]),
                expected,
                "{strategy}"
            );
            // Whole tensors on every rank load too.
            let target = sharded(&group, 3);
            let (m, o) = (full(&group, &m), full(&group, &o));
            let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
            set_state_dict(
                &m,
                &o,
                target.parameters(),
                &mut [&mut target_optimizer],
                &options(),
            )
            .unwrap();
            assert_eq!(
                gathered_bits(&target, &[&target_optimizer]),
                expected,
                "{strategy}, full"
            );
        }
    })
    .unwrap();
}

#[test]
fn groups_are_matched_by_the_names_in_them() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let mut optimizer = Optimizer::with_groups(model.parameters(), groups(0.1, 0.2)).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let lrs = |optimizer: &Optimizer| {
            optimizer
                .groups()
                .iter()
                .map(|g| (g.algorithm.lr(), g.extra.clone()))
                .collect::<Vec<_>>()
        };
        for options in [
            options(),
            StateDictOptions {
                full_state_dict: true,
                ..options()
            },
            StateDictOptions {
                flatten_optimizer_state_dict: true,
                ..options()
            },
        ] {
            let o = get_optimizer_state_dict(model.parameters(), &[&optimizer], &options).unwrap();
            let target = sharded(&group, 2);
            // Groups in another order, with other values, the empty one among them.
            let mut other = groups(0.7, 0.8);
            other.swap(0, 1);
            let mut target_optimizer = Optimizer::with_groups(target.parameters(), other).unwrap();
            set_optimizer_state_dict(
                &o,
                target.parameters(),
                &mut [&mut target_optimizer],
                &options,
            )
            .unwrap();
            let (found, expected) = (lrs(&target_optimizer), lrs(&optimizer));
            assert_eq!((&found[0], &found[1]), (&expected[1], &expected[0]));
            // Merging groups that differ is an error, not the first one's values.
            let mut one = Optimizer::new(target.parameters(), adamw()).unwrap();
            let error =
                set_optimizer_state_dict(&o, target.parameters(), &mut [&mut one], &options)
                    .unwrap_err();
            assert!(
                error.to_string().contains("different hyperparameters"),
                "{error}"
            );
            assert!(one.is_fresh());
        }
        // One saved group goes to all live groups that hold its parameters.
        let mut one = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut one], 1);
        let o = get_optimizer_state_dict(model.parameters(), &[&one], &options()).unwrap();
        let mut two = Optimizer::with_groups(model.parameters(), groups(0.7, 0.8)).unwrap();
        set_optimizer_state_dict(&o, model.parameters(), &mut [&mut two], &options()).unwrap();
        assert_eq!(
            (
                two.groups()[0].algorithm.lr(),
                two.groups()[1].algorithm.lr()
            ),
            (0.01, 0.01)
        );
        assert_eq!(two.groups()[2].algorithm.lr(), 0.5);
    })
    .unwrap();
}

#[test]
fn several_optimizers_over_one_model_take_their_own_part() {
    run_local(2, |group| {
        // Two stateless ones too: nothing but their groups tells them apart.
        for algorithm in [
            adamw(),
            Algorithm::Sgd(SgdOptions {
                lr: 0.25,
                ..SgdOptions::default()
            }),
        ] {
            let make = |model: &Model, algorithm: &Algorithm| {
                let part = |fqns: &[&str]| {
                    let group = ParamGroup::new(algorithm.clone(), fqns.iter().copied());
                    Optimizer::with_groups(model.parameters(), vec![group]).unwrap()
                };
                (
                    part(&["embedding.weight", "a.weight", "a.bias"]),
                    part(&["b.weight", "b.bias", "scale"]),
                )
            };
            let model = sharded(&group, 1);
            let (mut first, mut second) = make(&model, &algorithm);
            step(&model, &mut [&mut first, &mut second], 0);
            let (m, o) =
                get_state_dict(model.parameters(), &[&first, &second], &options()).unwrap();
            let expected = gathered_bits(&model, &[&first, &second]);
            let target = sharded(&group, 2);
            let (mut a, mut b) = make(&target, &algorithm);
            set_state_dict(
                &m,
                &o,
                target.parameters(),
                &mut [&mut a, &mut b],
                &options(),
            )
            .unwrap();
            assert_eq!(gathered_bits(&target, &[&a, &b]), expected);
        }
    })
    .unwrap();
}

#[test]
fn frozen_parameters_may_be_left_out() {
    run_local(2, |group| {
        let frozen = |seed| {
            let requires_grad = std::sync::Arc::new(|fqn: &str| !fqn.starts_with("a."));
            let config = FsdpConfig {
                requires_grad,
                ..config(2, ShardingStrategy::FullShard, true, seed)
            };
            model(group.clone(), config)
        };
        let model = frozen(1);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let ignore = StateDictOptions {
            ignore_frozen_params: true,
            ..options()
        };
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &ignore).unwrap();
        assert!(!m.contains_key("a.weight") && m.contains_key("b.weight"));
        assert!(!o.dict("state").unwrap().contains_key("a.weight"));
        let target = frozen(1);
        let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
        assert!(set_model_state_dict(&m, target.parameters(), &options()).is_err());
        set_state_dict(
            &m,
            &o,
            target.parameters(),
            &mut [&mut target_optimizer],
            &ignore,
        )
        .unwrap();
        assert_eq!(
            gathered_bits(&target, &[&target_optimizer]),
            gathered_bits(&model, &[&optimizer])
        );
    })
    .unwrap();
}

#[test]
fn parts_of_a_model_and_other_names() {
    run_local(2, |group| {
        let model = sharded(&group, 1);
        let part = StateDictOptions {
            submodules: vec!["a".into()],
            keep_submodule_prefixes: false,
            strict: false,
            ..options()
        };
        let m = get_model_state_dict(model.parameters(), &part).unwrap();
        assert_eq!(m.keys().collect::<Vec<_>>(), ["weight", "bias"]);
        let target = sharded(&group, 2);
        let untouched = |model: &Model| {
            let m = full(
                &group,
                &get_model_state_dict(model.parameters(), &options()).unwrap(),
            );
            bits(&m)
                .into_iter()
                .filter(|(key, _)| !key.starts_with("a."))
                .collect::<Vec<_>>()
        };
        let before = untouched(&target);
        set_model_state_dict(&m, target.parameters(), &part).unwrap();
        assert_eq!(untouched(&target), before);
        let weight = |model: &Model| {
            let m = full(
                &group,
                &get_model_state_dict(model.parameters(), &options()).unwrap(),
            );
            bits(&m)
                .into_iter()
                .find(|(key, _)| key == "a.weight")
                .unwrap()
        };
        assert_eq!(weight(&target), weight(&model));

        let renamed = StateDictOptions {
            fqn_renames: vec![("a".into(), "encoder.0".into())],
            ..options()
        };
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &renamed).unwrap();
        assert!(m.contains_key("encoder.0.weight") && !m.contains_key("a.weight"));
        assert!(o.dict("state").unwrap().contains_key("encoder.0.bias"));
        let mut target_optimizer = Optimizer::new(target.parameters(), adamw()).unwrap();
        let error = set_model_state_dict(&m, target.parameters(), &options()).unwrap_err();
        assert!(error.to_string().contains("`encoder.0.weight`"), "{error}");
        set_state_dict(
            &m,
            &o,
            target.parameters(),
            &mut [&mut target_optimizer],
            &renamed,
        )
        .unwrap();
        assert_eq!(
            gathered_bits(&target, &[&target_optimizer]),
            gathered_bits(&model, &[&optimizer])
        );
    })
    .unwrap();
}

#[test]
fn shared_views_of_optimizer_state_are_returned_only_when_no_save_reads_it_any_more() {
    run_local(1, |group| {
        let model = sharded(&group, 1);
        let parameters = model.parameters();
        let mut optimizer = Optimizer::new(parameters, adamw()).unwrap();
        step(&model, &mut [&mut optimizer], 0);
        let get = |options: StateDictOptions| {
            let options = StateDictOptions {
                share_storage: true,
                ..options
            };
            get_optimizer_state_dict(parameters, &[&optimizer], &options).unwrap();
            get_model_state_dict(parameters, &options).unwrap();
        };
        // Nobody can write into copies.
        get(StateDictOptions {
            full_state_dict: true,
            ..options()
        });
        get(StateDictOptions {
            cpu_offload: true,
            ..options()
        });
        let has_ended = AtomicBool::new(false);
        let guard = parameters.keep_unchanged().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Long enough for a call that does not wait to be over.
                std::thread::sleep(Duration::from_millis(100));
                has_ended.store(true, Ordering::SeqCst);
                drop(guard);
            });
            let options = StateDictOptions {
                share_storage: true,
                ..options()
            };
            get_optimizer_state_dict(parameters, &[&optimizer], &options).unwrap();
            assert!(has_ended.load(Ordering::SeqCst));
        });
        assert!(parameters.keep_unchanged().is_none());
    })
    .unwrap();
}
