//! Tensors handed on one by one.

use fsdp_comm::CommError;
use fsdp_layout::TensorBox;
use fsdp_state::{
    GatherOptions, KeepOn, StateDict, StateError, StateValue, gather_state_dict_into,
};

use crate::ranks::{bits, chunks, cut, f32s, one_error, path, run};

fn state(rank: usize) -> StateDict {
    let mut state = StateDict::new();
    for (key, seed) in [("c", 3), ("a", 1), ("b", 2)] {
        state.insert(key, cut(&f32s(&[6, 4], seed), &chunks(&[6, 4], 3)[rank]));
    }
    state.insert("d", 4i64);
    state
}

#[test]
fn values_come_sorted_by_path_to_the_ranks_that_keep() {
    let options = GatherOptions {
        keep_on: KeepOn::Ranks(vec![1]),
        device: None,
    };
    let seen = run(3, |group| {
        let mut seen = Vec::new();
        gather_state_dict_into(&state(group.rank()), &group, &options, |path, value| {
            seen.push((path.clone(), value));
            Ok(())
        })
        .unwrap();
        seen
    });
    assert!(seen[0].is_empty() && seen[2].is_empty());
    let paths: Vec<_> = seen[1].iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(paths, ["a", "b", "c", "d"].map(path));
    for ((_, value), seed) in seen[1].iter().zip(1..=3) {
        assert_eq!(bits(value.as_tensor().unwrap()), bits(&f32s(&[6, 4], seed)));
    }
    assert!(matches!(seen[1][3].1, StateValue::Plain(_)));
}

#[test]
fn a_sink_that_fails_on_one_rank_is_an_error_on_all_and_gets_nothing_more() {
    let error = one_error(run(3, |group| {
        let mut calls = 0;
        let outcome = gather_state_dict_into(
            &state(group.rank()),
            &group,
            &GatherOptions::default(),
            |path, _| {
                calls += 1;
                if group.rank() == 2 && calls == 2 {
                    let path = path.flat_key();
                    return Err(StateError::WrongContainer {
                        path,
                        expected: "disk with space left",
                    });
                }
                Ok(())
            },
        );
        assert_eq!(calls, if group.rank() == 2 { 2 } else { 4 });
        // The group goes on.
        group.barrier().unwrap();
        outcome
    }));
    let StateError::Comm(CommError::RankFailed { failures, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(failures.len(), 1);
    assert_eq!(
        (failures[0].rank, failures[0].message.as_str()),
        (2, "`b` is not a disk with space left")
    );
}

#[test]
fn a_tensor_that_cannot_be_read_when_its_turn_comes_is_an_error_on_all() {
    let error = one_error(run(3, |group| {
        // Large enough that each tensor moves by itself.
        let large = |seed| {
            cut(
                &f32s(&[600, 512], seed),
                &chunks(&[600, 512], 3)[group.rank()],
            )
        };
        let state: StateDict = [("a", large(1).into()), ("b", large(2).into())]
            .into_iter()
            .collect();
        let outcome =
            gather_state_dict_into(&state, &group, &GatherOptions::default(), |path, _| {
                if group.rank() == 1 && path.flat_key() == "a" {
                    fsdp_flat::storage::release(
                        &state.get("b").unwrap().as_sharded().unwrap().shards()[0].tensor,
                    )?;
                }
                Ok(())
            });
        group.barrier().unwrap();
        outcome
    }));
    let StateError::Comm(CommError::RankFailed { failures, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(
        failures
            .iter()
            .map(|failure| failure.rank)
            .collect::<Vec<_>>(),
        [1]
    );
    assert!(failures[0].message.contains("is freed"));
}

#[test]
fn a_rank_that_comes_late_or_never_is_a_timeout_that_names_it() {
    use std::time::Duration;
    let outcomes = run(2, |group| {
        if group.rank() == 1 {
            return Ok(());
        }
        let group = group.with_deadline(Duration::from_millis(200));
        let whole = cut(&f32s(&[6, 4], 1), &[TensorBox::whole(&[6, 4])]);
        let state: StateDict = [("a", whole.into())].into_iter().collect();
        gather_state_dict_into(&state, &group, &GatherOptions::default(), |_, _| Ok(()))
    });
    let error = outcomes.into_iter().next().unwrap().unwrap_err();
    assert!(
        matches!(
            error,
            StateError::Comm(CommError::RankLeft { rank: 1, .. } | CommError::Timeout { .. })
        ),
        "{error}"
    );
}
