//! [`Slot`]: the destination of a read.

use std::ops::Range;

use fsdp_digest::{BoxPlace, Sum};
use fsdp_layout::TensorBox;
use fsdp_layout::boxes::copy_runs;

/// A box of a tensor to be read, and the memory to fill.
#[derive(Debug)]
pub struct Slot<'d> {
    /// The box.
    pub bounds: TensorBox,
    /// Its row-major bytes.
    pub bytes: &'d mut [u8],
    /// The sum over the elements that were filled so far, if a digest is wanted.
    pub(crate) digest: Option<SlotDigest>,
    /// `true` if the digest of the whole tensor will be compared after the read, so that the hashes
    /// of its bytes need not be checked.
    pub(crate) is_compared: bool,
}

/// The sum over the elements that a slot was filled with.
#[derive(Debug)]
pub(crate) struct SlotDigest {
    place: BoxPlace,
    sum: Sum,
}

impl<'d> Slot<'d> {
    /// Makes a slot of a box and its memory, which must have the length of the box in bytes.
    #[must_use]
    pub fn new(bounds: TensorBox, bytes: &'d mut [u8]) -> Self {
        Slot {
            bounds,
            bytes,
            digest: None,
            is_compared: false,
        }
    }

    /// Adds a part of the box, which has been filled, to the sum, if that is asked for.
    pub(crate) fn add_to_digest(&mut self, part: &TensorBox, element_bytes: usize) {
        let Some(digest) = &mut self.digest else {
            return;
        };
        // The part lies in the box as runs of elements that follow each other.
        for run in copy_runs(part, &self.bounds, part) {
            let bytes = run.src * element_bytes..(run.src + run.len) * element_bytes;
            digest.add(bytes.start, &self.bytes[bytes]);
        }
    }

    /// Adds these bytes of the slot, which have been filled, to the digest of the slot, if one is
    /// asked for. A format that fills bytes by itself reports each byte once.
    pub fn filled(&mut self, range: Range<usize>) {
        if let (Some(digest), Some(bytes)) = (&mut self.digest, self.bytes.get(range.clone())) {
            digest.add(range.start, bytes);
        }
    }
}

impl SlotDigest {
    /// Makes the sum of a box, to which nothing has come yet.
    pub(crate) fn new(place: BoxPlace) -> Self {
        SlotDigest {
            place,
            sum: Sum::default(),
        }
    }

    /// Adds bytes that came to this position of the slot.
    pub(crate) fn add(&mut self, slot_offset: usize, bytes: &[u8]) {
        self.sum.add_piece(&self.place, slot_offset as u64, bytes);
    }

    /// Returns the sum over all that has come.
    pub(crate) fn sum(&self) -> Sum {
        self.sum
    }
}
