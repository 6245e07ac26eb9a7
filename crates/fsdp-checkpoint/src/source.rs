//! A checkpoint of any format as the source of a load: each rank reads the bytes that it needs, and nothing else.

use std::collections::HashMap;
use std::hash::{Hash as _, Hasher as _};
use std::ops::Range;

use candle_core::Tensor;
use fsdp_comm::{CommError, ProcessGroup};
use fsdp_dcp::checkpoint::Checkpoint;
use fsdp_dcp::metadata::Entry;
use fsdp_dcp::plan::{LoadRequest, ReadPlanOptions};
use fsdp_dcp::reader::{Destination, ReadOptions};
use fsdp_flat::storage::StorageGuard;
use fsdp_layout::{ErrorKind, Failure as _, KeyPath, PathPart, TensorBox};
use fsdp_state::engine::Wanted;
use fsdp_state::{Leaf, Lend, LoadError as _, LoadOptions, Memory, Schema, Source, StateValue};
use indexmap::IndexMap;
use twox_hash::XxHash3_64;

use crate::CheckpointError;
use crate::compare::{Comparison, check_value};
use crate::shared_read::{Row, replicas};

/// The bytes that are lent and read at once. It is more than the threads need to be busy, and it bounds the memory that
/// values pass through on their way to a device or to another dtype.
const WINDOW: usize = 512 << 20;

/// An open checkpoint of any format, as the source of a load.
///
/// Every rank opens the checkpoint by itself, and reads by itself unless replicas share the reading
/// ([`LoadOptions::read_once`]). Collectives: agreements; if the checkpoint has digests, a gather of sums, by which the
/// ranks check that all of them together have loaded what was saved; if the reading is shared, an object all-gather and
/// the all-gathers of the data.
pub struct CheckpointSource<'a> {
    checkpoint: &'a dyn Checkpoint,
    schema: Schema,
    /// The checkpoint's keys, in the order of the schema.
    keys: Vec<String>,
    /// The ranks that load the same data as this one, if they share the reading.
    replicas: Option<ProcessGroup>,
}

impl<'a> CheckpointSource<'a> {
    /// Returns a source of everything in a checkpoint, under the paths that the values had in the saved state dict. In
    /// formats that do not store paths, each path is the flat key as one part.
    #[must_use]
    pub fn new(checkpoint: &'a dyn Checkpoint) -> Self {
        Self::with_known_paths(checkpoint, &IndexMap::new())
    }

    /// Returns the same source as [`Self::new`], except that `paths` says which paths flat keys stand for in formats
    /// that do not store them.
    #[must_use]
    pub fn with_known_paths(checkpoint: &'a dyn Checkpoint, paths: &IndexMap<String, KeyPath>) -> Self {
        let paths = checkpoint.metadata().planner_data.as_ref().unwrap_or(paths);
        Self::with_paths(checkpoint, |key| paths.get(key).cloned().unwrap_or_else(|| flat_path(key)))
    }

    /// Returns a source of everything in a checkpoint, where each path is the flat key as one part: `["model.weight"]`.
    pub(crate) fn by_flat_key(checkpoint: &'a dyn Checkpoint) -> Self {
        Self::with_paths(checkpoint, flat_path)
    }

    /// Returns a source in which `path` gives the path of each key. A schema is sorted by path, and keys follow it.
    fn with_paths(checkpoint: &'a dyn Checkpoint, path: impl Fn(&str) -> KeyPath) -> Self {
        let entries = checkpoint.metadata().entries.iter();
        let mut leaves: Vec<(KeyPath, Leaf, String)> =
            entries.map(|(key, entry)| (path(key), leaf(entry), key.clone())).collect();
        leaves.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        let (schema, keys) = leaves.into_iter().map(|(path, leaf, key)| ((path, leaf), key)).unzip();
        CheckpointSource { checkpoint, schema: Schema::new(schema), keys, replicas: None }
    }

    /// Leaves out opaque plain values, which hold objects of other programs and cannot be loaded, and returns their keys.
    /// Values for which `is_state` returns `true` are kept.
    ///
    /// # Errors
    /// Values that cannot be read for another reason.
    pub(crate) fn without_foreign_objects(
        mut self,
        is_state: impl Fn(&KeyPath) -> bool,
    ) -> Result<(Self, Vec<String>), CheckpointError> {
        let (mut leaves, mut keys, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
        for ((path, leaf), key) in self.schema.iter().zip(std::mem::take(&mut self.keys)) {
            if matches!(leaf, Leaf::Plain)
                && !is_state(path)
                && let Err(error) = self.checkpoint.read_value(&key)
            {
                if error.kind() != ErrorKind::Unsafe {
                    return Err(error.into());
                }
                left_out.push(key);
                continue;
            }
            leaves.push((path.clone(), leaf.clone()));
            keys.push(key);
        }
        Ok((CheckpointSource { schema: Schema::new(leaves), keys, ..self }, left_out))
    }

    /// Returns the checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> &'a dyn Checkpoint {
        self.checkpoint
    }

    fn key(&self, position: usize) -> &str {
        self.keys.get(position).map_or("", String::as_str)
    }

    /// Returns the request to the checkpoint for what is wanted of one tensor.
    fn request(&self, wanted: &Wanted) -> LoadRequest {
        self.request_of(wanted, wanted.boxes.clone())
    }

    /// Returns the request to the checkpoint for boxes of a tensor that is wanted.
    fn request_of(&self, wanted: &Wanted, boxes: Vec<TensorBox>) -> LoadRequest {
        let (fqn, shape) = (self.key(wanted.position).to_owned(), wanted.shape.clone());
        LoadRequest { fqn, dtype: wanted.dtype, shape, boxes }
    }

    /// Fills memory with the wanted boxes, and adds what was read to the comparison with digests.
    fn fill(
        &self,
        wanted: &[Wanted],
        memories: &mut [Memory],
        options: ReadOptions,
        comparison: &mut Option<Comparison<'_>>,
    ) -> Result<(), CheckpointError> {
        let options = ReadOptions { digest: comparison.is_some(), ..options };
        let tensors: Vec<Vec<_>> = memories.iter().map(Memory::tensors).collect();
        let mut guard = StorageGuard::take(&tensors.iter().flatten().collect::<Vec<_>>())?;
        let Buffers { of_tensors, overlapping } = Buffers::lent(wanted, memories, &tensors, &mut guard);
        let mut destinations = Vec::with_capacity(wanted.len());
        let mut read = Vec::with_capacity(wanted.len());
        for (wanted, buffers) in wanted.iter().zip(of_tensors) {
            if let Some(buffers) = buffers {
                read.push(wanted);
                destinations.push(Destination { request: self.request(wanted), buffers });
            }
        }
        let done = self.checkpoint.read(destinations, options)?;
        if let Some(comparison) = comparison {
            for (wanted, sums) in read.into_iter().zip(&done.sums) {
                comparison.add(self.key(wanted.position), &wanted.boxes, sums);
            }
        }
        drop(guard);
        self.fill_overlapping(overlapping, wanted, memories, options, comparison)
    }

    /// Fills the tensors at the indices `overlapping`, which share elements with others. Their memory cannot be lent
    /// together with that of the others, so each is read into a copy.
    fn fill_overlapping(
        &self,
        overlapping: Vec<usize>,
        wanted: &[Wanted],
        memories: &mut [Memory],
        options: ReadOptions,
        comparison: &mut Option<Comparison<'_>>,
    ) -> Result<(), CheckpointError> {
        for index in overlapping {
            let wanted = &wanted[index];
            let mut copy = [Memory::fresh(wanted.dtype, &wanted.shape, &wanted.boxes)?];
            self.fill(std::slice::from_ref(wanted), &mut copy, options, comparison)?;
            if let [Memory::Tensors(values)] = &copy {
                memories[index].fill_from(values)?;
            }
        }
        Ok(())
    }

    /// Fills memory like [`Self::fill`], together with the replicas of this rank: each reads a share and receives those
    /// of the others. A rank that has failed passes no memory, and still takes part. Collective: an all-gather for each
    /// piece.
    ///
    /// # Errors
    /// The outer error is that of a collective, the inner one is this rank's own.
    fn fill_with_replicas(
        &self,
        replicas: &ProcessGroup,
        wanted: &[Wanted],
        memories: Option<&mut [Memory]>,
        options: ReadOptions,
        comparison: &mut Option<Comparison<'_>>,
    ) -> Result<Result<(), CheckpointError>, CommError> {
        let options = ReadOptions { digest: comparison.is_some(), ..options };
        let row = Row::new(wanted);
        let memories = memories.unwrap_or_default();
        let tensors: Vec<Vec<_>> = memories.iter().map(Memory::tensors).collect();
        let mut outcome = Ok(());
        let mut guard = StorageGuard::take(&tensors.iter().flatten().collect::<Vec<_>>())
            .map_err(|error| outcome = Err(error.into()))
            .ok();
        let (of_tensors, overlapping) = match &mut guard {
            Some(guard) if !memories.is_empty() => {
                let Buffers { of_tensors, overlapping } = Buffers::lent(wanted, memories, &tensors, guard);
                (of_tensors, overlapping)
            }
            _ => (wanted.iter().map(|_| None).collect(), Vec::new()),
        };
        // Shares that have no memory to go to are received into spare memory.
        let mut spare: Vec<Vec<u8>> = Vec::new();
        for (wanted, buffers) in wanted.iter().zip(&of_tensors) {
            let element = wanted.dtype.size_in_bytes() as usize;
            let length = |bounds: &TensorBox| if buffers.is_none() { bounds.numel() * element } else { 0 };
            spare.extend(wanted.boxes.iter().map(|bounds| vec![0; length(bounds)]));
        }
        let mut spare = spare.iter_mut();
        let mut places: Vec<&mut [u8]> = Vec::new();
        for (wanted, buffers) in wanted.iter().zip(of_tensors) {
            let spare: Vec<&mut [u8]> = spare.by_ref().take(wanted.boxes.len()).map(Vec::as_mut_slice).collect();
            places.extend(buffers.unwrap_or(spare));
        }
        for shares in row.shares(replicas.world_size()) {
            let own = &shares[replicas.rank()];
            let mut bytes = vec![0; own.len()];
            if outcome.is_ok() {
                outcome = self.read_share(&row, own, wanted, &mut bytes, options, comparison);
            }
            let counts: Vec<usize> = shares.iter().map(ExactSizeIterator::len).collect();
            let piece = shares.iter().map(|share| share.start).min().unwrap_or(0)
                ..shares.iter().map(|share| share.end).max().unwrap_or(0);
            let mut outputs = Vec::new();
            let mut rest = places.iter_mut().enumerate();
            for part in row.boxes_in(&piece) {
                let place = rest.find(|(index, _)| *index == part.place);
                outputs.extend(place.map(|(_, place)| &mut place[part.bytes]));
            }
            replicas.all_gather_uneven_into_slices(&mut outputs, &counts, &bytes)?;
        }
        drop(places);
        drop(guard);
        Ok(outcome.and_then(|()| self.fill_overlapping(overlapping, wanted, memories, options, comparison)))
    }

    /// Reads this rank's share of a row.
    fn read_share(
        &self,
        row: &Row,
        share: &Range<usize>,
        wanted: &[Wanted],
        mut bytes: &mut [u8],
        options: ReadOptions,
        comparison: &mut Option<Comparison<'_>>,
    ) -> Result<(), CheckpointError> {
        let requests = row.requests(wanted, share, |wanted, boxes| self.request_of(wanted, boxes));
        let mut destinations = Vec::with_capacity(requests.len());
        for request in requests.iter().cloned() {
            let element = request.dtype.size_in_bytes() as usize;
            let mut buffers = Vec::with_capacity(request.boxes.len());
            for bounds in &request.boxes {
                let (buffer, rest) = bytes.split_at_mut(bounds.numel() * element);
                buffers.push(buffer);
                bytes = rest;
            }
            destinations.push(Destination { request, buffers });
        }
        let done = self.checkpoint.read(destinations, options)?;
        if let Some(comparison) = comparison {
            for (request, sums) in requests.iter().zip(&done.sums) {
                comparison.add(&request.fqn, &request.boxes, sums);
            }
        }
        Ok(())
    }
}

/// The memory that is lent for a load, as bytes.
struct Buffers<'b> {
    /// For each tensor the bytes of each of its boxes; `None` for a tensor that cannot be lent.
    of_tensors: Vec<Option<Vec<&'b mut [u8]>>>,
    /// The indices of the tensors that share some of their elements with others.
    overlapping: Vec<usize>,
}

impl<'b> Buffers<'b> {
    /// Returns the bytes of `memories`, whose tensors the guard lends.
    fn lent(
        wanted: &[Wanted],
        memories: &'b mut [Memory],
        tensors: &[Vec<Tensor>],
        guard: &'b mut StorageGuard,
    ) -> Self {
        let is_again = repeated(wanted, tensors, guard);
        let mut slices = guard.bytes_mut().into_iter();
        let mut lent = Buffers { of_tensors: Vec::with_capacity(wanted.len()), overlapping: Vec::new() };
        for (index, (memory, tensors)) in memories.iter_mut().zip(tensors).enumerate() {
            let own: Vec<Option<&mut [u8]>> = slices.by_ref().take(tensors.len()).collect();
            let buffers: Option<Vec<&mut [u8]>> = match memory.raw_bytes_mut() {
                Some(bytes) => Some(vec![bytes]),
                None => own.into_iter().collect(),
            };
            // If several wanted tensors are one tensor in memory, only the first is read.
            if buffers.is_none() && !is_again[index] {
                lent.overlapping.push(index);
            }
            lent.of_tensors.push(buffers);
        }
        lent
    }
}

/// Returns for each wanted tensor whether an earlier one has the same boxes in the same memory, as tied parameters
/// have. The guard holds all the tensors of one wanted tensor next to each other.
fn repeated(wanted: &[Wanted], tensors: &[Vec<Tensor>], guard: &StorageGuard) -> Vec<bool> {
    let owners: Vec<usize> =
        tensors.iter().enumerate().flat_map(|(index, tensors)| std::iter::repeat_n(index, tensors.len())).collect();
    let mut repeated = Vec::with_capacity(wanted.len());
    let mut first = 0;
    for (wanted_here, tensors) in wanted.iter().zip(tensors) {
        let same: Option<Vec<usize>> = (first..first + tensors.len()).map(|at| guard.same_as(at)).collect();
        first += tensors.len();
        // A tensor without shards has no memory that another could have.
        let before = same.and_then(|same| Some((*same.first()?, same)));
        repeated.push(before.is_some_and(|(at, same)| {
            let before = owners[at];
            wanted[before].boxes == wanted_here.boxes && same.iter().all(|&at| owners[at] == before)
        }));
    }
    repeated
}

impl Source for CheckpointSource<'_> {
    type Error = CheckpointError;

    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn values(&self, positions: &[usize]) -> Result<Vec<StateValue>, CheckpointError> {
        // All tensors are read together.
        let wanted: Vec<Wanted> =
            positions.iter().filter_map(|&position| Wanted::whole(&self.schema, position)).collect();
        let memories = wanted.iter().map(|wanted| Memory::fresh(wanted.dtype, &wanted.shape, &wanted.boxes));
        let mut memories = memories.collect::<Result<Vec<_>, _>>()?;
        let mut comparison = Comparison::with(self.checkpoint);
        self.fill(&wanted, &mut memories, ReadOptions::default(), &mut comparison)?;
        comparison.map_or(Ok(()), |comparison| comparison.check_here())?;
        let mut tensors: HashMap<usize, Memory> = wanted.iter().map(|wanted| wanted.position).zip(memories).collect();
        let mut values = Vec::with_capacity(positions.len());
        for &position in positions {
            values.push(match tensors.remove(&position) {
                Some(memory) => memory.into_value(true, &candle_core::Device::Cpu)?,
                None => {
                    let value = self.checkpoint.read_value(self.key(position))?;
                    check_value(self.checkpoint, self.key(position), &value)?;
                    value.into()
                }
            });
        }
        Ok(values)
    }

    fn locate(
        &mut self,
        group: &ProcessGroup,
        operation: &'static str,
        wanted: &[Wanted],
        _: &dyn Fn(usize, usize) -> Option<Vec<TensorBox>>,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        let requests: Vec<LoadRequest> = wanted.iter().map(|wanted| self.request(wanted)).collect();
        // This finds boxes that no chunks cover, and files that are missing or too short, before anything changes.
        let checked = self.checkpoint.check_read(&requests, ReadPlanOptions::default());
        // Ranks must have the same digests, since all or none compare what they load with them.
        let digests = self.checkpoint.digests().map(|digests| digests.root().to_string());
        let mut hasher = XxHash3_64::new();
        digests.hash(&mut hasher);
        let checked = checked.map(|_| ()).map_err(CheckpointError::from);
        CheckpointError::agree(group, operation, Some(hasher.finish()), checked)?;
        let shares = options.read_once.unwrap_or_else(|| self.checkpoint.directory().is_object_store());
        self.replicas = if shares { replicas(group, wanted)? } else { None };
        Ok(())
    }

    fn read(
        &mut self,
        group: &ProcessGroup,
        operation: &'static str,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
        options: &LoadOptions,
    ) -> Result<(), CheckpointError> {
        let mut comparison = Comparison::with(self.checkpoint);
        let read = match &self.replicas {
            None => self.read_windows(wanted, lend, options, &mut comparison),
            Some(replicas) => {
                let read = self.read_with_replicas(replicas, wanted, lend, options, &mut comparison)?;
                // If a rank failed to read its share, the others lack it too, so all of them have to fail.
                CheckpointError::agree(group, operation, None, read)
            }
        };
        // A rank that failed takes part all the same: the others compare what they have.
        let compared = comparison.map_or(Ok(()), |comparison| comparison.check(group));
        match compared {
            Err(error @ CheckpointError::Comm(_)) => Err(error),
            compared => read.and(compared),
        }
    }
}

impl CheckpointSource<'_> {
    /// Reads all that is wanted, some of it at a time.
    fn read_windows(
        &self,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
        options: &LoadOptions,
        comparison: &mut Option<Comparison<'_>>,
    ) -> Result<(), CheckpointError> {
        let options = ReadOptions { threads: options.threads, ..ReadOptions::default() };
        let mut first = 0;
        while first < wanted.len() {
            let window = window(&wanted[first..]);
            let positions = first..first + window;
            // Ask for the memory of a window of tensors, fill all of it, and give it back in the same order.
            let mut memories = positions.clone().map(|index| lend.lend(index)).collect::<Result<Vec<_>, _>>()?;
            self.fill(&wanted[positions.clone()], &mut memories, options, comparison)?;
            positions.zip(memories).try_for_each(|(index, memory)| lend.filled(index, memory))?;
            first += window;
        }
        Ok(())
    }

    /// Reads all that is wanted in windows, together with the replicas of this rank.
    ///
    /// # Errors
    /// The outer error is that of a collective, the inner one is this rank's own.
    fn read_with_replicas(
        &self,
        replicas: &ProcessGroup,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
        options: &LoadOptions,
        comparison: &mut Option<Comparison<'_>>,
    ) -> Result<Result<(), CheckpointError>, CommError> {
        let options = ReadOptions { threads: options.threads, ..ReadOptions::default() };
        let mut outcome: Result<(), CheckpointError> = Ok(());
        let mut first = 0;
        while first < wanted.len() {
            let positions = first..first + window(&wanted[first..]);
            let window = &wanted[positions.clone()];
            let lent = if outcome.is_ok() {
                positions.clone().map(|index| lend.lend(index)).collect::<Result<Vec<_>, _>>()
            } else {
                Ok(Vec::new())
            };
            let mut memories = lent.unwrap_or_else(|error| {
                outcome = Err(error.into());
                Vec::new()
            });
            let own = outcome.is_ok().then_some(&mut memories[..]);
            let filled = self.fill_with_replicas(replicas, window, own, options, comparison)?;
            if outcome.is_ok() {
                let mut lent = positions.clone().zip(memories);
                outcome = filled.and_then(|()| Ok(lent.try_for_each(|(index, memory)| lend.filled(index, memory))?));
            }
            first = positions.end;
        }
        Ok(outcome)
    }
}

/// Returns how many of the wanted tensors to read at once: at least one.
fn window(wanted: &[Wanted]) -> usize {
    let mut bytes: usize = 0;
    for (index, wanted) in wanted.iter().enumerate() {
        let elements: usize = wanted.boxes.iter().map(TensorBox::numel).sum();
        bytes = bytes.saturating_add(elements.saturating_mul(wanted.dtype.size_in_bytes() as usize));
        // A tensor that is larger than the window is read by itself.
        if index > 0 && bytes > WINDOW {
            return index;
        }
    }
    wanted.len()
}

/// Returns the description of a checkpoint's entry in a schema.
fn leaf(entry: &Entry) -> Leaf {
    match entry {
        Entry::Bytes(_) => Leaf::Plain,
        Entry::Tensor(tensor) => Leaf::Whole { dtype: tensor.properties.dtype, shape: tensor.shape.clone() },
    }
}

/// Returns the path that has a flat key as its only part.
fn flat_path(key: &str) -> KeyPath {
    KeyPath(vec![PathPart::Key(key.to_owned())])
}
