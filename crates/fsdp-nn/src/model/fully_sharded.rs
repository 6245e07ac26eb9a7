//! [`FullyShardedDataParallel`]: the sharded model, its forward and its backward.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use fsdp_comm::ProcessGroup;
use fsdp_ops::autograd;

use super::build::agree_on_model;
use super::parameters::ShardedParameters;
use super::registry::{Backend, Registry};
use super::scope::Scope;
use crate::config::{FsdpConfig, cast};
use crate::error::{NnError, Result};
use crate::exchange::Phase;
use crate::guards::{OnDrop, lock};
use crate::unit::{FlatParamHandle, PreBackward, UnitOutput};

/// A candle model whose parameters, gradients and optimizer state are sharded over the ranks of a
/// process group: torch's `FullyShardedDataParallel`.
///
/// The model is built from a [`Scope`]. Each module built with [`Scope::unit`] is a unit, which is
/// gathered and released as a whole. Parameters outside of units belong to the root unit, which
/// stays gathered from forward to the end of backward. Every rank must build the same model and
/// call the same methods in the same order.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Linear, Module, linear};
/// use fsdp_comm::run_local;
/// use fsdp_nn::algorithm::{Algorithm, SgdOptions};
/// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, Unit};
///
/// let losses = run_local(2, |group| -> Result<Vec<f32>, NnError> {
///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
///         let hidden: Unit<Linear> = scope.pp("hidden").unit(|scope| linear(4, 8, scope.vb()))?;
///         Ok((hidden, linear(8, 1, scope.vb().pp("out"))?))
///     })?;
///     let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Sgd(SgdOptions { lr: 0.1, ..Default::default() }))?;
///     let x = Tensor::ones((3, 4), DType::F32, &Device::Cpu)?;
///     let mut losses = Vec::new();
///     for _ in 0..3 {
///         let loss = model.forward(|(hidden, out)| out.forward(&hidden.forward(&x)?.relu()?)?.sqr()?.mean_all())?;
///         model.backward(&loss)?;
///         optimizer.step()?;
///         model.parameters().zero_grad();
///         losses.push(loss.to_scalar::<f32>()?);
///     }
///     Ok(losses)
/// })?;
/// let first = losses.into_iter().next().unwrap()?;
/// assert!(first[2] < first[0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FullyShardedDataParallel<M> {
    module: M,
    parameters: Arc<ShardedParameters>,
    /// The dtype to which the model's output is converted.
    output_dtype: Option<DType>,
}

impl<M> FullyShardedDataParallel<M> {
    /// Builds a model and shards it. Initial values depend only on the seed and the parameters'
    /// names, not on the ranks, and no rank ever holds more than its own part of them. Collectives:
    /// two agreements; for `HybridShard` the creation of two subgroups; with prefetching, the
    /// creation of one more for each group that the model is sharded or replicated over.
    ///
    /// # Errors
    /// An error of one rank becomes an error on every rank. The errors of `build`;
    /// [`NnError::DifferentModels`] if the ranks do not build the same model; parameters that
    /// cannot share a unit (mixed dtypes, integers, and without `use_orig_params` frozen and
    /// trained ones, or two units of one name); [`BuildError::Mesh`](crate::BuildError::Mesh); ties
    /// that lead to no parameter ([`Scope::tie`]); [`NnError::ParametersSharded`] if `build`
    /// computes with parameters.
    pub fn new(
        group: ProcessGroup,
        config: FsdpConfig,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(group, &config, None, build)
    }

    /// Builds a model whose values will be loaded, and whose parameters are zero until then.
    /// `shapes` has the shape of each parameter by name. It decides which parameters exist:
    /// `contains_tensor` and `get_unchecked` of the builder answer from it. Collectives: those of
    /// [`Self::new`].
    ///
    /// # Errors
    /// [`BuildError::NotInCheckpoint`](crate::BuildError::NotInCheckpoint) for a parameter that is
    /// not in `shapes`, and [`BuildError::OtherShape`](crate::BuildError::OtherShape) for one that
    /// has another shape there. The builder returns these to `build`, which may handle them. The
    /// errors of [`Self::new`].
    pub fn empty(
        group: ProcessGroup,
        config: FsdpConfig,
        shapes: HashMap<String, Vec<usize>>,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(group, &config, Some(shapes), build)
    }

    /// Builds the module with parameters whose storages are empty, and then their shards. With
    /// `shapes`, these decide which parameters exist.
    fn build(
        group: ProcessGroup,
        config: &FsdpConfig,
        shapes: Option<HashMap<String, Vec<usize>>>,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> Result<Self> {
        if config.device.is_cuda() {
            candle_core::cuda::set_gemm_reduced_precision_f32(config.allow_tf32);
        }
        // The model's code takes the builder for one of candle's. What it requests is recorded.
        let registry = Arc::new(Mutex::new(Registry::new(config, shapes)));
        let backend: Box<dyn SimpleBackend> = Box::new(Backend(Arc::clone(&registry)));
        let dtype = config.mixed_precision.param.unwrap_or(config.dtype);
        let vb = VarBuilder::from_backend(backend, dtype, config.device.clone());
        let scope = Scope::sharded(vb, Arc::clone(&registry));
        let built = build(&scope).map_err(|error| lock(&registry).explain_error(error));
        let (parameters, module) = ShardedParameters::new(group, config, &registry, built)?;
        Ok(FullyShardedDataParallel {
            module,
            parameters: Arc::new(parameters),
            output_dtype: config.mixed_precision.output,
        })
    }

    /// Returns the parameters, for optimizers and state dicts.
    #[must_use]
    pub const fn parameters(&self) -> &Arc<ShardedParameters> {
        &self.parameters
    }

    /// Returns the process group.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        self.parameters.group()
    }

    /// Runs a forward with the root unit gathered. Collectives, over the shard group: one
    /// all-gather for the root unit and one for each unit whose forward `f` runs, unless they are
    /// gathered already. There are none if nothing is sharded.
    ///
    /// # Errors
    /// The errors of `f` and of the all-gathers; [`NnError::ParametersSharded`] if `f` computes
    /// with a parameter of a unit outside that unit's forward.
    pub fn forward<O: UnitOutput>(
        &self,
        f: impl FnOnce(&M) -> candle_core::Result<O>,
    ) -> Result<O> {
        let _forward = self.parameters.shared.forwards.begin();
        let is_outermost = self.parameters.shared.forwards.is_outermost();
        let overlap = self.parameters.overlap.as_ref().filter(|_| is_outermost);
        let phase = overlap
            .map(|overlap| overlap.begin(Phase::Forward))
            .transpose()?;
        let root = self.parameters.root();
        let root_guard = root.map(|root| root.unshard_for_forward()).transpose()?;
        let output =
            f(&self.module).map_err(|error| self.parameters.shared.explain_error(error))?;
        phase.map_or(Ok(()), |phase| phase.complete())?;
        drop(root_guard);
        let output = output.map_tensors(&mut |tensor| cast(tensor, self.output_dtype))?;
        // Attach a check to the output: a backward must fail if values have changed since this
        // forward. Units that are gathered attach it to their own output, the others do not.
        let unchecked: Vec<Arc<FlatParamHandle>> = self.parameters.unchecked_units();
        if root.is_none() && unchecked.is_empty() {
            return Ok(output);
        }
        let version_at_forward = self.parameters.shared.values.version();
        Ok(output.map_tensors(&mut |tensor| {
            // The hook may copy its tensor, so it is attached only where it is needed. A tensor
            // without a gradient has no backward. And a parameter that the model returns as its
            // output was not computed from the values of parameters.
            if !tensor.track_op() || self.parameters.has_tensor(tensor.id()) {
                return Ok(tensor);
            }
            PreBackward::new(root, &unchecked, version_at_forward).attach_to(tensor)
        })?)
    }

    /// Runs the backward of a loss, in place of candle's `loss.backward()`. The gradients are
    /// averaged over all ranks and added to the existing ones, sharded like the parameters.
    /// Collectives for each unit that the backward reaches: one all-gather (full sharding), one
    /// reduce-scatter over the shard group, and one all-reduce over the replicas (without sharding,
    /// over all ranks). Before the last of them, those of the root unit, one all-reduce of a byte
    /// for each unit and each parameter tells all ranks which parameters got a gradient on any
    /// rank. The reductions also run for units that this backward does not reach, if it reaches
    /// them on other ranks, or if earlier backwards inside [`Self::no_sync`] have left gradients
    /// there.
    ///
    /// Ranks may reach different parameters of a unit, or none of the root. Every other unit must
    /// be reached on all ranks or on none, because they gather and reduce it together in the middle
    /// of the backward. If the batches of some ranks have no use for a unit, let its output enter
    /// their losses times a tensor of zeros. (A product with the number 0 is no part of candle's
    /// graph.)
    ///
    /// After the first backward a warning (`tracing`) names the trained parameters that got no
    /// gradient. This is usually caused by operations of candle that have no backward and silently
    /// stop gradients.
    ///
    /// Returns candle's store with the gradients of variables that are not parameters of this
    /// model.
    ///
    /// # Errors
    /// candle's errors, and those of the collectives; [`NnError::ChangedSinceForward`] if the
    /// values of a unit have changed since the forward. All gradients of this rank are dropped
    /// then.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.compute_gradients(loss).inspect_err(|_| {
            self.parameters.zero_grad();
            // Units in use by a forward around this backward refuse, and stay gathered. Ignore
            // that: the error to return is that of the backward.
            for handle in &self.parameters.handles {
                let _ = handle.reshard();
            }
        })
    }

    /// Runs the backward of a loss, and waits until all gradients are reduced.
    fn compute_gradients(&self, loss: &Tensor) -> Result<GradStore> {
        let phase = self
            .parameters
            .overlap
            .as_ref()
            .map(|overlap| overlap.begin(Phase::Backward))
            .transpose()?;
        // The root unit stays gathered until the backward has passed all units.
        if let Some(root) = self.parameters.root() {
            root.unshard()?;
        }
        self.parameters.begin_backward(loss);
        let grads = autograd::backward(loss)
            .map_err(|error| self.parameters.shared.explain_error(error))?;
        if let Some(phase) = &phase {
            phase.complete()?;
        }
        self.parameters.finish_backward()?;
        Ok(grads)
    }

    /// Turns the reduction of gradients off, or on again, for later backwards: torch's
    /// `set_requires_gradient_sync`. While it is off, each rank accumulates whole gradients, and
    /// [`ShardedParameters::gradient`] does not change. The first backward after it is on again
    /// reduces them together with its own; a step before that is an error
    /// ([`NnError::GradientsNotReduced`]). Every rank must set the same; no communication.
    ///
    /// [`Self::no_sync`] does the same inside a closure.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, linear};
    /// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, NnError};
    /// # fsdp_comm::run_local(2, |group| {
    /// # let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(3, 1, scope.vb()))?;
    /// let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
    /// for micro_batch in 0..4 {
    ///     model.set_requires_gradient_sync(micro_batch == 3);
    ///     model.backward(&model.forward(|layer| layer.forward(&x)?.mean_all())?)?;
    ///     assert_eq!(model.parameters().gradient("weight")?.is_some(), micro_batch == 3);
    /// }
    /// # Ok::<(), NnError>(())
    /// # })?.into_iter().collect::<Result<Vec<()>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_requires_gradient_sync(&self, requires_gradient_sync: bool) {
        self.parameters
            .shared
            .reductions
            .set_no_sync(!requires_gradient_sync);
    }

    /// Turns the reduction of gradients over replicas off, or on again, for later backwards:
    /// torch's `set_requires_all_reduce`. While it is off, backwards with
    /// [`HybridShard`](crate::ShardingStrategy::HybridShard) reduce-scatter gradients inside of
    /// each replica, and accumulate them there as shards. The first backward after it is on again
    /// reduces the sum over the replicas. Like [`Self::set_requires_gradient_sync`] it avoids
    /// traffic between replicas, but takes less memory. With
    /// [`NoShard`](crate::ShardingStrategy::NoShard), where every rank is a replica, it avoids all
    /// traffic. Other strategies have no replicas, and ignore it. Every rank must set the same; no
    /// communication.
    pub fn set_requires_all_reduce(&self, requires_all_reduce: bool) {
        self.parameters
            .shared
            .reductions
            .set_no_all_reduce(!requires_all_reduce);
    }

    /// Runs `f`, inside which backwards do not communicate: torch's `no_sync`. Their gradients are
    /// accumulated whole on each rank, and reduced together with those of the next backward
    /// outside. This sets the switch of [`Self::set_requires_gradient_sync`], and restores it when
    /// `f` returns, fails or panics.
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn no_sync<T, E>(&self, f: impl FnOnce(&Self) -> Result<T, E>) -> Result<T, E> {
        let reductions = &self.parameters.shared.reductions;
        let previous = reductions.set_no_sync(true);
        let _restore = OnDrop(|| _ = reductions.set_no_sync(previous));
        f(self)
    }

    /// Sends gradients between ranks as a hook says, in all backwards to come: torch's
    /// `register_comm_hook`. They are rounded before they are sent, and converted back when they
    /// have been reduced; what is added up on a rank is not rounded. With `f32` gradients it halves
    /// what reductions move. As in torch, a model has one hook for good. Collectives: one
    /// agreement.
    ///
    /// ```
    /// # use candle_nn::linear;
    /// # use fsdp_nn::{CommHook, FsdpConfig, FullyShardedDataParallel, NnError};
    /// # fsdp_comm::run_local(2, |group| {
    /// let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| linear(3, 1, scope.vb()))?;
    /// model.register_comm_hook(CommHook::Bf16Compress)?;
    /// # Ok::<(), NnError>(())
    /// # })?.into_iter().collect::<Result<Vec<()>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`NnError::Options`] if the model has a hook; [`NnError::DifferentModels`] if ranks register
    /// different ones. One rank's error is every rank's.
    pub fn register_comm_hook(&self, hook: CommHook) -> Result<()> {
        let reductions = &self.parameters().shared.reductions;
        let checked_hook = match reductions.sent_dtype() {
            Some(_) => Err(second_hook_error()),
            None => Ok(hook),
        };
        let hook = agree_on_model(self.group(), "register_comm_hook", checked_hook, |hook| {
            vec![format!("the hook {hook:?}")]
        })?;
        if reductions.set_sent_dtype(hook.dtype()) {
            Ok(())
        } else {
            Err(second_hook_error())
        }
    }
}

/// Returns the error for a model that is given a second communication hook.
fn second_hook_error() -> NnError {
    NnError::options("the model has a communication hook already, and can have one only")
}

/// The way in which gradients travel between ranks: torch's communication hooks of the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommHook {
    /// Rounded to `bf16`: torch's `bf16_compress_hook`.
    Bf16Compress,
    /// Rounded to `f16`: torch's `fp16_compress_hook`. What `f16` cannot hold becomes infinite:
    /// scale the loss ([`GradScaler`](crate::GradScaler)).
    Fp16Compress,
}

impl CommHook {
    const fn dtype(self) -> DType {
        match self {
            CommHook::Bf16Compress => DType::BF16,
            CommHook::Fp16Compress => DType::F16,
        }
    }
}
