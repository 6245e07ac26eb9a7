//! Helpers that whole-system tests share.

pub mod counting_allocator;

/// The samples in the book, which run as doctests of this crate.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../docs/src/checkpoints.md")]
    mod checkpoints {}
    #[doc = include_str!("../../docs/src/several-models.md")]
    mod several_models {}
    #[doc = include_str!("../../docs/src/shard.md")]
    mod shard {}
    #[doc = include_str!("../../docs/src/state-dicts.md")]
    mod state_dicts {}
}
