//! A pickle reader that never executes anything.
//!
//! [`parse`] interprets the opcodes that CPython and torch write (protocols 2 to 5) and builds
//! plain nodes. There is no call mechanism: `REDUCE` and `NEWOBJ` only record *which* global was
//! applied to *which* arguments ([`Node::Object`]). An object of a global that is not on the list
//! of known ones ([`Global`]) is opaque ([`Node::Opaque`]): its name and arguments are kept, and
//! code that needs its value gets an error that names it.
//!
//! Nodes are in one arena and refer to each other by number. So malicious use of the memo does no
//! harm: a shared node costs one number, cycles are found when a value is built, and dropping never
//! recurses. [`mod@write`] writes pickles that torch's loaders accept.

mod error;
mod global;
mod node;
mod objects;
mod read;
mod walk;
pub mod write;

pub use error::{PickleError, PickleErrorKind};
pub(crate) use global::{BUILTINS, Global, QSCHEMES, STORAGES, name_at};
pub(crate) use node::{Fields, Node, NodeId, ObjectNode, OpaqueNode, Pickle, check_attributes};
pub use read::parse;
pub(crate) use read::parse_within;
pub(crate) use walk::{COPIES, Walk};

#[cfg(test)]
mod tests;
