//! How a model is sharded.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device};

use fsdp_layout::DeviceMesh;

use crate::{MixedPrecision, ShardingStrategy};

/// The moment at which a backward begins to gather its next unit: torch's `BackwardPrefetch`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackwardPrefetch {
    /// Before the gradients of the present unit are computed: torch's `BACKWARD_PRE`. The gather has most time, and one more
    /// unit is in memory.
    Pre,
    /// After the gradients of the present unit have been computed, and before they are reduced: torch's `BACKWARD_POST`. The
    /// gather runs beside what is computed between units only.
    Post,
}

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
    /// The moment at which a backward begins to gather its next unit; `None` (the default) if each unit is gathered when backward
    /// comes to it. With it, gradients of a unit are also reduced while backward goes on, so those of one more unit are in
    /// memory. Values are the same bits.
    ///
    /// Units are gathered ahead in the order of the step before, which the ranks compare first. A step that comes to units in
    /// another order gathers those on demand. It pays where ranks wait for the network: the collectives run on a thread of
    /// their own, which needs a core now and then. Without an effect on GPUs.
    pub backward_prefetch: Option<BackwardPrefetch>,
    /// `true` if a forward begins to gather its next unit before it computes the present one: torch's option of the same name.
    /// Takes the memory of one more unit, like [`Self::backward_prefetch`].
    pub forward_prefetch: bool,
    /// `true` (the default) if one unit at most is gathered ahead; three otherwise, for small units and a network of high
    /// latency. torch's option of the same name.
    pub limit_all_gathers: bool,
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
            backward_prefetch: None,
            forward_prefetch: false,
            limit_all_gathers: true,
            seed: 0,
            wrapped: Vec::new(),
            requires_grad: Arc::new(|_| true),
            ignored_states: Arc::new(|_| false),
        }
    }
}

impl FsdpConfig {
    /// Returns `true` if collectives run beside the computation.
    pub(crate) fn prefetches(&self) -> bool {
        (self.backward_prefetch.is_some() || self.forward_prefetch) && self.device.is_cpu()
    }

    /// Makes units of a model whose code has none ([`Scope::unit`](crate::Scope::unit)): torch's `auto_wrap_policy`. The
    /// parameters below each name that matches `pattern` are a unit, `*` standing for one part of a name: `model.layers.*`
    /// makes a unit of each layer. Where several patterns match, the first counts. Parameters of explicit units stay there.
    ///
    /// A unit is gathered when the forward or the backward reads the first of its parameters, and released when it reads one of
    /// another unit, unless one operation reads both. That is seen by the locks of candle's storages, so the model can be any: see
    /// [`Withheld`](fsdp_flat::storage::Withheld). On a GPU it is not, so a pattern is an error there. It takes a thread for each unit, which sleeps. Its backward needs
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
            .field("backward_prefetch", &self.backward_prefetch)
            .field("forward_prefetch", &self.forward_prefetch)
            .field("limit_all_gathers", &self.limit_all_gathers)
            .field("seed", &self.seed)
            .field("wrapped", &self.wrapped)
            .finish_non_exhaustive()
    }
}
