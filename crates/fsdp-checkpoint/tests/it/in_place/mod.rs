//! Loads into the memory of live tensors, and resumes through them.

#![expect(
    clippy::disallowed_methods,
    reason = "the tests damage files on purpose"
)]

mod digests;
mod fresh_optimizer;
mod load;
mod own_stateful;
mod parts;
mod replicas;
mod resume;
mod silent;
mod training;
