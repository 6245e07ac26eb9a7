//! Helpers that whole-system tests share.

pub mod counting_allocator;
