//! A live run, its checkpoints, and the runs that load them have one digest, at any number of ranks.

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{CheckpointError, Checkpointer, CheckpointerOptions, state_digest};
use fsdp_comm::run_local;
use fsdp_dcp::checkpoint;
use fsdp_dcp::digest::digest;
use fsdp_dcp::reader::OpenOptions;
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_layout::{PlainValue, TensorBox};
use fsdp_nn::ShardingStrategy;
use fsdp_state::{StateDict, StateError, digest_state_dict};

use crate::training::{adamw, new_run_with, step};

const STRATEGIES: [ShardingStrategy; 3] =
    [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard];

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
                let mut checkpointer = Checkpointer::new(&*path, &group, CheckpointerOptions::default()).unwrap();
                checkpointer.save(&*path.join("saved"), &run).unwrap();
                state_digest(&run, &group).unwrap()
            })
            .unwrap();
            let saved = checkpoint::open(path.join("saved"), OpenOptions { verify: true }).unwrap();
            let expected = digest(&*saved, 2).unwrap();
            // The save has recorded them.
            assert_eq!(saved.digests(), Some(&expected), "{strategy:?} on {ranks} ranks");
            for digests in &live {
                assert_eq!(digests.differing(&expected), Vec::<String>::new(), "{strategy:?} on {ranks} ranks");
            }
            // Another number of ranks, and other memory to begin with.
            run_local(5 - ranks, |group| {
                let mut run = new_run_with(&group, strategy, &adamw(), 4);
                run.values.insert("sampler", PlainValue::None);
                assert_ne!(state_digest(&run, &group).unwrap().root(), expected.root());
                let checkpointer = Checkpointer::new(&*path, &group, CheckpointerOptions::default()).unwrap();
                checkpointer.load(&*path.join("saved"), &mut run).unwrap();
                let loaded = state_digest(&run, &group).unwrap();
                assert_eq!(loaded.differing(&expected), Vec::<String>::new(), "{strategy:?} from {ranks} ranks");
                step(&mut run, 2);
                let after = state_digest(&run, &group).unwrap();
                let differing = after.differing(&expected);
                assert!(differing.contains(&"model.a.weight".to_owned()), "{differing:?}");
                assert!(!differing.contains(&"sampler".to_owned()), "{differing:?}");
            })
            .unwrap();
        }
    }
}

/// A tensor of f32 [4, 2] of which this rank has some rows.
fn rows(first: usize, count: usize) -> StateDict {
    let whole = Tensor::arange(0f32, 8., &Device::Cpu).unwrap().reshape((4, 2)).unwrap();
    let bounds = TensorBox::new(vec![first, 0], vec![count, 2]);
    let shards = vec![LocalShard { bounds, tensor: whole.narrow(0, first, count).unwrap() }];
    let mut state = StateDict::new();
    state.insert("weight", ShardedTensor::new(DType::F32, vec![4, 2], shards).unwrap());
    state
}

#[test]
fn elements_that_several_ranks_have_count_once_and_those_that_none_has_are_an_error() {
    let whole = run_local(1, |group| digest_state_dict(&rows(0, 4), &group).unwrap()).unwrap().swap_remove(0);
    for (first, second) in [((0, 2), (2, 2)), ((0, 3), (1, 3)), ((0, 4), (0, 4)), ((1, 3), (0, 4))] {
        let digests = run_local(2, |group| {
            let (first, count) = if group.rank() == 0 { first } else { second };
            digest_state_dict(&rows(first, count), &group).unwrap()
        });
        assert!(digests.unwrap().iter().all(|digests| *digests == whole), "{first:?} {second:?}");
    }
    let errors = run_local(2, |group| digest_state_dict(&rows(group.rank(), 1), &group).unwrap_err()).unwrap();
    assert!(errors.iter().all(|error| error.to_string().contains("weight")), "{errors:?}");
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
        run_local(1, |group| digest_state_dict(&rows(0, 3), &group)).unwrap().swap_remove(0),
        Err(StateError::NotCovered { .. } | StateError::Comm(_))
    ));
}
