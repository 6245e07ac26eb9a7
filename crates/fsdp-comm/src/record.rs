//! The record of each rank that all others get in a round: its call, its error if it has one, and
//! its payload if that is small.

use std::borrow::Cow;
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
    /// The type of the elements; `None` if objects or nothing but records move.
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

/// The encoded part of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) call: Call,
    pub(crate) fault: Option<Fault>,
    /// Numbers that may differ between ranks: sizes of objects, counts of an all-to-all, a schema
    /// hash.
    pub(crate) own_numbers: Vec<u64>,
    /// `true` if everything that this rank sends follows the header in the record. Unless this is
    /// so on all ranks, no rank uses the payloads in the records, and the payloads are transferred
    /// after them.
    pub(crate) inline: bool,
}

/// A decoded record: the header, and the payload behind it.
#[derive(Debug)]
pub(crate) struct Record<'a> {
    pub(crate) header: Cow<'a, Header>,
    pub(crate) payload: &'a [u8],
}

impl<'a> Record<'a> {
    /// Decodes a record. `own_header` is this rank's header, and `own_encoded` its encoded form.
    /// Most headers of other ranks are equal to it, and these are not decoded: with many ranks,
    /// decoding would take longer than the rest of a small collective.
    pub(crate) fn decode(
        bytes: &'a [u8],
        own_header: &'a Header,
        own_encoded: &[u8],
        operation: &str,
    ) -> Result<Self, CommError> {
        if let Some(payload) = bytes.strip_prefix(own_encoded) {
            return Ok(Record {
                header: Cow::Borrowed(own_header),
                payload,
            });
        }
        let (header, header_bytes) = wire::decode_prefix(bytes)
            .map_err(|message| CommError::object(operation, "decode", message))?;
        Ok(Record {
            header: Cow::Owned(header),
            payload: &bytes[header_bytes..],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_the_same_whether_its_header_is_this_ranks_or_another() {
        let header = |sequence: u64, own_numbers: Vec<u64>| {
            let call = Call {
                sequence,
                sizes: vec![3, 4],
                ..Call::new(Operation::AllGather)
            };
            Header {
                call,
                fault: None,
                own_numbers,
                inline: true,
            }
        };
        let own = header(7, vec![1]);
        let encoded = wire::encode(&own).unwrap();
        // The last one begins as this rank's does, but is longer.
        for other in [
            own.clone(),
            header(8, vec![1]),
            header(7, vec![1, 2]),
            header(7, Vec::new()),
        ] {
            for payload in [&b""[..], b"payload"] {
                let bytes = [&wire::encode(&other).unwrap()[..], payload].concat();
                let record = Record::decode(&bytes, &own, &encoded, "test").unwrap();
                assert_eq!((&*record.header, record.payload), (&other, payload));
                assert_eq!(matches!(record.header, Cow::Borrowed(_)), other == own);
            }
        }
        assert!(Record::decode(&encoded[..3], &own, &encoded, "test").is_err());
    }
}
