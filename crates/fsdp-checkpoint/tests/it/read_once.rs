//! Replicas that share the reading of a checkpoint: each byte comes from the storage once for all
//! of them.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{LoadOptions, SaveOptions, Stateful as _, save};
use fsdp_comm::{Operation, ProcessGroup, run_local};
use fsdp_flat::ShardedTensor;
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::reader::CheckpointReader;
use fsdp_layout::{Failure as _, FlatLayout};
use fsdp_state::{StateDict, StateValue};

/// Parameters of 9 MiB, one of them smaller than the number of ranks.
fn layout(world: usize) -> FlatLayout {
    let shapes = [
        ("up", vec![512, 1030]),
        ("scale", vec![3]),
        ("bias", vec![2048]),
        ("down", vec![900, 2000]),
    ];
    FlatLayout::new(
        shapes.map(|(name, shape)| (name.to_owned(), shape)).into(),
        4,
        world,
    )
    .unwrap()
}

/// Makes the state of shard `rank` of `world`, whose elements are their positions, or zeros; and a
/// whole tensor of another type.
fn state(world: usize, rank: usize, fill: bool) -> StateDict {
    let layout = layout(world);
    let mut state: StateDict = (0..layout.fqns().len())
        .map(|param| {
            let shape = &layout.shapes()[param];
            let boxes = layout.param_boxes(param, rank);
            let value = match layout.shard_param_infos(rank)[param] {
                Some(info) if fill => {
                    let range = info.param_range();
                    let flat =
                        Tensor::arange(range.start as f32, range.end as f32, &Device::Cpu).unwrap();
                    ShardedTensor::from_flat(shape, boxes, &flat).unwrap()
                }
                _ => ShardedTensor::zeros(DType::F32, shape, &boxes).unwrap(),
            };
            (layout.fqns()[param].clone(), StateValue::Sharded(value))
        })
        .collect();
    state.insert(
        "whole",
        Tensor::full(u8::from(fill), 37, &Device::Cpu).unwrap(),
    );
    state
}

fn bits(state: &StateDict) -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for (_, value) in state {
        let tensors: Vec<Tensor> = match value {
            StateValue::Tensor(tensor) => vec![tensor.clone()],
            StateValue::Sharded(sharded) => sharded
                .shards()
                .iter()
                .map(|shard| shard.tensor.clone())
                .collect(),
            other => panic!("{other:?}"),
        };
        for tensor in tensors {
            let flat = tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
            all.push(
                flat.to_vec1::<f32>()
                    .unwrap()
                    .iter()
                    .map(|element| element.to_bits())
                    .collect(),
            );
        }
    }
    all
}

/// Loads on `shards` times `replicas` ranks, and returns what each has read, and whether it passed
/// bytes on.
fn load(path: &Path, shards: usize, replicas: usize, options: &LoadOptions) -> Vec<(u64, bool)> {
    run_local(shards * replicas, |group: ProcessGroup| {
        let shard = group.rank() % shards;
        let reader = CheckpointReader::open(path).unwrap();
        let before = group.traffic();
        let mut loaded = state(shards, shard, false);
        loaded.load_state_dict(&reader, &group, options).unwrap();
        assert_eq!(bits(&loaded), bits(&state(shards, shard, true)));
        let moved = group
            .traffic()
            .since(&before)
            .count(Operation::AllGatherUneven);
        (reader.bytes_read(), moved > 0)
    })
    .unwrap()
}

fn saved(shards: usize) -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("checkpoint");
    run_local(shards, |group| {
        save(
            &path,
            &state(shards, group.rank(), true),
            &group,
            &SaveOptions::default(),
        )
        .unwrap();
    })
    .unwrap();
    (dir, path)
}

#[test]
fn each_byte_is_read_once_for_all_replicas() {
    let (_dir, path) = saved(2);
    let once = LoadOptions {
        read_once: Some(true),
        ..LoadOptions::default()
    };
    let total: u64 = load(&path, 1, 1, &LoadOptions::default())[0].0;
    // The replicas of no-shard, those of hybrid-shard, and both with a number that does not divide
    // the tensors.
    for (shards, replicas) in [(1, 4), (2, 2), (3, 3), (1, 2)] {
        let (read, moved): (Vec<u64>, Vec<bool>) =
            load(&path, shards, replicas, &once).into_iter().unzip();
        assert!(moved.iter().all(|moved| *moved));
        let sum: u64 = read.iter().sum();
        assert!(
            sum <= total + total / 20,
            "{shards} shards, {replicas} replicas: {read:?} of {total}"
        );
        let most = read.iter().max().copied().unwrap();
        assert!(
            most <= total / (shards * replicas) as u64 + total / 20,
            "{read:?} of {total}"
        );
        // Without it, every replica reads all of its shard.
        let each = load(&path, shards, replicas, &LoadOptions::default());
        let sum: u64 = each.iter().map(|(read, _)| read).sum();
        assert!(
            sum >= replicas as u64 * (total - total / 20),
            "{each:?} of {total}"
        );
    }
}

#[test]
fn ranks_that_want_different_things_read_for_themselves() {
    let (_dir, path) = saved(2);
    let once = LoadOptions {
        read_once: Some(true),
        ..LoadOptions::default()
    };
    assert!(load(&path, 3, 1, &once).iter().all(|(_, moved)| !moved));
}

#[test]
fn damage_that_one_rank_reads_is_the_same_error_on_all() {
    let (_dir, path) = saved(1);
    let file = path.join("__0_0.distcp");
    let mut bytes = fs::read(&file).unwrap();
    let place = bytes.len() * 3 / 5;
    bytes[place] ^= 4;
    fs::write(&file, bytes).unwrap();
    let once = LoadOptions {
        read_once: Some(true),
        ..LoadOptions::default()
    };
    for (shards, replicas) in [(1, 4), (2, 2)] {
        let errors = run_local(shards * replicas, |group| {
            let mut loaded = state(shards, group.rank() % shards, false);
            let reader = CheckpointReader::open(&path).unwrap();
            let error = loaded.load_state_dict(&reader, &group, &once).unwrap_err();
            (error.kind(), error.to_string())
        })
        .unwrap();
        let (kind, message) = &errors[0];
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert_eq!(*kind, fsdp_layout::ErrorKind::Corrupt);
        assert!(message.contains("__0_0.distcp"), "{message}");
    }
}
