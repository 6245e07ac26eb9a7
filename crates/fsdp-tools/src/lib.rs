//! Conversion, verification and comparison of checkpoints, of all formats that [`fsdp_formats`]
//! reads.
//!
//! This crate uses no tensor library, and no training job needs it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`convert`](mod@convert) | conversion of any format, with keys filtered, renamed, cast and resharded, in bounded memory |
//! | [`map`] | from the keys and shapes of one framework to those of another |
//! | [`tensor_parallel`] | the parts of a model that tensor-parallel ranks hold |
//! | [`merge`] | the average of checkpoints, and a base with a LoRA adapter |
//! | [`verify`](mod@verify), [`diff`](mod@diff), [`elements`] | checks of a checkpoint, the differences of two, statistics of tensors |
//! | `sign` (with the feature of this name) | signatures, in the format of OpenSSF Model Signing |

pub mod convert;
pub mod diff;
pub mod elements;
pub mod map;
pub mod merge;
mod nested;
#[cfg(feature = "sign")]
pub mod sign;
pub mod tensor_parallel;
pub mod verify;
