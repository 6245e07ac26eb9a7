//! State dicts of sharded models and optimizers over all ranks, by the properties that they must
//! have.

mod any_layout;
mod any_source_any_target;
mod cases;
mod common;
mod local;
mod model;
mod optim_errors;
mod optim_load;
mod optim_save;
mod rekey;
mod settings;
mod traffic;
