//! Reading parts of many tensors at once.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp_layout::{DType, TensorBox};
use tracing::{debug_span, info_span};

use super::CheckpointReader;
use super::items::{ReadError, byte_length};
use crate::checkpoint::lookup::{check_length, tensor_of};
use crate::error::FileError;
use crate::metadata::{Chunk, Replica, StorageInfo};
use crate::plan::{LoadPlan, LoadPlanError, LoadRequest, ReadPlanOptions, plan_load};
use crate::storage::read_at::BlockReader;
use crate::threads::on_threads;

/// What is wanted of a tensor, and where it goes.
#[derive(Debug)]
pub struct Destination<'d> {
    /// Key, dtype, shape and boxes.
    pub request: LoadRequest,
    /// For each box its bytes, row-major, in the dtype of the *checkpoint* (which is the request's, unless casts are
    /// allowed).
    pub buffers: Vec<&'d mut [u8]>,
}

/// How to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOptions {
    /// How strict to be with what is there.
    pub plan: ReadPlanOptions,
    /// Threads that read; four times as many from an object store, where they mostly wait.
    pub threads: usize,
}

impl Default for ReadOptions {
    fn default() -> Self {
        ReadOptions { plan: ReadPlanOptions::default(), threads: default_threads() }
    }
}

/// As many threads as there are cores, up to four: more do not make a disk faster.
pub(crate) fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(4))
}

/// Destinations larger than this are cut, so that threads can share them.
const LARGE_DESTINATION: usize = 64 << 20;

/// Boxes of one tensor that one thread fills.
struct Job<'d> {
    request: usize,
    boxes: Vec<(TensorBox, &'d mut [u8])>,
}

impl CheckpointReader {
    /// Reads one box of a tensor into its row-major bytes, in the checkpoint's dtype.
    ///
    /// ```no_run
    /// use fsdp_dcp::reader::CheckpointReader;
    /// use fsdp_layout::TensorBox;
    /// let checkpoint = CheckpointReader::open("checkpoints/step-20")?;
    /// // Rows 2 and 3 of a [1024, 768] tensor of f32.
    /// let mut rows = vec![0; 2 * 768 * 4];
    /// checkpoint.read_box("model.wte.weight", &TensorBox::new(vec![2, 0], vec![2, 768]), &mut rows)?;
    /// # Ok::<(), fsdp_dcp::FileError>(())
    /// ```
    pub fn read_box(&self, fqn: &str, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        let request = match self.metadata.tensor(fqn) {
            // Dtype and shape are taken on trust: whoever asks this way takes what there is.
            Some(tensor) => LoadRequest {
                fqn: fqn.to_owned(),
                dtype: tensor.properties.dtype,
                shape: tensor.shape.clone(),
                boxes: vec![bounds.clone()],
            },
            None => LoadRequest { fqn: fqn.to_owned(), dtype: DType::U8, shape: Vec::new(), boxes: Vec::new() },
        };
        self.read(vec![Destination { request, buffers: vec![dst] }], ReadOptions::default())?;
        Ok(())
    }

    /// Reads a whole tensor.
    pub fn read_tensor(&self, fqn: &str) -> Result<Vec<u8>, FileError> {
        let tensor = self.metadata.tensor(fqn).ok_or_else(|| match self.metadata.entries.contains_key(fqn) {
            true => LoadPlanError::Kind { fqn: fqn.to_owned(), saved: "value", wanted: "tensor" },
            false => LoadPlanError::Missing { fqn: fqn.to_owned() },
        })?;
        // Planned before allocating, so that an absurd shape allocates nothing.
        let bounds = TensorBox::whole(&tensor.shape);
        let dtype = tensor.properties.dtype;
        let request =
            LoadRequest { fqn: fqn.to_owned(), dtype, shape: tensor.shape.clone(), boxes: vec![bounds.clone()] };
        plan_load(&self.metadata, std::slice::from_ref(&request), ReadPlanOptions::default())?;
        let length = byte_length(&bounds, dtype).filter(|&length| self.is_plausible(&tensor.chunks, length));
        let length = length.ok_or_else(|| LoadPlanError::Size {
            fqn: fqn.to_owned(),
            saved: tensor.shape.clone(),
            wanted: Vec::new(),
        })?;
        let mut bytes = vec![0; length];
        self.read(vec![Destination { request, buffers: vec![&mut bytes] }], ReadOptions::default())?;
        Ok(bytes)
    }

    /// Whether items of these lengths can hold so many bytes: transforms apart, no file expands.
    fn is_plausible(&self, chunks: &[Chunk], length: usize) -> bool {
        let stored = chunks.iter().filter_map(|chunk| chunk.stored.as_ref());
        let total = stored.fold(0u64, |total, stored| match stored.transforms.is_empty() {
            true => total.saturating_add(stored.length),
            false => u64::MAX,
        });
        length as u64 <= total
    }

    /// Checks all that can be known of a [`CheckpointReader::read`] before the bytes of tensors are read: the plan, and
    /// that the files are there and long enough.
    pub fn check_read(&self, requests: &[LoadRequest], options: ReadPlanOptions) -> Result<LoadPlan, FileError> {
        let plan = plan_load(&self.metadata, requests, options)?;
        for read in &plan.reads {
            let fqn = &requests[read.request].fqn;
            let tensor = tensor_of(&self.metadata, fqn)?;
            self.check_item(fqn, &tensor.chunks[read.chunk], tensor.properties.dtype)?;
        }
        Ok(plan)
    }

    /// Plans and reads many tensors at once: in the order of the files, by several threads, each byte once.
    ///
    /// Everything is checked first; on an error of the plan no buffer was touched. After an error while reading, what
    /// the buffers hold is unspecified. Returns the plan, which lists the requests that were missing, if that was allowed.
    pub fn read(&self, destinations: Vec<Destination<'_>>, options: ReadOptions) -> Result<LoadPlan, FileError> {
        let (requests, buffers): (Vec<_>, Vec<_>) =
            destinations.into_iter().map(|destination| (destination.request, destination.buffers)).unzip();
        let plan = plan_load(&self.metadata, &requests, options.plan)?;
        let mut jobs = self.jobs(&requests, buffers, &plan, options.threads)?;
        // The first read of each request says where its job stands in line.
        let mut position = vec![usize::MAX; requests.len()];
        for (at, read) in plan.reads.iter().enumerate().rev() {
            position[read.request] = at;
        }
        jobs.sort_by_key(|job| position[job.request]);
        let threads = options.threads.saturating_mul(self.directory.threads_per_reader()).clamp(1, jobs.len().max(1));
        let bytes: usize = jobs.iter().flat_map(|job| &job.boxes).map(|(_, buffer)| buffer.len()).sum();
        let queue = Mutex::new(jobs.into_iter());
        let failed = AtomicBool::new(false);
        let work = || -> Result<(), FileError> {
            while !failed.load(Ordering::Relaxed) {
                let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(job) = job else { break };
                let request = &requests[job.request];
                let done = debug_span!("tensor", fqn = request.fqn).in_scope(|| self.run(request, job));
                failed.fetch_or(done.is_err(), Ordering::Relaxed);
                done?;
            }
            Ok(())
        };
        info_span!("read", bytes, threads).in_scope(|| on_threads(threads, work))?;
        Ok(plan)
    }

    /// Checks the buffers, and makes a job of each tensor (several of a large one).
    fn jobs<'d>(
        &self,
        requests: &[LoadRequest],
        buffers: Vec<Vec<&'d mut [u8]>>,
        plan: &LoadPlan,
        threads: usize,
    ) -> Result<Vec<Job<'d>>, FileError> {
        let mut jobs = Vec::with_capacity(requests.len());
        let mut missing = vec![false; requests.len()];
        for &index in &plan.missing {
            missing[index] = true;
        }
        for (index, (request, buffers)) in requests.iter().zip(buffers).enumerate() {
            if missing[index] {
                continue;
            }
            let dtype = self.metadata.tensor(&request.fqn).map_or(request.dtype, |tensor| tensor.properties.dtype);
            let given: usize = buffers.iter().map(|buffer| buffer.len()).sum();
            let wrong = |planned: usize| FileError::PayloadLength {
                fqn: request.fqn.clone(),
                given: given as u64,
                planned: planned as u64,
            };
            if buffers.len() != request.boxes.len() {
                return Err(wrong(request.boxes.iter().filter_map(|bounds| byte_length(bounds, dtype)).sum()));
            }
            let mut whole = Vec::with_capacity(buffers.len());
            for (bounds, buffer) in request.boxes.iter().zip(buffers) {
                let length = byte_length(bounds, dtype).unwrap_or(usize::MAX);
                if buffer.len() != length {
                    return Err(wrong(length));
                }
                if length > LARGE_DESTINATION && threads > 1 {
                    let parts = split(bounds, buffer, dtype.size_in_bytes() as usize);
                    jobs.extend(parts.into_iter().map(|part| Job { request: index, boxes: vec![part] }));
                } else {
                    whole.push((bounds.clone(), buffer));
                }
            }
            if !whole.is_empty() {
                jobs.push(Job { request: index, boxes: whole });
            }
        }
        Ok(jobs)
    }

    fn run(&self, request: &LoadRequest, mut job: Job<'_>) -> Result<(), FileError> {
        let Some(tensor) = self.metadata.tensor(&request.fqn) else { return Ok(()) };
        for chunk in &tensor.chunks {
            if !job.boxes.iter().any(|(bounds, _)| chunk.bounds.intersect(bounds).is_some()) {
                continue;
            }
            let stored = chunk.stored.as_ref();
            let stored = stored.ok_or_else(|| FileError::NotStored { fqn: request.fqn.clone() })?;
            self.run_chunk(&request.fqn, chunk, stored, tensor.properties.dtype, &mut job)
                .map_err(|error| self.item_error(&request.fqn, stored, error))?;
        }
        Ok(())
    }

    /// Reads a box of a chunk from another of its copies, in the checkpoint's dtype.
    pub(crate) fn read_replica(&self, replica: &Replica, bounds: &TensorBox, dst: &mut [u8]) -> Result<(), FileError> {
        let Replica { fqn, bounds: Some(whole), stored } = replica else {
            return Err(FileError::NotStored { fqn: replica.fqn.clone() });
        };
        let dtype = tensor_of(&self.metadata, fqn)?.properties.dtype;
        check_length(fqn, bounds, dtype.size_in_bytes(), dst)?;
        let chunk = Chunk { bounds: whole.clone(), stored: None };
        let mut job = Job { request: 0, boxes: vec![(bounds.clone(), dst)] };
        self.run_chunk(fqn, &chunk, stored, dtype, &mut job).map_err(|error| self.item_error(fqn, stored, error))
    }

    fn run_chunk(
        &self,
        fqn: &str,
        chunk: &Chunk,
        stored: &StorageInfo,
        dtype: DType,
        job: &mut Job<'_>,
    ) -> Result<(), ReadError> {
        let located = self.locate(fqn, chunk, stored, dtype)?;
        let mut reader = BlockReader::new(located.bytes.source());
        for (bounds, buffer) in &mut job.boxes {
            if let Some(overlap) = chunk.bounds.intersect(bounds) {
                located.tensor.read(&mut reader, located.start, &chunk.bounds, &overlap, bounds, buffer)?;
            }
        }
        Ok(())
    }
}

/// Cuts a box and its bytes along its first dimension that has an extent, into parts of about [`LARGE_DESTINATION`].
fn split<'d>(bounds: &TensorBox, mut buffer: &'d mut [u8], element: usize) -> Vec<(TensorBox, &'d mut [u8])> {
    let Some(dim) = bounds.sizes.iter().position(|&size| size > 1) else { return vec![(bounds.clone(), buffer)] };
    let row = bounds.sizes[dim + 1..].iter().product::<usize>() * element;
    let rows_at_once = (LARGE_DESTINATION / row.max(1)).max(1);
    let mut parts = Vec::new();
    let mut start = 0;
    while start < bounds.sizes[dim] {
        let rows = rows_at_once.min(bounds.sizes[dim] - start);
        let mut part = bounds.clone();
        part.offsets[dim] += start;
        part.sizes[dim] = rows;
        let (now, rest) = std::mem::take(&mut buffer).split_at_mut(rows * row);
        parts.push((part, now));
        buffer = rest;
        start += rows;
    }
    parts
}
