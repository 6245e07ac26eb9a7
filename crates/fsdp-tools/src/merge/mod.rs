//! Merges several checkpoints into one: the weighted average of checkpoints with the same keys, or
//! a base with a LoRA adapter.
//!
//! Both are views: values are computed when [`convert`](crate::convert::convert) reads them, piece
//! by piece, so memory does not grow with the size of tensors.

mod average;
mod base_model;
mod lora;
mod numbers;
mod pattern;

pub use self::average::Average;
pub use self::lora::{Lora, LoraConfig};
