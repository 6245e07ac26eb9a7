//! The errors of planning a save.

use thiserror::Error;

use super::validate::ChunkError;

/// The reason why ranks' items do not make one checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SavePlanError {
    /// One rank has a flat key twice.
    #[error("rank {rank} has the key `{fqn}` twice")]
    DuplicateKey {
        /// The key.
        fqn: String,
        /// The rank.
        rank: usize,
    },
    /// A key is longer than readers allow.
    #[error(
        "a key has {length} bytes, but a checkpoint can only have keys of at most {limit}; it begins with `{start}`"
    )]
    LongKey {
        /// The first characters of the key.
        start: String,
        /// Its length in bytes.
        length: usize,
        /// The most bytes that a key may have.
        limit: usize,
    },
    /// Two ranks mean different things by one key.
    #[error("`{fqn}` has {what} {first} on rank {first_rank}, but {second} on rank {second_rank}")]
    Disagreement {
        /// The key.
        fqn: String,
        /// The difference: dtype, shape, kind or path.
        what: &'static str,
        /// The first rank that has the key.
        first_rank: usize,
        /// Its dtype, shape, kind or path.
        first: String,
        /// The rank that differs.
        second_rank: usize,
        /// The other's dtype, shape, kind or path.
        second: String,
    },
    /// The chunks of all ranks do not make up the tensor.
    #[error("the chunks of `{fqn}` on ranks {ranks:?} do not make up the tensor")]
    Chunks {
        /// The key.
        fqn: String,
        /// The ranks that hold chunks of it (at most the first eight).
        ranks: Vec<usize>,
        /// The way in which they do not.
        #[source]
        source: Box<ChunkError>,
    },
}
