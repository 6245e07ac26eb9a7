//! Planning of saves and loads, as pure functions: which rank writes which boxes, and which parts
//! of which chunks a rank reads.
//!
//! Saving: every rank lists its [`WriteItem`]s. [`plan_save`] (on one rank) removes duplicates of
//! replicated tensors, balances the bytes that ranks write, checks that every tensor is covered
//! exactly once, and makes the [`Metadata`]. Each rank gets a [`Selection`]: the items that it must
//! write, out of those that it listed. If there are many ranks, what they have in common is sent
//! only once, as a [`schema`](LocalPlan::schema), and [`plan_offers`] makes the same plan from
//! that.
//!
//! Loading: [`plan_load`] intersects wanted boxes with saved chunks. It finds all errors before a
//! byte is read.
//!
//! [`Metadata`]: crate::metadata::Metadata

mod error;
mod load;
mod local;
mod overlap;
mod save;
mod validate;

pub use error::SavePlanError;
pub use load::{LoadPlanError, LoadRequest, ReadItem, plan_load};
pub use local::{HeldBox, LocalPlan, WriteContent, WriteItem};
pub use save::{
    Deduplicate, GlobalPlan, Offer, SelectedItem, Selection, check_key_length, plan_offers,
    plan_part, plan_save,
};
pub(crate) use validate::validate_cover;
pub use validate::{ChunkError, validate_chunks, validate_metadata};

#[cfg(test)]
mod tests;
