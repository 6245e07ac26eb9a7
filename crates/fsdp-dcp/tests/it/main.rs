//! Tests of the crate from outside: real PyTorch checkpoints, whole saves, crashes, damage.

mod fixtures;
mod save_load;
mod truth;
