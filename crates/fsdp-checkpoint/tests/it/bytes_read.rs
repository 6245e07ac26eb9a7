//! A rank reads the bytes that it needs and hardly any more, whatever number of ranks saved.

use candle_core::{DType, Device, Tensor};
use fsdp_checkpoint::{LoadOptions, SaveOptions, Stateful as _, save};
use fsdp_comm::run_local;
use fsdp_flat::ShardedTensor;
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::reader::CheckpointReader;
use fsdp_layout::FlatLayout;
use fsdp_state::{StateDict, StateValue};

/// Parameters of a model of 24 MiB.
fn layout(world: usize) -> FlatLayout {
    let shapes = [
        ("embedding", vec![1000, 512]),
        ("up", vec![512, 2048]),
        ("bias", vec![2048]),
        ("down", vec![2048, 2000]),
    ];
    let params = shapes.map(|(name, shape)| (name.to_owned(), shape));
    FlatLayout::new(params.into(), 4, world).unwrap()
}

/// Makes a rank's flat shard of them, each element its own position.
fn state(world: usize, rank: usize, fill: bool) -> StateDict {
    let layout = layout(world);
    (0..layout.fqns().len())
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
        .collect()
}

#[test]
fn a_load_reads_at_most_a_twentieth_more_than_it_needs() {
    let dir = tempfile::tempdir().unwrap();
    for saved in [1, 2, 4] {
        let path = dir.path().join(saved.to_string());
        run_local(saved, |group| {
            save(
                &path,
                &state(saved, group.rank(), true),
                &group,
                &SaveOptions::default(),
            )
            .unwrap();
        })
        .unwrap();
        for loaded in [1, 2, 3, 4, 5] {
            for rank in 0..loaded {
                let reader = CheckpointReader::open(&path).unwrap();
                let state = state(loaded, rank, false);
                run_local(1, |group| {
                    state
                        .clone()
                        .load_state_dict(&reader, &group, &LoadOptions::default())
                        .map(drop)
                })
                .unwrap()
                .remove(0)
                .unwrap();
                let mut needed = 0;
                for (fqn, value) in &state {
                    let value = value.as_sharded().unwrap();
                    needed += 4 * value.local_numel() as u64;
                    for shard in value.shards() {
                        let width = value.shape()[1..].iter().product::<usize>();
                        let first = shard.bounds.offsets[0] * width
                            + shard.bounds.offsets.get(1).copied().unwrap_or(0);
                        let found = shard
                            .tensor
                            .flatten_all()
                            .unwrap()
                            .get(0)
                            .unwrap()
                            .to_scalar::<f32>()
                            .unwrap();
                        assert_eq!(found, first as f32, "{fqn} {}", shard.bounds);
                    }
                }
                let read = reader.bytes_read();
                let limit = needed + needed / 20;
                assert!(
                    read <= limit,
                    "{saved} to {loaded}, rank {rank}: {read} bytes for {needed}"
                );
            }
        }
    }
}
