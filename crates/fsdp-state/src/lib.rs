//! State dicts: nested names to tensors (whole, sharded, or raw bytes) and plain values.
//!
//! | module | what it holds |
//! |---|---|
//! | [`state_dict`] | [`StateDict`] and [`StateValue`] |
//! | [`mod@flatten`] | nested to flat keys and back, by the rule of torch's checkpoints |

mod error;
pub mod flatten;
pub mod report;
pub mod state_dict;

pub use error::StateError;
pub use flatten::{FlatStateDict, flatten_state_dict, unflatten_state_dict};
pub use report::{LoadReport, Mismatch};
pub use state_dict::{StateDict, StateValue};
