//! Getting and setting the state of models and optimizers: what `get_state_dict` and
//! `set_state_dict` promise.

mod common;
mod foreign;
mod get_and_set;
mod load_paths;
mod refusals;
mod resume;
mod verify_by_load;
