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

use super::output::{Conversion, Converted, Streamed, unsupported};
use super::to_safetensors::{
    DirectoryWriter, Files, Inside, Piece, SideContents, Sums, files_of, whole_tensors,
};
use crate::tensor_parallel::{Cut, TensorParallelPlan};

/// Checks that a plan has all tensors of a checkpoint, with the same shapes.
pub(super) fn check_plan(
    source: &dyn Checkpoint,
    plan: &TensorParallelPlan,
) -> Result<(), FileError> {
    for (fqn, tensor) in source.metadata().tensors() {
        if plan.cut(fqn).map(Cut::shape) != Some(&tensor.shape[..]) {
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
    streamed: &'a Streamed<'a>,
    plan: &'a TensorParallelPlan,
    rank: usize,
    /// The sums over the elements that no rank with a lower number has, by key. So each element is
    /// in one sum.
    sums: Mutex<IndexMap<String, Sum>>,
}

impl RankSlices<'_> {
    /// Reads a box of the rank's part of a tensor, and adds to the sums the elements that no rank
    /// with a lower number has.
    fn read(
        &self,
        fqn: &str,
        cut: &Cut,
        part: &TensorBox,
        dst: &mut [u8],
    ) -> Result<(), FileError> {
        let source = self.streamed.source;
        let ranges = cut.ranges(self.rank);
        if ranges.is_empty() {
            source.read_box(fqn, part, dst)?;
            return self.add(fqn, part, dst, self.rank == 0);
        }
        let dim = cut.dim();
        let dtype = tensor_of(source.metadata(), fqn)?.properties.dtype;
        let element = dtype.size_in_bytes() as usize;
        let mut scratch = Vec::new();
        // The ranges follow each other in the rank's part.
        let mut local = 0;
        for range in &ranges {
            let mut here = part.clone();
            here.offsets[dim] = local;
            here.sizes[dim] = range.len;
            local += range.len;
            let Some(overlap) = part.intersect(&here) else {
                continue;
            };
            // The same box in the whole tensor.
            let mut whole = overlap.clone();
            whole.offsets[dim] = range.start + overlap.offsets[dim] - here.offsets[dim];
            // A box that lies in one range is read in place.
            if overlap == *part {
                source.read_box(fqn, &whole, dst)?;
                self.add(fqn, &whole, dst, range.is_first)?;
                continue;
            }
            scratch.resize(overlap.numel() * element, 0);
            source.read_box(fqn, &whole, &mut scratch)?;
            self.add(fqn, &whole, &scratch, range.is_first)?;
            for run in copy_runs(&overlap, &overlap, part) {
                let from = run.src * element..(run.src + run.len) * element;
                let to = run.dst * element..(run.dst + run.len) * element;
                dst[to].copy_from_slice(&scratch[from]);
            }
        }
        Ok(())
    }

    /// Adds a box of the whole tensor to the sums, if no rank with a lower number has it.
    fn add(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        bytes: &[u8],
        is_first: bool,
    ) -> Result<(), FileError> {
        if !is_first {
            return Ok(());
        }
        if let Some(progress) = self.streamed.options.progress {
            progress(bytes.len() as u64);
        }
        let tensor = tensor_of(self.streamed.source.metadata(), fqn)?;
        let element = tensor.properties.dtype.size_in_bytes() as usize;
        // Threads share a tensor, so each box is summed by itself and then added.
        let mut sum = Sum::default();
        sum.add_box(&tensor.shape, bounds, element, bytes)
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
        let source = self.streamed.source;
        // A tensor that was inside a value is not in the plan, and is written whole.
        let (Some(tensor), Some(cut)) = (source.metadata().tensor(fqn), self.plan.cut(fqn)) else {
            return self.streamed.payload(fqn, bounds, range, sink);
        };
        // A small file must not cause an unbounded number of elements.
        check_expansion(source, fqn, range.end)?;
        stream_boxes(
            &mut |part, dst| self.read(fqn, cut, part, dst),
            tensor.properties.dtype,
            bounds,
            range,
            sink,
        )
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        self.streamed.value(fqn)
    }
}

/// Writes files of at most `max_file_bytes` for each rank, with its parts of all tensors under the
/// source's keys.
pub(super) fn write_ranks(
    conversion: Conversion<'_>,
    plan: &TensorParallelPlan,
    max_file_bytes: u64,
) -> Result<Converted, FileError> {
    let source = conversion.source;
    let side = SideContents::read(source)?;
    let (values, inside) = side.encode()?;
    let whole = whole_tensors(source, &inside);
    let parts = Parts {
        whole: &whole,
        inside: &inside,
        plan,
        max_file_bytes,
    };
    // Every file notes how many files each rank has, so that a reader notices when one is missing.
    let files: Vec<usize> = (0..plan.ranks())
        .map(|rank| parts.files_of_rank(rank).len())
        .collect();
    let mut writer = DirectoryWriter::new(conversion, &side, &inside)?;
    for rank in 0..plan.ranks() {
        let slices = RankSlices {
            streamed: &writer.streamed,
            plan,
            rank,
            sums: Mutex::default(),
        };
        // The writer would compute sums over parts, which are of no whole tensor. `RankSlices`
        // computes them instead.
        let nothing_digested = Metadata::default();
        let writer_of_files = Files {
            staging: &writer.staging,
            source: &slices,
            digested: &nothing_digested,
            threads: writer.streamed.options.threads,
        };
        for (index, pieces) in parts.files_of_rank(rank).iter().enumerate() {
            // The note tells from which part of which tensor each tensor of this file was cut.
            let mut note = RankNote {
                rank,
                files: files.clone(),
                tensors: IndexMap::new(),
            };
            for piece in pieces {
                if let Some(cut) = parts.cut(piece.fqn)
                    && let Some(slice) = slice_note(cut, rank)
                {
                    note.tensors.insert(piece.fqn.to_owned(), slice);
                }
            }
            let note = serde_json::to_string(&note).expect("a note has texts and numbers only");
            let mut texts = side.texts(rank == 0 && index == 0);
            texts.insert(RANK_NOTE.to_owned(), note);
            let name = rank_file_name(rank, index);
            let hashes = writer_of_files.write(
                Some(&name),
                &|_| Ok(texts.clone()),
                pieces,
                &mut Sums::new(),
            )?;
            writer.integrity.files.insert(name, hashes);
        }
        // The sums of all ranks together are over each element once, so they give the digests of
        // the whole tensors.
        let sums = slices
            .sums
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        for (fqn, sum) in sums {
            let (key, _) = source
                .metadata()
                .entries
                .get_key_value(&fqn)
                .expect("only tensors of the source are summed");
            writer.sums.entry(key).or_default().add(sum);
        }
    }
    writer.finish(values, None)
}

/// The tensors of a checkpoint, and how ranks get their parts of them.
struct Parts<'p, 'a> {
    whole: &'p [Piece<'a>],
    inside: &'p Inside<'a>,
    plan: &'p TensorParallelPlan,
    max_file_bytes: u64,
}

impl<'a> Parts<'_, 'a> {
    /// Returns how a tensor is cut; `None` for one that was inside a value, which no plan has.
    fn cut(&self, fqn: &str) -> Option<&Cut> {
        self.plan
            .cut(fqn)
            .filter(|_| !self.inside.contains_key(fqn))
    }

    /// Returns the files of a rank, each with the parts of tensors that it holds. Tensors that were
    /// inside values are written once, with the first rank.
    fn files_of_rank(&self, rank: usize) -> Vec<Vec<Piece<'a>>> {
        let mut pieces = Vec::new();
        for piece in self.whole {
            if let Some(cut) = self.cut(piece.fqn) {
                let bounds = TensorBox::whole(&cut.shape_of(rank));
                pieces.push(Piece { bounds, ..*piece });
            } else if rank == 0 {
                pieces.push(piece.clone());
            }
        }
        files_of(pieces, self.max_file_bytes)
    }
}

/// Returns the note of a rank's part of a tensor; `None` if the rank has the whole tensor.
fn slice_note(cut: &Cut, rank: usize) -> Option<SliceNote> {
    if cut.shape_of(rank) == cut.shape() {
        return None;
    }
    Some(SliceNote {
        how: cut.how().to_owned(),
        shape: cut.shape().to_vec(),
        dim: cut.dim(),
        ranges: cut
            .ranges(rank)
            .iter()
            .map(|range| (range.start, range.start + range.len))
            .collect(),
    })
}
