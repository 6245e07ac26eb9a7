//! [`FsdpConfig`]: the options that decide how a model is sharded, and in which dtypes it is
//! gathered, computed with and reduced.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};

use fsdp_layout::DeviceMesh;
use serde::{Deserialize, Serialize};

/// The moment at which a backward begins to gather its next unit: torch's `BackwardPrefetch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackwardPrefetch {
    /// Before the gradients of the current unit are computed: torch's `BACKWARD_PRE`. This leaves
    /// the gather most time, and needs memory for one more unit.
    Pre,
    /// After the gradients of the current unit have been computed, and before they are reduced:
    /// torch's `BACKWARD_POST`. The gather overlaps only with what is computed between units.
    Post,
}

/// Options of [`FullyShardedDataParallel`](crate::FullyShardedDataParallel), like the arguments of
/// torch's class. They must be the same on every rank.
#[derive(Clone)]
pub struct FsdpConfig {
    /// The strategy: what is sharded.
    pub strategy: ShardingStrategy,
    /// The mesh of `HybridShard`, over all ranks of the process group: replicas along the first
    /// dimension, shards along the second. Other strategies ignore it, except that a model with a
    /// mesh has no local state dicts.
    pub mesh: Option<DeviceMesh>,
    /// `true` (the default) if the optimizer sees the model's own parameters, and not one
    /// FlatParameter per unit.
    pub use_orig_params: bool,
    /// The dtype of parameters that the model asks for without naming one: `F32`, `F64`, `BF16` or
    /// `F16`.
    pub dtype: DType,
    /// The dtypes of gathers, computation and reduction, where they are not `dtype`; for all units
    /// but those of [`Scope::unit_with`](crate::Scope::unit_with).
    pub mixed_precision: MixedPrecision,
    /// The device on which parameters live on this rank: the CPU, or an NVIDIA GPU (feature
    /// `cuda`).
    pub device: Device,
    /// `true` if shards, reduced gradients and optimizer state live in the host's memory, and only
    /// gathered parameters on `device`: torch's `CPUOffloadPolicy`. Each gather copies this rank's
    /// shard to the device, each reduction copies its part of the gradient back, and optimizers
    /// step on the host. It has no effect if `device` is the CPU.
    pub cpu_offload: bool,
    /// `true` if products of `f32` matrices on GPUs may round their factors to TF32, 10 bits of
    /// mantissa, which makes them several times as fast: torch's
    /// `torch.backends.cuda.matmul.allow_tf32`, which is `false` by default too. As in torch the
    /// setting is the process's: the last model that was built on a GPU has set it for all.
    pub allow_tf32: bool,
    /// The moment at which a backward begins to gather its next unit; `None` (the default) to
    /// gather each unit only when the backward needs it. With prefetching, gradients of a unit are
    /// also reduced while the backward continues, so the gradients of one more unit are in memory.
    /// Results are bit for bit the same.
    ///
    /// Units are prefetched in the order in which the previous step used them, after the ranks have
    /// checked that it was the same on all of them. A step that uses units in another order gathers
    /// those on demand. Prefetching pays off where ranks wait for the network: the collectives run
    /// on a separate thread, which needs some processor time. On GPUs it overlaps if the device has
    /// a stream for each thread, as those of `Device::new_cuda` have; with
    /// `Device::new_cuda_with_stream` the computation waits for each collective.
    pub backward_prefetch: Option<BackwardPrefetch>,
    /// `true` if a forward begins to gather its next unit before it computes the current one:
    /// torch's `forward_prefetch`. It takes the memory of one more unit, like
    /// [`Self::backward_prefetch`].
    pub forward_prefetch: bool,
    /// `true` (the default) if at most one unit is prefetched; otherwise three are, which helps
    /// with small units and a network of high latency. torch's `limit_all_gathers`.
    pub limit_all_gathers: bool,
    /// The seed of the initial values, which depend only on it and on the parameters' names.
    pub seed: u64,
    /// A function that returns `true` for the names of parameters to train; all by default. The
    /// others are frozen, like torch's parameters with `requires_grad=False`.
    pub requires_grad: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// A function that returns `true` for the names of parameters that FSDP ignores; none by
    /// default. torch's `ignored_states`. They are candle variables, whole on every rank, with the
    /// same initial values on all of them. They are in model state dicts, as buffers are. Their
    /// gradients are not reduced;
    /// [`FullyShardedDataParallel::backward`](crate::FullyShardedDataParallel::backward) returns
    /// them. No [`Optimizer`](crate::Optimizer) trains them, and neither clipping nor a
    /// [`GradScaler`](crate::GradScaler) knows their gradients: see
    /// [`ShardedParameters::ignored_states`](crate::ShardedParameters::ignored_states).
    pub ignored_states: Arc<dyn Fn(&str) -> bool + Send + Sync>,
}

impl Default for FsdpConfig {
    fn default() -> Self {
        FsdpConfig {
            strategy: ShardingStrategy::FullShard,
            mesh: None,
            use_orig_params: true,
            dtype: DType::F32,
            mixed_precision: MixedPrecision::default(),
            device: Device::Cpu,
            cpu_offload: false,
            allow_tf32: false,
            backward_prefetch: None,
            forward_prefetch: false,
            limit_all_gathers: true,
            seed: 0,
            requires_grad: Arc::new(|_| true),
            ignored_states: Arc::new(|_| false),
        }
    }
}

impl FsdpConfig {
    /// Returns `true` if collectives overlap with the computation.
    pub(crate) const fn prefetches(&self) -> bool {
        self.backward_prefetch.is_some() || self.forward_prefetch
    }
}

impl fmt::Debug for FsdpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsdpConfig")
            .field("strategy", &self.strategy)
            .field("mesh", &self.mesh)
            .field("use_orig_params", &self.use_orig_params)
            .field("dtype", &self.dtype)
            .field("mixed_precision", &self.mixed_precision)
            .field("cpu_offload", &self.cpu_offload)
            .field("allow_tf32", &self.allow_tf32)
            .field("backward_prefetch", &self.backward_prefetch)
            .field("forward_prefetch", &self.forward_prefetch)
            .field("limit_all_gathers", &self.limit_all_gathers)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

/// torch's `ShardingStrategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ShardingStrategy {
    /// Parameters are gathered before a unit's forward, freed after it, gathered again for its
    /// backward, and freed; gradients and optimizer state are sharded. torch's `FULL_SHARD`.
    #[default]
    FullShard,
    /// Like `FullShard`, but parameters stay gathered from forward to backward: torch's
    /// `SHARD_GRAD_OP`.
    ShardGradOp,
    /// Every rank holds everything, and gradients are all-reduced: torch's `NO_SHARD`. A single
    /// rank always has this strategy, and so has `HybridShard` with one rank for each replica.
    NoShard,
    /// Like `FullShard` along the last dimension of a 2-D mesh, and replicated along the first:
    /// gradients are reduce-scattered among the ranks that share shards, then all-reduced across
    /// replicas. torch's `HYBRID_SHARD`.
    HybridShard,
}

impl ShardingStrategy {
    /// Every strategy.
    pub const ALL: [ShardingStrategy; 4] = [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
        ShardingStrategy::HybridShard,
    ];

    /// Returns the name that the command line and the logs use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ShardingStrategy::FullShard => "full-shard",
            ShardingStrategy::ShardGradOp => "shard-grad-op",
            ShardingStrategy::NoShard => "no-shard",
            ShardingStrategy::HybridShard => "hybrid-shard",
        }
    }
}

impl fmt::Display for ShardingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ShardingStrategy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let strategy = Self::ALL
            .into_iter()
            .find(|strategy| strategy.name() == name);
        strategy.ok_or_else(|| {
            format!(
                "unknown strategy `{name}`: use {}",
                Self::ALL.map(Self::name).join(", ")
            )
        })
    }
}

/// The dtypes of a unit that differ from the dtype of its shards: torch's `MixedPrecision` and
/// `MixedPrecisionPolicy`.
///
/// Shards, optimizer state and checkpoints always have
/// [`FsdpConfig::dtype`](crate::FsdpConfig::dtype). With `f32` shards, updates that are too small
/// for a `bf16` value are not lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The dtype in which parameters are gathered and used in the computation: `BF16` or `F16`
    /// halve what the all-gathers move. It is the dtype of the model's builder, so parameters are
    /// requested in it. A parameter that the model requests in another dtype keeps that dtype.
    pub param: Option<DType>,
    /// The dtype in which gradients are reduced over ranks; that of the parameters by default.
    pub reduce: Option<DType>,
    /// The dtype of running statistics that the model requests; that of shards by default.
    pub buffer: Option<DType>,
    /// The dtype to which the output of the model is converted, or of the unit for which this is
    /// given. Units inside of it do not convert their outputs.
    pub output: Option<DType>,
    /// `true` (the default) if the input of [`Unit::forward`](candle_nn::Module::forward) is
    /// converted to the dtype of the parameters. Only with `param`: without it inputs stay as they
    /// are, also those that a unit of another dtype has computed. The inputs of closures
    /// ([`Unit::run`](crate::Unit::run), the model's own forward) cannot be converted.
    pub cast_inputs: bool,
}

impl Default for MixedPrecision {
    fn default() -> Self {
        MixedPrecision {
            param: None,
            reduce: None,
            buffer: None,
            output: None,
            cast_inputs: true,
        }
    }
}

impl MixedPrecision {
    /// Returns the setting for the units inside, which do not convert their outputs.
    pub(crate) const fn for_inner_units(self) -> Self {
        MixedPrecision {
            output: None,
            ..self
        }
    }
}

/// Returns a tensor in a dtype, if one is given and the tensor holds floats; others as they are.
pub(crate) fn cast(tensor: Tensor, dtype: Option<DType>) -> candle_core::Result<Tensor> {
    match dtype {
        Some(dtype) if tensor.dtype().is_float() && tensor.dtype() != dtype => {
            tensor.to_dtype(dtype)
        }
        _ => Ok(tensor),
    }
}
