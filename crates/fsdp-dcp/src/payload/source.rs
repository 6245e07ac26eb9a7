//! The interface through which a save reads what a rank holds.

use std::borrow::Cow;
use std::ops::Range;

use fsdp_layout::{PlainValue, TensorBox};

use crate::error::FileError;

/// A source of the bytes of a rank's items. Called from several threads at once.
pub trait PayloadSource: Sync {
    /// Gives bytes `range` of the row-major payload of box `bounds` of tensor `fqn`, in order, in pieces of any size.
    ///
    /// Large contiguous pieces are written from where they lie; small ones are gathered first.
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError>;

    /// Gives the same bytes as [`PayloadSource::payload`], to be looked at and not to be written.
    fn look(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        self.payload(fqn, bounds, range, sink)
    }

    /// Returns the bytes of a value that is copied as it is stored; `None` for one that [`PayloadSource::value`] returns.
    fn stored_item(&self, fqn: &str) -> Result<Option<Vec<u8>>, FileError> {
        let _ = fqn;
        Ok(None)
    }

    /// Returns a non-tensor value; its description, if [`PayloadSource::stored_item`] gives its bytes.
    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError>;
}
