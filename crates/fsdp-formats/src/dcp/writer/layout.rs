//! The layout of a rank's file: the place of each item, computed before any data is read.

use std::borrow::Cow;

use fsdp_digest::{BoxPlace, Digest};
use fsdp_layout::TensorBox;

use super::selected::{RankItems, cannot_write, selected_box, selected_item};
use crate::dcp::item::lay_out_tensor;
use crate::error::FileError;
use crate::plan::SelectedItem;
use crate::torch::value::encode_value;
use crate::zip::ArchiveLayout;

/// The alignment of large payloads in the file, for mapping and direct I/O.
const PAGE_BYTES: u64 = 4096;
/// The length from which payloads are aligned to pages. Shorter payloads keep the alignment that
/// they have in their item.
const MIN_PAGE_ALIGNED_BYTES: u64 = 64 << 10;
/// The length from which a payload has its own hash segment.
pub(super) const MIN_SEGMENT_BYTES: u64 = 16 << 10;

/// The plan of one file.
#[derive(Debug)]
pub(super) struct FileLayout<'p> {
    pub(super) items: Vec<ItemLayout<'p>>,
    pub(super) length: u64,
}

/// One item of the file, and its place there.
#[derive(Debug)]
pub(super) struct ItemLayout<'p> {
    pub(super) fqn: &'p str,
    pub(super) selected: SelectedItem,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) content: Content<'p>,
}

/// The content of an item.
#[derive(Debug)]
pub(super) enum Content<'p> {
    /// The whole item, and the digest of its value.
    Value(Cow<'p, [u8]>, Digest),
    Tensor {
        /// The box of the tensor.
        bounds: &'p TensorBox,
        /// The place of the box in its tensor, for its digest.
        place: Option<BoxPlace>,
        /// The bytes of the item around the payload, which is its only storage.
        archive: ArchiveLayout,
    },
}

impl ItemLayout<'_> {
    /// Returns the length of the payload; 0 for a value.
    pub(super) fn payload_length(&self) -> u64 {
        match &self.content {
            Content::Value(..) => 0,
            Content::Tensor { archive, .. } => archive.storage_length(0),
        }
    }

    /// Returns where the item ends in the file.
    pub(super) fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// Returns the start and the length of the payload in the file, if it has hash segments of its
    /// own; `None` for a value or a short payload.
    pub(super) fn segment_payload(&self) -> Option<(u64, u64)> {
        match &self.content {
            Content::Tensor { archive, .. } if archive.storage_length(0) >= MIN_SEGMENT_BYTES => {
                Some((
                    self.offset + archive.storage_offset(0),
                    archive.storage_length(0),
                ))
            }
            _ => None,
        }
    }
}

impl<'p> FileLayout<'p> {
    /// Lays out a rank's file: values first, then tensors, each in the order of the plan, as torch
    /// writes them. Without `with_digests`, boxes have no places for digests.
    pub(super) fn new(rank_items: &RankItems<'p>, with_digests: bool) -> Result<Self, FileError> {
        let mut items = Vec::with_capacity(rank_items.selection.kept.len());
        for &selected in &rank_items.selection.kept {
            items.push(make_item_layout(rank_items, selected, with_digests)?);
        }
        // The sort is stable, so values and tensors stay in the order of the plan.
        items.sort_by_key(|item| matches!(item.content, Content::Tensor { .. }));
        // Each item follows the one before it, after padding that aligns its payload.
        let mut end = 0;
        for item in &mut items {
            item.offset = match &item.content {
                Content::Tensor { archive, .. } => tensor_offset(end, archive),
                Content::Value(..) => end,
            };
            end = item.end();
        }
        Ok(FileLayout { items, length: end })
    }
}

/// Lays out a selected item, without a place yet: its offset is 0.
fn make_item_layout<'p>(
    rank_items: &RankItems<'p>,
    selected: SelectedItem,
    with_digests: bool,
) -> Result<ItemLayout<'p>, FileError> {
    let fqn = &selected_item(rank_items.plan, selected)?.fqn;
    let content = match selected_box(rank_items.plan, selected)? {
        None => {
            let value = rank_items.source.value(fqn)?;
            let bytes = match rank_items.source.stored_item(fqn)? {
                Some(bytes) => bytes,
                None => encode_value(&value)
                    .map_err(|source| cannot_write(fqn.clone(), source))?
                    .into(),
            };
            Content::Value(bytes, Digest::of_value(&value))
        }
        Some(tensor) => Content::Tensor {
            bounds: tensor.bounds,
            place: with_digests.then(|| tensor.place()).transpose()?,
            archive: lay_out_tensor(tensor.dtype, &tensor.bounds.sizes)
                .map_err(|source| cannot_write(fqn.clone(), source))?,
        },
    };
    Ok(ItemLayout {
        fqn,
        selected,
        offset: 0,
        length: match &content {
            Content::Value(bytes, _) => bytes.len() as u64,
            Content::Tensor { archive, .. } => archive.length(),
        },
        content,
    })
}

/// Returns where a tensor's item starts in the file, if the item before it ends at `previous_end`:
/// its payload is aligned.
pub(super) fn tensor_offset(previous_end: u64, archive: &ArchiveLayout) -> u64 {
    let alignment = if archive.storage_length(0) >= MIN_PAGE_ALIGNED_BYTES {
        PAGE_BYTES
    } else {
        64
    };
    (previous_end + archive.storage_offset(0)).next_multiple_of(alignment)
        - archive.storage_offset(0)
}
