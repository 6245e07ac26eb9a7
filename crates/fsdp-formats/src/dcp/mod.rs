//! Directories of `torch.distributed.checkpoint`: `.metadata`, and a file of items for each rank.

pub(crate) mod item;
pub mod parts;
pub(crate) mod reader;
pub(crate) mod sidecars;
pub mod writer;
