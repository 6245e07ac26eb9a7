//! A load of a state by N ranks, one after the other.

use fsdp_formats::Location;
use fsdp_formats::checkpoint::Checkpoint as _;
use fsdp_formats::plan::LoadRequest;
use fsdp_formats::reader::{CheckpointReader, Destination, ReadOptions};

use crate::state::{State, shard};

/// Loads every rank's part on `ranks` ranks and compares; returns the bytes read and the bytes
/// needed.
pub(crate) fn load(state: &State, ranks: usize, from: impl Into<Location>) -> (u64, u64) {
    let checkpoint = CheckpointReader::open(from).unwrap();
    assert!(checkpoint.directory().has_integrity());
    let mut needed = 0;
    for rank in 0..ranks {
        let mut wanted = Vec::new();
        for (fqn, (dtype, shape, _)) in &state.tensors {
            let boxes = shard(shape, rank, ranks);
            let buffers: Vec<Vec<u8>> = boxes
                .iter()
                .map(|b| vec![0xee; b.numel() * dtype.size_in_bytes() as usize])
                .collect();
            let request = LoadRequest {
                fqn: fqn.clone(),
                dtype: *dtype,
                shape: shape.clone(),
                boxes,
            };
            wanted.push((request, buffers));
        }
        let destinations = wanted.iter_mut().map(|(request, buffers)| {
            Destination::new(
                request.clone(),
                buffers.iter_mut().map(Vec::as_mut_slice).collect(),
            )
        });
        let options = ReadOptions {
            threads: 2,
            ..ReadOptions::default()
        };
        checkpoint.read(destinations.collect(), options).unwrap();
        for (request, buffers) in &wanted {
            for (bounds, buffer) in request.boxes.iter().zip(buffers) {
                assert!(
                    *buffer == state.part(&request.fqn, bounds),
                    "{} {bounds} on rank {rank}",
                    request.fqn
                );
                needed += buffer.len() as u64;
            }
        }
    }
    for (fqn, value) in &state.values {
        assert_eq!(checkpoint.read_value(fqn).unwrap(), *value);
    }
    (checkpoint.bytes_read(), needed)
}
