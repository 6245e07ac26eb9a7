//! The layout of a rank's file: the place of each item, computed before any data is read.

use std::borrow::Cow;

use fsdp_digest::{BoxPlace, Digest};
use fsdp_layout::TensorBox;

use crate::dcp::item::TensorItem;
use crate::error::{FileError, wrong_box};
use crate::payload::source::PayloadSource;
use crate::plan::{LocalPlan, SelectedItem, Selection, WriteContent};
use crate::torch::value::encode_value;

/// The alignment of large payloads in the file, for mapping and direct I/O.
const PAGE: u64 = 4096;
/// The length from which payloads are aligned to pages. Shorter payloads keep the alignment that
/// they have in their item.
const PAGE_ALIGNED: u64 = 64 << 10;
/// The length from which a payload has its own hash segment.
pub(super) const OWN_SEGMENT: u64 = 16 << 10;

/// The plan of one file.
#[derive(Debug)]
pub(super) struct FileLayout<'p> {
    pub(super) items: Vec<Placed<'p>>,
    pub(super) length: u64,
}

/// One item of the file.
#[derive(Debug)]
pub(super) struct Placed<'p> {
    pub(super) fqn: &'p str,
    pub(super) selected: SelectedItem,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) content: Content<'p>,
}

#[derive(Debug)]
pub(super) enum Content<'p> {
    /// The whole item, and the digest of its value.
    Value(Cow<'p, [u8]>, Digest),
    Tensor {
        bounds: &'p TensorBox,
        /// The place of the box in its tensor, for its digest.
        place: Option<BoxPlace>,
        around: TensorItem,
    },
}

impl Placed<'_> {
    pub(super) fn payload_length(&self) -> u64 {
        match &self.content {
            Content::Value(..) => 0,
            Content::Tensor { around, .. } => around.payload_length(),
        }
    }

    pub(super) fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// Returns the start and the length of the payload in the file, if it has hash segments of its
    /// own.
    pub(super) fn own_payload(&self) -> Option<(u64, u64)> {
        match &self.content {
            Content::Tensor { around, .. } if around.payload_length() >= OWN_SEGMENT => Some((
                self.offset + around.payload_offset(),
                around.payload_length(),
            )),
            _ => None,
        }
    }
}

impl<'p> FileLayout<'p> {
    /// Lays out a rank's file: values first, then tensors, each in the order of the plan, as torch
    /// writes them.
    pub(super) fn new(
        plan: &'p LocalPlan,
        selection: &Selection,
        source: &'p dyn PayloadSource,
        digests: bool,
    ) -> Result<Self, FileError> {
        let mut values = Vec::new();
        let mut tensors = Vec::new();
        for &selected in &selection.kept {
            let Some(of) = plan.items.get(selected.item as usize) else {
                continue;
            };
            let encode = |source| FileError::Encode {
                fqn: of.fqn.clone(),
                source,
            };
            let placed = |length, content| Placed {
                fqn: &of.fqn,
                selected,
                offset: 0,
                length,
                content,
            };
            match &of.content {
                WriteContent::Value { .. } => {
                    let value = source.value(&of.fqn)?;
                    let bytes = match source.stored_item(&of.fqn)? {
                        Some(bytes) => bytes,
                        None => Cow::Owned(encode_value(&value).map_err(encode)?),
                    };
                    values.push(placed(
                        bytes.len() as u64,
                        Content::Value(bytes, Digest::of_value(&value)),
                    ));
                }
                WriteContent::Tensor {
                    properties,
                    shape,
                    boxes,
                    ..
                } => {
                    let Some(bounds) = boxes.get(selected.index as usize) else {
                        continue;
                    };
                    let around =
                        TensorItem::new(properties.dtype, &bounds.sizes).map_err(encode)?;
                    let place = digests.then(|| {
                        let place =
                            BoxPlace::new(shape, bounds, properties.dtype.size_in_bytes() as usize);
                        place.map_err(|error| wrong_box(&of.fqn, &error))
                    });
                    let place = place.transpose()?;
                    tensors.push(placed(
                        around.length(),
                        Content::Tensor {
                            bounds,
                            place,
                            around,
                        },
                    ));
                }
            }
        }
        let mut items = values;
        items.append(&mut tensors);
        // Each item follows the one before it, after padding that aligns its payload.
        let mut at = 0u64;
        for placed in &mut items {
            if let Content::Tensor { around, .. } = &placed.content {
                at = tensor_offset(at, around);
            }
            placed.offset = at;
            at += placed.length;
        }
        Ok(FileLayout { items, length: at })
    }
}

/// Returns where a tensor's item starts in the file, if the item before it ends at `at`.
pub(super) fn tensor_offset(at: u64, around: &TensorItem) -> u64 {
    let align = if around.payload_length() >= PAGE_ALIGNED {
        PAGE
    } else {
        64
    };
    (at + around.payload_offset()).next_multiple_of(align) - around.payload_offset()
}
