//! The FlatParameter of one unit: its memory, gathered or sharded, and the forwards and backwards
//! that use it.

mod backward;
mod parameter;
mod whole;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_flat::storage::{release, to_device, zeros};
use fsdp_flat::{FlatParameter, ShardedTensor};
use fsdp_layout::FlatLayout;

use crate::exchange::{Groups, Moment, Overlap, UnitExchange};
use crate::precision::cast;
use crate::shared::Shared;
use crate::{MixedPrecision, NnError, Result, ShardingStrategy};

pub(crate) use backward::Unreduced;
pub(crate) use parameter::Parameter;
pub(crate) use whole::InUse;

/// torch's name of a FlatParameter within its unit.
pub(crate) const FLAT_PARAM: &str = "_flat_param";

/// The parts of a unit.
pub(crate) struct UnitSpec {
    pub(crate) name: String,
    pub(crate) is_root: bool,
    pub(crate) params: Vec<Parameter>,
    pub(crate) layout: FlatLayout,
    /// The dtype of the shards.
    pub(crate) dtype: DType,
    pub(crate) precision: MixedPrecision,
    /// `true` if shards live in the host's memory, even if the model computes on a GPU.
    pub(crate) cpu_offload: bool,
}

/// A unit's parameters on this rank.
///
/// If parameters are sharded, `flat` holds the authoritative values, this rank's shard, and the
/// parameters' own storages are filled only between gather and reshard. With `NoShard` the
/// parameters' storages hold the authoritative values and `flat` is `None`, unless the model
/// computes in another dtype: then `flat` is the whole FlatParameter.
#[derive(Debug)]
pub(crate) struct FlatParamHandle {
    pub(crate) name: String,
    pub(crate) is_root: bool,
    pub(crate) params: Vec<Parameter>,
    precision: MixedPrecision,
    strategy: ShardingStrategy,
    exchange: Arc<UnitExchange>,
    /// The collectives that overlap with the computation; `None` if the computation waits for each
    /// collective.
    overlap: Option<Arc<Overlap>>,
    shared: Arc<Shared>,
    state: Mutex<HandleState>,
}

#[derive(Debug, Default)]
struct HandleState {
    /// `true` while the parameters are gathered: their storages are filled.
    whole: bool,
    /// The forward that filled them.
    gathered_in: u64,
    /// The number of guards of forwards and backwards that compute with the parameters now.
    users: usize,
    /// The last change of the unit's values.
    changed_at: u64,
    /// The unsharded gradient of this rank's own batch. It exists from the last gradient to the
    /// reduction.
    unsharded_grad: Option<Tensor>,
    /// `true` for each parameter of `unsharded_grad` that has been written.
    written: Vec<bool>,
    /// `true` for each parameter that got a gradient on this rank since the last `zero_grad`.
    touched: Vec<bool>,
    /// `true` for each parameter that got a gradient on any rank; empty where the ranks have not
    /// agreed on it.
    has_gradient: Vec<bool>,
    /// The gradients that this backward has computed so far, by the numbers of their parameters.
    received: Vec<(usize, Tensor)>,
    /// `true` for each parameter that this backward has finished with, or never reaches; empty
    /// before it reaches the unit.
    finished: Vec<bool>,
    /// The number of parameters that this backward has yet to finish with.
    unfinished: usize,
    /// `true` during a backward in which this unit is reduced after all others.
    is_reduced_last: bool,
    /// `true` once this backward has reduced the unit's gradients, or begun to.
    is_reduced: bool,
    /// The gradient that has been reduced over the shard group, and not yet over replicas; as long
    /// as the shard.
    partial: Option<Tensor>,
    /// The reduced gradient, as long as the shard.
    grad: Option<Tensor>,
}

/// A guard for a unit's gathered parameters while they are in use. They cannot be resharded or
/// changed until all guards of the unit are dropped. With full sharding they are released then.
pub(crate) struct WholeParameters<'a>(&'a FlatParamHandle);

impl Drop for WholeParameters<'_> {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

impl FlatParamHandle {
    /// Makes a unit whose parameters' storages are released. `initialize` writes this rank's
    /// initial values into the flat shard, which is the whole FlatParameter with `NoShard`.
    pub(crate) fn new(
        unit: UnitSpec,
        strategy: ShardingStrategy,
        groups: &Groups,
        shared: Arc<Shared>,
        overlap: Option<Arc<Overlap>>,
        initialize: &dyn Fn(&FlatParameter) -> Result<()>,
    ) -> Result<Self> {
        let UnitSpec {
            name,
            is_root,
            params,
            layout,
            dtype,
            precision,
            cpu_offload,
        } = unit;
        let compute_dtype = params.first().map_or(dtype, |param| param.tensor.dtype());
        let rank = groups.shard.as_ref().map_or(0, ProcessGroup::rank);
        let shard = zeros(&[layout.sharded_numel()], dtype)?;
        let flat = FlatParameter::new(layout.clone(), rank, shard)?;
        initialize(&flat)?;
        // Compute initial values on the host, so that they are the same for all devices.
        let device = params
            .first()
            .map_or(Device::Cpu, |param| param.tensor.device().clone());
        let shard_device = if cpu_offload {
            Device::Cpu
        } else {
            device.clone()
        };
        let is_offloaded = cpu_offload && !device.is_cpu();
        let flat = FlatParameter::new(
            layout.clone(),
            rank,
            to_device(flat.shard(), &shard_device)?,
        )?;
        shared.count_held(layout.sharded_numel() * dtype.size_in_bytes());
        let exchange = UnitExchange {
            number: shared.add_unit(
                &name,
                params.iter().map(|param| param.fqn.clone()).collect(),
            ),
            name: name.clone(),
            layout,
            dtype,
            compute_dtype,
            reduce_dtype: precision.reduce.unwrap_or(compute_dtype),
            device,
            shard_device,
            groups: groups.labelled(&name),
            flat: (groups.shard.is_some() || compute_dtype != dtype || is_offloaded)
                .then(|| flat.clone()),
            tensors: params.iter().map(|param| param.tensor.clone()).collect(),
        };
        let (exchange, state) = (Arc::new(exchange), Mutex::default());
        let handle = FlatParamHandle {
            name,
            is_root,
            params,
            precision,
            strategy,
            exchange,
            overlap,
            shared,
            state,
        };
        for param in &handle.params {
            release(&param.tensor)?;
        }
        if handle.exchange.flat.is_none() {
            handle.exchange.fill(handle.exchange.parts(flat.shard())?)?;
            handle.set_whole(&mut handle.state(), true);
        }
        Ok(handle)
    }

    fn state(&self) -> MutexGuard<'_, HandleState> {
        // If a thread panicked with the lock, the state is still plain data, so it can be used.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of the unit in the model, which is the same on all ranks.
    pub(crate) fn number(&self) -> usize {
        self.exchange.number
    }

    pub(crate) fn layout(&self) -> &FlatLayout {
        &self.exchange.layout
    }

    pub(crate) fn dtype(&self) -> DType {
        self.exchange.dtype
    }

    /// Returns the device on which shards, reduced gradients and optimizer state live.
    pub(crate) fn shard_device(&self) -> &Device {
        &self.exchange.shard_device
    }

    /// Returns the rank whose part of the flat layout lives here.
    pub(crate) fn shard_rank(&self) -> usize {
        self.exchange.flat.as_ref().map_or(0, FlatParameter::rank)
    }

    /// Returns `true` if this rank holds only a part of the parameters.
    pub(crate) fn is_sharded(&self) -> bool {
        self.exchange.groups.shard.is_some()
    }

    /// Returns `true` if the parameters have to be gathered before they are used: parts of them are
    /// on other ranks, or the model computes in another dtype or on another device than that of the
    /// shards. Otherwise their storages are always filled.
    pub(crate) fn needs_gather(&self) -> bool {
        self.exchange.flat.is_some()
    }

    /// Returns `true` if none of the parameters was built to be trained.
    pub(crate) fn is_built_frozen(&self) -> bool {
        self.params.iter().all(|param| !param.is_trainable)
    }

    /// Converts the input of a forward to the dtype of the parameters, if that is asked for.
    pub(crate) fn cast_input(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        let is_cast = self.precision.cast_inputs && self.precision.param.is_some();
        cast(
            input.clone(),
            is_cast.then_some(self.exchange.compute_dtype),
        )
    }

    /// Converts the output of a forward.
    pub(crate) fn cast_output(&self, output: Tensor) -> candle_core::Result<Tensor> {
        cast(output, self.precision.output)
    }

    /// Returns this rank's shard; `None` if the parameters' own storages hold the authoritative
    /// values.
    pub(crate) fn flat_shard(&self) -> Option<&Tensor> {
        self.exchange.flat.as_ref().map(FlatParameter::shard)
    }

    /// Returns torch's name of the FlatParameter: `<unit>._flat_param`.
    pub(crate) fn flat_param_name(&self) -> String {
        match self.name.as_str() {
            "" => FLAT_PARAM.to_owned(),
            name => format!("{name}.{FLAT_PARAM}"),
        }
    }

    /// Returns `true` if parameters are released after forward.
    pub(crate) fn reshards_after_forward(&self) -> bool {
        matches!(
            self.strategy,
            ShardingStrategy::FullShard | ShardingStrategy::HybridShard
        ) && !self.is_root
    }

    /// Returns what the unit's collectives need.
    pub(crate) const fn exchange(&self) -> &Arc<UnitExchange> {
        &self.exchange
    }

    /// Returns this rank's part of parameter `param`, flat, as a view of the live memory; `None` if
    /// it has none.
    pub(crate) fn local_piece(&self, param: usize) -> Result<Option<Tensor>> {
        match &self.exchange.flat {
            Some(flat) => Ok(flat.piece(param, flat.shard())?),
            None => Ok(Some(self.params[param].tensor.detach().flatten_all()?)
                .filter(|flat| flat.elem_count() > 0)),
        }
    }

    /// Returns this rank's part of the reduced gradient of parameter `param`, flat; `None` if there
    /// is no gradient, or if this rank has no part of the parameter.
    pub(crate) fn grad_piece(&self, param: usize) -> Result<Option<Tensor>> {
        let Some(grad) = self.grad() else {
            return Ok(None);
        };
        match self
            .exchange
            .layout
            .shard_param_info(param, self.shard_rank())
        {
            Some(info) => Ok(Some(grad.narrow(
                0,
                info.offset_in_shard,
                info.numel_in_shard,
            )?)),
            None => Ok(None),
        }
    }

    /// Returns parameter `param` as boxes of views of the live memory.
    pub(crate) fn sharded_param(&self, param: usize) -> Result<ShardedTensor> {
        match &self.exchange.flat {
            Some(flat) => Ok(flat.sharded(param, flat.shard())?),
            None => Ok(ShardedTensor::from_whole(
                &self.params[param].tensor.detach(),
            )),
        }
    }

    /// Returns the reduced gradient, as long as the shard; `None` before a backward or after
    /// `zero_grad`.
    pub(crate) fn grad(&self) -> Option<Tensor> {
        self.state().grad.clone()
    }

    /// Drops the unit's gradients, and everything that is known of them.
    pub(crate) fn zero_grad(&self) {
        let mut state = self.state();
        state.grad = None;
        state.partial = None;
        state.unsharded_grad = None;
        state.touched.clear();
        state.has_gradient.clear();
        state.received.clear();
        state.finished.clear();
        state.is_reduced_last = false;
        state.is_reduced = false;
    }

    /// Checks that no backward has left gradients here that it has not reduced.
    ///
    /// # Errors
    /// [`NnError::BackwardNotEnded`].
    pub(crate) fn check_backward_ended(&self) -> Result<()> {
        if self.state().received.is_empty() {
            return Ok(());
        }
        Err(NnError::BackwardNotEnded {
            unit: self.exchange.name.clone(),
        })
    }

    /// Returns `true` for each parameter that got a gradient on this rank since the last
    /// `zero_grad`.
    pub(crate) fn touched(&self) -> Vec<bool> {
        let mut touched = self.state().touched.clone();
        touched.resize(self.params.len(), false);
        touched
    }

    /// Sets what the ranks have agreed on: `true` for each parameter that got a gradient on any
    /// rank.
    pub(crate) fn set_has_gradient(&self, has_gradient: Vec<bool>) {
        self.state().has_gradient = has_gradient;
    }

    /// Returns `true` if a parameter got a gradient. Where the ranks have not agreed on that, all
    /// parameters of a unit that has gradients count as having one.
    pub(crate) fn has_gradient(&self, param: usize) -> bool {
        let state = self.state();
        state.grad.is_some() && state.has_gradient.get(param).copied().unwrap_or(true)
    }

    /// Gathers the parameters for a forward. They stay gathered while the returned guard lives.
    /// Collectives: one all-gather over the shard group, none if they are gathered already.
    pub(crate) fn gather_for_forward(&self) -> Result<WholeParameters<'_>> {
        let mut state = self.state();
        // Lending is the same on all ranks, so all of them gather again.
        if state.users == 0 && self.shared.may_be_stale(state.gathered_in) {
            self.release_locked(&mut state)?;
        }
        self.gather_locked(&mut state)?;
        state.users += 1;
        Ok(WholeParameters(self))
    }

    /// Ends a use that [`Self::gather_for_forward`] or an [`InUse`] has begun.
    fn end_use(&self) {
        let mut state = self.state();
        state.users -= 1;
        if state.users == 0 && self.reshards_after_forward() {
            // If this fails (only a GPU's driver can), the parameters stay gathered, and are still
            // counted as such.
            let _ = self.release_locked(&mut state);
        }
    }

    /// Gathers the parameters for a backward.
    /// Collectives: one all-gather over the shard group, none if they are gathered already.
    pub(crate) fn gather(&self) -> Result<()> {
        self.gather_locked(&mut self.state())
    }

    /// Fills the parameters' storages from all ranks' shards.
    fn gather_locked(&self, state: &mut HandleState) -> Result<()> {
        if !self.needs_gather() || state.whole {
            return Ok(());
        }
        // If the unit has been prefetched, this takes the values from there.
        let gathered = match &self.overlap {
            Some(overlap) => overlap.gather(&self.exchange)?,
            None => self.exchange.gather()?,
        };
        self.exchange.fill(gathered)?;
        self.set_whole(state, true);
        state.gathered_in = self.shared.forward();
        self.shared.count_held(self.exchange.unsharded_bytes());
        if let Some(overlap) = &self.overlap {
            overlap.gather_next(Moment::BeforeComputation);
        }
        Ok(())
    }

    /// Notes whether the unit is gathered.
    fn set_whole(&self, state: &mut HandleState, whole: bool) {
        state.whole = whole;
        self.shared.set_whole(self.exchange.number, whole);
    }

    /// Releases the memory of gathered parameters. No communication.
    pub(crate) fn reshard(&self) -> Result<()> {
        let mut state = self.state();
        self.check_unused(&state)?;
        self.discard_ahead()?;
        self.release_locked(&mut state)
    }

    /// Discards prefetched parameters, of this unit and of all others.
    fn discard_ahead(&self) -> Result<()> {
        self.overlap
            .as_ref()
            .map_or(Ok(()), |overlap| overlap.discard())
    }

    /// Releases the gathered parameters, if they are gathered and can be gathered again.
    fn release_locked(&self, state: &mut HandleState) -> Result<()> {
        if !self.needs_gather() || !state.whole {
            return Ok(());
        }
        for param in &self.params {
            release(&param.tensor)?;
        }
        self.set_whole(state, false);
        self.shared.count_released(self.exchange.unsharded_bytes());
        Ok(())
    }

    /// Checks that no forward computes with the parameters now.
    fn check_unused(&self, state: &HandleState) -> Result<()> {
        if state.users > 0 {
            Err(NnError::UnitInUse {
                unit: self.name.clone(),
            })
        } else {
            Ok(())
        }
    }

    /// Prepares a change of the unit's values: waits for those who read them, removes the gathered
    /// copy of the old values, and makes the backward of a forward that used them an error. No
    /// communication.
    pub(crate) fn begin_change(&self) -> Result<()> {
        self.shared.readers.wait();
        let mut state = self.state();
        self.check_unused(&state)?;
        self.discard_ahead()?;
        self.release_locked(&mut state)?;
        state.changed_at = self.shared.change();
        Ok(())
    }

    /// Returns the number of the last change of values of any unit, for [`Self::check_unchanged`].
    pub(crate) fn last_change(&self) -> u64 {
        self.shared.last_change()
    }

    /// Checks that the unit's values have not changed after the change with the number `since`,
    /// which [`Self::last_change`] returned before.
    pub(crate) fn check_unchanged(&self, since: u64) -> Result<()> {
        if self.state().changed_at > since {
            return Err(NnError::ChangedSinceForward {
                unit: self.name.clone(),
            });
        }
        Ok(())
    }

    /// Converts an error of a computation. candle's error about released memory becomes one that
    /// names the sharded units.
    pub(crate) fn explain(&self, error: candle_core::Error) -> NnError {
        NnError::of_computation(error, || self.shared.sharded())
    }
}
