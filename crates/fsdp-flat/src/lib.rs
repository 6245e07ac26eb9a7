//! Candle tensors on layouts: [`ShardedTensor`] and [`FlatParameter`].
//!
//! | module | what it holds |
//! |---|---|
//! | `cuda` (feature `cuda`) | the memory of tensors on NVIDIA GPUs |
//! | [`dtype`] | candle's dtypes and ours |
//! | [`storage`] | the memory behind a tensor: read it, change it in place, free it and give it back |
//! | `taken` | the memory of many tensors at once ([`TakenStorages`]) |
//! | [`raw`] | tensors of dtypes that candle does not compute with, as bytes |
//! | [`sharded`] | a global shape and the boxes of it that this rank owns |
//! | [`flatten`] | many tensors to one flat tensor and back, with FlatParameter's padding |
//! | [`mod@pad`] | padding: constant, reflect, replicate, circular |
//! | `streamed` | large copies that go around the caches ([`copy_streamed`]) |
//! | [`flat_parameter`] | this rank's shard of many parameters |
//!
//! Nothing here communicates.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dtype;
mod error;
pub mod flat_parameter;
pub mod flatten;
pub mod pad;
pub mod raw;
pub mod sharded;
pub mod storage;
mod streamed;
mod taken;

pub use error::FlatError;
pub use flat_parameter::FlatParameter;
pub use flatten::{flatten_tensors, get_shard, get_unpadded_shard, unflatten_tensors};
pub use raw::RawTensor;
pub use sharded::{LocalShard, ShardedTensor};
pub use streamed::copy_streamed;
pub use taken::TakenStorages;
