//! The trait of everything that a load can take values from.

use fsdp_comm::ProcessGroup;
use fsdp_layout::TensorBox;

use super::options::LoadOptions;
use super::target::Wanted;
use crate::lend::{Lend, Memory};
use crate::{Schema, StateError, StateValue};

/// State that can be loaded: a checkpoint of any format, a state dict on one rank or on all, the live model.
///
/// Every rank of a group has a source of the same schema.
pub trait Source {
    /// The source's own errors.
    type Error;

    /// Returns the names, kinds, dtypes and shapes of everything that it holds.
    fn schema(&self) -> &Schema;

    /// Returns small values, which ranks look at before they agree: plain ones and tensors of one element, by their
    /// positions in the schema. No communication.
    ///
    /// # Errors
    /// This rank's own.
    fn values(&self, positions: &[usize]) -> Result<Vec<StateValue>, Self::Error>;

    /// Returns a hash of the elements of a tensor that every rank holds whole for itself, so that ranks can make sure that
    /// they hold the same; `None` for tensors that come from one place.
    ///
    /// # Errors
    /// This rank's own.
    fn hash(&self, position: usize) -> Result<Option<u64>, Self::Error> {
        let _ = position;
        Ok(None)
    }

    /// Makes copies of values that share memory with the live tensors that a load is about to fill, without being these very
    /// tensors: they would be overwritten before they are read. `memory` gives the target's memory of a wanted tensor.
    ///
    /// # Errors
    /// This rank's own.
    fn separate(
        &mut self,
        wanted: &[Wanted],
        memory: &mut dyn FnMut(usize) -> Result<Memory, StateError>,
    ) -> Result<(), Self::Error> {
        let _ = (wanted, memory);
        Ok(())
    }

    /// Finds out where the wanted elements are, and that there is each of them. After it nothing is left that ranks could
    /// know to be wrong, so that targets may be changed. Collective where elements are spread over ranks.
    ///
    /// `wanted_on` tells the boxes that a rank wants of a wanted tensor, where that is known without asking it.
    ///
    /// # Errors
    /// The same on every rank.
    fn locate(
        &mut self,
        group: &ProcessGroup,
        operation: &'static str,
        wanted: &[Wanted],
        wanted_on: &dyn Fn(usize, usize) -> Option<Vec<TensorBox>>,
        options: &LoadOptions,
    ) -> Result<(), Self::Error>;

    /// Fills the memory that `lend` gives for the wanted tensors. Collective where elements are spread over ranks; a
    /// rank's own failure is returned when all collectives are done.
    ///
    /// # Errors
    /// Those of collectives, the same on every rank, and this rank's own.
    fn read(
        &mut self,
        group: &ProcessGroup,
        operation: &'static str,
        wanted: &[Wanted],
        lend: &mut dyn Lend,
        options: &LoadOptions,
    ) -> Result<(), Self::Error>;
}
