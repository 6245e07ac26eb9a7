//! Saving with N ranks and loading with M: whatever the layout, the bits are the same, and read once.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use fsdp_dcp::CheckpointError;
use fsdp_dcp::durable::Durable;
use fsdp_dcp::item::value_item_length;
use fsdp_dcp::plan::{LoadRequest, LocalPlan, SaveOptions, plan_save};
use fsdp_dcp::reader::{CheckpointReader, Destination, ReadOptions};
use fsdp_dcp::writer::{PayloadSource, WriteOptions, finish, write_rank};
use fsdp_layout::boxes::{boxes_of_flat_range, copy_runs};
use fsdp_layout::{DType, PlainValue, TensorBox};

/// A whole state in memory; every rank reads its boxes from it.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) tensors: BTreeMap<String, (DType, Vec<usize>, Vec<u8>)>,
    pub(crate) values: BTreeMap<String, PlainValue>,
}

impl PayloadSource for State {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let bytes = self.part(fqn, bounds);
        // Odd pieces, so that the writer has to gather them.
        bytes[range.start as usize..range.end as usize].chunks(100_003).try_for_each(sink)
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, CheckpointError> {
        Ok(Cow::Borrowed(&self.values[fqn]))
    }
}

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

    pub(crate) fn part(&self, fqn: &str, bounds: &TensorBox) -> Vec<u8> {
        let (dtype, shape, bytes) = &self.tensors[fqn];
        let element = dtype.size_in_bytes() as usize;
        let mut part = Vec::with_capacity(bounds.numel() * element);
        for run in copy_runs(bounds, &TensorBox::whole(shape), bounds) {
            part.extend_from_slice(&bytes[run.src * element..(run.src + run.len) * element]);
        }
        part
    }

    /// What each of `ranks` ranks holds: flat ranges of every tensor but the scalar, which all have.
    pub(crate) fn plans(&self, ranks: usize) -> Vec<LocalPlan> {
        (0..ranks)
            .map(|rank| {
                let mut plan = LocalPlan::default();
                for (fqn, (dtype, shape, _)) in &self.tensors {
                    plan.add_tensor(fqn, None, *dtype, shape.clone(), shard(shape, rank, ranks));
                }
                for (fqn, value) in &self.values {
                    plan.add_value(fqn, None, value_item_length(value).unwrap());
                }
                plan
            })
            .collect()
    }
}

/// Rank's equal part of the flat tensor, as boxes; all of a scalar.
fn shard(shape: &[usize], rank: usize, ranks: usize) -> Vec<TensorBox> {
    if shape.is_empty() {
        return vec![TensorBox::whole(shape)];
    }
    let numel: usize = shape.iter().product();
    let each = numel.div_ceil(ranks);
    boxes_of_flat_range(shape, (rank * each).min(numel)..((rank + 1) * each).min(numel))
}

pub(crate) fn save(state: &State, ranks: usize, target: &Path, durable: &Durable) -> Result<(), CheckpointError> {
    let plans = state.plans(ranks);
    let global = plan_save(&plans, SaveOptions::default())?;
    let staging = durable.prepare(target, true)?;
    let name = staging.name().to_owned();
    let written = std::thread::scope(|scope| {
        let ranks: Vec<_> = plans
            .iter()
            .enumerate()
            .map(|(rank, plan)| {
                let (selection, name) = (&global.selections[rank], &name);
                scope.spawn(move || {
                    let joined = durable.join(target, name)?;
                    write_rank(&joined, rank, plan, selection, state, &WriteOptions { threads: 2 })
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<_>, _>>()
    })?;
    finish(staging, global.metadata, &plans, &written)
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
