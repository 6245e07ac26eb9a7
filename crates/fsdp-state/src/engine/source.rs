//! The trait of everything that a load can take values from.

use fsdp_comm::ProcessGroup;
use fsdp_layout::TensorBox;

use super::options::LoadOptions;
use super::target::Wanted;
use crate::error::StateError;
use crate::lend::{Lend, Memory};
use crate::schema::Schema;
use crate::state_dict::StateValue;

/// State that can be loaded: a checkpoint of any format, a state dict on one rank or on all, the
/// live model.
///
/// Every rank of a group has a source of the same schema.
pub trait Source {
    /// The source's own errors.
    type Error;

    /// Returns the names, kinds, dtypes and shapes of everything that it holds.
    fn schema(&self) -> &Schema;

    /// Returns the small values at `positions` of the schema: plain values, and tensors of one
    /// element. A target sees them before the ranks agree. No communication.
    ///
    /// # Errors
    /// An error of this rank only.
    fn values(&self, positions: &[usize]) -> Result<Vec<StateValue>, Self::Error>;

    /// Describes what the source holds beyond its schema, for people to read. It must be the same
    /// on all ranks, and the load checks this.
    fn contents(&self) -> String {
        String::new()
    }

    /// Checks that this rank can read all that it wants, and, if each rank reads for itself, that
    /// names which become one tensor have the same values here. No communication.
    ///
    /// # Errors
    /// An error of this rank only: what cannot be read, [`StateError::TiedNamesDiffer`].
    fn check(&self, wanted: &[Wanted]) -> Result<(), Self::Error> {
        let _ = wanted;
        Ok(())
    }

    /// Returns a hash of the elements of a tensor that every rank holds a whole copy of. Ranks
    /// compare these hashes, to make sure that their copies are equal. Returns `None` for tensors
    /// that all ranks take from the same place.
    ///
    /// # Errors
    /// An error of this rank only.
    fn hash(&self, position: usize) -> Result<Option<u64>, Self::Error> {
        let _ = position;
        Ok(None)
    }

    /// Returns `true` if a read sends values from rank to rank, so that all ranks must want the
    /// same tensors. The default is `false`: each rank reads its own values, such as from files.
    fn moves_between_ranks(&self) -> bool {
        false
    }

    /// Copies the values whose storage is shared with live tensors that a load is about to fill.
    /// Otherwise the load could overwrite them before it reads them. A value that would be loaded
    /// into itself is not copied.
    ///
    /// `memory` returns the target's memory of a wanted tensor.
    ///
    /// # Errors
    /// An error of this rank only.
    fn separate(
        &mut self,
        wanted: &[Wanted],
        memory: &mut dyn FnMut(&Wanted) -> Result<Memory, StateError>,
    ) -> Result<(), Self::Error> {
        let _ = (wanted, memory);
        Ok(())
    }

    /// Finds out which ranks have the wanted elements, and checks that none is missing, and that
    /// names which become one tensor have the same values if [`Self::check`] could not. This is the
    /// last check before a load changes its target. Collective if elements are spread over ranks.
    ///
    /// # Errors
    /// The same on every rank.
    fn locate(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        wanted_on: &WantedOn<'_>,
    ) -> Result<(), Self::Error>;

    /// Fills the memory that `lend` gives for the wanted tensors. Collective where elements are
    /// spread over ranks; a rank's own failure is returned when all collectives are done.
    ///
    /// # Errors
    /// The errors of collectives, the same on every rank, and this rank's own.
    fn read(
        &mut self,
        call: &LoadCall<'_>,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
    ) -> Result<(), Self::Error>;
}

/// A call of [`load_state`](super::load_state), as its steps see it.
#[derive(Clone, Copy, Debug)]
pub struct LoadCall<'a> {
    /// The name of the function that loads, for messages.
    pub operation: &'static str,
    /// The ranks that load.
    pub group: &'a ProcessGroup,
    /// The options of the load.
    pub options: &'a LoadOptions,
}

/// A function that returns the boxes of a wanted tensor that a rank wants; `None` if only that rank
/// knows.
pub type WantedOn<'a> = dyn Fn(&Wanted, usize) -> Option<Vec<TensorBox>> + 'a;
