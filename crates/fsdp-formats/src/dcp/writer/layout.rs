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
        bounds: &'p TensorBox,
        /// The place of the box in its tensor, for its digest.
        place: Option<BoxPlace>,
        /// The bytes of the item around the payload, which is its only storage.
        around: ArchiveLayout,
    },
}

impl ItemLayout<'_> {
    pub(super) fn payload_length(&self) -> u64 {
        match &self.content {
            Content::Value(..) => 0,
            Content::Tensor { around, .. } => around.storage_length(0),
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// Returns the start and the length of the payload in the file, if it has hash segments of its
    /// own.
    pub(super) fn own_payload(&self) -> Option<(u64, u64)> {
        match &self.content {
            Content::Tensor { around, .. } if around.storage_length(0) >= MIN_SEGMENT_BYTES => {
                Some((
                    self.offset + around.storage_offset(0),
                    around.storage_length(0),
                ))
            }
            _ => None,
        }
    }
}

impl<'p> FileLayout<'p> {
    /// Lays out a rank's file: values first, then tensors, each in the order of the plan, as torch
    /// writes them.
    pub(super) fn new(rank: &RankItems<'p>, digests: bool) -> Result<Self, FileError> {
        let mut items = Vec::with_capacity(rank.selection.kept.len());
        for &selected in &rank.selection.kept {
            items.push(item_layout(rank, selected, digests)?);
        }
        // The sort is stable, so values and tensors stay in the order of the plan.
        items.sort_by_key(|item| matches!(item.content, Content::Tensor { .. }));
        // Each item follows the one before it, after padding that aligns its payload.
        let mut end = 0;
        for item in &mut items {
            item.offset = match &item.content {
                Content::Tensor { around, .. } => tensor_offset(end, around),
                Content::Value(..) => end,
            };
            end = item.end();
        }
        Ok(FileLayout { items, length: end })
    }
}

/// Lays out a selected item, without a place yet: its offset is 0.
fn item_layout<'p>(
    rank: &RankItems<'p>,
    selected: SelectedItem,
    digests: bool,
) -> Result<ItemLayout<'p>, FileError> {
    let fqn = &selected_item(rank.plan, selected)?.fqn;
    let content = match selected_box(rank.plan, selected)? {
        None => {
            let value = rank.source.value(fqn)?;
            let bytes = match rank.source.stored_item(fqn)? {
                Some(bytes) => bytes,
                None => encode_value(&value)
                    .map_err(|source| cannot_write(fqn.clone(), source))?
                    .into(),
            };
            Content::Value(bytes, Digest::of_value(&value))
        }
        Some(tensor) => Content::Tensor {
            bounds: tensor.bounds,
            place: digests.then(|| tensor.place()).transpose()?,
            around: lay_out_tensor(tensor.dtype, &tensor.bounds.sizes)
                .map_err(|source| cannot_write(fqn.clone(), source))?,
        },
    };
    Ok(ItemLayout {
        fqn,
        selected,
        offset: 0,
        length: match &content {
            Content::Value(bytes, _) => bytes.len() as u64,
            Content::Tensor { around, .. } => around.length(),
        },
        content,
    })
}

/// Returns where a tensor's item starts in the file, if the item before it ends at `at`.
pub(super) fn tensor_offset(at: u64, around: &ArchiveLayout) -> u64 {
    let align = if around.storage_length(0) >= MIN_PAGE_ALIGNED_BYTES {
        PAGE_BYTES
    } else {
        64
    };
    (at + around.storage_offset(0)).next_multiple_of(align) - around.storage_offset(0)
}
