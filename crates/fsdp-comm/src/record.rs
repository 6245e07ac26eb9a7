//! The call of each rank in an operation, and what it tells the others beside its ballot.

use std::fmt;

use fsdp_layout::{DType, ErrorKind, Failure};
use serde::{Deserialize, Serialize};

use crate::error::{CommError, bounded};
use crate::reduce::ReduceOp;
use crate::wire;

macro_rules! operations {
    ($($variant:ident, $name:literal;)*) => {
        /// The operations of a process group.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        #[expect(missing_docs, reason = "each is the method of the same name")]
        pub enum Operation {
            $($variant,)*
        }

        impl Operation {
            /// Returns the name of its method, e.g. `all_gather`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Operation::$variant => $name,)* }
            }
        }
    };
}

operations! {
    Barrier, "barrier";
    AllGather, "all_gather";
    AllGatherUneven, "all_gather_uneven";
    ReduceScatter, "reduce_scatter";
    AllReduce, "all_reduce";
    Broadcast, "broadcast";
    Gather, "gather";
    GatherUneven, "gather_uneven";
    Scatter, "scatter";
    ScatterUneven, "scatter_uneven";
    AllToAllUneven, "all_to_all_uneven";
    Subgroup, "subgroup";
    MeshGroup, "mesh_group";
    AllGatherObject, "all_gather_object";
    GatherObject, "gather_object";
    ScatterObject, "scatter_object";
    BroadcastObject, "broadcast_object";
    Agree, "agree";
    BroadcastResult, "broadcast_result";
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One call of an operation. All ranks must make the same call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) operation: Operation,
    /// The number of operations of the group before this one, which the group sets when the call
    /// begins.
    pub(crate) sequence: u64,
    /// The name given to `agree` or `broadcast_result`, or to the handle of the group.
    pub(crate) label: Option<String>,
    /// The type of the elements; `None` if objects or nothing but ballots move.
    pub(crate) dtype: Option<DType>,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) root: Option<usize>,
    /// The numbers of elements, one for all or one for each rank; or the ranks of a sub-group; or a
    /// mesh and its dimension.
    pub(crate) sizes: Vec<usize>,
    /// `true` if the elements are in GPU memory.
    pub(crate) on_device: bool,
}

impl Call {
    pub(crate) fn new(operation: Operation) -> Self {
        Call {
            operation,
            sequence: 0,
            label: None,
            dtype: None,
            reduce: None,
            root: None,
            sizes: Vec::new(),
            on_device: false,
        }
    }

    /// Returns the name for messages: the one given to `agree` or `broadcast_result`, or the
    /// operation's.
    pub(crate) fn name(&self) -> &str {
        match (self.operation, &self.label) {
            (Operation::Agree | Operation::BroadcastResult, Some(label)) => label,
            _ => self.operation.name(),
        }
    }
}

impl fmt::Display for Call {
    /// Writes e.g. `all_reduce(sum) of 8 float32`, `broadcast from 2 of 8 float32`, ``agree on
    /// `save` ``.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if let Some(reduce) = self.reduce {
            write!(f, "({reduce})")?;
        }
        if let Some(label) = &self.label {
            write!(f, " on `{label}`")?;
        }
        match (self.operation, self.root) {
            (Operation::Gather | Operation::GatherUneven | Operation::GatherObject, Some(root)) => {
                write!(f, " to {root}")?;
            }
            (_, Some(root)) => write!(f, " from {root}")?,
            _ => {}
        }
        match (self.dtype, &self.sizes[..]) {
            (Some(dtype), [numel]) => write!(f, " of {numel} {dtype}")?,
            (Some(dtype), []) => write!(f, " of {dtype}")?,
            (Some(dtype), counts) => write!(f, " of {counts:?} {dtype}")?,
            (None, []) => {}
            (None, sizes) => write!(f, " of {sizes:?}")?,
        }
        if self.on_device {
            write!(f, " in GPU memory")?;
        }
        Ok(())
    }
}

/// A rank's own error, because of which the operation fails on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
}

impl Fault {
    pub(crate) fn new(failure: &impl Failure) -> Self {
        Fault {
            kind: failure.kind(),
            message: bounded(failure),
        }
    }
}

/// The record that a rank shows all others if they are not unanimous, so that the error says why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) call: Call,
    pub(crate) fault: Option<Fault>,
}

/// The bytes that a rank attaches to its ballot: numbers, and its payload if that is small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attachment<'a> {
    /// Numbers that may differ between ranks: sizes of objects, counts of an all-to-all, a schema
    /// hash.
    pub(crate) numbers: Vec<u64>,
    /// Everything that this rank sends, or nothing if that is too much. Unless it is everything on
    /// all ranks, no rank uses it, and the payloads are transferred afterwards.
    pub(crate) payload: &'a [u8],
}

impl<'a> Attachment<'a> {
    /// Returns the attachment as bytes; none if it is empty, so that an operation that needs none
    /// sends none.
    pub(crate) fn encode(&self) -> Vec<u8> {
        if self.numbers.is_empty() && self.payload.is_empty() {
            return Vec::new();
        }
        let numbers = wire::encode_plain(&self.numbers);
        [&numbers, self.payload].concat()
    }

    /// Reads the attachment of another rank.
    pub(crate) fn decode(bytes: &'a [u8], operation: &str) -> Result<Self, CommError> {
        let (numbers, numbers_bytes) = match bytes {
            [] => (Vec::new(), 0),
            _ => wire::decode_prefix(bytes)
                .map_err(|message| CommError::object(operation, "decode", message))?,
        };
        Ok(Attachment {
            numbers,
            payload: &bytes[numbers_bytes..],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachments_come_back() {
        for numbers in [vec![], vec![7], vec![u64::MAX, 0]] {
            for payload in [&b""[..], b"payload"] {
                let attachment = Attachment {
                    numbers: numbers.clone(),
                    payload,
                };
                let bytes = attachment.encode();
                assert_eq!(bytes.is_empty(), numbers.is_empty() && payload.is_empty());
                assert_eq!(Attachment::decode(&bytes, "test").unwrap(), attachment);
            }
        }
    }

    #[test]
    fn an_attachment_without_the_numbers_that_it_promises_is_refused() {
        for bytes in [
            &[1][..],
            &[1; 8],
            &[2, 0, 0, 0, 0, 0, 0, 0, 9, 9],
            &[255; 16],
        ] {
            assert!(Attachment::decode(bytes, "test").is_err(), "{bytes:?}");
        }
    }
}
