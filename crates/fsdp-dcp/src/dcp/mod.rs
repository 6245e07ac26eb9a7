//! Directories of `torch.distributed.checkpoint`: `.metadata`, and a file of items for each rank.

pub(crate) mod item;
pub(crate) mod reader;
pub(crate) mod reshard;
pub mod writer;
