//! Tests of the crate from outside: real PyTorch checkpoints, whole saves, crashes, damage.

#![expect(clippy::disallowed_methods, reason = "tests damage and move checkpoints by hand")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod convert;
mod crash;
mod damage;
mod fixtures;
mod hostile;
mod save_load;
mod truth;
mod verify;
