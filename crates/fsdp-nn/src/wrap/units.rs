//! The units of a model whose code has none: gathered when a computation comes to them, released when it comes to the next.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::TensorId;

use crate::handle::FlatParamHandle;
use crate::shared::Shared;
use crate::{NnError, Result};

/// The wrapped units of a model. Units are numbered as the model has declared them; 0 is the root.
#[derive(Debug, Default)]
pub(crate) struct WrappedUnits {
    /// The state that all units share; set once the model is complete.
    shared: OnceLock<Arc<Shared>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The unit of each parameter, in the order in which the model has asked for them.
    asked: Vec<usize>,
    /// For each span of the model the number of parameters that it had asked for before.
    spans: Vec<usize>,
    units: HashMap<usize, Weak<FlatParamHandle>>,
    /// Units with a span between two of their own parameters, which can belong to no other unit.
    with_own_spans: HashSet<usize>,
    /// The units that the forward has gathered and not released.
    gathered: Vec<usize>,
    /// A unit that has been gathered ahead, and the one before it.
    ahead: Option<(usize, usize)>,
    /// The units that the present backward comes to, in order.
    chain: Vec<usize>,
    /// How many of these have been gathered.
    gathered_of_chain: usize,
    /// The error of a gathering, which no span can report.
    failed: Option<NnError>,
}

impl WrappedUnits {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the model, while it is built, asks for a parameter of this unit. The order tells which layers a span
    /// lies between.
    pub(crate) fn ask(&self, unit: usize) {
        self.state().asked.push(unit);
    }

    /// Notes that the model has made a span, and returns how many parameters it had asked for before.
    pub(crate) fn make_span(&self) -> usize {
        let mut state = self.state();
        let asked = state.asked.len();
        state.spans.push(asked);
        asked
    }

    /// Takes the units of the complete model.
    ///
    /// # Errors
    /// [`NnError::UnseenUnit`] for a unit that is sharded, but has no span.
    pub(crate) fn complete(&self, shared: &Arc<Shared>, units: &[(usize, Arc<FlatParamHandle>)]) -> Result<()> {
        let mut state = self.state();
        state.units = units.iter().map(|(unit, handle)| (*unit, Arc::downgrade(handle))).collect();
        let neighbours: Vec<_> = state.spans.iter().map(|&asked| state.neighbours(asked)).collect();
        for (unit, handle) in units {
            if handle.is_gathered() && !neighbours.iter().any(|(a, b)| [*a, *b].contains(&Some(*unit))) {
                return Err(NnError::UnseenUnit { unit: handle.name.clone() });
            }
        }
        state.with_own_spans = neighbours.iter().filter_map(|(a, b)| a.filter(|_| a == b)).collect();
        // A second call cannot happen: a model is completed once.
        let _ = self.shared.set(Arc::clone(shared));
        Ok(())
    }

    /// Makes the unit whole that a span belongs to, by the number of parameters that were asked for before it was made.
    ///
    /// A layer makes its span before it asks for its parameters or after that, so a span between parameters of two units
    /// can be of either, and also of something around them. Then what the forward comes to next is gathered ahead.
    pub(crate) fn enter(&self, asked: usize) {
        let is_running = self.shared.get().is_some_and(|shared| shared.is_running());
        let mut state = self.state();
        if !is_running || state.failed.is_some() {
            return;
        }
        let entered = match state.neighbours(asked) {
            (None, None) => Ok(()),
            (Some(unit), after) if after == Some(unit) => state.use_unit(unit),
            (None, Some(after)) => state.use_unit(after),
            (Some(before), after) if state.gathered.contains(&before) => {
                after.map_or(Ok(()), |after| state.gather_ahead(before, after))
            }
            // Its own spans are going to tell when the forward comes to it.
            (Some(before), _) if state.with_own_spans.contains(&before) => Ok(()),
            (Some(before), _) => state.use_unit(before),
        };
        state.failed = entered.err();
    }

    /// Ends a forward: releases what it has gathered, where the strategy does that, and returns the error of a gathering.
    pub(crate) fn end_forward(&self) -> Result<()> {
        let mut state = self.state();
        state.ahead = None;
        let released = state.release_all_but(&[]);
        state.failed.take().map_or(released, Err)
    }

    /// Returns the units.
    pub(crate) fn handles(&self) -> Vec<Arc<FlatParamHandle>> {
        self.state().units.values().filter_map(Weak::upgrade).collect()
    }

    /// Begins a backward that comes to parameters in the order of `nodes`, and gathers the first unit of them.
    pub(crate) fn begin_backward(&self, nodes: &[TensorId]) -> Result<()> {
        let mut state = self.state();
        let mut unit_of: HashMap<TensorId, usize> = HashMap::new();
        for (&unit, handle) in &state.units {
            let Some(handle) = handle.upgrade() else { continue };
            unit_of.extend(handle.params.iter().map(|param| (param.tensor.id(), unit)));
        }
        let mut seen = HashSet::new();
        state.chain =
            nodes.iter().filter_map(|id| unit_of.get(id).copied()).filter(|unit| seen.insert(*unit)).collect();
        state.gathered_of_chain = 0;
        state.gather_chain_to(0)
    }

    /// Gathers the unit that a backward comes to after this one, to whose parameters it comes now.
    pub(crate) fn pass(&self, unit: usize) -> Result<()> {
        let mut state = self.state();
        match state.chain.iter().position(|other| *other == unit) {
            Some(at) => state.gather_chain_to(at + 1),
            None => Ok(()),
        }
    }
}

impl State {
    /// Returns the wrapped units of the parameters before and after a span.
    fn neighbours(&self, asked: usize) -> (Option<usize>, Option<usize>) {
        let wrapped = |unit: Option<&usize>| unit.copied().filter(|unit| self.units.contains_key(unit));
        (wrapped(asked.checked_sub(1).and_then(|before| self.asked.get(before))), wrapped(self.asked.get(asked)))
    }

    fn handle(&self, unit: usize) -> Option<Arc<FlatParamHandle>> {
        self.units.get(&unit).and_then(Weak::upgrade)
    }

    /// Makes a unit whole for its forward, and releases those that the forward has left.
    fn use_unit(&mut self, unit: usize) -> Result<()> {
        let next = self.ahead.filter(|(before, _)| *before == unit).map_or(unit, |(_, next)| next);
        self.release_all_but(&[unit, next])?;
        self.gather(unit)
    }

    /// Makes the unit after the one that computes whole.
    fn gather_ahead(&mut self, before: usize, unit: usize) -> Result<()> {
        self.release_all_but(&[before, unit])?;
        self.ahead = Some((before, unit));
        self.gather(unit)
    }

    fn gather(&mut self, unit: usize) -> Result<()> {
        let Some(handle) = self.handle(unit) else { return Ok(()) };
        handle.gather_for_forward()?;
        if !self.gathered.contains(&unit) {
            self.gathered.push(unit);
        }
        Ok(())
    }

    /// Releases the units that the forward has gathered, but for these, where the strategy releases after forward.
    fn release_all_but(&mut self, kept: &[usize]) -> Result<()> {
        let (kept, left) = std::mem::take(&mut self.gathered).into_iter().partition(|unit| kept.contains(unit));
        self.gathered = kept;
        let left: Vec<usize> = left;
        for handle in left.into_iter().filter_map(|unit| self.handle(unit)) {
            if handle.reshards_after_forward() {
                handle.reshard_after_forward()?;
            }
        }
        Ok(())
    }

    fn gather_chain_to(&mut self, at: usize) -> Result<()> {
        while self.gathered_of_chain <= at
            && let Some(&unit) = self.chain.get(self.gathered_of_chain)
        {
            self.gathered_of_chain += 1;
            if let Some(handle) = self.handle(unit) {
                handle.gather()?;
            }
        }
        Ok(())
    }
}
