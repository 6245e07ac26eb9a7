//! A checkpoint of any format as the source of a load: each rank reads the bytes that it needs, and
//! nothing else.

use std::collections::{HashMap, HashSet};

use candle_core::{Device, Tensor};
use fsdp_comm::{CommError, ProcessGroup};
use fsdp_flat::storage::{StorageGuard, zeroed_vec};
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::metadata::Entry;
use fsdp_formats::plan::LoadRequest;
use fsdp_formats::reader::{Destination, ReadOptions};
use fsdp_layout::{ErrorKind, Failure as _, KeyPath, TensorBox};
use fsdp_state::engine::{LoadCall, Wanted, WantedOn, check_tied_values, want_tied};
use fsdp_state::{
    Leaf, Lend, LoadError as _, Memory, Schema, Source, StateDict, StateError, StateValue,
    lent_bytes, set_element,
};
use indexmap::IndexMap;

use crate::compare::{Comparison, check_value};
use crate::error::CheckpointError;
use crate::shared_read::{JoinedBoxes, PIECE_BYTES, find_replicas};
use crate::threads::{Access, thread_count};

/// The bytes that are lent and read at once. It is more than the threads need to be busy, and it
/// bounds the memory that values pass through on their way to a device or to another dtype.
const WINDOW_BYTES: usize = 512 << 20;

/// An open checkpoint of any format, as the source of a load.
///
/// Every rank opens the checkpoint by itself, and reads by itself unless replicas share the reading
/// ([`LoadOptions::read_once`](fsdp_state::LoadOptions::read_once)). Collectives: if the checkpoint
/// has digests, a gather of sums, by which the ranks check that all of them together have loaded
/// what was saved, and an agreement if hashes have to be checked as well; if the reading is shared,
/// an object all-gather, the all-gathers of the data and an agreement.
pub struct CheckpointSource<'a> {
    checkpoint: &'a dyn Checkpoint,
    schema: Schema,
    /// The checkpoint's keys, in the order of the schema.
    keys: Vec<String>,
    /// The ranks that load the same data as this one, if they share the reading.
    replicas: Option<ProcessGroup>,
    /// `true` if parts of tensors are read without checking hashes, because the sums over the parts
    /// of all ranks are compared with the digest of the tensor. Hashes are checked afterwards if
    /// the parts do not make up the tensor.
    is_compared: bool,
}

impl<'a> CheckpointSource<'a> {
    /// Returns a source of everything in a checkpoint, under the paths that the values had in the
    /// saved state dict. In formats that do not store paths, each path is the flat key as one part.
    #[must_use]
    pub fn new(checkpoint: &'a dyn Checkpoint) -> Self {
        Self::with_known_paths(checkpoint, &IndexMap::new())
    }

    /// Returns the same source as [`Self::new`], except that `paths` says which paths flat keys
    /// stand for in formats that do not store them.
    pub(crate) fn with_known_paths(
        checkpoint: &'a dyn Checkpoint,
        paths: &IndexMap<String, KeyPath>,
    ) -> Self {
        let paths = checkpoint.metadata().planner_data.as_ref().unwrap_or(paths);
        Self::with_paths(checkpoint, |key| {
            paths.get(key).cloned().unwrap_or_else(|| flat_path(key))
        })
    }

    /// Returns a source of everything in a checkpoint, where each path is the flat key as one part:
    /// `["model.weight"]`.
    pub(crate) fn by_flat_key(checkpoint: &'a dyn Checkpoint) -> Self {
        Self::with_paths(checkpoint, flat_path)
    }

    /// Returns a source in which `path_of_key` gives the path of each key. A schema is sorted by
    /// path, and keys follow it.
    fn with_paths(checkpoint: &'a dyn Checkpoint, path_of_key: impl Fn(&str) -> KeyPath) -> Self {
        let mut leaves: Vec<(KeyPath, Leaf, String)> = checkpoint
            .metadata()
            .entries
            .iter()
            .map(|(key, entry)| (path_of_key(key), leaf_of_entry(entry), key.clone()))
            .collect();
        leaves.sort_by(|(path, ..), (other_path, ..)| path.cmp(other_path));
        let (leaves, keys) = leaves
            .into_iter()
            .map(|(path, leaf, key)| ((path, leaf), key))
            .unzip();
        CheckpointSource {
            checkpoint,
            schema: Schema::new(leaves),
            keys,
            replicas: None,
            is_compared: false,
        }
    }

    /// Leaves out opaque plain values, which hold objects of other programs and cannot be loaded,
    /// and returns their keys. Values for which `is_state` returns `true` are kept.
    ///
    /// # Errors
    /// Values that cannot be read for another reason.
    pub(crate) fn without_foreign_objects(
        self,
        is_state: impl Fn(&KeyPath) -> bool,
    ) -> Result<(Self, Vec<String>), CheckpointError> {
        let mut foreign_keys = HashSet::new();
        for ((path, leaf), key) in self.schema.iter().zip(&self.keys) {
            if !matches!(leaf, Leaf::Plain) || is_state(path) {
                continue;
            }
            match self.checkpoint.read_value(key) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Unsafe => {
                    _ = foreign_keys.insert(key.clone())
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.without(|key| foreign_keys.contains(key)))
    }

    /// Leaves out the values whose flat keys `is_left_out` selects, and returns these keys.
    pub(crate) fn without(self, is_left_out: impl Fn(&str) -> bool) -> (Self, Vec<String>) {
        let mut leaves = Vec::new();
        let mut keys = Vec::new();
        let mut left_out = Vec::new();
        for (leaf, key) in self.schema.iter().zip(self.keys) {
            if is_left_out(&key) {
                left_out.push(key);
            } else {
                leaves.push(leaf.clone());
                keys.push(key);
            }
        }
        (
            CheckpointSource {
                schema: Schema::new(leaves),
                keys,
                ..self
            },
            left_out,
        )
    }

    /// Puts the values that `is_wanted` selects, by their positions in the schema and their paths,
    /// into a state dict: whole and on the CPU. No communication.
    ///
    /// # Errors
    /// Values that cannot be read; paths that contradict each other.
    pub(crate) fn copy_to(
        &self,
        state: &mut StateDict,
        is_wanted: impl Fn(usize, &KeyPath) -> bool,
    ) -> Result<(), CheckpointError> {
        let mut positions = Vec::new();
        let mut paths = Vec::new();
        for (position, (path, _)) in self.schema.iter().enumerate() {
            if is_wanted(position, path) {
                positions.push(position);
                paths.push(path);
            }
        }
        for (path, value) in paths.into_iter().zip(self.values(&positions)?) {
            set_element(state, path, value)?;
        }
        Ok(())
    }

    /// Returns the flat key of a position in the schema.
    fn key(&self, position: usize) -> &str {
        &self.keys[position]
    }

    /// Returns the request to the checkpoint for boxes of a tensor that is wanted.
    fn request(&self, wanted: &Wanted, boxes: Vec<TensorBox>) -> LoadRequest {
        LoadRequest {
            fqn: self.key(wanted.position).to_owned(),
            dtype: wanted.dtype,
            shape: wanted.shape.clone(),
            boxes,
        }
    }

    /// Checks that two names which become one tensor have the same values: by their digests, or by
    /// reading this rank's boxes of both, piece by piece.
    ///
    /// # Errors
    /// [`StateError::TiedNamesDiffer`]; what cannot be read.
    fn check_tied(&self, first: &Wanted, second: &Wanted) -> Result<(), CheckpointError> {
        if first.dtype == second.dtype
            && let Some(digests) = self.checkpoint.digests()
            && let Some(first_digest) = digests.get(self.key(first.position))
            && let Some(second_digest) = digests.get(self.key(second.position))
        {
            if first_digest == second_digest {
                return Ok(());
            }
            return Err(StateError::tied_values_differ(&first.key, &second.key).into());
        }
        self.checkpoint
            .check_read(&[self.request(second, second.boxes.clone())])?;
        let joined = JoinedBoxes::new(std::slice::from_ref(first));
        let request_boxes = |wanted: &Wanted, boxes: Vec<TensorBox>| self.request(wanted, boxes);
        for share in joined.shares(PIECE_BYTES, 1).into_iter().flatten() {
            for request in joined.requests(std::slice::from_ref(first), &share, request_boxes) {
                let pieces = [first, second].map(|name| Wanted {
                    boxes: request.boxes.clone(),
                    ..name.clone()
                });
                let mut memories = Vec::with_capacity(pieces.len());
                for piece in &pieces {
                    let memory = Memory::fresh(piece.dtype, &piece.shape, &piece.boxes)?;
                    memories.push(Some(memory));
                }
                Reading::new(self, ReadOptions::default()).fill(&pieces, &mut memories)?;
                if let [Some(first_values), Some(second_values)] = &memories[..] {
                    let (first, second) = (&pieces[0], &pieces[1]);
                    check_tied_values((first, first_values), (second, second_values))?;
                }
            }
        }
        Ok(())
    }

    /// Checks the hashes of what this rank has read of some tensors, by reading them again, one
    /// after the other.
    fn check_hashes(&self, fqns: &HashSet<&str>, wanted: &[Wanted]) -> Result<(), CheckpointError> {
        for tensor in wanted {
            if !fqns.contains(self.key(tensor.position)) {
                continue;
            }
            let elements: usize = tensor.boxes.iter().map(TensorBox::numel).sum();
            let mut bytes = zeroed_vec(elements * tensor.dtype.size_in_bytes() as usize)?;
            let request = self.request(tensor, tensor.boxes.clone());
            self.checkpoint.read(
                destinations(vec![request], &mut bytes),
                ReadOptions::default(),
            )?;
        }
        Ok(())
    }
}

/// A reading of a checkpoint: all that it has read is compared with the digests, if there are any.
struct Reading<'a> {
    source: &'a CheckpointSource<'a>,
    options: ReadOptions,
    comparison: Option<Comparison<'a>>,
}

impl<'a> Reading<'a> {
    /// Begins reading. Digests of what is read are computed if the checkpoint has digests to
    /// compare them with.
    fn new(source: &'a CheckpointSource<'_>, options: ReadOptions) -> Self {
        let comparison = Comparison::with_digests_of(source.checkpoint);
        Reading {
            source,
            options: ReadOptions {
                digest: comparison.is_some(),
                ..options
            },
            comparison,
        }
    }

    /// Reads boxes of tensors, and adds their sums to the comparison.
    fn read(&mut self, destinations: Vec<Destination<'_>>) -> Result<(), CheckpointError> {
        let outcome = self.source.checkpoint.read(destinations, self.options)?;
        if let Some(comparison) = &mut self.comparison {
            for (request, sums) in outcome.requests.into_iter().zip(outcome.sums) {
                comparison.record_read(request, sums);
            }
        }
        Ok(())
    }

    /// Fills memory with the wanted boxes, and adds their sums to the comparison. A tensor that has
    /// no memory is not read.
    fn fill(
        &mut self,
        wanted: &[Wanted],
        memories: &mut [Option<Memory>],
    ) -> Result<(), CheckpointError> {
        let mut guard = take_storages(memories)?;
        let lent = lent_bytes(memories.iter_mut().map(Option::as_mut), &mut guard)?;
        let mut destinations = Vec::with_capacity(wanted.len());
        for (tensor, buffers) in wanted.iter().zip(lent) {
            if let Some(buffers) = buffers {
                let request = self.source.request(tensor, tensor.boxes.clone());
                destinations.push(Destination {
                    request,
                    buffers,
                    is_compared: self.source.is_compared,
                });
            }
        }
        self.read(destinations)
    }

    /// Reads all that is wanted in windows, together with the replicas of this rank if they share
    /// the reading.
    ///
    /// # Errors
    /// The outer error is that of a collective, the inner one is this rank's own.
    fn read_windows(
        &mut self,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
    ) -> Result<Result<(), CheckpointError>, CommError> {
        let mut outcome: Result<(), CheckpointError> = Ok(());
        // Replicas that read together must have the same windows.
        let window_bytes = match self.source.replicas {
            Some(_) => WINDOW_BYTES,
            None => lend.window_bytes(),
        };
        let mut window_start = 0;
        while window_start < wanted.len() {
            let indices = window_start
                ..window_start + window_tensor_count(&wanted[window_start..], window_bytes);
            let window = &wanted[indices.clone()];
            // Ask for the memory of a window of tensors, fill all of it, and give it back in the
            // same order. A rank that has failed asks for none, and only takes part in the
            // collectives.
            let mut lent = outcome.and_then(|()| {
                let memories: Result<Vec<_>, _> =
                    indices.clone().map(|index| lend.lend(index)).collect();
                Ok(memories?)
            });
            let filled = match (&self.source.replicas, &mut lent) {
                (Some(replicas), Ok(memories)) => {
                    self.fill_with_replicas(replicas, window, memories)?
                }
                (Some(replicas), Err(_)) => self.fill_with_replicas(replicas, window, &mut [])?,
                (None, Ok(memories)) => self.fill(window, memories),
                (None, Err(_)) => Ok(()),
            };
            outcome = lent.and_then(|memories| {
                filled?;
                for (index, memory) in indices.clone().zip(memories) {
                    if let Some(memory) = memory {
                        lend.filled(index, memory)?;
                    }
                }
                Ok(())
            });
            window_start = indices.end;
        }
        Ok(outcome)
    }

    /// Fills memory as [`Self::fill`] does, but together with the replicas of this rank, which all
    /// want the same: each replica reads a share of it and receives the shares of the others. A
    /// rank that has failed passes no memory, and still takes part. Collective: an all-gather for
    /// each piece.
    ///
    /// # Errors
    /// The outer error is that of a collective, the inner one is this rank's own.
    fn fill_with_replicas(
        &mut self,
        replicas: &ProcessGroup,
        wanted: &[Wanted],
        memories: &mut [Option<Memory>],
    ) -> Result<Result<(), CheckpointError>, CommError> {
        let joined = JoinedBoxes::new(wanted);
        // Step 1: lend the bytes of the memory, and find the buffer of each box there. A rank that
        // fails here goes on without memory, because the replicas wait for it in the all-gathers.
        let mut guard = None;
        let mut lent = Vec::new();
        let mut outcome = take_storages(memories).and_then(|storages| {
            let memories = memories.iter_mut().map(Option::as_mut);
            lent = lent_bytes(memories, guard.insert(storages))?;
            Ok(())
        });
        lent.resize_with(wanted.len(), || None);
        let mut box_buffers: Vec<Option<&mut [u8]>> = Vec::new();
        for (tensor, buffers) in wanted.iter().zip(lent) {
            match buffers {
                Some(buffers) => box_buffers.extend(buffers.into_iter().map(Some)),
                None => box_buffers.extend(tensor.boxes.iter().map(|_| None)),
            }
        }
        // Step 2: piece by piece, read this rank's share, and gather the shares of all replicas
        // into the buffers.
        for shares in joined.shares(PIECE_BYTES, replicas.world_size()) {
            let own_share = &shares[replicas.rank()];
            let mut bytes = vec![0; own_share.len()];
            if outcome.is_ok() {
                let requests = joined.requests(wanted, own_share, |wanted, boxes| {
                    self.source.request(wanted, boxes)
                });
                outcome = self.read(destinations(requests, &mut bytes));
            }
            let counts: Vec<usize> = shares.iter().map(ExactSizeIterator::len).collect();
            // The shares follow each other, and there is one for each replica.
            let piece = shares[0].start..shares[shares.len() - 1].end;
            // Parts of boxes that have no buffer are received into spare memory.
            let mut spare_memory = vec![0; piece.len()];
            let mut spare = spare_memory.as_mut_slice();
            let mut outputs = Vec::new();
            let mut remaining_buffers = box_buffers.iter_mut().enumerate();
            for part in joined.box_parts_in(&piece) {
                let box_buffer = remaining_buffers.find(|(index, _)| *index == part.joined_index);
                let (spare_part, spare_rest) =
                    std::mem::take(&mut spare).split_at_mut(part.byte_range.len());
                spare = spare_rest;
                outputs.push(match box_buffer {
                    Some((_, Some(box_buffer))) => &mut box_buffer[part.byte_range],
                    _ => spare_part,
                });
            }
            replicas.all_gather_uneven_into_slices(&mut outputs, &counts, &bytes)?;
        }
        Ok(outcome)
    }
}

/// Cuts `bytes` into the buffers of all boxes of these requests, in their order, and returns the
/// requests with their buffers. Panics if there are too few bytes.
fn destinations(requests: Vec<LoadRequest>, mut bytes: &mut [u8]) -> Vec<Destination<'_>> {
    let mut destinations = Vec::with_capacity(requests.len());
    for request in requests {
        let element_bytes = request.dtype.size_in_bytes() as usize;
        let mut buffers = Vec::with_capacity(request.boxes.len());
        for bounds in &request.boxes {
            let (buffer, later_bytes) = bytes.split_at_mut(bounds.numel() * element_bytes);
            buffers.push(buffer);
            bytes = later_bytes;
        }
        destinations.push(Destination::new(request, buffers));
    }
    destinations
}

/// Takes the storages out of the tensors of some memories, until the guard is dropped.
fn take_storages(memories: &[Option<Memory>]) -> Result<StorageGuard, CheckpointError> {
    let tensors: Vec<Tensor> = memories
        .iter()
        .flatten()
        .flat_map(Memory::tensors)
        .collect();
    Ok(StorageGuard::take(&tensors.iter().collect::<Vec<_>>())?)
}

impl Source for CheckpointSource<'_> {
    type Error = CheckpointError;

    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn values(&self, positions: &[usize]) -> Result<Vec<StateValue>, CheckpointError> {
        // All tensors are read together.
        let wanted: Vec<Wanted> = positions
            .iter()
            .filter_map(|&position| Wanted::whole(&self.schema, position))
            .collect();
        let mut memories = Vec::with_capacity(wanted.len());
        for tensor in &wanted {
            let memory = Memory::fresh(tensor.dtype, &tensor.shape, &tensor.boxes)?;
            memories.push(Some(memory));
        }
        let mut reading = Reading::new(self, ReadOptions::default());
        reading.fill(&wanted, &mut memories)?;
        if let Some(comparison) = &reading.comparison {
            comparison.check_whole_tensors()?;
        }
        let mut tensors: HashMap<usize, Memory> = HashMap::new();
        for (tensor, memory) in wanted.iter().zip(memories) {
            tensors.extend(memory.map(|memory| (tensor.position, memory)));
        }
        let mut values = Vec::with_capacity(positions.len());
        for position in positions {
            values.push(match tensors.remove(position) {
                Some(memory) => memory.into_value(true, &Device::Cpu)?,
                None => {
                    let key = self.key(*position);
                    let value = self.checkpoint.read_value(key)?;
                    check_value(self.checkpoint, key, &value)?;
                    value.into()
                }
            });
        }
        Ok(values)
    }

    fn contents(&self) -> String {
        // Ranks must have the same digests, since all or none compare what they load with them.
        // Without any, two steps of a run are known by their names only.
        if let Some(digests) = self.checkpoint.digests() {
            return format!("a checkpoint with the digest {}", digests.root());
        }
        let name = self.checkpoint.path().file_name().unwrap_or_default();
        format!("a checkpoint without digests, `{}`", name.display())
    }

    fn check(&self, wanted: &[Wanted]) -> Result<(), CheckpointError> {
        let requests: Vec<LoadRequest> = wanted
            .iter()
            .map(|wanted| self.request(wanted, wanted.boxes.clone()))
            .collect();
        // This finds boxes that no chunks cover, and files that are missing or too short, before
        // anything changes.
        self.checkpoint.check_read(&requests)?;
        for first in wanted {
            for &position in &first.tied_positions {
                self.check_tied(first, &want_tied(&self.schema, first, position)?)?;
            }
        }
        Ok(())
    }

    fn locate(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        _: &WantedOn<'_>,
    ) -> Result<(), CheckpointError> {
        let is_shared = call
            .options
            .read_once
            .unwrap_or_else(|| self.checkpoint.directory().is_object_store());
        self.replicas = if is_shared {
            find_replicas(call.group, wanted)?
        } else {
            None
        };
        // A rank that is alone knows at once which tensors it reads in part only. Replicas check
        // the hashes of their shares.
        self.is_compared = self.checkpoint.digests().is_some()
            && call.group.world_size() > 1
            && self.replicas.is_none();
        Ok(())
    }

    fn read(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
    ) -> Result<(), CheckpointError> {
        let is_object_store = self.checkpoint.directory().is_object_store();
        let threads = thread_count(
            Access::Read,
            call.options.threads,
            call.group,
            is_object_store,
        );
        let options = ReadOptions {
            threads,
            ..ReadOptions::default()
        };
        let mut reading = Reading::new(self, options);
        // If a collective among the replicas fails, only the replicas know. So the failure counts
        // as this rank's own error here.
        let mut outcome = reading
            .read_windows(wanted, lend)
            .unwrap_or_else(|error| Err(error.into()));
        if self.replicas.is_some() {
            // If a rank failed to read its share, the others lack it too, so all of them have to
            // fail.
            outcome = CheckpointError::agree(call.group, call.operation, None, outcome);
        }
        // A rank that failed to read takes part nevertheless, because the others compare what they
        // have read.
        let Some(comparison) = reading.comparison else {
            return outcome;
        };
        let compared = comparison.check(call.group, call.operation, self.is_compared, |fqns| {
            self.check_hashes(fqns, wanted)
        });
        match compared {
            Err(error @ CheckpointError::Comm(_)) => Err(error),
            compared => outcome.and(compared),
        }
    }
}

/// Returns how many of the wanted tensors to read at once: at least one.
fn window_tensor_count(wanted: &[Wanted], window_bytes: usize) -> usize {
    let mut bytes: usize = 0;
    for (index, tensor) in wanted.iter().enumerate() {
        let elements: usize = tensor.boxes.iter().map(TensorBox::numel).sum();
        bytes =
            bytes.saturating_add(elements.saturating_mul(tensor.dtype.size_in_bytes() as usize));
        // A tensor that is larger than the window is read by itself.
        if index > 0 && bytes > window_bytes {
            return index;
        }
    }
    wanted.len()
}

/// Returns the description of a checkpoint's entry in a schema.
fn leaf_of_entry(entry: &Entry) -> Leaf {
    match entry {
        Entry::Bytes(_) => Leaf::Plain,
        Entry::Tensor(tensor) => Leaf::Whole {
            dtype: tensor.properties.dtype,
            shape: tensor.shape.clone(),
        },
    }
}

/// Returns the path that has a flat key as its only part.
fn flat_path(key: &str) -> KeyPath {
    KeyPath::from_key(key)
}
