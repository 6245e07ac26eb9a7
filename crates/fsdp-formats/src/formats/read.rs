//! Reading parts of many tensors at once, by several threads: the same for every format.

use std::collections::{BTreeSet, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_digest::{BoxPlace, Digest, StateDigest, Sum};
use fsdp_layout::boxes::checked_bytes;
use fsdp_layout::{DType, TensorBox};
use tracing::{debug_span, info_span};

use crate::error::{FileError, wrong_box};
use crate::metadata::{Metadata, TensorEntry};
use crate::payload::slot::{Slot, SlotDigest};
use crate::plan::{LoadRequest, plan_load};
use crate::storage::checked_directory::CheckedDirectory;
use crate::threads::{default_threads, lock, on_threads, unlocked};

/// The options of opening a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenOptions {
    /// `true` to check what is read against the integrity file, where there is one.
    pub verify: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { verify: true }
    }
}

/// The boxes wanted of a tensor, and where they go.
#[derive(Debug)]
pub struct Destination<'d> {
    /// Key, dtype, shape and boxes.
    pub request: LoadRequest,
    /// The bytes of each box, row-major, in the dtype of the *checkpoint* (which is the request's,
    /// unless casts are allowed).
    pub buffers: Vec<&'d mut [u8]>,
    /// `true` if the caller compares the sums of this tensor with its digest, together with those
    /// of other readers that read the rest of it. If sums are asked for and the checkpoint has such
    /// a digest, the hashes of its bytes are not checked.
    pub is_compared: bool,
}

impl<'d> Destination<'d> {
    /// Makes a destination whose bytes are checked by this read.
    #[must_use]
    pub fn new(request: LoadRequest, buffers: Vec<&'d mut [u8]>) -> Self {
        Destination {
            request,
            buffers,
            is_compared: false,
        }
    }
}

/// The options of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOptions {
    /// Threads that read; four times as many from an object store, where they mostly wait.
    pub threads: usize,
    /// `true` to sum over what is read, for whoever compares the sums with the recorded digests.
    pub digest: bool,
}

/// The outcome of a read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadDone {
    /// The sum over the elements of each box, by request, if it was asked for.
    pub sums: Vec<Vec<Sum>>,
    /// The requests, in the order of the destinations.
    pub requests: Vec<LoadRequest>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions {
            threads: default_threads(),
            digest: false,
        }
    }
}

/// The size from which destinations are cut, so that threads can share them.
pub(super) const LARGE_BOX_BYTES: usize = 64 << 20;

/// Boxes of one tensor that one thread fills.
struct FillJob<'d> {
    /// The position of the request among all.
    request_index: usize,
    /// The position in the request of the box that each slot is of.
    box_indices: Vec<usize>,
    slots: Vec<Slot<'d>>,
}

/// A request, and what was recorded of its tensor.
struct RecordedRequest<'c> {
    request: LoadRequest,
    /// The tensor in the checkpoint; `None` if it is missing.
    tensor: Option<&'c TensorEntry>,
    /// The digest of the tensor, if sums are asked for.
    digest: Option<Digest>,
    /// See [`Destination::is_compared`].
    is_compared: bool,
}

impl RecordedRequest<'_> {
    /// Returns the tensor and its digest if the request is for the tensor as a whole, in one box,
    /// so that what is read can be compared with the digest. Returns `None` otherwise, for an empty
    /// tensor, of which nothing is read, and if no digest was recorded.
    fn whole_tensor(&self) -> Option<(&TensorEntry, Digest)> {
        let tensor = self.tensor?;
        match &self.request.boxes[..] {
            [bounds] if bounds.sizes == tensor.shape && !bounds.is_empty() => {
                Some((tensor, self.digest?))
            }
            _ => None,
        }
    }
}

/// The parts of a checkpoint that a read of many tensors needs.
pub(super) struct ReadSource<'c> {
    pub(super) metadata: &'c Metadata,
    pub(super) digests: Option<&'c StateDigest>,
    pub(super) directory: &'c CheckedDirectory,
    /// Reads boxes of one tensor, as the checkpoint's format does.
    pub(super) read_boxes: &'c ReadBoxes<'c>,
}

/// A function that fills slots with boxes of one tensor.
type ReadBoxes<'c> = dyn Fn(&str, &mut [Slot<'_>]) -> Result<(), FileError> + Sync + 'c;

/// Checks the hashes of the files with whole tensors whose sums are not what was recorded: they
/// were read without checking hashes. The error tells which bytes are wrong. If none are, it
/// returns `Ok`: the sums tell the caller that something else is wrong.
fn check_files_of_differing_tensors(
    source: &ReadSource<'_>,
    requests: &[RecordedRequest<'_>],
    sums: &[Vec<Sum>],
) -> Result<(), FileError> {
    let mut differing_tensors = HashSet::new();
    for (recorded, box_sums) in requests.iter().zip(sums) {
        let Some((tensor, digest)) = recorded.whole_tensor() else {
            continue;
        };
        // A request for a whole tensor has one box, and so one sum.
        if box_sums[0].finish(tensor.properties.dtype, &tensor.shape) != digest {
            differing_tensors.insert(recorded.request.fqn.as_str());
        }
    }
    if differing_tensors.is_empty() {
        return Ok(());
    }
    let mut file_names = BTreeSet::new();
    for (fqn, _, stored) in source.metadata.stored() {
        if differing_tensors.contains(fqn) {
            file_names.insert(stored.relative_path.as_str());
        }
    }
    for name in file_names {
        let file = source.directory.file(name)?;
        file.verify_whole()
            .map_err(|error| source.directory.file_error(name, error))?;
    }
    Ok(())
}

/// Plans and reads many tensors at once: in the order of the files, by several threads, each byte
/// once.
///
/// Where sums are asked for, tensors that are read whole are checked by their digests, and by their
/// hashes only if those differ. So are tensors of which the caller compares the sums
/// ([`Destination::is_compared`]).
pub(super) fn read_in_parallel(
    source: &ReadSource<'_>,
    destinations: Vec<Destination<'_>>,
    options: ReadOptions,
) -> Result<ReadDone, FileError> {
    // Digests are needed only where sums are asked for.
    let digests = source.digests.filter(|_| options.digest);
    let mut requests = Vec::with_capacity(destinations.len());
    let mut buffers = Vec::with_capacity(destinations.len());
    for destination in destinations {
        let request = destination.request;
        requests.push(RecordedRequest {
            tensor: source.metadata.tensor(&request.fqn),
            digest: digests.and_then(|digests| digests.get(&request.fqn)),
            is_compared: destination.is_compared,
            request,
        });
        buffers.push(destination.buffers);
    }
    // Nothing is read before all requests and all buffers are known to be right.
    let planned_reads = plan_load(
        source.metadata,
        requests.iter().map(|recorded| &recorded.request),
    )?;
    let mut jobs = make_jobs(&requests, buffers, options.threads)?;
    // The jobs are taken in the order of the files: a job stands where the first read of its
    // request does.
    let mut first_positions = vec![usize::MAX; requests.len()];
    for (position, read) in planned_reads.iter().enumerate().rev() {
        first_positions[read.request] = position;
    }
    jobs.sort_by_key(|job| first_positions[job.request_index]);
    if options.digest {
        for job in &mut jobs {
            let recorded = &requests[job.request_index];
            add_slot_digests(job, recorded)?;
            // The digest says more than the hashes do, so these need not be checked too.
            let is_compared = (recorded.digest.is_some() && recorded.is_compared)
                || recorded.whole_tensor().is_some();
            for slot in &mut job.slots {
                slot.is_compared = is_compared;
            }
        }
    }
    let mut sums = Vec::with_capacity(requests.len());
    for recorded in &requests {
        sums.push(vec![Sum::default(); recorded.request.boxes.len()]);
    }
    let shared_sums = Mutex::new(sums);
    let threads = options
        .threads
        .saturating_mul(source.directory.threads_per_reader())
        .clamp(1, jobs.len().max(1));
    let bytes: usize = jobs
        .iter()
        .flat_map(|job| &job.slots)
        .map(|slot| slot.bytes.len())
        .sum();
    let queue = Mutex::new(jobs.into_iter());
    let failed = AtomicBool::new(false);
    info_span!("read", bytes, threads).in_scope(|| {
        on_threads(threads, || {
            // After an error the others stop at their next job.
            while !failed.load(Ordering::Relaxed) {
                let job = lock(&queue).next();
                let Some(mut job) = job else { break };
                let fqn = &requests[job.request_index].request.fqn;
                let outcome = debug_span!("tensor", fqn)
                    .in_scope(|| (source.read_boxes)(fqn, &mut job.slots));
                failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
                outcome?;
                let mut all_sums = lock(&shared_sums);
                for (&box_index, slot) in job.box_indices.iter().zip(&job.slots) {
                    if let Some(digest) = &slot.digest {
                        all_sums[job.request_index][box_index].add(digest.sum());
                    }
                }
            }
            Ok(())
        })
    })?;
    let mut sums = unlocked(shared_sums);
    if options.digest {
        check_files_of_differing_tensors(source, &requests, &sums)?;
    } else {
        sums.clear();
    }
    Ok(ReadDone {
        sums,
        requests: requests
            .into_iter()
            .map(|recorded| recorded.request)
            .collect(),
    })
}

/// Makes each slot of a job sum over the elements that it is filled with.
fn add_slot_digests(
    job: &mut FillJob<'_>,
    recorded: &RecordedRequest<'_>,
) -> Result<(), FileError> {
    let tensor = recorded
        .tensor
        .expect("a job is made only for a tensor that is there");
    for slot in &mut job.slots {
        let element_bytes = tensor.properties.dtype.size_in_bytes() as usize;
        let place = BoxPlace::new(&tensor.shape, &slot.bounds, element_bytes)
            .map_err(|error| wrong_box(&recorded.request.fqn, &error))?;
        slot.digest = Some(SlotDigest::new(place));
    }
    Ok(())
}

/// Checks the lengths of the buffers, and returns a job for each tensor; several for a large one,
/// none for one without bytes.
fn make_jobs<'d>(
    requests: &[RecordedRequest<'_>],
    buffers: Vec<Vec<&'d mut [u8]>>,
    threads: usize,
) -> Result<Vec<FillJob<'d>>, FileError> {
    let mut jobs = Vec::with_capacity(requests.len());
    for (request_index, (recorded, buffers)) in requests.iter().zip(buffers).enumerate() {
        let request = &recorded.request;
        let tensor = recorded.tensor.expect("the plan has found each tensor");
        let dtype = tensor.properties.dtype;
        check_buffers(request, dtype, &buffers)?;
        // All boxes of a tensor go into one job, as a file's blocks may hold parts of several;
        // only a large box is cut, so that the threads share it.
        let mut job = FillJob {
            request_index,
            box_indices: Vec::new(),
            slots: Vec::with_capacity(buffers.len()),
        };
        for (box_index, (bounds, buffer)) in request.boxes.iter().zip(buffers).enumerate() {
            if buffer.len() > LARGE_BOX_BYTES && threads > 1 {
                for part in split_large_box(bounds, buffer, dtype.size_in_bytes() as usize) {
                    jobs.push(FillJob {
                        request_index,
                        box_indices: vec![box_index],
                        slots: vec![part],
                    });
                }
            } else if !buffer.is_empty() {
                job.box_indices.push(box_index);
                job.slots.push(Slot::new(bounds.clone(), buffer));
            }
        }
        if !job.slots.is_empty() {
            jobs.push(job);
        }
    }
    Ok(jobs)
}

/// Checks that there is one buffer for each box, and that it has the length of the box in bytes.
/// Otherwise the error is [`FileError::PayloadLength`].
pub(crate) fn check_buffers(
    request: &LoadRequest,
    dtype: DType,
    buffers: &[&mut [u8]],
) -> Result<(), FileError> {
    let box_lengths = request
        .boxes
        .iter()
        .map(|bounds| checked_bytes(&bounds.sizes, dtype));
    let planned = if buffers.len() == request.boxes.len() {
        match box_lengths
            .zip(buffers)
            .find(|(length, buffer)| *length != Some(buffer.len()))
        {
            None => return Ok(()),
            Some((length, _)) => length.unwrap_or(usize::MAX),
        }
    } else {
        box_lengths.flatten().sum()
    };
    Err(FileError::PayloadLength {
        fqn: request.fqn.clone(),
        given: buffers.iter().map(|buffer| buffer.len() as u64).sum(),
        planned: planned as u64,
    })
}

/// Returns the parts of a box and its bytes, cut along its first dimension that has an extent, into
/// parts of about [`LARGE_BOX_BYTES`].
fn split_large_box<'d>(
    bounds: &TensorBox,
    mut buffer: &'d mut [u8],
    element_bytes: usize,
) -> Vec<Slot<'d>> {
    let Some(dim) = bounds.sizes.iter().position(|&size| size > 1) else {
        return vec![Slot::new(bounds.clone(), buffer)];
    };
    let row_bytes = bounds.sizes[dim + 1..].iter().product::<usize>() * element_bytes;
    let rows_at_once = (LARGE_BOX_BYTES / row_bytes.max(1)).max(1);
    let mut parts = Vec::new();
    let mut start = 0;
    while start < bounds.sizes[dim] {
        let rows = rows_at_once.min(bounds.sizes[dim] - start);
        let mut part_bounds = bounds.clone();
        part_bounds.offsets[dim] += start;
        part_bounds.sizes[dim] = rows;
        let (part_buffer, rest) = std::mem::take(&mut buffer).split_at_mut(rows * row_bytes);
        parts.push(Slot::new(part_bounds, part_buffer));
        buffer = rest;
        start += rows;
    }
    parts
}
