//! Writes a model for tensor-parallel ranks: each rank's parts of the tensors go to files of their
//! own, which inference servers read.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use fsdp_digest::Sum;
use fsdp_formats::checkpoint::{Checkpoint, VALUES_FILE};
use fsdp_formats::internals::{
    Integrity, RANK_NOTE, RankNote, SliceNote, check_expansion, rank_file_name, stream_boxes,
    tensor_of, wrong_box,
};
use fsdp_formats::metadata::Metadata;
use fsdp_formats::writer::PayloadSource;
use fsdp_formats::{FileError, FormatError};
use fsdp_layout::boxes::copy_runs;
use fsdp_layout::{PlainValue, TensorBox};
use indexmap::IndexMap;

use super::output::{Conversion, Converted, Streamed, unsupported};
use super::to_safetensors::{Aside, Files, Piece, Sums, digests, files_of, finish, whole_tensors};
use crate::tensor_parallel::{Cut, Slice, TensorParallelPlan};

/// Checks that a plan has all tensors of a checkpoint, with the same shapes.
pub(crate) fn check_plan(
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
    /// Reads a box of the rank's part of a tensor, and adds to `sum` the elements that no rank with
    /// a lower number has.
    fn read(
        &self,
        fqn: &str,
        slice: &Slice,
        part: &TensorBox,
        dst: &mut [u8],
        sum: &mut Sum,
    ) -> Result<(), FileError> {
        let source = self.streamed.source;
        let tensor = tensor_of(source.metadata(), fqn)?;
        let element = tensor.properties.dtype.size_in_bytes() as usize;
        let mut scratch = Vec::new();
        let mut add = |bounds: &TensorBox, bytes: &[u8], is_first: bool| {
            if !is_first {
                return Ok(());
            }
            if let Some(progress) = self.streamed.options.progress {
                progress(bytes.len() as u64);
            }
            sum.add_box(&tensor.shape, bounds, element, bytes)
                .map_err(|error| wrong_box(fqn, &error))
        };
        if slice.ranges.is_empty() {
            source.read_box(fqn, part, dst)?;
            return add(part, dst, self.rank == 0);
        }
        let mut local = 0;
        for range in &slice.ranges {
            let mut here = part.clone();
            (here.offsets[slice.dim], here.sizes[slice.dim]) = (local, range.len);
            local += range.len;
            let Some(overlap) = part.intersect(&here) else {
                continue;
            };
            let mut whole = overlap.clone();
            whole.offsets[slice.dim] =
                range.start + overlap.offsets[slice.dim] - here.offsets[slice.dim];
            if overlap == *part {
                source.read_box(fqn, &whole, dst)?;
                add(&whole, dst, range.is_first)?;
                continue;
            }
            scratch.resize(overlap.numel() * element, 0);
            source.read_box(fqn, &whole, &mut scratch)?;
            add(&whole, &scratch, range.is_first)?;
            for run in copy_runs(&overlap, &overlap, part) {
                let (from, to, len) = (run.src * element, run.dst * element, run.len * element);
                dst[to..to + len].copy_from_slice(&scratch[from..from + len]);
            }
        }
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
        check_expansion(source, fqn, range.end)?;
        let slice = cut.slice(self.rank);
        let mut sum = Sum::default();
        let mut read =
            |part: &TensorBox, dst: &mut [u8]| self.read(fqn, &slice, part, dst, &mut sum);
        stream_boxes(&mut read, tensor.properties.dtype, bounds, range, sink)?;
        self.sums
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(fqn.to_owned())
            .or_default()
            .add(sum);
        Ok(())
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        self.streamed.value(fqn)
    }
}

/// Writes files of at most `max_file_bytes` for each rank, with its parts of all tensors under the
/// source's keys.
pub(crate) fn write_ranks(
    conversion: Conversion<'_>,
    plan: &TensorParallelPlan,
    max_file_bytes: u64,
) -> Result<Converted, FileError> {
    let Conversion {
        source,
        staging,
        extra,
        options,
    } = conversion;
    staging.claim()?;
    let aside = Aside::read(source)?;
    let (bytes, inside) = aside.encode()?;
    let whole = whole_tensors(source, &inside);
    let streamed = Streamed {
        source,
        options,
        extra: inside.clone(),
    };
    let pieces_of = |rank: usize| -> Vec<Vec<Piece<'_>>> {
        // Tensors that were inside values are written once, with the first rank.
        let pieces = whole.iter().filter_map(|of| match plan.cut(of.fqn) {
            Some(cut) if !inside.contains_key(of.fqn) => Some(Piece {
                bounds: TensorBox::whole(&cut.shape_of(rank)),
                ..*of
            }),
            _ => (rank == 0).then(|| of.clone()),
        });
        files_of(pieces, max_file_bytes)
    };
    // Every file notes how many files each rank has, so that a reader notices when one is missing.
    let files: Vec<usize> = (0..plan.ranks())
        .map(|rank| pieces_of(rank).len())
        .collect();
    let mut integrity = Integrity {
        files: extra.copy(&staging)?,
        ..Integrity::default()
    };
    let mut sums: IndexMap<String, Sum> = IndexMap::new();
    for rank in 0..plan.ranks() {
        let slices = RankSlices {
            streamed: &streamed,
            plan,
            rank,
            sums: Mutex::default(),
        };
        // The writer would compute sums over parts, which are of no whole tensor. `RankSlices`
        // computes them instead.
        let none = Metadata::default();
        let files_of_rank = Files {
            staging: &staging,
            source: &slices,
            digested: &none,
            threads: options.threads,
        };
        for (index, pieces) in pieces_of(rank).iter().enumerate() {
            // The note tells from which part of which tensor each tensor of this file was cut.
            let cut = |piece: &Piece<'_>| {
                let cut = plan
                    .cut(piece.fqn)
                    .filter(|_| !inside.contains_key(piece.fqn))?;
                Some((piece.fqn.to_owned(), slice_note(cut, rank)?))
            };
            let note = RankNote {
                rank,
                files: files.clone(),
                tensors: pieces.iter().filter_map(cut).collect(),
            };
            let note = serde_json::to_string(&note).map_err(|error| {
                let source = FormatError::Malformed {
                    what: "note of a rank",
                    reason: error.to_string(),
                };
                FileError::Encode {
                    fqn: RANK_NOTE.to_owned(),
                    source,
                }
            })?;
            let name = rank_file_name(rank, index);
            let mut texts = aside.texts(rank == 0 && index == 0);
            texts.insert(RANK_NOTE.to_owned(), note);
            let written = files_of_rank.write(
                Some(&name),
                &|_| Ok(texts.clone()),
                pieces,
                &mut Sums::new(),
            )?;
            integrity.files.insert(name, written);
        }
        // The sums of all ranks together are over each element once, so they give the digests of
        // the whole tensors.
        for (fqn, sum) in slices
            .sums
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
        {
            sums.entry(fqn).or_default().add(sum);
        }
    }
    let sums: Sums<'_> = sums.iter().map(|(fqn, &sum)| (fqn.as_str(), sum)).collect();
    let small = bytes
        .map(|bytes| (VALUES_FILE.to_owned(), bytes))
        .into_iter()
        .collect();
    finish(
        source,
        staging,
        integrity,
        digests(&streamed, &aside, &sums),
        small,
    )
}

/// Returns the note of a rank's part of a tensor; `None` if the rank has the whole tensor.
fn slice_note(cut: &Cut, rank: usize) -> Option<SliceNote> {
    if cut.shape_of(rank) == cut.shape() {
        return None;
    }
    let slice = cut.slice(rank);
    Some(SliceNote {
        how: cut.how().to_owned(),
        shape: cut.shape().to_vec(),
        dim: slice.dim,
        ranges: slice
            .ranges
            .iter()
            .map(|range| (range.start, range.start + range.len))
            .collect(),
    })
}
