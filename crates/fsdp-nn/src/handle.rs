//! The FlatParameter of one unit at work: gather, free, collect gradients, reduce them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use fsdp_comm::{Element, ProcessGroup, ReduceOp};
use fsdp_flat::storage::{
    HostSlice, HostSliceMut, Scalar, copied_vec, refill, refill_from, release, to_device, zeroed_vec, zeros, zeros_on,
};
use fsdp_flat::{FlatParameter, ShardedTensor, with_float};
use fsdp_layout::FlatLayout;
use fsdp_layout::flat::FlatEntry;
use tracing::trace;

use crate::device;
use crate::gradient::copy_gradient;
use crate::{NnError, Result, ShardingStrategy};

/// torch's name of a FlatParameter within its unit.
pub(crate) const FLAT_PARAM: &str = "_flat_param";

/// One parameter of a unit.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) fqn: String,
    /// What the model computes with. Its storage is empty while the unit is sharded.
    pub(crate) tensor: Tensor,
    pub(crate) requires_grad: bool,
}

/// What all units of one model share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Whether a backward reduces gradients over ranks; off inside `no_sync`.
    pub(crate) sync: AtomicBool,
    bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
}

impl Shared {
    pub(crate) fn new() -> Self {
        Shared { sync: AtomicBool::new(true), bytes: AtomicUsize::new(0), peak_bytes: AtomicUsize::new(0) }
    }

    fn hold(&self, bytes: usize) {
        let now = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak_bytes.fetch_max(now, Ordering::Relaxed);
    }

    fn release(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn parameter_bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn peak_parameter_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }
}

/// The ranks that a model is spread over.
#[derive(Debug, Clone)]
pub(crate) struct Groups {
    /// Ranks that each hold a shard; `None` if nothing is sharded.
    pub(crate) shard: Option<ProcessGroup>,
    /// Ranks that hold the same values as this one; `None` if there are no others.
    pub(crate) replicate: Option<ProcessGroup>,
}

impl Groups {
    /// Ranks that share a FlatParameter.
    pub(crate) fn shards(&self) -> usize {
        self.shard.as_ref().map_or(1, ProcessGroup::world_size)
    }
}

/// What a unit is made of.
pub(crate) struct UnitSpec {
    pub(crate) name: String,
    pub(crate) is_root: bool,
    pub(crate) params: Vec<Parameter>,
    pub(crate) layout: FlatLayout,
    pub(crate) dtype: DType,
}

/// A unit's parameters on this rank.
///
/// Where parameters are sharded, the truth is `flat`, this rank's shard, and the parameters' own storages are filled
/// only between gather and reshard. With `NoShard` the parameters' storages are the truth and `flat` is `None`.
#[derive(Debug)]
pub(crate) struct FlatParamHandle {
    pub(crate) name: String,
    pub(crate) is_root: bool,
    pub(crate) params: Vec<Parameter>,
    layout: FlatLayout,
    dtype: DType,
    device: Device,
    strategy: ShardingStrategy,
    groups: Groups,
    flat: Option<FlatParameter>,
    shared: Arc<Shared>,
    state: Mutex<HandleState>,
}

#[derive(Debug, Default)]
struct HandleState {
    gathered: bool,
    /// Gradients of this rank's own batch, unsharded; there from the last gradient to the reduction.
    unsharded_grad: Option<Tensor>,
    /// Which parameters of `unsharded_grad` have been written.
    written: Vec<bool>,
    /// What this backward has brought so far: gradients of trainable parameters, by their numbers.
    received: Vec<(usize, Tensor)>,
    /// The reduced gradient, as long as the shard.
    grad: Option<Tensor>,
}

impl FlatParamHandle {
    /// A unit whose parameters' storages are empty. `initialize` writes this rank's initial values into the flat
    /// shard, which is the whole FlatParameter with `NoShard`.
    pub(crate) fn new(
        unit: UnitSpec,
        strategy: ShardingStrategy,
        groups: Groups,
        shared: Arc<Shared>,
        initialize: &dyn Fn(&FlatParameter) -> Result<()>,
    ) -> Result<Self> {
        let UnitSpec { name, is_root, params, layout, dtype } = unit;
        let rank = groups.shard.as_ref().map_or(0, ProcessGroup::rank);
        let shard = zeros(&[layout.sharded_numel()], dtype)?;
        let flat = FlatParameter::new(layout.clone(), rank, shard)?;
        initialize(&flat)?;
        // The values come from the host, and are the same on all devices.
        let device = params.first().map_or(Device::Cpu, |param| param.tensor.device().clone());
        let flat = FlatParameter::new(layout.clone(), rank, to_device(flat.shard(), &device)?)?;
        shared.hold(layout.sharded_numel() * dtype.size_in_bytes());
        let handle = FlatParamHandle {
            name,
            is_root,
            params,
            layout,
            dtype,
            device,
            strategy,
            flat: groups.shard.is_some().then(|| flat.clone()),
            groups,
            shared,
            state: Mutex::new(HandleState::default()),
        };
        for param in &handle.params {
            release(&param.tensor)?;
        }
        if handle.flat.is_none() {
            with_float!(dtype, T => handle.fill_from_flat::<T>(flat.shard())?, else handle.unsupported()?);
            handle.state().gathered = true;
        }
        Ok(handle)
    }

    fn state(&self) -> MutexGuard<'_, HandleState> {
        // A panic while the lock was held left plain data behind: carrying on is sound.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unsupported(&self) -> Result<()> {
        Err(NnError::Candle(candle_core::Error::UnsupportedDTypeForOp(self.dtype, "FlatParameter")))
    }

    pub(crate) const fn layout(&self) -> &FlatLayout {
        &self.layout
    }

    pub(crate) const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the parameters, their gradients and their optimizer state live.
    pub(crate) const fn device(&self) -> &Device {
        &self.device
    }

    /// The rank whose part of the flat layout lives here.
    pub(crate) fn shard_rank(&self) -> usize {
        self.flat.as_ref().map_or(0, FlatParameter::rank)
    }

    /// Whether this rank holds only a part of the parameters.
    pub(crate) const fn is_sharded(&self) -> bool {
        self.flat.is_some()
    }

    /// This rank's shard, where parameters are sharded.
    pub(crate) fn flat_shard(&self) -> Option<&Tensor> {
        self.flat.as_ref().map(FlatParameter::shard)
    }

    /// torch's name of the FlatParameter: `<unit>._flat_param`.
    pub(crate) fn flat_param_name(&self) -> String {
        match self.name.as_str() {
            "" => FLAT_PARAM.to_owned(),
            name => format!("{name}.{FLAT_PARAM}"),
        }
    }

    /// Whether parameters are freed after forward.
    pub(crate) fn reshards_after_forward(&self) -> bool {
        matches!(self.strategy, ShardingStrategy::FullShard | ShardingStrategy::HybridShard) && !self.is_root
    }

    fn unsharded_bytes(&self) -> usize {
        self.layout.numels().iter().sum::<usize>() * self.dtype.size_in_bytes()
    }

    /// This rank's part of parameter `param`, flat, as a view of the live memory; `None` if it has none.
    pub(crate) fn local_piece(&self, param: usize) -> Result<Option<Tensor>> {
        match &self.flat {
            Some(flat) => Ok(flat.piece(param, flat.shard())?),
            None => Ok(Some(self.params[param].tensor.detach().flatten_all()?).filter(|flat| flat.elem_count() > 0)),
        }
    }

    /// This rank's part of the reduced gradient of parameter `param`, flat.
    pub(crate) fn grad_piece(&self, param: usize) -> Result<Option<Tensor>> {
        let Some(grad) = self.grad() else { return Ok(None) };
        match self.layout.shard_param_infos(self.shard_rank())[param] {
            Some(info) => Ok(Some(grad.narrow(0, info.offset_in_shard, info.numel_in_shard)?)),
            None => Ok(None),
        }
    }

    /// Parameter `param` as boxes of views of the live memory.
    pub(crate) fn sharded_param(&self, param: usize) -> Result<ShardedTensor> {
        match &self.flat {
            Some(flat) => Ok(flat.sharded(param, flat.shard())?),
            None => Ok(ShardedTensor::from_whole(&self.params[param].tensor.detach())),
        }
    }

    /// The reduced gradient, as long as the shard; `None` before a backward or after `zero_grad`.
    pub(crate) fn grad(&self) -> Option<Tensor> {
        self.state().grad.clone()
    }

    pub(crate) fn zero_grad(&self) {
        let mut state = self.state();
        state.grad = None;
        state.unsharded_grad = None;
        state.received.clear();
    }

    /// Fills the parameters' storages from all ranks' shards. One all-gather over the shard group, none if the
    /// parameters are whole already.
    pub(crate) fn gather(&self) -> Result<()> {
        let mut state = self.state();
        let (Some(flat), Some(group)) = (&self.flat, &self.groups.shard) else { return Ok(()) };
        if state.gathered {
            return Ok(());
        }
        trace!(unit = %self.name, "all-gather parameters");
        match device::all_gather(group, flat.shard())? {
            Some(whole) => self.fill_from_device(&whole)?,
            None => with_float!(self.dtype, T => self.gather_typed::<T>(flat, group)?, else self.unsupported()?),
        }
        state.gathered = true;
        self.shared.hold(self.unsharded_bytes());
        Ok(())
    }

    fn gather_typed<T: Scalar + Element>(&self, flat: &FlatParameter, group: &ProcessGroup) -> Result<()> {
        let mut values: Vec<Vec<T>> = Vec::with_capacity(self.layout.entries().len() + 1);
        for &numel in self.layout.numels_with_padding() {
            values.push(zeroed_vec(numel)?);
        }
        let right = self.layout.padded_unsharded_numel() - self.layout.unpadded_unsharded_numel();
        values.push(zeroed_vec(right)?);
        let mut slices: Vec<&mut [T]> = values.iter_mut().map(Vec::as_mut_slice).collect();
        group.all_gather_into_slices(&mut slices, &HostSlice::<T>::read(flat.shard())?)?;
        for (entry, value) in self.layout.entries().iter().zip(values) {
            if let FlatEntry::Param(param) = *entry {
                refill(&self.params[param].tensor, value)?;
            }
        }
        Ok(())
    }

    /// Fills the parameters' storages from a whole flat parameter on their device.
    fn fill_from_device(&self, whole: &Tensor) -> Result<()> {
        for (index, param) in self.params.iter().enumerate() {
            let range = self.layout.param_range(index);
            refill_from(&param.tensor, &whole.narrow(0, range.start, range.len())?)?;
        }
        Ok(())
    }

    /// Fills the parameters' storages from a whole flat parameter.
    fn fill_from_flat<T: Scalar>(&self, flat: &Tensor) -> Result<()> {
        let data = HostSlice::<T>::read(flat)?;
        for (index, param) in self.params.iter().enumerate() {
            refill(&param.tensor, copied_vec(&data[self.layout.param_range(index)])?)?;
        }
        Ok(())
    }

    /// Gives the memory of gathered parameters back. No communication.
    pub(crate) fn reshard(&self) -> Result<()> {
        self.reshard_locked(&mut self.state())
    }

    fn reshard_locked(&self, state: &mut HandleState) -> Result<()> {
        if self.flat.is_none() || !state.gathered {
            return Ok(());
        }
        for param in &self.params {
            release(&param.tensor)?;
        }
        state.gathered = false;
        self.shared.release(self.unsharded_bytes());
        Ok(())
    }

    /// Takes the gradient of one parameter from candle's backward. With the unit's last one the parameters are freed
    /// and the gradients are reduced over ranks.
    pub(crate) fn receive_grad(&self, param: usize, grad: &Tensor) -> Result<()> {
        let mut state = self.state();
        // As they are: the first ones come before candle computes the others, and before the unit after is through. The
        // memory for all of them is taken when that of the parameters has been given back.
        state.received.push((param, grad.detach()));
        if state.received.len() == self.params.iter().filter(|param| param.requires_grad).count() {
            self.finish_backward_locked(&mut state)?;
        }
        Ok(())
    }

    /// Puts the gradients that have been received into the unsharded one, or adds them to what is there.
    fn flatten_received(&self, state: &mut HandleState) -> Result<()> {
        let received = std::mem::take(&mut state.received);
        if state.unsharded_grad.is_none() {
            state.unsharded_grad = Some(zeros_on(&[self.layout.padded_unsharded_numel()], self.dtype, &self.device)?);
            state.written = vec![false; self.params.len()];
        }
        let Some(buffer) = &state.unsharded_grad else { return Ok(()) };
        for (param, grad) in received {
            let range = self.layout.param_range(param);
            let accumulate = std::mem::replace(&mut state.written[param], true);
            if !self.device.is_cpu() {
                device::copy_gradient(&grad, buffer, range, accumulate)?;
            } else {
                with_float!(self.dtype, T => {
                    copy_gradient::<T>(&grad, &mut HostSliceMut::write(buffer)?[range], accumulate)?;
                }, else self.unsupported()?);
            }
        }
        Ok(())
    }

    /// Ends a backward that did not reach all of the unit's parameters: those count as zero.
    pub(crate) fn finish_backward(&self) -> Result<()> {
        let mut state = self.state();
        if !state.received.is_empty() {
            self.finish_backward_locked(&mut state)?;
        } else {
            self.reshard_locked(&mut state)?;
        }
        Ok(())
    }

    fn finish_backward_locked(&self, state: &mut HandleState) -> Result<()> {
        self.reshard_locked(state)?;
        self.flatten_received(state)?;
        if !self.shared.sync.load(Ordering::Relaxed) {
            return Ok(());
        }
        let Some(unsharded) = state.unsharded_grad.take() else { return Ok(()) };
        trace!(unit = %self.name, "reduce gradients");
        let reduced = with_float!(self.dtype, T => self.reduce::<T>(unsharded)?, else {
            self.unsupported()?;
            unsharded
        });
        match &state.grad {
            Some(grad) if !self.device.is_cpu() => {
                let range = 0..grad.elem_count();
                device::copy_gradient(&reduced, grad, range, true)?;
            }
            Some(grad) => with_float!(self.dtype, T => {
                let from = HostSlice::<T>::read(&reduced)?;
                HostSliceMut::<T>::write(grad)?.iter_mut().zip(from.iter()).for_each(|(to, from)| *to += *from);
            }, else self.unsupported()?),
            None => state.grad = Some(reduced),
        }
        Ok(())
    }

    /// The mean of all ranks' gradients: this rank's shard of it, or all of it if nothing is sharded.
    fn reduce<T: Scalar + Element>(&self, unsharded: Tensor) -> Result<Tensor> {
        let mut reduced = unsharded;
        if let Some(group) = &self.groups.shard {
            let unsharded = reduced;
            reduced = zeros_on(&[self.layout.sharded_numel()], self.dtype, &self.device)?;
            if !device::reduce_scatter(group, &reduced, &unsharded)? {
                let input = HostSlice::<T>::read(&unsharded)?;
                let mut output = HostSliceMut::<T>::write(&reduced)?;
                group.reduce_scatter(&mut output, &input, ReduceOp::Avg)?;
                output.finish()?;
            }
        }
        if let Some(group) = &self.groups.replicate
            && !device::all_reduce(group, &reduced)?
        {
            let mut buffer = HostSliceMut::<T>::write(&reduced)?;
            group.all_reduce(&mut buffer, ReduceOp::Avg)?;
            buffer.finish()?;
        }
        Ok(reduced)
    }
}
