//! Objects of any size, and agreement.

use fsdp_comm::{CommError, MAX_MESSAGE_BYTES, ProcessGroup};
use fsdp_layout::{ErrorKind, Failure as _};
use serde::{Deserialize, Serialize};

use super::{Case, error_of, same_on_all};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("objects: of all sizes", 1..=5, |group| of_all_sizes(&group)),
        Case::new("objects: in pieces", 1..=4, |group| in_pieces(&group)),
        Case::new("objects: that cannot be encoded", 2..=3, |group| {
            that_cannot_be_encoded(&group)
        }),
        Case::new("objects: of different types", 2..=2, |group| {
            of_different_types(&group)
        }),
        Case::new("objects: agreement", 1..=5, |group| agreement(&group)),
        Case::new("objects: agreement on a schema", 2..=4, |group| {
            agreement_on_a_schema(&group)
        }),
        Case::new("objects: a result", 1..=5, |group| a_result(&group)),
        Case::new("objects: a large result", 1..=3, |group| {
            a_large_result(&group)
        }),
        Case::new("objects: a result that cannot be encoded", 1..=3, |group| {
            a_result_that_cannot_be_encoded(&group)
        }),
        Case::new("objects: a result that cannot be decoded", 2..=3, |group| {
            a_result_that_cannot_be_decoded(&group)
        }),
        Case::new("objects: kinds of failures", 2..=3, |group| {
            kinds_of_failures(&group)
        }),
        Case::new("objects: messages of any size", 2..=3, |group| {
            messages_of_any_size(&group)
        }),
    ]
}

/// Checks that the errors of all ranks have the kind of the first failing rank's error.
fn kinds_of_failures(group: &ProcessGroup) {
    let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
    let outcome = if group.rank() == 1 {
        Err(full())
    } else {
        Ok(())
    };
    let error = error_of(group.agree("save", outcome));
    let CommError::RankFailed { failures, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (failures.len(), failures[0].rank, failures[0].kind),
        (1, 1, ErrorKind::NoSpace)
    );
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    same_on_all(group, &error);
    let error = error_of(group.agree("save", Err::<(), _>("no kind")));
    assert_eq!(error.kind(), ErrorKind::Other);
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Object {
    name: String,
    bytes: Vec<u8>,
    next: Option<Box<Object>>,
}

/// Makes a rank's object: a small one for rank 0, a larger one for each rank after it.
fn object(rank: usize, scale: usize) -> Object {
    let next = (rank > 0).then(|| Box::new(object(rank - 1, scale)));
    Object {
        name: format!("rank {rank}"),
        bytes: vec![rank as u8; rank * scale],
        next,
    }
}

fn of_all_sizes(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    for scale in [0, 10, 3000, 300_000] {
        let all: Vec<Object> = (0..world_size).map(|rank| object(rank, scale)).collect();
        assert_eq!(group.all_gather_object(&all[rank]).unwrap(), all);
        for root in [0, world_size - 1] {
            let gathered = group.gather_object(&all[rank], root).unwrap();
            assert_eq!(gathered, (rank == root).then(|| all.clone()));
            let values = (rank == root).then_some(&all[..]);
            assert_eq!(group.scatter_object(values, root).unwrap(), all[rank]);
            let value = (rank == root).then_some(&all[world_size - 1]);
            assert_eq!(
                group.broadcast_object(value, root).unwrap(),
                all[world_size - 1]
            );
        }
    }
    group.all_gather_object(&()).unwrap();
    assert_eq!(group.broadcast_object(Some(&String::new()), 0).unwrap(), "");
}

/// Objects that are too large for one round move in several. Text is used because it is encoded
/// fast.
fn in_pieces(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    // Different lengths, so that some ranks are done before others. One is empty.
    let text = |rank: usize| format!("{rank}abcdefg").repeat(rank * (3 << 20) / 8 + rank * 100);
    let all: Vec<String> = (0..world_size)
        .map(|rank| text(rank + 3))
        .chain([String::new()])
        .collect();
    let all = &all[1..];
    let root = world_size - 1;
    assert!(group.all_gather_object(&all[rank]).unwrap() == all);
    assert!(group.gather_object(&all[rank], root).unwrap() == (rank == root).then(|| all.to_vec()));
    assert!(
        group
            .scatter_object((rank == root).then_some(all), root)
            .unwrap()
            == all[rank]
    );
    let long = text(8);
    assert!(
        group
            .broadcast_object((rank == root).then_some(&long), root)
            .unwrap()
            == long
    );
    // The group goes on.
    assert_eq!(group.all_gather_object(&rank).unwrap().len(), world_size);
}

/// Encodes on all ranks but one.
#[derive(Debug, Deserialize)]
struct Picky(bool);

impl Serialize for Picky {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0 {
            serializer.serialize_bool(true)
        } else {
            Err(serde::ser::Error::custom("not this one"))
        }
    }
}

fn that_cannot_be_encoded(group: &ProcessGroup) {
    let error = error_of(group.all_gather_object(&Picky(group.rank() != 1)));
    match (group.rank(), &error) {
        (
            1,
            CommError::Object {
                action, message, ..
            },
        ) => {
            assert_eq!((&action[..], &message[..]), ("encode", "not this one"))
        }
        (
            _,
            CommError::RankFailed {
                operation,
                failures,
            },
        ) => {
            assert_eq!(
                (&operation[..], failures[0].rank, failures.len()),
                ("all_gather_object", 1, 1)
            );
            assert!(failures[0].message.contains("not this one"), "{error}");
        }
        _ => panic!("{error:?}"),
    }
    assert_eq!(
        group.all_gather_object(&Picky(true)).unwrap().len(),
        group.world_size()
    );
}

fn of_different_types(group: &ProcessGroup) {
    // Ranks cannot know each other's types; what does not decode is an error and no panic.
    let error = match group.rank() {
        0 => error_of(group.all_gather_object(&1u8)),
        _ => error_of(group.all_gather_object(&"a longer string".to_owned())),
    };
    assert!(
        matches!(&error, CommError::Object { action, .. } if action == "decode"),
        "{error:?}"
    );
    group.barrier().unwrap();
}

fn agreement(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    assert_eq!(group.agree("save", Ok::<_, String>(rank)), Ok(rank));
    for failing in 1..1usize << world_size {
        let fails = |rank: usize| failing >> rank & 1 == 1;
        let outcome = if fails(rank) {
            Err(format!("rank {rank}'s own reason"))
        } else {
            Ok(())
        };
        let error = error_of(group.agree("save", outcome));
        let CommError::RankFailed {
            operation,
            failures,
        } = &error
        else {
            panic!("{error:?}")
        };
        assert_eq!(operation, "save");
        let expected: Vec<usize> = (0..world_size).filter(|&rank| fails(rank)).collect();
        assert_eq!(
            failures
                .iter()
                .map(|failure| failure.rank)
                .collect::<Vec<_>>(),
            expected
        );
        assert!(
            failures
                .iter()
                .all(|failure| failure.message == format!("rank {}'s own reason", failure.rank))
        );
        same_on_all(group, &error);
    }
    assert_eq!(group.agree("save", Ok::<_, String>(rank)), Ok(rank));
}

fn agreement_on_a_schema(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    assert_eq!(
        group.agree_on("load", u64::MAX, Ok::<_, String>(())),
        Ok(())
    );
    let error = error_of(group.agree_on("load", (rank == 1).into(), Ok::<_, String>(())));
    let CommError::SchemaMismatch { operation, schemas } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(operation, "load");
    let ranks: Vec<&[usize]> = schemas.iter().map(|schema| &schema.ranks[..]).collect();
    let others: Vec<usize> = (0..world_size).filter(|&rank| rank != 1).collect();
    assert_eq!(ranks, [&others[..], &[1]]);
    same_on_all(group, &error);
    // A rank's own error says more than a difference that may come of it.
    let outcome = if rank == 0 {
        Err("no such file")
    } else {
        Ok(())
    };
    let error = error_of(group.agree_on("load", rank as u64, outcome));
    assert!(
        matches!(&error, CommError::RankFailed { failures, .. } if failures.len() == 1),
        "{error:?}"
    );
    same_on_all(group, &error);
}

/// Checks that the root's value reaches every rank, and that the errors of any set of ranks, with
/// the root among them or not, reach every rank in its place.
fn a_result(group: &ProcessGroup) {
    let (rank, world_size) = (group.rank(), group.world_size());
    for root in [0, world_size - 1] {
        let value = || (rank == root).then(|| object(rank, 300));
        let succeed = || group.broadcast_result("commit", Ok::<_, String>(value()), root);
        assert_eq!(succeed(), Ok(object(root, 300)));
        for failing in 1..1usize << world_size {
            let fails = |rank: usize| failing >> rank & 1 == 1;
            let outcome = if fails(rank) {
                Err(format!("rank {rank}'s own reason"))
            } else {
                Ok(value())
            };
            let error = error_of(group.broadcast_result("commit", outcome, root));
            let CommError::RankFailed {
                operation,
                failures,
            } = &error
            else {
                panic!("{error:?}")
            };
            assert_eq!(operation, "commit");
            let named: Vec<(usize, String)> = failures
                .iter()
                .map(|failure| (failure.rank, failure.message.clone()))
                .collect();
            let expected: Vec<(usize, String)> = (0..world_size)
                .filter(|&rank| fails(rank))
                .map(|rank| (rank, format!("rank {rank}'s own reason")))
                .collect();
            assert_eq!(named, expected);
            same_on_all(group, &error);
        }
        // The group goes on. A value that is not the root's is ignored.
        let own = Ok::<_, String>(Some(object(rank, 300)));
        assert_eq!(
            group.broadcast_result("commit", own, root),
            Ok(object(root, 300))
        );
        let nothing = Ok::<_, String>((rank == root).then_some(()));
        assert_eq!(group.broadcast_result("commit", nothing, root), Ok(()));
    }
}

/// A value that needs several rounds moves in none of them if a rank has an error.
fn a_large_result(group: &ProcessGroup) {
    let (rank, root) = (group.rank(), group.world_size() - 1);
    let long = "0123456789abcdef".repeat((20 << 20) / 16);
    let value = || (rank == root).then(|| long.clone());
    let received = group.broadcast_result("commit", Ok::<_, String>(value()), root);
    assert!(received.unwrap() == long);
    let outcome = if rank == 0 && root != 0 {
        Err("no space")
    } else {
        Ok(value())
    };
    let traffic = group.traffic();
    let received = group.broadcast_result("commit", outcome, root);
    if root == 0 {
        assert!(received.unwrap() == long);
    } else {
        let error = error_of(received);
        assert_eq!(group.traffic().since(&traffic).object_bytes_sent, 0);
        same_on_all(group, &error);
    }
}

/// The encoder's error is the same on every rank, unlike that of the other objects.
fn a_result_that_cannot_be_encoded(group: &ProcessGroup) {
    let root = group.world_size() - 1;
    let value = Ok::<_, String>((group.rank() == root).then_some(Picky(false)));
    let error = error_of(group.broadcast_result("commit", value, root));
    let CommError::RankFailed { failures, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!((failures.len(), failures[0].rank), (1, root));
    assert!(failures[0].message.contains("not this one"), "{error}");
    same_on_all(group, &error);
    // Only the root's value is encoded.
    let value = Ok::<_, String>(Some(Picky(group.rank() == root)));
    assert!(group.broadcast_result("commit", value, root).unwrap().0);
}

fn a_result_that_cannot_be_decoded(group: &ProcessGroup) {
    let received = match group.rank() {
        0 => group
            .broadcast_result("commit", Ok::<_, String>(Some(1u8)), 0)
            .map(drop),
        _ => group
            .broadcast_result::<String, String>("commit", Ok(None), 0)
            .map(drop),
    };
    match (group.rank(), &received) {
        (0, Ok(())) => {}
        (1.., Err(CommError::Object { action, .. })) if action == "decode" => {}
        _ => panic!("{received:?}"),
    }
    group.barrier().unwrap();
}

fn messages_of_any_size(group: &ProcessGroup) {
    let outcome = if group.rank() == 1 {
        Err("é".repeat(5 << 20))
    } else {
        Ok(())
    };
    let error = error_of(group.agree(&"long name ".repeat(10_000), outcome));
    let CommError::RankFailed {
        operation,
        failures,
    } = &error
    else {
        panic!("{error:?}")
    };
    assert!(
        failures[0].message.len() <= MAX_MESSAGE_BYTES && failures[0].message.starts_with("éé")
    );
    assert!(operation.len() <= MAX_MESSAGE_BYTES);
    same_on_all(group, &error);
}
