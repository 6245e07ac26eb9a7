//! State dicts of models and optimizers: `get_state_dict`, `set_state_dict` and their halves.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod get_and_set;
mod load_paths;
