//! A checkpoint as the source of payloads, and files whose frame is known before their payloads.

use std::borrow::Cow;
use std::ops::Range;

use fsdp_layout::{PlainTensor, PlainValue, TensorBox};
use indexmap::IndexMap;

use super::ConvertOptions;
use crate::checkpoint::lookup::tensor_of;
use crate::checkpoint::{Checkpoint, stream};
use crate::error::FileError;
use crate::writer::PayloadSource;

/// Gives the bytes of a checkpoint's tensors to a writer. `extra` are tensors by value, under keys of their own.
pub(super) struct Streamed<'a> {
    pub(super) source: &'a dyn Checkpoint,
    pub(super) options: ConvertOptions<'a>,
    pub(super) extra: IndexMap<String, &'a PlainTensor>,
}

impl PayloadSource for Streamed<'_> {
    fn payload(
        &self,
        fqn: &str,
        bounds: &TensorBox,
        range: Range<u64>,
        sink: &mut dyn FnMut(&[u8]) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        if let Some(tensor) = self.extra.get(fqn) {
            return sink(&tensor.data[range.start as usize..range.end as usize]);
        }
        let dtype = tensor_of(self.source.metadata(), fqn)?.properties.dtype;
        stream(self.source, fqn, dtype, bounds, range, &mut |bytes| {
            if let Some(progress) = self.options.progress {
                progress(bytes.len() as u64);
            }
            sink(bytes)
        })
    }

    fn value(&self, fqn: &str) -> Result<Cow<'_, PlainValue>, FileError> {
        self.source.read_value(fqn).map(Cow::Owned)
    }
}
