//! A state with everything in it, and a load of it by N ranks, one after the other.

use fsdp_dcp::Location;
use fsdp_dcp::plan::LoadRequest;
use fsdp_dcp::reader::{CheckpointReader, Destination, ReadOptions};
use fsdp_layout::{DType, PlainValue};

use crate::state::{State, shard};

/// Tensors of many shapes: a scalar, empty, odd, small, and one of the shape `large`.
pub(crate) fn sample(large: [usize; 2]) -> State {
    let mut state = State::default();
    let mut seed = 1u64;
    for (name, dtype, shape) in [
        ("scalar", DType::F32, vec![]),
        ("empty", DType::I64, vec![0, 4]),
        ("vector", DType::BF16, vec![1001]),
        ("matrix", DType::F32, vec![513, 257]),
        ("cube", DType::U8, vec![7, 5, 11]),
        ("large", DType::F32, large.to_vec()),
        ("bool", DType::Bool, vec![3]),
    ] {
        let length = shape.iter().product::<usize>() * dtype.size_in_bytes() as usize;
        let bytes = (0..length).map(|_| {
            seed = seed
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (seed >> 56) as u8
        });
        state
            .tensors
            .insert(name.to_owned(), (dtype, shape, bytes.collect()));
    }
    state.values.insert("step".to_owned(), PlainValue::Int(20));
    state.values.insert(
        "betas".to_owned(),
        PlainValue::Tuple(vec![0.9.into(), 0.95.into()]),
    );
    state
}

/// Loads every rank's part on `ranks` ranks and compares; returns the bytes read and the bytes
/// needed.
pub(crate) fn load(state: &State, ranks: usize, from: impl Into<Location>) -> (u64, u64) {
    let checkpoint = CheckpointReader::open(from).unwrap();
    assert!(checkpoint.has_integrity());
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
