//! The vocabulary of sharding and its arithmetic.
//!
//! Everything here is plain data and pure functions: dtypes, non-tensor values, boxes of N-d
//! tensors, the layout of a FlatParameter, dim-0 chunks, placements on a device mesh. This crate
//! uses no tensor library, does no I/O, and does not communicate: ranks are only numbers to it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`dtype`] | the element types that files hold, their sizes and their names in torch and safetensors |
//! | [`value`] | plain, non-tensor values of a state dict |
//! | [`path`] | the path of a value in a nested state dict, and its flat key |
//! | [`boxes`] | hyper-rectangles of a tensor: intersection, flat ranges, copies between boxes |
//! | [`cover`] | the parts of a box that other boxes leave uncovered |
//! | [`shard`] | torch's rule for cutting `n` elements over ranks |
//! | [`flat`] | the layout of many parameters in one FlatParameter |
//! | [`mesh`] | rank arithmetic of an N-d device mesh |
//! | [`placement`] | Shard / Replicate / strided shards on a mesh, as boxes |
//! | [`failure`] | kinds of failure, which errors keep when they are sent to other ranks |

pub mod boxes;
mod count;
pub mod cover;
pub mod dtype;
pub mod failure;
pub mod flat;
mod key_text;
pub mod mesh;
pub mod path;
pub mod placement;
pub mod shard;
pub mod value;

pub use boxes::{CopyRun, TensorBox};
pub use count::count_text;
pub use dtype::DType;
pub use failure::{ErrorKind, Failure, with_causes};
pub use flat::{FlatLayout, FlatLayoutError, ShardParamInfo};
pub use mesh::DeviceMesh;
pub use path::{KeyPath, MAX_DEPTH, PathPart};
pub use placement::Placement;
pub use value::{PlainTensor, PlainValue, PythonType};
