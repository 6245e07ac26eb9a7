//! A live run, its checkpoints, and the runs that load them have one digest, at any number of
//! ranks.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, LoadOptions, load, load_in_place,
    state_digest,
};
use fsdp_comm::{Operation, run_local};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::checkpoint;
use fsdp_formats::digest::digest;
use fsdp_formats::internals::{INTEGRITY_FILE, Integrity};
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{ErrorKind, Failure as _, PlainValue, TensorBox};
use fsdp_nn::ShardingStrategy;
use fsdp_state::{StateDict, StateError, digest_state_dict};

use crate::in_place::training::{adamw, new_run_with, step};

const STRATEGIES: [ShardingStrategy; 3] = [
    ShardingStrategy::FullShard,
    ShardingStrategy::ShardGradOp,
    ShardingStrategy::NoShard,
];

#[test]
fn a_live_run_has_the_digest_of_its_checkpoint_at_any_number_of_ranks() {
    let dir = tempfile::tempdir().unwrap();
    for (index, strategy) in STRATEGIES.into_iter().enumerate() {
        for ranks in 1..=4 {
            let path = dir.path().join(format!("{index}-{ranks}"));
            let live = run_local(ranks, |group| {
                let mut run = new_run_with(&group, strategy, &adamw(), 3);
                step(&mut run, 1);
                let betas = PlainValue::Tuple(vec![PlainValue::Float(0.5), PlainValue::Int(7)]);
                run.values.insert("sampler", betas);
                let mut checkpointer =
                    Checkpointer::new(&*path, &group, CheckpointerOptions::default()).unwrap();
                checkpointer.save(&*path.join("saved"), &run).unwrap();
                state_digest(&run, &group).unwrap()
            })
            .unwrap();
            let saved = checkpoint::open(path.join("saved"), OpenOptions { verify: true }).unwrap();
            let expected = digest(&*saved, 2).unwrap();
            // The save has recorded them.
            assert_eq!(
                saved.digests(),
                Some(&expected),
                "{strategy:?} on {ranks} ranks"
            );
            for digests in &live {
                assert_eq!(
                    digests.differing(&expected),
                    Vec::<String>::new(),
                    "{strategy:?} on {ranks} ranks"
                );
            }
            // Another number of ranks, and other memory to begin with.
            run_local(5 - ranks, |group| {
                let mut run = new_run_with(&group, strategy, &adamw(), 4);
                run.values.insert("sampler", PlainValue::None);
                assert_ne!(state_digest(&run, &group).unwrap().root(), expected.root());
                let mut checkpointer =
                    Checkpointer::new(&*path, &group, CheckpointerOptions::default()).unwrap();
                checkpointer.load(&*path.join("saved"), &mut run).unwrap();
                let loaded = state_digest(&run, &group).unwrap();
                assert_eq!(
                    loaded.differing(&expected),
                    Vec::<String>::new(),
                    "{strategy:?} from {ranks} ranks"
                );
                step(&mut run, 2);
                let after = state_digest(&run, &group).unwrap();
                let differing = after.differing(&expected);
                assert!(
                    differing.contains(&"model.a.weight".to_owned()),
                    "{differing:?}"
                );
                assert!(!differing.contains(&"sampler".to_owned()), "{differing:?}");
            })
            .unwrap();
        }
    }
}

/// A tensor of f32 [4, 2] of which this rank has some rows.
fn rows(first: usize, count: usize) -> StateDict {
    let whole = Tensor::arange(0f32, 8., &Device::Cpu)
        .unwrap()
        .reshape((4, 2))
        .unwrap();
    let bounds = TensorBox::new(vec![first, 0], vec![count, 2]);
    let shards = vec![LocalShard {
        bounds,
        tensor: whole.narrow(0, first, count).unwrap(),
    }];
    let mut state = StateDict::new();
    state.insert(
        "weight",
        ShardedTensor::new(DType::F32, vec![4, 2], shards).unwrap(),
    );
    state
}

#[test]
fn elements_that_several_ranks_have_count_once_and_those_that_none_has_are_an_error() {
    let whole = run_local(1, |group| digest_state_dict(&rows(0, 4), &group).unwrap())
        .unwrap()
        .swap_remove(0);
    for (first, second) in [
        ((0, 2), (2, 2)),
        ((0, 3), (1, 3)),
        ((0, 4), (0, 4)),
        ((1, 3), (0, 4)),
    ] {
        let digests = run_local(2, |group| {
            let (first, count) = if group.rank() == 0 { first } else { second };
            digest_state_dict(&rows(first, count), &group).unwrap()
        });
        assert!(
            digests.unwrap().iter().all(|digests| *digests == whole),
            "{first:?} {second:?}"
        );
    }
    let errors = run_local(2, |group| {
        digest_state_dict(&rows(group.rank(), 1), &group).unwrap_err()
    })
    .unwrap();
    assert!(
        errors
            .iter()
            .all(|error| error.to_string().contains("weight")),
        "{errors:?}"
    );
}

#[test]
fn ranks_with_other_names_get_the_same_error() {
    let errors = run_local(2, |group| {
        let mut state = rows(0, 4);
        if group.rank() == 1 {
            state.insert("more", 1i64);
        }
        let error: CheckpointError = digest_state_dict(&state, &group).unwrap_err().into();
        error.to_string()
    })
    .unwrap();
    assert_eq!(errors[0], errors[1]);
    assert!(matches!(
        run_local(1, |group| digest_state_dict(&rows(0, 3), &group))
            .unwrap()
            .swap_remove(0),
        Err(StateError::NotCovered { .. } | StateError::Comm(_))
    ));
}

/// Exchanges the recorded digests of two names, as if their state had been saved under each
/// other's: all hashes stay right.
fn exchange_digests(checkpoint: &Path, a: &str, b: &str) {
    let file = checkpoint.join(INTEGRITY_FILE);
    let mut integrity = Integrity::decode(&std::fs::read(&file).unwrap()).unwrap();
    let digests = integrity.digests.as_mut().unwrap();
    let (of_a, of_b) = (digests.get(a).unwrap(), digests.get(b).unwrap());
    digests.insert(a, of_b);
    digests.insert(b, of_a);
    std::fs::write(&file, integrity.encode().unwrap()).unwrap();
}

#[test]
fn a_load_that_is_not_what_was_saved_is_the_same_error_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (weight, moment) = (
        "optim.state.a.weight.exp_avg",
        "optim.state.a.weight.exp_avg_sq",
    );
    for (index, strategy) in STRATEGIES.into_iter().enumerate() {
        for ranks in 1..=3 {
            let run_dir = dir.path().join(format!("{index}-{ranks}"));
            let path = &*run_dir.join("saved");
            let outcomes = run_local(ranks, |group| {
                let mut run = new_run_with(&group, strategy, &adamw(), 3);
                step(&mut run, 1);
                let mut checkpointer =
                    Checkpointer::new(&*run_dir, &group, CheckpointerOptions::default()).unwrap();
                checkpointer.save(path, &run).unwrap();
                group.barrier().unwrap();
                if group.rank() == 0 {
                    exchange_digests(path, weight, moment);
                }
                group.barrier().unwrap();
                let mut options = CheckpointerOptions::default();
                options.load.staged = true;
                let mut staged = Checkpointer::new(&*run_dir, &group, options.clone()).unwrap();
                let mut resumed = new_run_with(&group, strategy, &adamw(), 4);
                let before = state_digest(&resumed, &group).unwrap();
                let error = staged.load(path, &mut resumed).unwrap_err().to_string();
                assert_eq!(state_digest(&resumed, &group).unwrap(), before);
                let in_place = checkpointer.load(path, &mut resumed).unwrap_err();
                assert!(
                    matches!(
                        in_place,
                        CheckpointError::State(StateError::PartlyLoaded { .. })
                    ),
                    "{in_place}"
                );
                // Without verification nothing is compared.
                options.load.verify = false;
                let mut unchecked = Checkpointer::new(&*run_dir, &group, options).unwrap();
                unchecked.load(path, &mut resumed).unwrap();
                error
            })
            .unwrap();
            for error in &outcomes {
                assert_eq!(*error, outcomes[0]);
                let named = [weight, moment]
                    .iter()
                    .all(|name| error.contains(&format!("`{name}`")));
                assert!(named && error.contains("on rank 0"), "{error}");
                // Each rank has read a part of them, or all.
                assert_eq!(error.contains("on rank 0, 1"), ranks > 1, "{error}");
            }
        }
    }
}

/// The ranks compare what they have loaded with the digests in collectives, so all of them or none
/// must have digests.
#[test]
fn copies_of_a_checkpoint_with_and_without_digests_are_the_same_error_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let (with, without) = (dir.path().join("with"), dir.path().join("without"));
    for path in [&with, &without] {
        run_local(1, |group| {
            fsdp_checkpoint::save(path.as_path(), &rows(0, 4), &group, &Default::default())
                .unwrap();
        })
        .unwrap();
    }
    std::fs::remove_file(without.join(INTEGRITY_FILE)).unwrap();
    let digest = checkpoint::open(&*with, OpenOptions { verify: true })
        .unwrap()
        .digests()
        .unwrap()
        .root();
    let errors = run_local(3, |group| {
        let path = if group.rank() == 1 { &*without } else { &*with };
        let mut state = rows(0, 4);
        let before = digest_state_dict(&state, &group).unwrap();
        let fresh = load(path, &mut state, &group, &LoadOptions::default()).unwrap_err();
        let in_place =
            load_in_place(path, &mut state, &group, &LoadOptions::default()).unwrap_err();
        assert_eq!(digest_state_dict(&state, &group).unwrap(), before);
        assert_eq!(fresh.to_string(), in_place.to_string());
        fresh.to_string()
    });
    let found = "rank 1 was called with a checkpoint without digests";
    let expected = format!("rank 0 with a checkpoint with the digest {digest}");
    for error in errors.unwrap() {
        assert!(
            error.contains(found) && error.contains(&expected),
            "{error}"
        );
    }
}

/// Ranks wait for each other in every collective, so there are no more of them than the load needs.
#[test]
fn a_load_from_files_takes_two_agreements_and_a_live_one_three() {
    let dir = tempfile::tempdir().unwrap();
    let path = &*dir.path().join("saved");
    let counts = run_local(2, |group| {
        let mut state = rows(2 * group.rank(), 2);
        fsdp_checkpoint::save(path, &state, &group, &Default::default()).unwrap();
        let mut count = |in_place: bool| {
            let before = group.traffic();
            let load = if in_place { load_in_place } else { load };
            load(path, &mut state, &group, &LoadOptions::default()).unwrap();
            let during = group.traffic().since(&before);
            // The comparison with the digests takes one of each of these, and nothing else is
            // called but agreements.
            let compared = [
                Operation::AllGatherObject,
                Operation::GatherObject,
                Operation::BroadcastObject,
            ];
            assert_eq!(compared.map(|operation| during.count(operation)), [1; 3]);
            let all: u64 = during.collectives.values().sum();
            assert_eq!(all - 3, during.count(Operation::Agree));
            during.count(Operation::Agree)
        };
        (count(false), count(true))
    });
    assert_eq!(counts.unwrap(), [(2, 3); 2]);
}

/// The whole of a tensor on some ranks, parts of it on others, and too little of it to tell.
#[test]
fn any_layout_of_a_state_dict_is_compared_as_far_as_its_ranks_have_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = &*dir.path().join("saved");
    run_local(1, |group| {
        let mut state = rows(0, 4);
        state.insert(
            "other",
            Tensor::zeros((4, 2), DType::F32, &Device::Cpu).unwrap(),
        );
        fsdp_checkpoint::save(path, &state, &group, &Default::default()).unwrap();
    })
    .unwrap();
    let loads = |first: (usize, usize), second: (usize, usize)| {
        let outcomes = run_local(2, |group| {
            let (start, count) = if group.rank() == 0 { first } else { second };
            let mut state = rows(start, count);
            let fresh = load(path, &mut state, &group, &LoadOptions::default())
                .map_err(|error| error.to_string());
            let mut live = rows(start, count);
            let in_place = load_in_place(path, &mut live, &group, &LoadOptions::default()).is_ok();
            assert_eq!(fresh.is_ok(), in_place);
            fresh.map(|_| ())
        });
        let outcomes = outcomes.unwrap();
        assert_eq!(outcomes[0], outcomes[1]);
        outcomes[0].clone()
    };
    let layouts = [
        ((0, 2), (2, 2)),
        ((0, 4), (0, 4)),
        ((0, 4), (1, 2)),
        ((0, 0), (0, 4)),
        ((0, 3), (1, 3)),
        ((0, 1), (2, 1)),
    ];
    for (first, second) in layouts {
        assert_eq!(loads(first, second), Ok(()));
    }
    exchange_digests(path, "weight", "other");
    for (first, second) in &layouts[..4] {
        let error = loads(*first, *second).unwrap_err();
        assert!(error.contains("`weight`"), "{error}");
    }
    // No element is loaded by one rank alone, or not all are.
    for (first, second) in &layouts[4..] {
        assert_eq!(loads(*first, *second), Ok(()));
    }
}

/// Hashes are not checked where digests are. Damage is found all the same, and the error names the
/// file, also if the ranks do not read all of the tensor.
#[test]
fn damage_in_a_tensor_that_ranks_read_in_parts_is_found_whichever_parts_they_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = &*dir.path().join("saved");
    run_local(1, |group| {
        fsdp_checkpoint::save(path, &rows(0, 4), &group, &Default::default()).unwrap()
    })
    .unwrap();
    // Damage the second row.
    let file = path.join("__0_0.distcp");
    let mut bytes = std::fs::read(&file).unwrap();
    let row = [2f32.to_le_bytes(), 3f32.to_le_bytes()].concat();
    let at = bytes
        .windows(row.len())
        .position(|window| window == row)
        .unwrap();
    bytes[at] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let layouts = [
        // All of it: in one part for each rank, with a part that both read, and all of it on both.
        ((0, 2), (2, 2)),
        ((0, 2), (1, 3)),
        ((0, 4), (0, 4)),
        ((0, 4), (1, 2)),
        // Not all of it.
        ((1, 1), (3, 1)),
        ((0, 2), (0, 2)),
        ((1, 2), (1, 2)),
    ];
    for (first, second) in layouts {
        let errors = run_local(2, |group| {
            let (start, count) = if group.rank() == 0 { first } else { second };
            let fresh = load(
                path,
                &mut rows(start, count),
                &group,
                &LoadOptions::default(),
            )
            .unwrap_err();
            let in_place = load_in_place(
                path,
                &mut rows(start, count),
                &group,
                &LoadOptions::default(),
            )
            .unwrap_err();
            assert_eq!([fresh.kind(), in_place.kind()], [ErrorKind::Corrupt; 2]);
            [fresh.to_string(), in_place.to_string()]
        });
        let errors = errors.unwrap();
        assert_eq!(errors[0], errors[1]);
        assert!(
            errors[0].iter().all(|error| error.contains("__0_0.distcp")),
            "{first:?} {second:?}: {errors:?}"
        );
    }
}
