//! Reading a box of a tensor that may lie in its storage in any order: row-major, transposed,
//! channels-last, expanded.
//!
//! Elements are visited in the order of their position in the storage, so that a file is read
//! forwards.

use fsdp_layout::TensorBox;
use fsdp_layout::boxes::row_major_strides;

use crate::error::FormatError;
use crate::payload::slot::Slot;
use crate::storage::read_at::{BlockReader, ReadAt};

/// The places of a tensor's (or chunk's) elements in a storage, counted in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StridedLayout {
    /// The box of the whole tensor that this is.
    pub bounds: TensorBox,
    /// Position of the box's first element.
    pub offset: u64,
    /// Elements from one index to the next, in each dimension.
    pub strides: Vec<usize>,
}

impl StridedLayout {
    /// Returns the position of the box's last element in the storage; `None` if the box is empty,
    /// or the position does not fit.
    pub(crate) fn last(&self) -> Option<u64> {
        if self.bounds.is_empty() {
            return None;
        }
        let mut position = self.offset;
        for (&size, &stride) in self.bounds.sizes.iter().zip(&self.strides) {
            position = position.checked_add((size as u64 - 1).checked_mul(stride as u64)?)?;
        }
        Some(position)
    }
}

/// `len` elements at `src`, `src + src_step`, … of the storage, that belong at `dst`, `dst +
/// dst_step`, … .
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StridedRun {
    pub(crate) src: u64,
    pub(crate) dst: usize,
    pub(crate) len: usize,
    pub(crate) src_step: usize,
    pub(crate) dst_step: usize,
}

/// The runs of `overlap`, from a storage to a row-major buffer of the box `dst`. `overlap` must lie
/// in both boxes.
#[derive(Debug, Clone)]
pub(crate) struct StridedRuns {
    /// Outer dimensions: extent, source step, destination step; the slowest first.
    outer: Vec<(usize, usize, usize)>,
    index: Vec<usize>,
    next: Option<StridedRun>,
}

impl StridedRuns {
    /// Finds the longest runs: dimensions that continue each other are merged, and the one with the
    /// smallest step in the storage is innermost.
    pub(crate) fn new(
        overlap: &TensorBox,
        source: &StridedLayout,
        destination: &TensorBox,
    ) -> Self {
        let destination_strides = row_major_strides(&destination.sizes);
        let mut first_run = StridedRun {
            src: source.offset,
            dst: 0,
            len: 1,
            src_step: 1,
            dst_step: 1,
        };
        let mut dims = Vec::with_capacity(overlap.rank());
        for (dim, &dst_stride) in destination_strides.iter().enumerate() {
            first_run.src +=
                ((overlap.offsets[dim] - source.bounds.offsets[dim]) * source.strides[dim]) as u64;
            first_run.dst += (overlap.offsets[dim] - destination.offsets[dim]) * dst_stride;
            if overlap.sizes[dim] != 1 {
                dims.push((overlap.sizes[dim], source.strides[dim], dst_stride));
            }
        }
        // Sort the dimensions in the order of the storage: the one with the smallest step is
        // innermost.
        dims.sort_by_key(|&(_, src_step, _)| std::cmp::Reverse(src_step));
        // Merge neighbouring dimensions that continue each other both in the source and in the
        // destination.
        let mut merged: Vec<(usize, usize, usize)> = Vec::with_capacity(dims.len());
        for (size, src_step, dst_step) in dims {
            match merged.last_mut() {
                Some((outer, outer_src, outer_dst))
                    if *outer_src == size * src_step && *outer_dst == size * dst_step =>
                {
                    (*outer, *outer_src, *outer_dst) = (*outer * size, src_step, dst_step);
                }
                _ => merged.push((size, src_step, dst_step)),
            }
        }
        if let Some((len, src_step, dst_step)) = merged.pop() {
            first_run = StridedRun {
                len,
                src_step,
                dst_step,
                ..first_run
            };
        }
        StridedRuns {
            index: vec![0; merged.len()],
            outer: merged,
            next: (!overlap.is_empty()).then_some(first_run),
        }
    }

    /// Returns the storage position after the last element that any run touches.
    pub(crate) fn end(&self) -> u64 {
        self.next.map_or(0, |run| {
            let outer: usize = self
                .outer
                .iter()
                .map(|&(size, step, _)| (size - 1) * step)
                .sum();
            run.src + (outer + (run.len - 1) * run.src_step) as u64 + 1
        })
    }
}

impl Iterator for StridedRuns {
    type Item = StridedRun;

    fn next(&mut self) -> Option<StridedRun> {
        let run = self.next?;
        let mut following = run;
        self.next = None;
        // Counts up like an odometer, the innermost of the outer dimensions first.
        for (&(size, src_step, dst_step), index) in self.outer.iter().zip(&mut self.index).rev() {
            *index += 1;
            if *index < size {
                following.src += src_step as u64;
                following.dst += dst_step;
                self.next = Some(following);
                break;
            }
            following.src -= ((size - 1) * src_step) as u64;
            following.dst -= (size - 1) * dst_step;
            *index = 0;
        }
        Some(run)
    }
}

/// A gap between runs up to which it is cheaper to read on than to read again.
const NEAR_BYTES: u64 = 16 << 10;

/// Elements in a source of bytes.
pub(crate) struct StoredElements<'l> {
    /// The first byte of their storage.
    pub(crate) storage: u64,
    /// The bytes of one element.
    pub(crate) element: usize,
    /// The places of the elements in the storage.
    pub(crate) layout: &'l StridedLayout,
}

impl StoredElements<'_> {
    /// Reads `overlap`, which must lie in the layout's box and in the slot's, into a slot. What is
    /// read is added to the slot's digest, if that is asked for.
    pub(crate) fn read<S: ReadAt + ?Sized>(
        &self,
        reader: &mut BlockReader<'_, S>,
        overlap: &TensorBox,
        slot: &mut Slot<'_>,
    ) -> Result<(), FormatError> {
        let element_bytes = self.element;
        let all_runs = StridedRuns::new(overlap, self.layout, &slot.bounds);
        let end_of_runs = self.storage + all_runs.end() * element_bytes as u64;
        let mut runs = all_runs.peekable();
        let mut scratch = Vec::new();
        let mut is_scattered = false;
        while let Some(run) = runs.next() {
            let start = self.storage + run.src * element_bytes as u64;
            // Reading ahead pays only while the next run is near.
            let end = start + ((run.len - 1) * run.src_step * element_bytes + element_bytes) as u64;
            let is_near = runs.peek().is_some_and(|next| {
                self.storage + next.src * (element_bytes as u64) < end + NEAR_BYTES
            });
            let limit = if is_near { end_of_runs } else { end };
            if run.dst_step == 1 && (run.src_step == 1 || run.len == 1) {
                let slot_offset = run.dst * element_bytes;
                let dst = &mut slot.bytes[slot_offset..slot_offset + run.len * element_bytes];
                reader.read(start, dst, limit, &mut |piece_offset, bytes| {
                    if let Some(digest) = &mut slot.digest {
                        digest.add(slot_offset + piece_offset, bytes);
                    }
                })?;
                continue;
            }
            is_scattered = true;
            // Elements lie apart, here or there: read what spans some of them, then pick.
            const SPAN_BYTES: usize = 64 << 10;
            let step = run.src_step * element_bytes;
            let elements_at_once = SPAN_BYTES
                .checked_div(step)
                .map_or(run.len, |count| count.max(1));
            for first_index in (0..run.len).step_by(elements_at_once) {
                let count = elements_at_once.min(run.len - first_index);
                scratch.resize((count - 1) * step + element_bytes, 0);
                let span_start = start + (first_index * step) as u64;
                reader.read(span_start, &mut scratch, limit, &mut |_, _| ())?;
                for index in 0..count {
                    let slot_offset =
                        (run.dst + (first_index + index) * run.dst_step) * element_bytes;
                    let element_source = &scratch[index * step..index * step + element_bytes];
                    slot.bytes[slot_offset..slot_offset + element_bytes]
                        .copy_from_slice(element_source);
                }
            }
        }
        // Elements that came one by one are digested in rows, once all are there.
        if is_scattered {
            slot.add_to_digest(overlap, element_bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fsdp_digest::{BoxPlace, Sum};
    use proptest::prelude::*;

    use super::*;
    use crate::payload::slot::SlotDigest;

    /// Generates a shape, the order of its dimensions in memory, and a box in it.
    fn case() -> impl Strategy<Value = (Vec<usize>, Vec<usize>, Vec<usize>, Vec<usize>)> {
        prop::collection::vec(1usize..6, 0..4).prop_flat_map(|shape| {
            let order = Just((0..shape.len()).collect::<Vec<_>>()).prop_shuffle();
            let offsets: Vec<_> = shape.iter().map(|&n| 0..n).collect();
            (Just(shape), order, offsets).prop_flat_map(|(shape, order, offsets)| {
                let sizes: Vec<_> = shape
                    .iter()
                    .zip(&offsets)
                    .map(|(&n, &o)| 1..=n - o)
                    .collect();
                (Just(shape), Just(order), Just(offsets), sizes)
            })
        })
    }

    proptest! {
        #[test]
        fn any_memory_order_reads_as_row_major((shape, order, offsets, sizes) in case()) {
            // Strides of a dense tensor whose dimensions lie in memory in this order.
            let mut strides = vec![0; shape.len()];
            let mut step = 1;
            for &d in order.iter().rev() {
                strides[d] = step;
                step *= shape[d];
            }
            let storage: Vec<u8> = (0..step as u16).flat_map(u16::to_le_bytes).collect();
            let wanted = TensorBox::new(offsets, sizes);
            let from = StridedLayout { bounds: TensorBox::whole(&shape), offset: 0, strides: strides.clone() };
            let mut dst = vec![0xee; wanted.numel() * 2];
            let mut reader = BlockReader::new(&storage);
            let mut slot = Slot::new(wanted.clone(), &mut dst);
            slot.digest = Some(SlotDigest::new(BoxPlace::new(&shape, &wanted, 2).unwrap()));
            let stored = StoredElements { storage: 0, element: 2, layout: &from };
            stored.read(&mut reader, &wanted, &mut slot).unwrap();
            let sum = slot.digest.unwrap().sum();
            let mut expected = Sum::default();
            expected.add_box(&shape, &wanted, 2, &dst).unwrap();
            prop_assert_eq!(sum, expected);
            let local = row_major_strides(&wanted.sizes);
            for i in 0..wanted.numel() {
                let at: usize =
                    (0..shape.len()).map(|d| (wanted.offsets[d] + i / local[d] % wanted.sizes[d]) * strides[d]).sum();
                prop_assert_eq!(u16::from_le_bytes([dst[2 * i], dst[2 * i + 1]]), at as u16);
            }
        }
    }

    #[test]
    fn expanded_tensors_repeat_their_elements() {
        let from = StridedLayout {
            bounds: TensorBox::whole(&[3, 2]),
            offset: 1,
            strides: vec![0, 1],
        };
        let storage = [9u8, 1, 2];
        let mut dst = [0; 6];
        let whole = TensorBox::whole(&[3, 2]);
        let mut slot = Slot::new(whole.clone(), &mut dst);
        let stored = StoredElements {
            storage: 0,
            element: 1,
            layout: &from,
        };
        let source = &storage[..];
        let mut reader = BlockReader::new(&source);
        stored.read(&mut reader, &whole, &mut slot).unwrap();
        assert_eq!(dst, [1, 2, 1, 2, 1, 2]);
    }
}
