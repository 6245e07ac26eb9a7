//! The FlatParameter of one unit: its memory, gathered or sharded, and the forwards and backwards
//! that use it.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use candle_core::{DType, Device, Tensor};
use fsdp_flat::storage::{exchange_memory, owned_copy, release, to_device, zeros_on};
use fsdp_flat::{FlatParameter, ShardedTensor};
use fsdp_layout::FlatLayout;
use fsdp_ops::step;

use super::gradients::Gradients;
use super::parameter::Parameter;
use crate::config::{BackwardPrefetch, MixedPrecision, ShardingStrategy, cast};
use crate::error::{NnError, Result};
use crate::exchange::{Gathered, Groups, Overlap, Shared, UnitExchange, device};
use crate::guards::lock;

/// torch's name of a FlatParameter within its unit.
pub(crate) const FLAT_PARAM: &str = "_flat_param";

/// The parts of a unit.
pub(crate) struct UnitSpec {
    pub(crate) name: String,
    /// The number of the unit in the model, which is the same on all ranks.
    pub(crate) unit_number: usize,
    pub(crate) is_root: bool,
    pub(crate) params: Vec<Parameter>,
    /// This rank's initial values, on the host.
    pub(crate) flat: FlatParameter,
    pub(crate) precision: MixedPrecision,
    pub(crate) strategy: ShardingStrategy,
    pub(crate) groups: Groups,
    /// `true` if shards live in the host's memory, even if the model computes on a GPU.
    pub(crate) cpu_offload: bool,
}

/// A unit's parameters on this rank.
///
/// If parameters are sharded, the exchange's `flat` holds the authoritative values, this rank's
/// shard, and the parameters' own storages are filled only between gather and reshard. With
/// `NoShard` the parameters' storages hold the authoritative values and `flat` is `None`, unless
/// the model computes in another dtype or the shards are in the host's memory for a model on a GPU:
/// then `flat` is the whole FlatParameter.
#[derive(Debug)]
pub(crate) struct FlatParamHandle {
    pub(crate) is_root: bool,
    pub(crate) params: Vec<Parameter>,
    precision: MixedPrecision,
    strategy: ShardingStrategy,
    /// The parts that the unit's collectives need.
    pub(crate) exchange: Arc<UnitExchange>,
    /// The collectives that overlap with the computation; `None` if the computation waits for each
    /// collective.
    pub(super) overlap: Option<Arc<Overlap>>,
    pub(super) shared: Arc<Shared>,
    /// One tensor for each parameter, whose memory [`Self::cast_to_kept`] casts the parameter into.
    /// While the parameters are unsharded they have that memory, and these tensors are released in
    /// their place. Unset for units that are not cast that way.
    kept: OnceLock<Vec<Tensor>>,
    state: Mutex<HandleState>,
}

#[derive(Debug)]
pub(super) struct HandleState {
    /// The forward that gathered the parameters.
    gathered_in_forward: u64,
    /// The number of guards that keep the parameters as they are now.
    pub(super) user_count: usize,
    /// The version of the unit's values: that of the model ([`FlatParamHandle::version`]) at their
    /// last change.
    version: u64,
    pub(super) gradients: Gradients,
}

/// A guard for a unit's parameters while they are in use. They cannot be resharded or changed until
/// all guards of the unit are dropped. With full sharding they are released then.
#[derive(Debug)]
pub(crate) struct InUse(Arc<FlatParamHandle>);

impl InUse {
    pub(crate) fn new(handle: &Arc<FlatParamHandle>) -> Self {
        handle.state().user_count += 1;
        InUse(Arc::clone(handle))
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.user_count -= 1;
        if state.user_count == 0 && self.0.reshards_after_forward() {
            // If this fails (only a GPU's driver can), the parameters stay gathered, and are still
            // counted as such.
            let _ = self.0.release();
        }
    }
}

impl FlatParamHandle {
    /// Makes a unit whose parameters' storages are released, unless they hold the authoritative
    /// values.
    pub(crate) fn new(
        unit: UnitSpec,
        shared: Arc<Shared>,
        overlap: Option<Arc<Overlap>>,
    ) -> Result<Self> {
        let first_tensor = &unit
            .params
            .first()
            .expect("a unit without parameters is not built")
            .tensor;
        let compute_dtype = first_tensor.dtype();
        let device = first_tensor.device().clone();
        let dtype = unit.flat.shard().dtype();
        let layout = unit.flat.layout().clone();
        let shard_device = if unit.cpu_offload {
            Device::Cpu
        } else {
            device.clone()
        };
        let shard = to_device(unit.flat.shard(), &shard_device)?;
        shared
            .memory
            .count_held(layout.sharded_numel() * dtype.size_in_bytes());
        // Where nothing is sharded, cast or offloaded, the model's own tensors are the parameters.
        // There is no other copy of them.
        let is_offloaded = unit.cpu_offload && !device.is_cpu();
        let is_unsharded = unit.groups.shard.is_none() && compute_dtype == dtype && !is_offloaded;
        let flat = if is_unsharded {
            None
        } else {
            Some(FlatParameter::new(
                layout.clone(),
                unit.flat.rank(),
                shard.clone(),
            )?)
        };
        let reduce_dtype = if unit.groups.is_empty() && device.is_cuda() {
            // Gradients that stay on this GPU are never sent, so they are not rounded to a narrower
            // dtype.
            dtype
        } else {
            unit.precision.reduce.unwrap_or(compute_dtype)
        };
        let exchange = UnitExchange {
            unit_number: unit.unit_number,
            groups: unit.groups.with_label(&unit.name),
            name: unit.name,
            layout,
            dtype,
            compute_dtype,
            reduce_dtype,
            device,
            shard_device,
            flat,
            is_unsharded: AtomicBool::new(is_unsharded),
        };
        let handle = FlatParamHandle {
            is_root: unit.is_root,
            precision: unit.precision,
            strategy: unit.strategy,
            exchange: Arc::new(exchange),
            overlap,
            shared,
            kept: OnceLock::new(),
            state: Mutex::new(HandleState {
                gathered_in_forward: 0,
                user_count: 0,
                version: 0,
                gradients: Gradients::new(unit.params.len()),
            }),
            params: unit.params,
        };
        // The model's tensors have been empty so far.
        if is_unsharded {
            handle.fill_storages(handle.exchange.split_into_params(&shard)?)?;
        } else {
            handle.release_storages()?;
        }
        Ok(handle)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, HandleState> {
        lock(&self.state)
    }

    /// Returns the unit's name; empty for the root.
    pub(crate) fn name(&self) -> &str {
        &self.exchange.name
    }

    /// Returns the number of the unit in the model, which is the same on all ranks.
    pub(crate) fn unit_number(&self) -> usize {
        self.exchange.unit_number
    }

    pub(crate) fn layout(&self) -> &FlatLayout {
        &self.exchange.layout
    }

    pub(crate) fn dtype(&self) -> DType {
        self.exchange.dtype
    }

    /// Returns the dtype of the shards, as one of `fsdp_layout`.
    pub(crate) fn file_dtype(&self) -> fsdp_layout::DType {
        fsdp_flat::dtype::from_candle(self.exchange.dtype)
            .expect("a unit is built of parameters whose dtype files can have")
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
    pub(crate) fn needs_unshard(&self) -> bool {
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
        match self.name() {
            "" => FLAT_PARAM.to_owned(),
            name => format!("{name}.{FLAT_PARAM}"),
        }
    }

    /// Returns `true` if parameters are released after forward. As in torch, those of the root are
    /// not: the backward needs them first.
    pub(crate) fn reshards_after_forward(&self) -> bool {
        matches!(
            self.strategy,
            ShardingStrategy::FullShard | ShardingStrategy::HybridShard
        ) && !self.is_root
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
        let info = self.layout().shard_param_info(param, self.shard_rank());
        let (Some(grad), Some(info)) = (self.grad(), info) else {
            return Ok(None);
        };
        Ok(Some(grad.narrow(
            0,
            info.offset_in_shard,
            info.numel_in_shard,
        )?))
    }

    /// Returns this rank's elements of a parameter, or of values like it, as boxes. `flat` is
    /// `None` for no elements.
    pub(crate) fn to_boxes(&self, param: usize, flat: Option<&Tensor>) -> Result<ShardedTensor> {
        let shape = &self.layout().shapes()[param];
        Ok(match flat {
            Some(flat) => {
                let boxes = self.layout().param_boxes(param, self.shard_rank());
                ShardedTensor::from_flat(shape, boxes, flat)?
            }
            None => ShardedTensor::new(self.dtype(), shape.clone(), Vec::new())?,
        })
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
        self.state().gradients.reduced.clone()
    }

    /// Drops the unit's gradients, and everything that is known of them.
    pub(crate) fn zero_grad(&self) {
        self.state().gradients = Gradients::new(self.params.len());
    }

    /// Checks that backwards have left no gradients here that are not reduced over all ranks.
    ///
    /// # Errors
    /// [`NnError::BackwardNotEnded`] and [`NnError::GradientsNotReduced`].
    pub(crate) fn check_gradients_reduced(&self) -> Result<()> {
        let state = self.state();
        let unit = || self.name().to_owned();
        if !state.gradients.received.is_empty() {
            return Err(NnError::BackwardNotEnded { unit: unit() });
        }
        if state.gradients.unsharded.is_some() || state.gradients.partial.is_some() {
            return Err(NnError::GradientsNotReduced { unit: unit() });
        }
        Ok(())
    }

    /// Returns `true` for each parameter that got a gradient on this rank since the last
    /// `zero_grad`.
    pub(crate) fn has_own_gradient(&self) -> Vec<bool> {
        self.state().gradients.has_own_gradient.clone()
    }

    /// Sets what the ranks have agreed on: `true` for each parameter that got a gradient on any
    /// rank.
    pub(crate) fn set_has_gradient(&self, has_gradient: Vec<bool>) {
        self.state().gradients.has_gradient = Some(has_gradient);
    }

    /// Returns `true` if a parameter got a gradient. Where the ranks have not agreed on that, all
    /// parameters of a unit that has gradients count as having one.
    pub(crate) fn has_gradient(&self, param: usize) -> bool {
        let state = self.state();
        let gradients = &state.gradients;
        let agreed = gradients.has_gradient.as_ref();
        gradients.reduced.is_some() && agreed.is_none_or(|has_gradient| has_gradient[param])
    }

    /// Unshards the parameters for a forward. They stay gathered while the returned guard lives.
    /// Collectives: one all-gather over the shard group, none if they are gathered already.
    pub(crate) fn unshard_for_forward(self: &Arc<Self>) -> Result<InUse> {
        let mut state = self.state();
        // An earlier forward may have gathered them, and somebody may have written into lent shards
        // since. Lending is the same on all ranks, so all of them gather again.
        if state.user_count == 0 && self.shared.may_be_stale(state.gathered_in_forward) {
            self.release()?;
        }
        self.unshard_locked(&mut state)?;
        state.user_count += 1;
        Ok(InUse(Arc::clone(self)))
    }

    /// Unshards the parameters for a backward.
    /// Collectives: one all-gather over the shard group, none if they are gathered already.
    pub(crate) fn unshard(&self) -> Result<()> {
        self.unshard_locked(&mut self.state())
    }

    /// Fills the parameters' storages from all ranks' shards, unless they are filled. Records in
    /// `state` the forward that did it, counts the memory, and starts to prefetch the units that
    /// are used next, if the options say so.
    fn unshard_locked(&self, state: &mut HandleState) -> Result<()> {
        if self.exchange.is_unsharded() {
            return Ok(());
        }
        if !self.cast_to_kept()? {
            // If the unit has been prefetched, this takes the values from there.
            let gathered = match &self.overlap {
                Some(overlap) => overlap.all_gather(&self.exchange)?,
                None => self.exchange.all_gather()?,
            };
            self.fill_storages(gathered)?;
            self.count_unsharded();
        }
        self.exchange.set_unsharded(true);
        state.gathered_in_forward = self.shared.forwards.last_number();
        if let Some(overlap) = &self.overlap {
            overlap.prefetch_next(BackwardPrefetch::Pre);
        }
        Ok(())
    }

    /// Counts the memory of the unsharded parameters among what is held.
    fn count_unsharded(&self) {
        self.shared
            .memory
            .count_held(self.exchange.unsharded_bytes());
    }

    /// Casts the parameters of a unit that is whole on one GPU, by one launch and without new
    /// memory: that of the cast is kept until the unit is dropped. Returns `false`, and does
    /// nothing, for other units.
    fn cast_to_kept(&self) -> Result<bool> {
        let UnitExchange {
            layout,
            groups,
            compute_dtype,
            device,
            ..
        } = &*self.exchange;
        let Some(shard) = self.flat_shard().filter(|_| groups.shard.is_none()) else {
            return Ok(false);
        };
        if !shard.device().same_device(device)
            || !step::can_write(device, *compute_dtype, shard.dtype())?
        {
            return Ok(false);
        }
        let kept = match self.kept.get() {
            Some(kept) => kept,
            None => {
                let params = self.params.iter();
                let zeros =
                    params.map(|param| zeros_on(param.tensor.dims(), *compute_dtype, device));
                let zeros = zeros.collect::<std::result::Result<_, _>>()?;
                self.count_unsharded();
                self.kept.get_or_init(|| zeros)
            }
        };
        let mut writes = Vec::with_capacity(kept.len());
        for (param, kept) in kept.iter().enumerate() {
            let range = layout.param_range(param);
            writes.push((
                kept.flatten_all()?,
                Some(shard.narrow(0, range.start, range.len())?),
            ));
        }
        step::write(&writes, false)?;
        self.exchange_kept(kept)?;
        Ok(true)
    }

    /// Exchanges the memory of each parameter with what is kept for it.
    fn exchange_kept(&self, kept: &[Tensor]) -> Result<()> {
        for (param, kept) in self.params.iter().zip(kept) {
            exchange_memory(&param.tensor, kept)?;
        }
        Ok(())
    }

    /// Puts gathered values into the parameters' storages.
    fn fill_storages(&self, gathered: Gathered) -> Result<()> {
        match gathered {
            Gathered::Host(contents) => {
                for (param, contents) in self.params.iter().zip(contents) {
                    contents.move_into(&param.tensor)?;
                }
                Ok(())
            }
            Gathered::Device(flat) => {
                let params = self.params.iter().map(|param| &param.tensor);
                device::fill(params, &self.exchange.layout, &flat)
            }
        }
    }

    /// Releases the memory of gathered parameters; that of a cast is [kept](Self::cast_to_kept). No
    /// communication.
    pub(crate) fn reshard(&self) -> Result<()> {
        let state = self.state();
        self.check_unused(&state)?;
        self.discard_prefetched()?;
        self.release()
    }

    /// Discards prefetched parameters, of this unit and of all others.
    fn discard_prefetched(&self) -> Result<()> {
        self.overlap
            .as_ref()
            .map_or(Ok(()), |overlap| overlap.discard())
    }

    /// Releases the gathered parameters, if they are gathered and can be gathered again. The caller
    /// has locked the state.
    pub(super) fn release(&self) -> Result<()> {
        // Storages that hold the authoritative values must never be released.
        if !self.needs_unshard() || !self.exchange.is_unsharded() {
            return Ok(());
        }
        if let Some(kept) = self.kept.get() {
            self.exchange_kept(kept)?;
        } else {
            self.release_storages()?;
            let bytes = self.exchange.unsharded_bytes();
            self.shared.memory.count_released(bytes);
        }
        self.exchange.set_unsharded(false);
        Ok(())
    }

    /// Frees the memory of the parameters' storages.
    fn release_storages(&self) -> Result<()> {
        for param in &self.params {
            release(&param.tensor)?;
        }
        Ok(())
    }

    /// Checks that no forward computes with the parameters now.
    fn check_unused(&self, state: &HandleState) -> Result<()> {
        if state.user_count > 0 {
            Err(NnError::UnitInUse {
                unit: self.name().to_owned(),
            })
        } else {
            Ok(())
        }
    }

    /// Prepares a change of the unit's values: waits for those who read them, removes the gathered
    /// copy of the old values, and makes the backward of a forward that used them an error. No
    /// communication.
    pub(crate) fn begin_change(&self) -> Result<()> {
        self.shared.values.wait_for_readers()?;
        let mut state = self.state();
        self.check_unused(&state)?;
        self.discard_prefetched()?;
        self.release()?;
        // A backward compares this with the version at its forward.
        state.version = self.shared.values.next_version();
        Ok(())
    }

    /// Returns the version of the values of all units, for [`Self::check_unchanged`]: it rises with
    /// each change of any of them.
    pub(crate) fn version(&self) -> u64 {
        self.shared.values.version()
    }

    /// Checks that the unit's values have not changed since `version_at_forward`, which
    /// [`Self::version`] returned then.
    pub(crate) fn check_unchanged(&self, version_at_forward: u64) -> Result<()> {
        if self.state().version > version_at_forward {
            return Err(NnError::ChangedSinceForward {
                unit: self.name().to_owned(),
            });
        }
        Ok(())
    }

    /// Returns copies of the unsharded parameters in the dtype of the shards.
    /// Collectives: one all-gather over the shard group, none if nothing is sharded.
    pub(crate) fn all_gather_params(&self) -> Result<Vec<Tensor>> {
        let exchange = Arc::clone(&self.exchange);
        // Run the gather in the same queue as the units' other collectives, so that their order is
        // the same on all ranks.
        let gathered = match &self.overlap {
            Some(overlap) => overlap.run(move || exchange.all_gather_flat())?,
            None => exchange.all_gather_flat()?,
        };
        let Some(gathered) = gathered else {
            return self
                .params
                .iter()
                .map(|param| Ok(owned_copy(&param.tensor.detach())?))
                .collect();
        };
        let mut params = Vec::with_capacity(self.params.len());
        for (index, shape) in self.layout().shapes().iter().enumerate() {
            let range = self.layout().param_range(index);
            let flat = gathered.narrow(0, range.start, range.len())?;
            params.push(owned_copy(&flat.reshape(shape.as_slice())?)?);
        }
        Ok(params)
    }
}
