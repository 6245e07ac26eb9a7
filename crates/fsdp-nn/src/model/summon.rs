//! The whole parameters on every rank, to look at or to change.

use fsdp_flat::ShardedTensor;

use candle_core::Tensor;
use indexmap::{IndexMap, IndexSet};

use super::build::{agree_on_model, hash_elements};
use super::parameters::ShardedParameters;
use crate::error::{BuildError, NnError, Result};
use crate::unit::InUse;

const WRITE_BACK: &str = "FullParameters::write_back";

/// All parameters of a model, whole on every rank, until it is dropped: torch's
/// `summon_full_params`. Made by [`ShardedParameters::summon_full_params`].
///
/// While it lives, nothing else can change the parameters: an optimizer's step, a load or a reshard
/// is an error.
#[derive(Debug)]
pub struct FullParameters<'a> {
    parameters: &'a ShardedParameters,
    tensors: IndexMap<String, Tensor>,
    /// The names whose values have been replaced.
    replaced_names: IndexSet<String>,
    guards: Vec<InUse>,
}

impl ShardedParameters {
    /// Gathers all parameters whole on every rank, in the dtype of shards: torch's
    /// `summon_full_params`. It takes the memory of the whole model on each rank. What is changed
    /// is written back by [`FullParameters::write_back`] only, as with `writeback=True` in torch;
    /// dropping it changes nothing. Collectives: one all-gather for each unit, none where nothing
    /// is sharded.
    ///
    /// ```
    /// use candle_nn::linear;
    /// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError};
    /// fsdp_comm::run_local(3, |group| {
    ///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(4, 2, scope.vb()))?;
    ///     let mut whole = model.parameters().summon_full_params()?;
    ///     let doubled = (whole.get("weight")? * 2.0)?;
    ///     whole.set("weight", doubled)?;
    ///     whole.write_back()?;
    ///     Ok::<(), NnError>(())
    /// })?
    /// .into_iter()
    /// .collect::<Result<Vec<()>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The errors of the all-gathers.
    pub fn summon_full_params(&self) -> Result<FullParameters<'_>> {
        let guards = self.handles.iter().map(InUse::new).collect();
        // Every rank gathers all units in the same order.
        let mut unit_tensors: Vec<Vec<Tensor>> = Vec::with_capacity(self.handles.len());
        for handle in &self.handles {
            unit_tensors.push(handle.all_gather_params()?);
        }
        self.synchronize()?;
        let mut tensors = IndexMap::new();
        for fqn in self.fqns() {
            let (handle, param) = self.place(fqn)?;
            tensors.insert(
                fqn.to_owned(),
                unit_tensors[handle.unit_number()][param].clone(),
            );
        }
        Ok(FullParameters {
            parameters: self,
            tensors,
            replaced_names: IndexSet::new(),
            guards,
        })
    }
}

impl FullParameters<'_> {
    /// Returns a parameter, by its name or one that is tied to it.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`].
    pub fn get(&self, fqn: &str) -> Result<&Tensor> {
        let name = self.parameters.canonical_fqn(fqn);
        self.tensors
            .get(name)
            .ok_or_else(|| NnError::unknown_parameter(fqn))
    }

    /// Returns the parameters by name, in the order in which the model declared them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors
            .iter()
            .map(|(fqn, tensor)| (fqn.as_str(), tensor))
    }

    /// Replaces the value of a parameter here; the model gets it with [`Self::write_back`]. No
    /// communication.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`]; a value of another shape or dtype.
    pub fn set(&mut self, fqn: &str, value: Tensor) -> Result<()> {
        let current = self.get(fqn)?;
        if current.dims() != value.dims() || current.dtype() != value.dtype() {
            return Err(BuildError::Conflict {
                fqn: fqn.to_owned(),
                asked: format!("{:?} {:?}", value.dims(), value.dtype()),
                existing: format!("{:?} {:?}", current.dims(), current.dtype()),
            }
            .into());
        }
        let name = self.parameters.canonical_fqn(fqn).to_owned();
        self.tensors.insert(name.clone(), value.detach());
        self.replaced_names.insert(name);
        Ok(())
    }

    /// Writes what has been [`set`](Self::set) into the model: each rank its own part.
    ///
    /// Collectives: one agreement, in which ranks compare hashes of the values. If they differed,
    /// parts of different values would be mixed in one parameter.
    ///
    /// # Errors
    /// [`NnError::DifferentModels`] if the ranks have set different parameters or values,
    /// [`NnError::UnitInUse`] while somebody else uses a unit, and [`NnError::Swapped`]. One rank's
    /// error is every rank's, and changes nothing.
    pub fn write_back(self) -> Result<()> {
        let FullParameters {
            parameters,
            tensors,
            replaced_names,
            guards,
        } = self;
        // The guards would refuse the reshard and the change of values.
        drop(guards);
        let ready = parameters
            .check_not_swapped()
            .and_then(|()| parameters.reshard());
        let prepared = ready.and_then(|()| {
            let values = replaced_names
                .iter()
                .filter_map(|fqn| tensors.get_key_value(fqn));
            values
                .map(|(fqn, value)| Ok((fqn, value, hash_elements(value)?)))
                .collect::<Result<Vec<_>>>()
        });
        // Every rank writes its own part, so other values on another rank would break the parameter
        // in pieces.
        let values = agree_on_model(parameters.group(), WRITE_BACK, prepared, |values| {
            values
                .iter()
                .map(|(fqn, _, hash)| {
                    format!("the parameter `{fqn}` with values of hash {hash:016x}")
                })
                .collect()
        })?;
        for (fqn, value, _) in values {
            parameters.set_parameter(fqn, &ShardedTensor::from_whole(value))?;
        }
        Ok(())
    }
}
