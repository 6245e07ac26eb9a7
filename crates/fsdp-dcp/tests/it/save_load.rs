//! Saving with N ranks and loading with M: whatever the layout, the bits are the same, and read once.

use std::path::Path;

use fsdp_dcp::durable::Durable;
use fsdp_dcp::plan::LoadRequest;
use fsdp_dcp::reader::{CheckpointReader, Destination, ReadOptions};
use fsdp_layout::{DType, PlainValue};

use crate::state::{State, save, shard};

impl State {
    /// Tensors of many shapes: scalars, empty, odd, small and large.
    pub(crate) fn sample() -> State {
        let mut state = State::default();
        let mut seed = 1u64;
        for (name, dtype, shape) in [
            ("scalar", DType::F32, vec![]),
            ("empty", DType::I64, vec![0, 4]),
            ("vector", DType::BF16, vec![1001]),
            ("matrix", DType::F32, vec![513, 257]),
            ("cube", DType::U8, vec![7, 5, 11]),
            ("large", DType::F32, vec![1024, 4099]),
            ("bool", DType::Bool, vec![3]),
        ] {
            let length = shape.iter().product::<usize>() * dtype.size_in_bytes() as usize;
            let bytes = (0..length).map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (seed >> 56) as u8
            });
            state.tensors.insert(name.to_owned(), (dtype, shape, bytes.collect()));
        }
        state.values.insert("step".to_owned(), PlainValue::Int(20));
        state.values.insert("betas".to_owned(), PlainValue::Tuple(vec![0.9.into(), 0.95.into()]));
        state
    }
}

/// Loads every rank's part on `ranks` ranks and compares; returns the bytes read and the bytes needed.
pub(crate) fn load(state: &State, ranks: usize, target: &Path) -> (u64, u64) {
    let checkpoint = CheckpointReader::open(target).unwrap();
    assert!(checkpoint.is_sealed());
    let mut needed = 0;
    for rank in 0..ranks {
        let mut wanted = Vec::new();
        for (fqn, (dtype, shape, _)) in &state.tensors {
            let boxes = shard(shape, rank, ranks);
            let buffers: Vec<Vec<u8>> =
                boxes.iter().map(|b| vec![0xee; b.numel() * dtype.size_in_bytes() as usize]).collect();
            let request = LoadRequest { fqn: fqn.clone(), dtype: *dtype, shape: shape.clone(), boxes };
            wanted.push((request, buffers));
        }
        let destinations = wanted.iter_mut().map(|(request, buffers)| Destination {
            request: request.clone(),
            buffers: buffers.iter_mut().map(Vec::as_mut_slice).collect(),
        });
        let options = ReadOptions { threads: 2, ..ReadOptions::default() };
        checkpoint.read(destinations.collect(), options).unwrap();
        for (request, buffers) in &wanted {
            for (bounds, buffer) in request.boxes.iter().zip(buffers) {
                assert!(*buffer == state.part(&request.fqn, bounds), "{} {bounds} on rank {rank}", request.fqn);
                needed += buffer.len() as u64;
            }
        }
    }
    for (fqn, value) in &state.values {
        assert_eq!(checkpoint.read_value(fqn).unwrap(), *value);
    }
    (checkpoint.bytes_read(), needed)
}

#[test]
fn any_number_of_ranks_saves_and_any_number_loads() {
    let state = State::sample();
    let parent = tempfile::tempdir().unwrap();
    for ranks in [1, 2, 3, 5] {
        let target = parent.path().join(format!("ranks-{ranks}"));
        save(&state, ranks, &target, &Durable::new()).unwrap();
        for loading in [1, 2, 3, 4] {
            let (read, needed) = load(&state, loading, &target);
            assert!(read as f64 <= needed as f64 * 1.05 + 65536.0, "{ranks} to {loading}: {read} of {needed} bytes");
        }
    }
}

#[test]
fn equal_states_give_equal_files() {
    let state = State::sample();
    let parent = tempfile::tempdir().unwrap();
    let (a, b) = (parent.path().join("a"), parent.path().join("b"));
    save(&state, 2, &a, &Durable::new()).unwrap();
    save(&state, 2, &b, &Durable::new()).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&a).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".integrity", ".metadata", "__0_0.distcp", "__1_0.distcp"]);
    for name in names {
        assert!(std::fs::read(a.join(&name)).unwrap() == std::fs::read(b.join(&name)).unwrap(), "{name:?}");
    }
}
