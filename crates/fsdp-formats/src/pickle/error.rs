//! The errors of pickles, with their positions.

use std::borrow::Cow;

use thiserror::Error;

use crate::budget::OverBudget;
use crate::limits::BeyondLimit;

/// The reason why a pickle was refused, and the position.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("pickle refused at byte {offset}: {kind}")]
#[non_exhaustive]
pub struct PickleError {
    /// Position of the opcode (or, for a value of a wrong kind, of the opcode that made the value).
    pub offset: u64,
    /// The reason.
    pub kind: PickleErrorKind,
}

impl PickleError {
    /// Returns the type of the object that only running code could build, if that is the error.
    pub(crate) fn opaque_type(&self) -> Option<String> {
        match &self.kind {
            PickleErrorKind::Global { module, name } => Some(format!("{module}.{name}")),
            _ => None,
        }
    }
}

/// The reason why a pickle was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PickleErrorKind {
    /// The bytes end inside an opcode or before `STOP`.
    #[error("the bytes end too early")]
    Truncated,
    /// An opcode that is not supported. Only protocols 0 and 1 need it.
    #[error("opcode `0x{opcode:02x}` is not supported{}", if is_old(*opcode) {
        ": the pickle is of protocol 0 or 1; save it again with `pickle_protocol=2`"
    } else {
        ""
    })]
    Opcode {
        /// The opcode byte.
        opcode: u8,
    },
    /// A protocol beyond 5.
    #[error("pickle protocol {protocol} is not supported")]
    Protocol {
        /// The protocol number.
        protocol: u8,
    },
    /// A value that only an unknown class or function could build. It was neither imported nor
    /// called.
    #[error("global `{module}.{name}` is not allowed")]
    Global {
        /// Its module.
        module: String,
        /// Its qualified name.
        name: String,
    },
    /// A length or count beyond its limit.
    #[error(transparent)]
    Limit(#[from] BeyondLimit),
    /// More than the budget of memory and work for an input allows. A file of which that is true
    /// may be sound.
    #[error(transparent)]
    TooLarge(#[from] OverBudget),
    /// An opcode needs more operands than the stack holds, or a mark that is not there.
    #[error("the stack does not hold what the opcode needs")]
    Stack,
    /// A memo entry that does not exist.
    #[error("memo entry {index} does not exist")]
    Memo {
        /// Its index.
        index: u64,
    },
    /// Text that is not UTF-8 (or a `GLOBAL` line that is not text).
    #[error("text is not UTF-8")]
    Text,
    /// A value of another kind than this place needs.
    #[error("expected {expected}, found {found}")]
    Kind {
        /// The kind that was needed.
        expected: &'static str,
        /// The kind that is there.
        found: &'static str,
    },
    /// A value of the right kind that is not valid here.
    #[error("{what}")]
    Value {
        /// The defect.
        what: Cow<'static, str>,
    },
    /// An object lacks an attribute that it must have.
    #[error("the object has no `{field}`")]
    Field {
        /// The attribute.
        field: &'static str,
    },
}

/// Returns `true` for an opcode of protocol 0 or 1 that has a better successor.
fn is_old(opcode: u8) -> bool {
    b"ILFSVPpgio".contains(&opcode)
}

impl PickleErrorKind {
    /// Returns `true` for a reason that a sound pickle may have too.
    pub(crate) fn is_unsupported(&self) -> bool {
        match self {
            PickleErrorKind::Opcode { opcode } => is_old(*opcode),
            PickleErrorKind::TooLarge(_) | PickleErrorKind::Protocol { .. } => true,
            _ => false,
        }
    }

    /// Makes the error with this reason at a position in the pickle.
    pub(crate) fn at(self, offset: usize) -> PickleError {
        PickleError {
            offset: offset as u64,
            kind: self,
        }
    }
}
