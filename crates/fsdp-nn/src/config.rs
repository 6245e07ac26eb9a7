//! How a model is sharded.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device};

use fsdp_layout::DeviceMesh;

use crate::{MixedPrecision, ShardingStrategy};

/// Options of [`FullyShardedDataParallel`](crate::FullyShardedDataParallel), like the arguments of torch's; the same on
/// every rank.
#[derive(Clone)]
pub struct FsdpConfig {
    /// The strategy: what is sharded.
    pub strategy: ShardingStrategy,
    /// The mesh of `HybridShard`, over all ranks of the process group: replicas along the first dimension, shards along
    /// the second. Other strategies need none.
    pub mesh: Option<DeviceMesh>,
    /// `true` (the default) if the optimizer sees the model's own parameters, rather than one FlatParameter a unit.
    pub use_orig_params: bool,
    /// The dtype of parameters that the model asks for without naming one: `F32`, `F64`, `BF16` or `F16`.
    pub dtype: DType,
    /// The dtypes of gathers, computation and reduction, where they are not `dtype`; for all units but those of
    /// [`Scope::unit_with`](crate::Scope::unit_with).
    pub mixed_precision: MixedPrecision,
    /// The device on which parameters live on this rank: the CPU, or an NVIDIA GPU (feature `cuda`).
    pub device: Device,
    /// `true` if shards, reduced gradients and optimizer state live in the host's memory, and only gathered parameters on
    /// `device`: torch's `CPUOffloadPolicy`. Each gather copies this rank's shard to the device, each reduction copies its part
    /// of the gradient back, and optimizers step on the host. Without an effect where `device` is the CPU.
    pub cpu_offload: bool,
    /// Seed of the initial values, which depend on it and on the parameters' names alone.
    pub seed: u64,
    /// Patterns of names whose parameters form units: see [`Self::wrap`].
    pub wrapped: Vec<String>,
    /// A function that tells by name which parameters are trained; all by default. The others are frozen: torch's
    /// `requires_grad` of false.
    pub requires_grad: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// A function that tells by name which parameters are left alone; none by default. They are candle's own variables, whole
    /// on every rank and the same at the beginning: torch's `ignored_states`. They are in model state dicts as buffers are, but
    /// nobody reduces their gradients, which [`FullyShardedDataParallel::backward`](crate::FullyShardedDataParallel::backward)
    /// returns, and no [`Optimizer`](crate::Optimizer) knows them: see
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
            seed: 0,
            wrapped: Vec::new(),
            requires_grad: Arc::new(|_| true),
            ignored_states: Arc::new(|_| false),
        }
    }
}

impl FsdpConfig {
    /// Makes units of a model whose code has none ([`Scope::unit`](crate::Scope::unit)): torch's `auto_wrap_policy`. The
    /// parameters below each name that matches `pattern` are a unit, `*` standing for one part of a name: `model.layers.*`
    /// makes a unit of each layer. Where several patterns match, the first counts. Parameters of explicit units stay there.
    ///
    /// A unit is gathered when the forward comes to the first of its layers and released when it comes to another unit's,
    /// with the next unit at times gathered ahead. That is seen by the `tracing` spans that layers make with their parameters
    /// and enter in their forward, as those of candle-transformers do. Its backward needs
    /// [`FullyShardedDataParallel::backward`](crate::FullyShardedDataParallel::backward).
    ///
    /// ```
    /// use fsdp_nn::FsdpConfig;
    /// let config = FsdpConfig::default().wrap("model.layers.*").wrap("lm_head");
    /// assert_eq!(config.wrapped, ["model.layers.*", "lm_head"]);
    /// ```
    #[must_use]
    pub fn wrap(mut self, pattern: impl Into<String>) -> Self {
        self.wrapped.push(pattern.into());
        self
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
            .field("seed", &self.seed)
            .field("wrapped", &self.wrapped)
            .finish_non_exhaustive()
    }
}
