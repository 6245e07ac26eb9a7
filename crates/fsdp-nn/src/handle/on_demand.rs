//! The parameters of a unit that are gathered when a computation waits for them.

use fsdp_flat::storage::Withheld;

use super::FlatParamHandle;
use crate::Result;

impl FlatParamHandle {
    /// Makes the [`Withheld`] that blocks readers of the parameters while these are not gathered.
    pub(crate) fn withheld(&self) -> Result<Withheld> {
        Ok(Withheld::new(self.exchange.tensors.clone())?)
    }

    /// Prepares a computation that will gather the parameters on demand: in a forward, a copy that
    /// may be stale is released. Returns `true` if the parameters must be withheld.
    pub(crate) fn prepare_on_demand(&self, is_forward: bool) -> Result<bool> {
        let mut state = self.state();
        if is_forward {
            self.release_stale_locked(&mut state)?;
        }
        Ok(self.needs_gather() && !state.whole)
    }

    /// Gathers the parameters, for which a computation waits. With `in_use` they stay gathered
    /// until [`Self::withhold`]. Collectives: one all-gather over the shard group.
    pub(crate) fn gather_on_demand(&self, withheld: &Withheld, in_use: bool) -> Result<()> {
        let mut state = self.state();
        let gathered = self.fetch()?;
        // Note this before the computation continues. It may run collectives of its own, and all
        // ranks must run collectives in the same order.
        self.note_gathered(&mut state);
        if let Err(error) = withheld.give(gathered) {
            self.note_released(&mut state);
            return Err(error.into());
        }
        state.users += usize::from(in_use);
        Ok(())
    }

    /// Releases parameters that a computation does not use any more, so that the computation waits
    /// when it uses them again. No communication.
    pub(crate) fn withhold(&self, withheld: &Withheld, in_use: bool) -> Result<()> {
        let mut state = self.state();
        state.users -= usize::from(in_use);
        if state.users > 0 {
            return Ok(());
        }
        withheld.withhold();
        // This happens before the computation continues, so all ranks wait alike when they use the
        // parameters again. Only another thread of the program can be reading them now; their
        // memory is freed when it has finished.
        withheld.settle()?;
        if state.whole {
            self.note_released(&mut state);
        }
        Ok(())
    }

    /// Ends the use of parameters that [`Self::gather_on_demand`] has gathered, at the end of a
    /// forward. They are released if the strategy says so.
    pub(crate) fn end_on_demand(&self) {
        self.end_use();
    }
}
