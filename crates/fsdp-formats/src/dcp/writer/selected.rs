//! The items that a rank must write, and how a selection refers to them.

use fsdp_digest::BoxPlace;
use fsdp_layout::{DType, TensorBox};

use crate::error::{FileError, FormatError, wrong_box};
use crate::payload::source::PayloadSource;
use crate::plan::{LocalPlan, SelectedItem, Selection, WriteContent, WriteItem};

/// The items that one rank writes, and the source of their bytes.
#[derive(Clone, Copy)]
pub struct RankItems<'a> {
    /// The rank.
    pub rank: usize,
    /// All that the rank holds.
    pub plan: &'a LocalPlan,
    /// The part of it that the rank must write.
    pub selection: &'a Selection,
    /// The source of the bytes.
    pub source: &'a dyn PayloadSource,
}

/// A box of a tensor that a rank must write.
pub(super) struct SelectedBox<'p> {
    pub(super) fqn: &'p str,
    pub(super) dtype: DType,
    shape: &'p [usize],
    pub(super) bounds: &'p TensorBox,
}

impl SelectedBox<'_> {
    /// Returns the place of the box in its tensor.
    pub(super) fn place(&self) -> Result<BoxPlace, FileError> {
        BoxPlace::new(self.shape, self.bounds, self.dtype.size_in_bytes() as usize)
            .map_err(|error| wrong_box(self.fqn, &error))
    }
}

/// Returns the box that is selected of a plan; `None` if it is a value that is selected. A
/// selection of another plan is an error.
pub(super) fn selected_box(
    plan: &LocalPlan,
    selected: SelectedItem,
) -> Result<Option<SelectedBox<'_>>, FileError> {
    let item = selected_item(plan, selected)?;
    let WriteContent::Tensor {
        properties,
        shape,
        boxes,
        ..
    } = &item.content
    else {
        return Ok(None);
    };
    let Some(bounds) = boxes.get(selected.index as usize) else {
        return Err(other_plan_error(item.fqn.clone()));
    };
    Ok(Some(SelectedBox {
        fqn: &item.fqn,
        dtype: properties.dtype,
        shape,
        bounds,
    }))
}

/// Returns the item that is selected of a plan. A selection of another plan is an error.
pub(super) fn selected_item(
    plan: &LocalPlan,
    selected: SelectedItem,
) -> Result<&WriteItem, FileError> {
    plan.items
        .get(selected.item as usize)
        .ok_or_else(|| other_plan_error(format!("item {}", selected.item)))
}

/// Returns the error of a selection that was made of another plan than the rank's.
fn other_plan_error(fqn: String) -> FileError {
    let source = FormatError::unexpected("a selection from this rank's plan", "that of another");
    cannot_write(fqn, source)
}

/// Returns the error of an item that cannot be written.
pub(super) fn cannot_write(fqn: String, source: FormatError) -> FileError {
    FileError::Encode { fqn, source }
}
