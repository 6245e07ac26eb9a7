//! [`PayloadSource`]: the interface through which a save reads a rank's tensors and values.

use std::borrow::Cow;
use std::ops::Range;

use fsdp_layout::{PlainValue, TensorBox};

use crate::error::FileError;

/// A source of the bytes of a rank's items. Several threads call it at once.
pub trait PayloadSource: Sync {
    /// Passes bytes `range` of the row-major payload of box `bounds` of tensor `fqn` to `sink`, in
    /// order, in pieces of any size.
    ///
    /// Large contiguous pieces are written without a copy; small ones are collected first.
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError>;

    /// Passes the same bytes as [`PayloadSource::payload`], for a caller that only reads them and
    /// does not count them as written.
    fn peek(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        self.payload(fqn, bounds, range, sink)
    }

    /// Returns the stored bytes of a value that is copied without decoding it; `None` if
    /// [`PayloadSource::value`] returns the value.
    fn stored_item(&self, fqn: &str) -> Result<Option<Cow<'_, [u8]>>, FileError> {
        let _ = fqn;
        Ok(None)
    }

    /// Returns a non-tensor value, or its description if [`PayloadSource::stored_item`] returns its
    /// bytes.
    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError>;
}
