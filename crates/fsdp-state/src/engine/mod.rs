//! The engine that moves all state: [`load_state`] takes it from a [`Source`] to a [`Target`].
//!
//! | file | what it holds |
//! |---|---|
//! | `source`, `target` | the two traits |
//! | `options` | [`LoadOptions`] |
//! | `load` | [`load_state`]: compare, agree, lend, read, commit |
//! | `lending` | the target's memory, lent to the source |
//! | `dict` | state dicts as sources: on every rank, on one rank, or sharded over ranks |
//! | `tied` | names of a source that become one tensor, whose values are compared |
//! | `fresh` | state dicts as targets: in the layout of a template, fresh or in place, or whole ones |

mod dict;
mod fresh;
mod lending;
mod load;
mod options;
mod source;
mod target;
mod tied;

pub use dict::{BoxesOn, DictSource};
pub use fresh::DictTarget;
pub(crate) use fresh::WholeTarget;
pub use load::{LoadError, check_state, load_state};
pub use options::{LoadOptions, is_part_of};
pub use source::{LoadCall, Source, WantedOn};
pub use target::{Common, Plan, Target, Values, Wanted};
pub use tied::{check_tied_values, want_tied};
