//! Planning: pure functions from what ranks hold to who writes what, and from what a rank wants to what it reads.
//!
//! Saving: every rank lists its [`WriteItem`]s; [`plan_save`] (on one rank) drops the duplicates that replicated tensors
//! are, balances the ranks by bytes, checks that every tensor is covered exactly once, and makes the [`Metadata`];
//! each rank gets the [`Selection`] of its own items that it must write. Where ranks are many, they send what they have
//! in common once, as a [`PlanSchema`], and [`plan_offers`] does the same.
//!
//! Loading: [`plan_load`] intersects wanted boxes with saved chunks. Everything that can be wrong is found there,
//! before a byte is read.
//!
//! [`Metadata`]: crate::metadata::Metadata

mod error;
mod load;
mod local;
mod save;
mod validate;

pub use error::SavePlanError;
pub use load::{LoadPlan, LoadPlanError, LoadRequest, ReadItem, ReadPlanOptions, plan_load};
pub use local::{HeldBox, LocalPlan, PlanSchema, SchemaContent, SchemaItem, WriteContent, WriteItem};
pub use save::{
    Deduplicate, GlobalPlan, Offer, PlanOptions, SelectedItem, Selection, plan_offers, plan_part, plan_save,
};
pub(crate) use validate::validate_chunks;
pub use validate::{ChunkError, validate_metadata};

#[cfg(test)]
mod tests;
