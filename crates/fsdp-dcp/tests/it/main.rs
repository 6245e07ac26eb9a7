//! Tests of the crate from outside: real PyTorch checkpoints, whole saves, crashes, damage.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod crash;
mod damage;
mod fixtures;
mod save_load;
mod truth;
