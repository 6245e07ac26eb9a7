//! The end of a backward: all ranks reduce the gradients that are left, and agree on the parameters
//! that got one.

use std::sync::atomic::Ordering;

use fsdp_comm::ReduceOp;
use tracing::warn;

use super::parameters::ShardedParameters;
use crate::error::Result;
use crate::exchange::Groups;
use crate::unit::PendingReduction;

/// The most parameters that the warning names.
const MAX_NAMED: usize = 8;

/// Returns `true` if the hashes of all ranks are the same. `hashes` has the largest of all ranks'
/// bytes of the hash, and then the largest of their inverses, which are those of the smallest
/// bytes.
fn is_same_hash(hashes: &[u8]) -> bool {
    let (largest, inverse) = hashes.split_at(hashes.len() / 2);
    let mut pairs = largest.iter().zip(inverse);
    pairs.all(|(byte, inverted)| *byte == !*inverted)
}

impl ShardedParameters {
    /// Ends a backward that has come to all parameters that it reaches: waits until all gradients
    /// are reduced, those of the root unit among them.
    ///
    /// Collectives: unless gradients are accumulated without communication, one all-reduce of a
    /// byte for each unit and each parameter, in which the ranks also compare the calls on GPU
    /// memory that they have made since the last such all-reduce. If these are the same, the next
    /// step does not agree on each of them again. While replicas do not reduce, one all-gather of a
    /// byte for each unit over the shard group instead. Then the reductions of units that have
    /// gradients left on any rank.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        for handle in self.handles.iter().rev() {
            handle.end_backward()?;
        }
        if !self.shared.reductions.syncs() {
            return Ok(());
        }
        // A rank may have nothing left of a unit that others have gradients of: its batch did not
        // come to the root, or no earlier backward to the unit. All ranks go through the same
        // units, in the same order.
        let own_unreduced: Vec<u8> = self
            .handles
            .iter()
            .map(|handle| handle.unreduced() as u8)
            .collect();
        if !self.shared.reductions.all_reduces() && self.replicate_group().is_some() {
            let unreduced = self.unreduced_in_replica(own_unreduced)?;
            return self.reduce_unreduced(&unreduced);
        }
        let has_own_gradients = self
            .handles
            .iter()
            .flat_map(|handle| handle.has_own_gradient());
        let mut bytes: Vec<u8> = own_unreduced
            .into_iter()
            .chain(has_own_gradients.map(u8::from))
            .collect();
        let flag_count = bytes.len();
        if let Some(hash) = self.calls_hash() {
            bytes.extend_from_slice(&hash.to_le_bytes());
            bytes.extend_from_slice(&(!hash).to_le_bytes());
        }
        if self.group().world_size() > 1 {
            self.group().all_reduce(&mut bytes, ReduceOp::Max)?;
        }
        let (flags, hashes) = bytes.split_at(flag_count);
        if !hashes.is_empty() {
            let is_same = is_same_hash(hashes);
            self.all_groups()
                .try_for_each(|groups| groups.begin_step(is_same))?;
        }
        let (unreduced, has_own_gradients) = flags.split_at(self.handles.len());
        self.reduce_unreduced(unreduced)?;
        self.set_has_gradient(
            &has_own_gradients
                .iter()
                .map(|&byte| byte != 0)
                .collect::<Vec<bool>>(),
        );
        Ok(())
    }

    /// Returns a hash of the calls on GPU memory since the last backward that compared them; `None`
    /// if the groups move no GPU memory.
    fn calls_hash(&self) -> Option<u64> {
        if !self.all_groups().any(Groups::moves_gpu_memory) {
            return None;
        }
        // A reduction is part of the hash only after the thread of the collectives has called it.
        if let Some(overlap) = &self.overlap {
            overlap.finish_reductions();
        }
        Some(self.all_groups().fold(0u64, |hash, groups| {
            hash.wrapping_mul(31).wrapping_add(groups.calls_hash())
        }))
    }

    /// Returns what the ranks of this replica have left to reduce of each unit, as bytes;
    /// `own_unreduced` is what this rank has. Partial gradients stay: only other replicas have more
    /// of them.
    fn unreduced_in_replica(&self, mut own_unreduced: Vec<u8>) -> Result<Vec<u8>> {
        own_unreduced
            .iter_mut()
            .filter(|byte| **byte == PendingReduction::Partial as u8)
            .for_each(|byte| *byte = PendingReduction::Nothing as u8);
        let Some(group) = self.shard_group() else {
            return Ok(own_unreduced);
        };
        let rank_bytes = group.all_gather_object(&own_unreduced)?;
        Ok((0..own_unreduced.len())
            .map(|unit| {
                let unit_bytes = rank_bytes.iter().map(|bytes| bytes[unit]);
                unit_bytes.max().expect("a group has ranks")
            })
            .collect())
    }

    /// Reduces what all ranks together have left, given as one byte for each unit, and waits for
    /// all reductions.
    fn reduce_unreduced(&self, unreduced: &[u8]) -> Result<()> {
        for (handle, &unreduced) in self.handles.iter().zip(unreduced).rev() {
            handle.reduce_unreduced(PendingReduction::from_byte(unreduced))?;
        }
        self.handles
            .iter()
            .try_for_each(|handle| handle.take_reduced())
    }

    /// Checks that backwards have left no gradients on this rank that are not reduced over all. No
    /// communication.
    ///
    /// # Errors
    /// [`NnError::BackwardNotEnded`](crate::NnError::BackwardNotEnded) and
    /// [`NnError::GradientsNotReduced`](crate::NnError::GradientsNotReduced).
    pub(crate) fn check_gradients_reduced(&self) -> Result<()> {
        self.handles
            .iter()
            .try_for_each(|handle| handle.check_gradients_reduced())
    }

    /// Returns `true` if the parameter has got a gradient on any rank since the last
    /// [`Self::zero_grad`]. One that the loss does not depend on, or only through operations
    /// without a backward, has none: its [`Self::gradient`] is zero where its unit has gradients,
    /// and optimizers leave it as it is. No communication.
    ///
    /// The ranks agree on it in
    /// [`FullyShardedDataParallel::backward`](crate::FullyShardedDataParallel::backward).
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`](crate::NnError::UnknownParameter).
    pub fn has_gradient(&self, fqn: &str) -> Result<bool> {
        let (handle, param) = self.place(fqn)?;
        Ok(handle.has_gradient(param))
    }

    /// Records which parameters got a gradient on any rank, and warns, once, of those without one.
    /// No communication.
    pub(crate) fn set_has_gradient(&self, has_gradient: &[bool]) {
        let mut remaining = has_gradient;
        for handle in &self.handles {
            let unit_flags;
            (unit_flags, remaining) = remaining.split_at(handle.params.len());
            handle.set_has_gradient(unit_flags.to_vec());
        }
        // Every rank has the same result, so one warning is enough.
        if !self.has_looked_for_unreached.swap(true, Ordering::Relaxed) && self.group().rank() == 0
        {
            self.warn_of_unreached(has_gradient);
        }
    }

    /// Warns of trained parameters that got no gradient. `has_gradient` is in the order of all
    /// parameters.
    fn warn_of_unreached(&self, has_gradient: &[bool]) {
        let params = self.handles.iter().flat_map(|handle| &handle.params);
        let unreached: Vec<&str> = params
            .zip(has_gradient)
            .filter(|(param, has_gradient)| param.requires_grad() && !**has_gradient)
            .map(|(param, _)| param.fqn.as_str())
            .collect();
        if unreached.is_empty() {
            return;
        }
        // A few names are enough to find the place in the model.
        let mut names = unreached
            .iter()
            .take(MAX_NAMED)
            .map(|fqn| format!("`{fqn}`"))
            .collect::<Vec<_>>()
            .join(", ");
        if unreached.len() > MAX_NAMED {
            names += &format!(" and {} more", unreached.len() - MAX_NAMED);
        }
        warn!(
            "no gradient comes to {} of the trained parameters, which stay as they are: {names}. \
             Either the loss does not depend on them, or an operation without a backward cuts \
             their gradients off: candle's fused ones (softmax_last_dim, RmsNorm, LayerNorm, rope, \
             sdpa) have none, those of `fsdp_ops` do",
            unreached.len()
        );
    }
}
