//! Loads into the memory of live tensors, and resumes through them.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

mod crafted_paths;
mod digests;
mod fresh_optimizer;
mod load;
mod odd_runs;
mod own_stateful;
mod parts;
mod replicas;
pub(crate) mod resume;
mod silent;
mod tied_names;
pub(crate) mod training;
