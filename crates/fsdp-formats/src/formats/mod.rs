//! The part of reading that all formats share: the trait `Checkpoint`, views of checkpoints, and
//! reads of many tensors at once.

pub(crate) mod assembled;
pub(crate) mod blocks;
pub(crate) mod build;
pub(crate) mod byte_order;
pub(crate) mod change;
pub(crate) mod checkpoint;
pub(crate) mod extra;
pub(crate) mod flat_json;
pub(crate) mod index;
pub(crate) mod joined;
pub(crate) mod key_move;
pub(crate) mod layer;
pub(crate) mod lookup;
pub(crate) mod opaque;
pub(crate) mod python_json;
pub(crate) mod read;
pub(crate) mod replicas;
pub(crate) mod stream;
pub(crate) mod structure;
#[cfg(test)]
mod tests;
pub(crate) mod weights;
