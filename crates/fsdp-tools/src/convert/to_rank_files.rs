//! Writes a model for tensor-parallel ranks: each rank's parts of the tensors go to files of their
//! own, which inference servers read.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fsdp_digest::Sum;
use fsdp_formats::FileError;
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_formats::internals::{
    RANK_NOTE, RankNote, SliceNote, check_expansion, rank_file_name, stream_boxes, tensor_of,
    wrong_box,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::writer::PayloadSource;
use fsdp_layout::boxes::copy_runs;
use fsdp_layout::{PlainValue, TensorBox};
use indexmap::IndexMap;

use super::output::{CheckpointPayloads, Conversion, unsupported};
use super::to_safetensors::{
    DirectoryWriter, FileWriter, Piece, SideContents, Sums, list_whole_tensors, split_into_files,
};
use crate::tensor_parallel::{Cut, TensorParallelPlan};

/// Checks that a plan has all tensors of a checkpoint, with the same shapes.
pub(super) fn check_plan(
    source: &dyn Checkpoint,
    plan: &TensorParallelPlan,
) -> Result<(), FileError> {
    for (fqn, tensor) in source.metadata().tensors() {
        if plan.cut(fqn).map(|cut| &cut.shape) != Some(&tensor.shape) {
            return Err(unsupported(
                fqn,
                "a tensor that the plan for tensor-parallel ranks does not have, or has in another shape",
            ));
        }
    }
    Ok(())
}

/// The parts of one rank, as a source of payloads.
struct RankSlices<'a> {
    payloads: &'a CheckpointPayloads<'a>,
    plan: &'a TensorParallelPlan,
    rank: usize,
    /// The sums over the elements that no rank with a lower number has, by key. So each element is
    /// in one sum.
    sums: Mutex<Sums>,
}

impl RankSlices<'_> {
    /// Reads a box of the rank's part of a tensor, and adds to the sums the elements that no rank
    /// with a lower number has.
    fn read(
        &self,
        fqn: &str,
        cut: &Cut,
        part: &TensorBox,
        output: &mut [u8],
    ) -> Result<(), FileError> {
        let source = self.payloads.source;
        let ranges = cut.ranges(self.rank);
        if ranges.is_empty() {
            source.read_box(fqn, part, output)?;
            return self.add_to_sums(fqn, part, output, self.rank == 0);
        }
        let dim = cut.dim;
        let dtype = tensor_of(source.metadata(), fqn)?.properties.dtype;
        let element_bytes = dtype.size_in_bytes() as usize;
        let mut scratch = Vec::new();
        // The ranges follow each other in the rank's part, wherever they are in the whole tensor,
        // so each is read by itself.
        let mut local_start = 0;
        for range in &ranges {
            let mut range_box = part.clone();
            range_box.offsets[dim] = local_start;
            range_box.sizes[dim] = range.len;
            local_start += range.len;
            let Some(overlap) = part.intersect(&range_box) else {
                continue;
            };
            // The same box in the whole tensor.
            let mut whole = overlap.clone();
            whole.offsets[dim] = range.start + overlap.offsets[dim] - range_box.offsets[dim];
            // A box that lies in one range is read in place.
            if overlap == *part {
                source.read_box(fqn, &whole, output)?;
                self.add_to_sums(fqn, &whole, output, range.is_first)?;
                continue;
            }
            // Otherwise its rows do not follow each other in `output`, and are copied there.
            scratch.resize(overlap.numel() * element_bytes, 0);
            source.read_box(fqn, &whole, &mut scratch)?;
            self.add_to_sums(fqn, &whole, &scratch, range.is_first)?;
            for run in copy_runs(&overlap, &overlap, part) {
                let scratch_range = run.src * element_bytes..(run.src + run.len) * element_bytes;
                let output_range = run.dst * element_bytes..(run.dst + run.len) * element_bytes;
                output[output_range].copy_from_slice(&scratch[scratch_range]);
            }
        }
        Ok(())
    }

    /// Adds a box of the whole tensor to the sums, and reports its bytes as progress, unless a rank
    /// with a lower number has it too (`is_first` is `false`).
    fn add_to_sums(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        bytes: &[u8],
        is_first: bool,
    ) -> Result<(), FileError> {
        if !is_first {
            return Ok(());
        }
        if let Some(progress) = self.payloads.options.progress {
            progress(bytes.len() as u64);
        }
        let tensor = tensor_of(self.payloads.source.metadata(), fqn)?;
        let element_bytes = tensor.properties.dtype.size_in_bytes() as usize;
        // Threads share a tensor, so each box is summed by itself and then added.
        let mut sum = Sum::default();
        sum.add_box(&tensor.shape, bounds, element_bytes, bytes)
            .map_err(|error| wrong_box(fqn, &error))?;
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.entry(fqn.to_owned()).or_default().add(sum);
        Ok(())
    }
}

impl PayloadSource for RankSlices<'_> {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let source = self.payloads.source;
        // A tensor that was inside a value is not in the plan, and is written whole.
        let (Some(tensor), Some(cut)) = (source.metadata().tensor(fqn), self.plan.cut(fqn)) else {
            return self.payloads.payload(fqn, bounds, range, sink);
        };
        // A small file must not cause an unbounded number of elements.
        check_expansion(source, fqn, range.end)?;
        stream_boxes(
            &mut |part, output| self.read(fqn, cut, part, output),
            tensor.properties.dtype,
            bounds,
            range,
            sink,
        )
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        self.payloads.value(fqn)
    }
}

/// Writes files of at most `max_file_bytes` for each rank, with its parts of all tensors under the
/// source's keys. Returns the name of the values file, if there are values.
pub(super) fn write_ranks(
    conversion: Conversion<'_>,
    plan: &TensorParallelPlan,
    max_file_bytes: u64,
) -> Result<Option<String>, FileError> {
    let source = conversion.source;
    let side = SideContents::read(source)?;
    let (values, inner_tensors) = side.encode()?;
    let whole_tensors = list_whole_tensors(source, &inner_tensors);
    // The files of all ranks are chosen first: every file notes how many files each rank has, so
    // that a reader notices when one is missing.
    let files_by_rank: Vec<Vec<Vec<Piece<'_>>>> = (0..plan.ranks())
        .map(|rank| {
            split_into_files(
                pieces_of_rank(source, &whole_tensors, plan, rank),
                max_file_bytes,
            )
        })
        .collect();
    let file_counts: Vec<usize> = files_by_rank.iter().map(Vec::len).collect();
    let mut writer = DirectoryWriter::new(conversion, &side, &inner_tensors)?;
    for (rank, files) in files_by_rank.iter().enumerate() {
        let slices = RankSlices {
            payloads: &writer.payloads,
            plan,
            rank,
            sums: Mutex::default(),
        };
        // The writer would compute sums over parts, which are of no whole tensor. `RankSlices`
        // computes them instead.
        let nothing_digested = Metadata::default();
        let file_writer = FileWriter {
            staging: &writer.staging,
            source: &slices,
            digested: &nothing_digested,
            threads: writer.payloads.options.thread_count(),
        };
        for (index, pieces) in files.iter().enumerate() {
            // The note tells from which part of which tensor each tensor of this file was cut.
            let mut note = RankNote {
                rank,
                files: file_counts.clone(),
                tensors: IndexMap::new(),
            };
            for piece in pieces {
                if let Some(cut) = cut_of(source, plan, piece.fqn)
                    && let Some(slice) = slice_note(cut, rank)
                {
                    note.tensors.insert(piece.fqn.to_owned(), slice);
                }
            }
            let note = serde_json::to_string(&note).expect("a note has texts and numbers only");
            let mut texts = side.texts(rank == 0 && index == 0);
            texts.insert(RANK_NOTE.to_owned(), note);
            let name = rank_file_name(rank, index);
            let hashes =
                file_writer.write(Some(&name), |_| Ok(texts.clone()), pieces, &mut Sums::new())?;
            writer.integrity.files.insert(name, hashes);
        }
        // The sums of all ranks together are over each element once, so they give the digests of
        // the whole tensors.
        let sums = slices
            .sums
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        for (fqn, sum) in sums {
            writer.sums.entry(fqn).or_default().add(sum);
        }
    }
    writer.finish(values, None)
}

/// Returns how a tensor is cut; `None` for one that was inside a value, which no plan has.
fn cut_of<'p>(source: &dyn Checkpoint, plan: &'p TensorParallelPlan, fqn: &str) -> Option<&'p Cut> {
    plan.cut(fqn)
        .filter(|_| source.metadata().tensor(fqn).is_some())
}

/// Returns the parts of tensors that a rank holds. Tensors that were inside values are written
/// once, with the first rank.
fn pieces_of_rank<'a>(
    source: &dyn Checkpoint,
    whole_tensors: &[Piece<'a>],
    plan: &TensorParallelPlan,
    rank: usize,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    for piece in whole_tensors {
        if let Some(cut) = cut_of(source, plan, piece.fqn) {
            let bounds = TensorBox::whole(&cut.shape_of(rank));
            pieces.push(Piece { bounds, ..*piece });
        } else if rank == 0 {
            pieces.push(piece.clone());
        }
    }
    pieces
}

/// Returns the note of a rank's part of a tensor; `None` if the rank has the whole tensor.
fn slice_note(cut: &Cut, rank: usize) -> Option<SliceNote> {
    if cut.shape_of(rank) == cut.shape {
        return None;
    }
    Some(SliceNote {
        how: cut.how.clone(),
        shape: cut.shape.clone(),
        dim: cut.dim,
        ranges: cut
            .ranges(rank)
            .iter()
            .map(|range| (range.start, range.start + range.len))
            .collect(),
    })
}
