//! Collectives that overlap with the computation: units are prefetched before the model needs them,
//! and the gradients of the last unit are reduced while the backward continues.
//!
//! All collectives of the units run on one thread, in separate process groups. The computation
//! queues them. It does the same on all ranks, so all ranks run them in the same order, even if one
//! rank is ahead of another.
//!
//! Over NCCL that thread only queues them on the GPU. A collective begins when the GPU has come to
//! the place at which the computation queued it. Where the computation takes the result, it waits
//! for the collective, on the GPU. So the host runs ahead, and the memory of units is bounded as on
//! a CPU.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use fsdp_comm::ProcessGroup;
use tracing::{trace, warn};

use super::order::Order;
use super::shared::Shared;
use super::unit::{Gathered, Reduction, UnitExchange};
use super::worker::{Ticket, Worker};
use crate::config::{BackwardPrefetch, FsdpConfig};
use crate::error::{NnError, Result};
use crate::guards::lock;

/// The largest number of prefetched units, unless [`FsdpConfig::limit_all_gathers`] limits it to
/// one.
const MAX_PREFETCHED: usize = 3;

/// A phase of a step. In each phase a model uses its units in a certain order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Forward,
    Backward,
}

/// The collectives of a model that overlap with its computation.
#[derive(Debug)]
pub(crate) struct Overlap {
    forward_prefetch: bool,
    backward_prefetch: Option<BackwardPrefetch>,
    /// The largest number of prefetched units.
    max_prefetched: usize,
    worker: Worker,
    /// The ranks that gather together.
    shard: Option<ProcessGroup>,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    phase: Option<Phase>,
    forward: Order,
    backward: Order,
    /// The units that are being prefetched: the next ones of the order, in that order.
    prefetched: VecDeque<(Arc<UnitExchange>, Ticket<Gathered>)>,
    /// The reductions whose results have not been taken yet. Only the last one may still be
    /// running.
    reductions: Vec<(usize, Ticket<Reduction>)>,
}

impl State {
    /// Waits until the thread of the collectives has run every reduction that was submitted to it.
    /// The results stay here until they are taken.
    fn finish_reductions(&mut self) {
        for (_, ticket) in &mut self.reductions {
            ticket.finish();
        }
    }

    /// Returns the order of the present phase; `None` outside of phases.
    const fn order(&mut self) -> Option<&mut Order> {
        match self.phase {
            Some(phase) => Some(self.order_of_phase(phase)),
            None => None,
        }
    }

    const fn order_of_phase(&mut self, phase: Phase) -> &mut Order {
        match phase {
            Phase::Forward => &mut self.forward,
            Phase::Backward => &mut self.backward,
        }
    }
}

impl Overlap {
    /// Starts the thread for a model whose units use these process groups. Nothing else may use the
    /// groups.
    pub(crate) fn start(
        config: &FsdpConfig,
        shard: Option<ProcessGroup>,
        shared: Arc<Shared>,
    ) -> Result<Self> {
        let worker =
            Worker::start("fsdp-collectives", &config.device).map_err(candle_core::Error::Io)?;
        Ok(Overlap {
            forward_prefetch: config.forward_prefetch,
            backward_prefetch: config.backward_prefetch,
            max_prefetched: if config.limit_all_gathers {
                1
            } else {
                MAX_PREFETCHED
            },
            worker,
            shard,
            shared,
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Begins a phase, which ends when the guard is dropped. Collectives: one all-gather of a
    /// number, if the order of units has changed since the last one.
    pub(crate) fn begin(&self, phase: Phase) -> Result<PhaseGuard<'_>> {
        let mut state = self.state();
        // Units that were gathered ahead followed the order of another phase.
        self.discard_prefetched(&mut state)?;
        // Compare the order between ranks before following it: collectives in different orders
        // would be an error.
        if let Some(order) = state.order_of_phase(phase).order_to_compare() {
            let is_same = self.is_same_on_all_ranks(order)?;
            state.order_of_phase(phase).set_is_same(is_same);
            if !is_same {
                warn!(
                    ?phase,
                    "ranks use their units in different orders: units are not prefetched"
                );
            }
        }
        let outer_phase = state.phase.replace(phase);
        state.order_of_phase(phase).begin();
        Ok(PhaseGuard {
            overlap: self,
            phase,
            outer_phase,
        })
    }

    /// Returns `true` if all ranks know the same `order`.
    fn is_same_on_all_ranks(&self, order: &[usize]) -> Result<bool> {
        let Some(group) = &self.shard else {
            return Ok(true);
        };
        let group = group.with_label("the order of units");
        let bytes: Vec<u8> = order.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        let hash = twox_hash::XxHash3_64::oneshot(&bytes);
        let hashes = self
            .worker
            .submit(move || Ok(group.all_gather_object(&hash)?))
            .wait()?;
        Ok(hashes.iter().all(|other| *other == hash))
    }

    /// Gathers a unit, or takes its prefetched parameters, and records that the phase uses it now.
    /// Collectives: one all-gather over the shard group, unless the unit was prefetched.
    pub(crate) fn all_gather(&self, unit: &Arc<UnitExchange>) -> Result<Gathered> {
        let mut state = self.state();
        if let Some(order) = state.order() {
            order.record_use(unit.unit_number);
        }
        if let Some((_, ticket)) = state
            .prefetched
            .pop_front_if(|(prefetched_unit, _)| prefetched_unit.unit_number == unit.unit_number)
        {
            return self.take_gathered(unit, ticket);
        }
        // The phase has left the known order, on all ranks. Discard the prefetched units.
        self.discard_prefetched(&mut state)?;
        let unit = Arc::clone(unit);
        self.worker.submit(move || unit.all_gather()).wait()
    }

    /// Waits for a gather that runs in the background, and returns what it has gathered.
    fn take_gathered(&self, unit: &UnitExchange, ticket: Ticket<Gathered>) -> Result<Gathered> {
        let gathered = ticket.wait();
        self.shared.memory.count_released(unit.unsharded_bytes());
        gathered.map_err(|error| background_error(unit, "all-gather", error))
    }

    /// Starts to prefetch the units that the model uses next, if the options ask for it at this
    /// `moment`: in a forward before a unit is computed, in a backward at the chosen one.
    pub(crate) fn prefetch_next(&self, moment: BackwardPrefetch) {
        let mut state = self.state();
        let is_wanted = match state.phase {
            Some(Phase::Forward) => self.forward_prefetch && moment == BackwardPrefetch::Pre,
            Some(Phase::Backward) => self.backward_prefetch == Some(moment),
            None => false,
        };
        if !is_wanted {
            return;
        }
        let prefetched_count = state.prefetched.len();
        let next_units = state.order().map_or(&[][..], |order| order.next_units());
        let units_to_prefetch: Vec<usize> = next_units
            .iter()
            .take(self.max_prefetched)
            .skip(prefetched_count)
            .copied()
            .collect();
        for unit_number in units_to_prefetch {
            let unit = Arc::clone(&self.shared.units()[unit_number]);
            // The unit is still gathered from an earlier use. If it is released before the model
            // uses it again, it is gathered on demand then.
            if unit.is_unsharded() {
                return;
            }
            trace!(unit = %unit.name, "gather ahead");
            self.shared.memory.count_held(unit.unsharded_bytes());
            let background_unit = Arc::clone(&unit);
            let ticket = self.worker.submit(move || background_unit.all_gather());
            state.prefetched.push_back((unit, ticket));
        }
    }

    /// Waits for the units that are being prefetched, and discards them, because their values are
    /// about to change or the model does not use them.
    pub(crate) fn discard(&self) -> Result<()> {
        self.discard_prefetched(&mut self.state())
    }

    /// Waits for all prefetched units that were not used, and drops their values. Returns the first
    /// error of any.
    fn discard_prefetched(&self, state: &mut State) -> Result<()> {
        let mut outcome = Ok(());
        while let Some((unit, ticket)) = state.prefetched.pop_front() {
            outcome = outcome.and(self.take_gathered(&unit, ticket).map(drop));
        }
        outcome
    }

    /// Runs other collectives in the units' groups. Prefetched units are discarded. Every rank must
    /// do the same.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.discard()?;
        self.worker.submit(job).wait()
    }

    /// Reduces the gradients of a unit. If the backward can continue meanwhile, this returns
    /// `None`, and the result comes from [`Self::take_reduced`]. Collectives: those of
    /// [`UnitExchange::reduce`].
    pub(crate) fn reduce(
        &self,
        unit: &Arc<UnitExchange>,
        reduction: Reduction,
    ) -> Result<Option<Reduction>> {
        let mut state = self.state();
        let overlaps = state.phase == Some(Phase::Backward) && self.backward_prefetch.is_some();
        // Wait for all earlier reductions; on a GPU only the GPU does. So the unreduced gradients
        // of at most two units are in memory: this unit, and the one that is computed while this
        // one is reduced.
        state.finish_reductions();
        let background_unit = Arc::clone(unit);
        let ticket = self
            .worker
            .submit(move || background_unit.reduce(reduction));
        if !overlaps {
            return ticket.wait().map(Some);
        }
        state.reductions.push((unit.unit_number, ticket));
        Ok(None)
    }

    /// Waits until the thread of the collectives has run every reduction that was submitted to it.
    /// Over NCCL they have been queued then, and the GPU may still be at work. The results stay
    /// here for [`Self::take_reduced`].
    pub(crate) fn finish_reductions(&self) {
        self.state().finish_reductions();
    }

    /// Waits for the reduction of a unit's gradients, if there is one.
    pub(crate) fn take_reduced(&self, unit: &UnitExchange) -> Result<Option<Reduction>> {
        let mut state = self.state();
        let Some(position) = state
            .reductions
            .iter()
            .position(|(unit_number, _)| *unit_number == unit.unit_number)
        else {
            return Ok(None);
        };
        let (_, ticket) = state.reductions.remove(position);
        ticket
            .wait()
            .map(Some)
            .map_err(|error| background_error(unit, "reduction of gradients", error))
    }
}

/// Wraps the error of a collective that ran in the background, with the unit and the operation that
/// it belongs to.
fn background_error(unit: &UnitExchange, operation: &'static str, error: NnError) -> NnError {
    NnError::BackgroundCollective {
        unit: unit.name.clone(),
        operation,
        error: Box::new(error),
    }
}

/// The guard of a phase. When it is dropped, the outer phase continues, if there is one: a backward
/// may compute a forward again.
pub(crate) struct PhaseGuard<'a> {
    overlap: &'a Overlap,
    phase: Phase,
    outer_phase: Option<Phase>,
}

impl PhaseGuard<'_> {
    /// Ends the phase after all of its units, and records their order. Reductions may still run.
    pub(crate) fn complete(&self) -> Result<()> {
        let mut state = self.overlap.state();
        if let Some(order) = state.order() {
            order.learn();
        }
        state.phase = self.outer_phase;
        self.overlap.discard_prefetched(&mut state)
    }
}

impl Drop for PhaseGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.overlap.state();
        state.phase = self.outer_phase;
        // Only a failed phase leaves gathers and reductions behind. Its own error is being
        // returned, so theirs are ignored.
        let _ = self.overlap.discard_prefetched(&mut state);
        // A forward inside of a backward leaves the reductions of that backward alone.
        if self.phase == Phase::Backward {
            for (_, ticket) in state.reductions.drain(..) {
                let _ = ticket.wait();
            }
        }
    }
}
