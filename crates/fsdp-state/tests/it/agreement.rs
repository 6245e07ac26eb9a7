//! One rank that does something different causes one error on all ranks.

use candle_core::DType;
use fsdp_comm::CommError;
use fsdp_flat::storage::release;
use fsdp_layout::TensorBox;
use fsdp_state::{
    GatherOptions, KeepOn, LoadOptions, StateDict, StateError, broadcast_state_dict,
    distribute_state_dict, gather_state_dict, gather_state_dict_into, reshard_sharded_tensor,
    reshard_state_dict,
};

use crate::ranks::{chunks, cut, f32s, one_error, run, tensor};

/// Makes a dict with a tensor of which every rank has a chunk.
fn state(rank: usize, world_size: usize) -> StateDict {
    let mut state = StateDict::new();
    state.insert(
        "weight",
        cut(&f32s(&[6, 2], 1), &chunks(&[6, 2], world_size)[rank]),
    );
    state.insert("step", 1i64);
    state
}

/// Calls every function that takes a dict, with what `change` makes of one rank's; each must fail
/// alike on all ranks without moving a tensor, and leave the group usable.
fn fails_alike(change: impl Fn(&mut StateDict) + Sync, check: impl Fn(&str, StateError)) {
    let changed = |rank: usize| {
        let mut state = state(rank, 3);
        if rank == 1 {
            change(&mut state);
        }
        state
    };
    let options = LoadOptions::default();
    type Call<'a> =
        &'a (dyn Fn(&fsdp_comm::ProcessGroup, &StateDict) -> Result<(), StateError> + Sync);
    let calls: [(&str, Call<'_>); 6] = [
        ("gather_state_dict", &|group, state| {
            gather_state_dict(state, group, &GatherOptions::default()).map(drop)
        }),
        ("gather_state_dict_into", &|group, state| {
            gather_state_dict_into(state, group, &GatherOptions::default(), |_, _| Ok(()))
        }),
        ("broadcast_state_dict", &|group, state| {
            broadcast_state_dict(Some(&StateDict::new()), state, 0, group, &options).map(drop)
        }),
        ("distribute_state_dict", &|group, state| {
            distribute_state_dict(state, state, group, &options).map(drop)
        }),
        ("reshard_state_dict", &|group, own| {
            reshard_state_dict(&state(group.rank(), 3), own, group, &options).map(drop)
        }),
        ("reshard_state_dict", &|group, own| {
            reshard_state_dict(own, &state(group.rank(), 3), group, &options).map(drop)
        }),
    ];
    for (name, call) in calls {
        let error = one_error(run(3, |group| {
            let outcome = call(&group, &changed(group.rank()));
            assert_eq!(group.traffic().tensor_bytes(), 0, "{name}");
            group.barrier().unwrap();
            outcome
        }));
        check(name, error);
    }
}

#[test]
fn a_key_that_one_rank_lacks_is_named() {
    fails_alike(
        |state| {
            state.remove("step");
        },
        |name, error| match error {
            StateError::KeyMismatch {
                operation,
                rank: 1,
                key,
                reference: 0,
            } => {
                assert_eq!((operation, key.as_str()), (name, "step"));
            }
            other => panic!("{name}: {other}"),
        },
    );
}

#[test]
fn a_key_that_only_one_rank_has_is_named() {
    fails_alike(
        |state| {
            state.insert("extra", f32s(&[1], 1));
        },
        |name, error| match error {
            StateError::KeyMismatch {
                rank: 0,
                key,
                reference: 1,
                ..
            } => assert_eq!(key, "extra"),
            other => panic!("{name}: {other}"),
        },
    );
}

#[test]
fn kinds_dtypes_and_shapes_that_differ_are_named() {
    let others = [
        (
            tensor(&[6, 2], DType::BF16, 1),
            "sharded tensor of bfloat16 [6, 2]",
        ),
        (f32s(&[2, 6], 1), "sharded tensor of float32 [2, 6]"),
    ];
    for (other, description) in others {
        fails_alike(
            |state| {
                state.insert("weight", cut(&other, &[]));
            },
            |name, error| match error {
                StateError::ValueMismatch {
                    key,
                    rank: 1,
                    found,
                    reference: 0,
                    expected,
                    ..
                } => {
                    assert_eq!(
                        (key.as_str(), found.as_str()),
                        ("weight", description),
                        "{name}"
                    );
                    assert_eq!(expected, "sharded tensor of float32 [6, 2]");
                }
                other => panic!("{name}: {other}"),
            },
        );
    }
    fails_alike(
        |state| {
            state.insert("step", f32s(&[], 1));
        },
        |name, error| {
            assert!(
                matches!(error, StateError::ValueMismatch { rank: 1, .. }),
                "{name}: {error}"
            )
        },
    );
}

#[test]
fn a_rank_that_cannot_read_its_tensor_is_named() {
    fails_alike(
        |state| {
            let weight = state
                .get("weight")
                .and_then(|weight| weight.as_sharded())
                .unwrap();
            release(&weight.shards()[0].tensor).unwrap();
        },
        |name, error| match error {
            StateError::Comm(CommError::RankFailed {
                operation,
                failures,
            }) => {
                assert_eq!(operation, name);
                assert_eq!(failures.len(), 1);
                assert_eq!(failures[0].rank, 1);
                assert!(
                    failures[0].message.contains("is freed"),
                    "{}",
                    failures[0].message
                );
            }
            other => panic!("{name}: {other}"),
        },
    );
}

#[test]
fn arguments_that_differ_are_named() {
    let error = one_error(run(3, |group| {
        let keep_on = if group.rank() == 2 {
            KeepOn::Ranks(vec![2])
        } else {
            KeepOn::All
        };
        gather_state_dict(
            &state(group.rank(), 3),
            &group,
            &GatherOptions {
                keep_on,
                device: None,
            },
        )
    }));
    let StateError::ArgumentMismatch {
        rank: 2,
        found,
        expected,
        ..
    } = error
    else {
        panic!("{error}")
    };
    assert_eq!(
        (found.as_str(), expected.as_str()),
        ("keep on ranks [2]", "keep on all ranks")
    );
    let error = one_error(run(2, |group| {
        let options = LoadOptions {
            strict: group.rank() == 0,
            ..LoadOptions::default()
        };
        broadcast_state_dict(
            Some(&state(0, 1)),
            &state(group.rank(), 2),
            0,
            &group,
            &options,
        )
    }));
    assert!(
        matches!(error, StateError::ArgumentMismatch { rank: 1, .. }),
        "{error}"
    );
    for change in [
        (|options: &mut LoadOptions| options.staged = true) as fn(&mut LoadOptions),
        |options| options.verify = false,
        |options| options.read_once = Some(true),
    ] {
        let error = one_error(run(2, |group| {
            let mut options = LoadOptions::default();
            if group.rank() == 1 {
                change(&mut options);
            }
            reshard_state_dict(
                &state(group.rank(), 2),
                &state(group.rank(), 2),
                &group,
                &options,
            )
        }));
        let StateError::ArgumentMismatch {
            rank: 1,
            found,
            expected,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_ne!(found, expected);
    }
}

#[test]
fn ranks_that_do_not_exist_and_boxes_that_are_none_are_refused_by_all() {
    let failures = |error: StateError| match error {
        StateError::Comm(CommError::RankFailed { failures, .. }) => failures,
        other => panic!("{other}"),
    };
    let keep = failures(one_error(run(2, |group| {
        let options = GatherOptions {
            keep_on: KeepOn::Ranks(vec![0, 2]),
            device: None,
        };
        gather_state_dict(&state(group.rank(), 2), &group, &options)
    })));
    assert_eq!(keep.len(), 2);
    assert!(keep[0].message.contains("no rank 2"));
    let root = failures(one_error(run(2, |group| {
        broadcast_state_dict(
            None,
            &state(group.rank(), 2),
            5,
            &group,
            &LoadOptions::default(),
        )
    })));
    assert!(root[1].message.contains("no rank 5"));
    let source = failures(one_error(run(2, |group| {
        broadcast_state_dict(
            None,
            &state(group.rank(), 2),
            1,
            &group,
            &LoadOptions::default(),
        )
    })));
    assert_eq!(source.len(), 1);
    assert!(source[0].rank == 1 && source[0].message.contains("brought no state dict"));
    for boxes in [
        vec![TensorBox::new(vec![5, 0], vec![2, 2])],
        vec![
            TensorBox::new(vec![0, 0], vec![2, 2]),
            TensorBox::new(vec![1, 1], vec![2, 1]),
        ],
        vec![TensorBox::new(vec![0], vec![2])],
    ] {
        let wrong = failures(one_error(run(2, |group| {
            let sharded = cut(&f32s(&[6, 2], 1), &chunks(&[6, 2], 2)[group.rank()]);
            let wanted = if group.rank() == 1 {
                boxes.clone()
            } else {
                sharded.boxes()
            };
            reshard_sharded_tensor(&sharded, &wanted, &group)
        })));
        assert_eq!(
            wrong.iter().map(|failure| failure.rank).collect::<Vec<_>>(),
            [1]
        );
    }
}
