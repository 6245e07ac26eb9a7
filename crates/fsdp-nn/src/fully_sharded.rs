//! The sharded model.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use fsdp_comm::ProcessGroup;

use crate::config::FsdpConfig;
use crate::exchange::Phase;
use crate::handle::FlatParamHandle;
use crate::hooks::PreBackwardOp;
use crate::parameters::ShardedParameters;
use crate::precision::cast;
use crate::registry::{Backend, Registry, lock};
use crate::scope::Scope;
use crate::unit::UnitOutput;
use crate::{NnError, Result};

/// A candle model whose parameters, gradients and optimizer state are sharded over the ranks of a process group:
/// torch's `FullyShardedDataParallel`.
///
/// The model is built from a [`Scope`]; modules built with [`Scope::unit`] are gathered and released one by one, and
/// whatever parameters are in no unit belong to the root unit, which is whole from forward to the end of backward.
/// Every rank must build the same model and call the same methods in the same order.
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
    /// Builds a model and shards it. Values depend on the seed and the parameters' names alone, not on the ranks;
    /// no rank ever holds more than its own part of them. Collectives: two agreements; for `HybridShard` the
    /// making of two sub-groups; with a prefetch that of one more for each group that the model is spread over.
    ///
    /// # Errors
    /// The errors of `build`; [`NnError::DifferentModels`] if the ranks do not build the same; parameters that cannot share a
    /// unit (mixed dtypes, integers, and without `use_orig_params` frozen and trained ones, or two units of one name);
    /// [`NnError::Mesh`]; ties that lead nowhere ([`Scope::tie`]); [`NnError::ParametersSharded`] for a `build` that computes
    /// with parameters. One rank's error is every rank's.
    pub fn new(
        group: ProcessGroup,
        config: FsdpConfig,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(group, &config, None, build)
    }

    /// Builds a model that is going to be loaded, whose parameters are zero until then. `shapes` has the shape of each
    /// parameter that will be there, by name. While the model is built they answer which parameters there are, also before
    /// the model has asked for them (`contains_tensor`, `get_unchecked`). Collectives: as [`Self::new`].
    ///
    /// # Errors
    /// [`NnError::NotInCheckpoint`] for a parameter that is not in `shapes`, and [`NnError::OtherShape`] for one that has
    /// another shape there: errors of the builder, which `build` may catch. Those of [`Self::new`].
    pub fn empty(
        group: ProcessGroup,
        config: FsdpConfig,
        shapes: HashMap<String, Vec<usize>>,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(group, &config, Some(shapes), build)
    }

    fn build(
        group: ProcessGroup,
        config: &FsdpConfig,
        shapes: Option<HashMap<String, Vec<usize>>>,
        build: impl FnOnce(&Scope) -> candle_core::Result<M>,
    ) -> Result<Self> {
        let is_sharded = config.strategy.is_sharded() && group.world_size() > 1;
        let registry = Arc::new(Mutex::new(Registry::new(is_sharded, config, shapes)));
        let backend: Box<dyn SimpleBackend> = Box::new(Backend(Arc::clone(&registry)));
        let dtype = config.mixed_precision.param.unwrap_or(config.dtype);
        let vb = VarBuilder::from_backend(backend, dtype, config.device.clone());
        let scope = Scope::sharded(vb, Arc::clone(&registry));
        let built = build(&scope).map_err(|error| lock(&registry).explain(error));
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

    /// Runs a forward with the root unit in place. Collectives, over the shard group: one all-gather for the root and,
    /// through the units' forwards, one for each unit, where they are not whole already; none where nothing is sharded.
    ///
    /// # Errors
    /// The errors of `f` and of the all-gathers; [`NnError::ParametersSharded`] where `f` computes with a parameter of a unit
    /// outside that unit's forward.
    pub fn forward<O: UnitOutput>(&self, f: impl FnOnce(&M) -> candle_core::Result<O>) -> Result<O> {
        let _forward = self.parameters.shared.begin_forward();
        let is_outermost = self.parameters.shared.is_outermost();
        let ahead = self.parameters.ahead.as_ref().filter(|_| is_outermost);
        let phase = ahead.map(|ahead| ahead.begin(Phase::Forward)).transpose()?;
        let root = self.parameters.root();
        let whole = root.map(|root| root.use_whole()).transpose()?;
        let watching = self.parameters.wrapped.begin(Phase::Forward)?;
        let output = f(&self.module);
        watching.map_or(Ok(()), |watching| watching.end())?;
        let output = output.map_err(|error| self.parameters.explain(error))?;
        phase.map_or(Ok(()), |phase| phase.complete())?;
        drop(whole);
        let output = output.map_tensors(&mut |tensor| cast(tensor, self.output_dtype))?;
        // A unit's own output checks it, unless it has none (wrapped units) or needs no gather.
        let unchecked: Vec<Arc<FlatParamHandle>> = self.parameters.unchecked_units();
        if root.is_none() && unchecked.is_empty() {
            return Ok(output);
        }
        let changes = self.parameters.shared.last_change();
        Ok(output.map_tensors(&mut |tensor| {
            // The hook copies what it is attached to. What has no gradient needs none, nor does a parameter, which was not computed.
            if !tensor.track_op() || self.parameters.has_tensor(tensor.id()) {
                return Ok(tensor);
            }
            tensor.apply_op1(PreBackwardOp::of_model(root, &unchecked, changes))
        })?)
    }

    /// Runs the backward of a loss: gradients, averaged over all ranks, are added to those that are there, sharded as
    /// the parameters are. Collectives for each unit that backward reaches: one all-gather (full sharding), one
    /// reduce-scatter over the shard group, and one all-reduce over the replicas (without sharding, all ranks). The same
    /// for units that it does not reach, if earlier backwards inside [`Self::no_sync`] have left gradients. In the end one
    /// all-reduce of a byte for each parameter, which tells all ranks to which of them a gradient has come on any rank.
    ///
    /// After the first backward a warning (`tracing`) names the trained parameters that no gradient has come to. candle has
    /// operations without a backward, and says nothing where they cut gradients off.
    ///
    /// Returns candle's store, which has the gradients of variables that are no parameters of this model.
    ///
    /// # Errors
    /// candle's, and those of the collectives; [`NnError::ChangedSinceForward`] where the values of a unit are not those of
    /// the forward any more. Then all gradients are gone.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let grads = match self.compute_gradients(loss) {
            Ok(grads) => grads,
            Err(error) => {
                self.parameters.zero_grad();
                // Units that a forward around this backward uses stay whole. The error to return is that of the backward.
                for handle in &self.parameters.handles {
                    let _ = handle.reshard();
                }
                return Err(error);
            }
        };
        let shared = &self.parameters.shared;
        if shared.syncs() && (shared.all_reduces() || self.parameters.replicate_group().is_none()) {
            self.parameters.agree_on_gradients()?;
        }
        Ok(grads)
    }

    /// Runs the backward of a loss, to the last reduction.
    fn compute_gradients(&self, loss: &Tensor) -> Result<GradStore> {
        let phase = self.parameters.ahead.as_ref().map(|ahead| ahead.begin(Phase::Backward)).transpose()?;
        // The root stays whole until backward is through with all units.
        if let Some(root) = self.parameters.root() {
            root.gather()?;
        }
        self.parameters.begin_backward(loss);
        let watching = self.parameters.wrapped.begin(Phase::Backward)?;
        let grads = loss.backward();
        watching.map_or(Ok(()), |watching| watching.end())?;
        let grads = grads.map_err(|error| self.parameters.explain(error))?;
        if let Some(phase) = &phase {
            phase.complete()?;
        }
        // On all ranks in the same order, since each unit may have gradients to reduce.
        for handle in self.parameters.handles.iter().rev() {
            handle.finish_backward()?;
        }
        self.parameters.handles.iter().try_for_each(|handle| handle.take_reduced())?;
        Ok(grads)
    }

    /// Turns the reduction of gradients off, or on again, for the backwards to come: torch's `set_requires_gradient_sync`.
    /// While it is off, gradients stay whole on each rank, and no [`ShardedParameters::gradient`] changes; the next backward
    /// after it is on again reduces them together with its own. On every rank alike; no communication.
    ///
    /// [`Self::no_sync`] does the same for the length of a closure.
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
        self.parameters.shared.set_no_sync(!requires_gradient_sync);
    }

    /// Turns the reduction of gradients over replicas off, or on again, for the backwards to come: torch's
    /// `set_requires_all_reduce`. While it is off, the backwards of [`HybridShard`](crate::ShardingStrategy::HybridShard) reduce
    /// and scatter gradients inside of each replica, and add them up there as shards; the next backward after it is on again
    /// reduces the sum over replicas. It takes less memory than [`Self::set_requires_gradient_sync`], and as little of the
    /// network between replicas. Strategies without replicas ignore it. On every rank alike; no communication.
    pub fn set_requires_all_reduce(&self, requires_all_reduce: bool) {
        self.parameters.shared.set_no_all_reduce(!requires_all_reduce);
    }

    /// Runs `f` with backwards that do not communicate: their gradients stay whole on each rank and are reduced
    /// together with those of the next backward outside: torch's `no_sync`. Restored on every exit path. The same switch as
    /// [`Self::set_requires_gradient_sync`].
    ///
    /// # Errors
    /// The errors of `f`.
    pub fn no_sync<T, E>(&self, f: impl FnOnce(&Self) -> Result<T, E>) -> Result<T, E> {
        struct Restore<'a>(&'a ShardedParameters, bool);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.shared.set_no_sync(self.1);
            }
        }
        let _restore = Restore(&self.parameters, self.parameters.shared.set_no_sync(true));
        f(self)
    }
}

impl From<NnError> for candle_core::Error {
    fn from(error: NnError) -> Self {
        error.into_candle()
    }
}
