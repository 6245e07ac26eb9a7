//! Candle tensors with sharded layouts: [`ShardedTensor`] and [`FlatParameter`], and access to the
//! memory of tensors.
//!
//! | module | what it holds |
//! |---|---|
//! | [`dtype`] | conversions between candle's dtypes and those of `fsdp-layout` |
//! | [`storage`] | the memory behind a tensor: read it, change it in place, release it and fill it again |
//! | [`raw`] | tensors of dtypes that candle does not compute with, as bytes |
//! | [`sharded`] | a global shape and the boxes of it that this rank owns |
//! | [`flatten`] | many tensors to one flat tensor and back, with FlatParameter's padding |
//! | [`mod@pad`] | padding: constant, reflect, replicate, circular |
//! | `non_temporal` | large copies that bypass the caches ([`non_temporal_copy`]) |
//! | [`flat_parameter`] | this rank's shard of many parameters |
//!
//! Nothing here communicates.

pub mod dtype;
mod error;
pub mod flat_parameter;
pub mod flatten;
mod non_temporal;
pub mod pad;
pub mod raw;
pub mod sharded;
pub mod storage;

pub use error::{FlatError, candle_message};
pub use flat_parameter::FlatParameter;
pub use flatten::{flatten_tensors, get_shard, get_unpadded_shard, unflatten_tensors};
pub use non_temporal::non_temporal_copy;
pub use raw::RawTensor;
pub use sharded::{LocalShard, ShardedTensor};
