//! A running average of the weights of a model.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use candle_core::{Device, Tensor};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::{HostBytes, HostSliceMut, owned_copy};
use fsdp_flat::with_float;
use fsdp_state::{StateDict, StateError, StateValue};
use indexmap::IndexMap;

use crate::error::{NnError, Result};
use crate::model::parameters::{ShardedParameters, check_values, write_boxes};
use crate::optimizer::{all_or_none, move_towards};
use crate::state::{names_that_count, persistent_buffers, to_plain};

/// The key of the number of updates.
const N_AVERAGED: &str = "n_averaged";
const LOAD_OPERATION: &str = "AveragedModel::load_state_dict";
/// The prefix of the parameters' names.
const MODULE_PREFIX: &str = "module.";

/// An exponential moving average of a sharded model's weights: torch's `AveragedModel` with
/// `get_ema_multi_avg_fn(decay)`. Each rank averages its shard; no method communicates.
///
/// The first [`Self::update`] copies the weights, and each later one moves the average towards them
/// by `1 - decay`. Call [`Self::swap`] before an evaluation, to exchange weights and average, and
/// again after it.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, linear};
/// use fsdp_nn::algorithm::{Algorithm, SgdOptions};
/// use fsdp_nn::{AveragedModel, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer};
///
/// fsdp_comm::run_local(2, |group| {
///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(3, 1, scope.vb()))?;
///     let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Sgd(SgdOptions::default()))?;
///     let mut average = AveragedModel::new(model.parameters(), 0.999)?;
///     let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
///     let loss = || model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all());
///     for _ in 0..3 {
///         model.backward(&loss()?)?;
///         optimizer.step()?;
///         model.parameters().zero_grad();
///         average.update()?;
///     }
///     average.swap()?;
///     let _of_the_average = loss()?;
///     average.swap()?;
///     Ok::<(), NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// In a checkpoint the average is a value beside model and optimizer: `TrainState::average` saves
/// and loads it.
#[derive(Debug)]
pub struct AveragedModel {
    parameters: Arc<ShardedParameters>,
    decay: f64,
    n_averaged: i64,
    /// This rank's part of the average of each parameter, flat; `None` where it has none.
    average: IndexMap<String, Option<Tensor>>,
    /// `true` while the model has the average, and this the weights.
    is_swapped: bool,
}

impl AveragedModel {
    /// Makes an average that begins as a copy of the weights. It takes as much memory as the
    /// shards.
    ///
    /// # Errors
    /// [`NnError::Options`] for a decay that is not between 0 and 1; [`NnError::Swapped`] while
    /// the model has another average; candle's errors.
    pub fn new(parameters: &Arc<ShardedParameters>, decay: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&decay) {
            return Err(NnError::options(format!(
                "the decay of an average of weights is {decay}, but must be between 0 and 1"
            )));
        }
        parameters.check_not_swapped()?;
        // Begin at the weights, so that the average can be used before the first update.
        let mut average = IndexMap::new();
        for fqn in parameters.fqns() {
            let piece = parameters.local_piece(fqn)?;
            let copy = piece.map(|piece| owned_copy(&piece)).transpose()?;
            average.insert(fqn.to_owned(), copy);
        }
        Ok(AveragedModel {
            parameters: Arc::clone(parameters),
            decay,
            n_averaged: 0,
            average,
            is_swapped: false,
        })
    }

    /// Returns `true` if this averages the weights of this very model, and not of one like it.
    #[must_use]
    pub fn belongs_to(&self, parameters: &ShardedParameters) -> bool {
        self.parameters.is_same_model(parameters)
    }

    /// Begins anew, as a copy of the current weights: for weights that come without their average.
    /// No communication.
    ///
    /// # Errors
    /// [`NnError::Swapped`] while the model has this average or another one; candle's errors.
    pub fn restart(&mut self) -> Result<()> {
        self.parameters.check_not_swapped()?;
        self.parameters.wait_for_readers()?;
        for (fqn, average) in &self.average {
            let (Some(average), Some(param)) = (average, self.parameters.local_piece(fqn)?) else {
                continue;
            };
            average.slice_set(&param, 0, 0)?;
        }
        self.n_averaged = 0;
        Ok(())
    }

    /// Returns the number of updates so far.
    #[must_use]
    pub const fn n_averaged(&self) -> i64 {
        self.n_averaged
    }

    /// Updates the average with the current weights. Call it after each optimizer step, on every
    /// rank.
    ///
    /// # Errors
    /// [`NnError::Swapped`] while the model has this average or another one; candle's errors.
    pub fn update(&mut self) -> Result<()> {
        self.parameters.check_not_swapped()?;
        self.parameters.wait_for_readers()?;
        let weight = if self.n_averaged == 0 {
            1.0
        } else {
            1.0 - self.decay
        };
        for (fqn, average) in &self.average {
            let (Some(average), Some(param)) = (average, self.parameters.local_piece(fqn)?) else {
                continue;
            };
            move_towards(average, &param, weight)?;
        }
        self.n_averaged = self.n_averaged.saturating_add(1);
        Ok(())
    }

    /// Exchanges the weights of the model with the average. Until it is called again, the model
    /// computes with the average. Its state dict is that of the average then, for a model to be
    /// published, but a step of an optimizer, a save or load of a run, and a load of the model are
    /// errors. Every rank must call it.
    ///
    /// If the average is dropped while the model has it, the weights are lost: the model keeps the
    /// average, and cannot be trained any more.
    ///
    /// # Errors
    /// [`NnError::UnitInUse`] inside a forward; [`NnError::Swapped`] while the model has another
    /// average; candle's errors, of which memory is one. Nothing has been exchanged then.
    pub fn swap(&mut self) -> Result<()> {
        if self.parameters.has_average() && !self.is_swapped {
            return Err(NnError::Swapped);
        }
        self.parameters.reshard()?;
        self.parameters.wait_for_readers()?;
        // Step 1: prepare all parameters for the change.
        let mut pairs = Vec::with_capacity(self.average.len());
        for (fqn, average) in &self.average {
            self.parameters.begin_change(fqn)?;
            let param = self.parameters.local_piece(fqn)?;
            pairs.extend(average.clone().zip(param));
        }
        // Step 2: exchange them. A mixture would look like the weights, or like the average.
        all_or_none(&pairs, exchange, exchange)?;
        self.is_swapped = !self.is_swapped;
        self.parameters
            .has_average
            .store(self.is_swapped, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the average under torch's keys: `n_averaged`, and `module.NAME` for each name of
    /// each parameter and for each persistent buffer. Parameters are views of the average, sharded
    /// like the model; buffers are the model's own.
    ///
    /// # Errors
    /// [`NnError::Swapped`] while the model has the average.
    pub fn state_dict(&self) -> Result<StateDict> {
        if self.is_swapped {
            return Err(NnError::Swapped);
        }
        let mut state = StateDict::new();
        state.insert(N_AVERAGED, Tensor::new(self.n_averaged, &Device::Cpu)?);
        for name in self.parameters.names() {
            let average = self.sharded_average(self.parameters.canonical_fqn(name))?;
            state.insert(format!("{MODULE_PREFIX}{name}"), average);
        }
        for (name, buffer) in persistent_buffers(&self.parameters) {
            state.insert(format!("{MODULE_PREFIX}{name}"), buffer);
        }
        Ok(state)
    }

    /// Leaves out of the state dict of the average those names of tied parameters under which
    /// nothing was saved, if something was saved under another of their names. `is_saved` gets keys
    /// of the state dict.
    pub fn retain_saved_names(&self, state: &mut StateDict, is_saved: impl Fn(&str) -> bool) {
        for (fqn, aliases) in self.parameters.aliases_by_fqn() {
            let names = std::iter::once(fqn).chain(aliases);
            let (saved_keys, other_keys): (Vec<String>, Vec<String>) = names
                .map(|name| format!("{MODULE_PREFIX}{name}"))
                .partition(|key| is_saved(key));
            if !saved_keys.is_empty() {
                other_keys.iter().for_each(|key| _ = state.remove(key));
            }
        }
    }

    /// Checks that an average can go on from the number of updates in a state dict. A load of a
    /// whole run checks it before anything changes.
    ///
    /// # Errors
    /// [`StateError::Incompatible`] names the key.
    pub fn check_n_averaged(state: &StateDict) -> Result<()> {
        if state.get(N_AVERAGED).and_then(read_count).is_some() {
            return Ok(());
        }
        let mut report = fsdp_state::LoadReport::default();
        report.missing.push(N_AVERAGED.to_owned());
        Err(StateError::Incompatible {
            operation: LOAD_OPERATION,
            report,
        }
        .into())
    }

    /// Loads a state dict, whose parameters must cover this rank's shards. A tied parameter may be
    /// there under any of its names, and must have the same values under all that are there. Values
    /// that are views of the average itself, which a load in place has already filled, are not
    /// copied. Buffers belong to the model, and are not read.
    ///
    /// # Errors
    /// [`StateError::Incompatible`] names keys that are missing or have another kind of value;
    /// those of a [`ShardedParameters::set_parameter`]; [`NnError::Swapped`]. Nothing has been
    /// changed then.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        if self.is_swapped {
            return Err(NnError::Swapped);
        }
        let mut report = fsdp_state::LoadReport::default();
        let count = state.get(N_AVERAGED).and_then(read_count);
        report
            .missing
            .extend(count.is_none().then(|| N_AVERAGED.to_owned()));
        // Step 1: find the values of all parameters.
        let mut param_values = Vec::with_capacity(self.average.len());
        let names = state
            .keys()
            .filter_map(|key| key.strip_prefix(MODULE_PREFIX));
        let chosen = names_that_count(
            &self.parameters,
            names.filter(|name| self.parameters.contains(name)),
        );
        for fqn in self.average.keys() {
            let key = format!(
                "{MODULE_PREFIX}{}",
                chosen.get(fqn.as_str()).unwrap_or(&fqn.as_str())
            );
            let Some(values) = state.get(&key).and_then(as_sharded) else {
                report.missing.push(key);
                continue;
            };
            param_values.push((fqn, self.sharded_average(fqn)?, values));
        }
        let Some(count) = count.filter(|_| report.missing.is_empty()) else {
            return Err(StateError::Incompatible {
                operation: LOAD_OPERATION,
                report,
            }
            .into());
        };
        // Step 2: check all of them before any is written.
        for (fqn, target, values) in &param_values {
            check_values(fqn, values, target)?;
        }
        self.check_tied(state, &chosen)?;
        self.parameters.wait_for_readers()?;
        for (_, target, values) in &param_values {
            write_boxes(values, target)?;
        }
        self.n_averaged = count;
        Ok(())
    }

    /// Checks that a tied parameter has the same values on this rank under each of its names in a
    /// state dict. `chosen` has the names that count.
    ///
    /// # Errors
    /// [`StateError::TiedNamesDiffer`]; values that do not cover this rank's boxes.
    fn check_tied(&self, state: &StateDict, chosen: &HashMap<&str, &str>) -> Result<()> {
        for (key, value) in state {
            let name = key.strip_prefix(MODULE_PREFIX).unwrap_or_default();
            let fqn = self.parameters.canonical_fqn(name);
            let Some(counting_name) = chosen.get(fqn).filter(|counting| **counting != name) else {
                continue;
            };
            let counting_key = format!("{MODULE_PREFIX}{counting_name}");
            let target = self.sharded_average(fqn)?;
            let (Some(values), Some(counting_values)) = (
                as_sharded(value),
                state.get(&counting_key).and_then(as_sharded),
            ) else {
                continue;
            };
            if values.is_same_view(&counting_values) {
                continue;
            }
            check_values(fqn, &values, &target)?;
            let copies = [&values, &counting_values].map(|values| {
                let copy = ShardedTensor::zeros(target.dtype(), target.shape(), &target.boxes())?;
                write_boxes(values, &copy)?;
                Ok::<_, NnError>(copy)
            });
            let [first, second] = copies;
            if !have_same_elements(&first?, &second?)? {
                return Err(StateError::tied_values_differ(&counting_key, key).into());
            }
        }
        Ok(())
    }

    /// Returns the average of a parameter as this rank's boxes of it.
    fn sharded_average(&self, fqn: &str) -> Result<ShardedTensor> {
        let (handle, param) = self.parameters.place(fqn)?;
        handle.to_boxes(param, self.average[fqn].as_ref())
    }
}

/// Exchanges the elements of a parameter with those of its average. On an error neither has
/// changed, unless a GPU has failed.
fn exchange((average, param): &(Tensor, Tensor)) -> Result<()> {
    if !average.device().is_cpu() {
        // candle cannot exchange the contents of two tensors on a GPU.
        let old_values = owned_copy(param)?;
        param.slice_set(average, 0, 0)?;
        return Ok(average.slice_set(&old_values, 0, 0)?);
    }
    with_float!(average.dtype(), T => {
        let mut average = HostSliceMut::<T>::write(average)?;
        let mut param = HostSliceMut::<T>::write(param)?;
        average.swap_with_slice(&mut param);
    });
    Ok(())
}

/// Returns the number of updates that a value holds; `None` if it is not an integer of at least 0.
fn read_count(value: &StateValue) -> Option<i64> {
    to_plain(value)?.as_int().filter(|count| *count >= 0)
}

/// Returns a tensor, whole or sharded, as a sharded one; `None` for other values.
fn as_sharded(value: &StateValue) -> Option<ShardedTensor> {
    match value {
        StateValue::Sharded(sharded) => Some(sharded.clone()),
        StateValue::Tensor(whole) => Some(ShardedTensor::from_whole(whole)),
        _ => None,
    }
}

/// Returns `true` if two tensors of the same boxes have the same elements on this rank.
fn have_same_elements(first: &ShardedTensor, second: &ShardedTensor) -> Result<bool> {
    for (shard, other) in first.shards().iter().zip(second.shards()) {
        if *HostBytes::read(&shard.tensor)? != *HostBytes::read(&other.tensor)? {
            return Ok(false);
        }
    }
    Ok(true)
}
