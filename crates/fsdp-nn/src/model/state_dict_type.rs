//! The state dict that a model gives: torch's `StateDictType` and its configs, set for a scope.

use candle_core::Device;
use fsdp_state::{GatherOptions, KeepOn};

use crate::error::{Result, StateDictError};

/// torch's `StateDictType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StateDictType {
    /// Whole tensors under the model's names.
    #[default]
    Full,
    /// The model's names, each tensor as the boxes that a rank owns.
    Sharded,
    /// One flat tensor a unit, as it lies on the rank.
    Local,
}

/// The config of a model state dict, for the [`StateDictType`] of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDictConfig {
    /// torch's `FullStateDictConfig`.
    Full {
        /// `true` if tensors are put on the CPU; they are not by default.
        offload_to_cpu: bool,
        /// `true` if only rank 0 gets the state dict and the others an empty one; on load, if only
        /// rank 0 has one.
        rank0_only: bool,
    },
    /// torch's `ShardedStateDictConfig`.
    Sharded {
        /// `true` if tensors are put on the CPU; they are not by default.
        offload_to_cpu: bool,
    },
    /// torch's `LocalStateDictConfig`.
    Local {
        /// `true` if tensors are put on the CPU; they are not by default.
        offload_to_cpu: bool,
    },
}

/// The config of an optimizer state dict, for the [`StateDictType`] of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimStateDictConfig {
    /// torch's `FullOptimStateDictConfig`.
    Full {
        /// `true` if tensors are put on the CPU; they are by default.
        offload_to_cpu: bool,
        /// `true` if only rank 0 gets the state dict and the others an empty one; on load, if only
        /// rank 0 has one.
        rank0_only: bool,
    },
    /// torch's `ShardedOptimStateDictConfig`.
    Sharded {
        /// `true` if tensors are put on the CPU; they are by default.
        offload_to_cpu: bool,
    },
    /// torch's `LocalOptimStateDictConfig`.
    Local {
        /// `true` if tensors are put on the CPU; they are not by default.
        offload_to_cpu: bool,
    },
}

impl From<StateDictType> for StateDictConfig {
    /// Returns the default config of a type.
    fn from(state_dict_type: StateDictType) -> Self {
        let offload_to_cpu = false;
        match state_dict_type {
            StateDictType::Full => StateDictConfig::Full {
                offload_to_cpu,
                rank0_only: false,
            },
            StateDictType::Sharded => StateDictConfig::Sharded { offload_to_cpu },
            StateDictType::Local => StateDictConfig::Local { offload_to_cpu },
        }
    }
}

impl StateDictConfig {
    /// Returns `true` if tensors are put on the CPU.
    #[must_use]
    pub const fn offload_to_cpu(&self) -> bool {
        match *self {
            StateDictConfig::Full { offload_to_cpu, .. }
            | StateDictConfig::Sharded { offload_to_cpu }
            | StateDictConfig::Local { offload_to_cpu } => offload_to_cpu,
        }
    }

    /// Returns `true` if only rank 0 has the state dict.
    #[must_use]
    pub const fn rank0_only(&self) -> bool {
        matches!(
            self,
            StateDictConfig::Full {
                rank0_only: true,
                ..
            }
        )
    }

    /// Returns the ranks of the model's group that get a state dict, and the device of its tensors.
    pub(crate) fn gather_options(&self) -> GatherOptions {
        gather_options(self.rank0_only(), self.offload_to_cpu())
    }

    /// Returns torch's name of the config's class, for messages.
    const fn class(&self) -> &'static str {
        match self {
            StateDictConfig::Full { .. } => "FullStateDictConfig",
            StateDictConfig::Sharded { .. } => "ShardedStateDictConfig",
            StateDictConfig::Local { .. } => "LocalStateDictConfig",
        }
    }
}

impl From<StateDictType> for OptimStateDictConfig {
    /// Returns the default config of a type.
    fn from(state_dict_type: StateDictType) -> Self {
        match state_dict_type {
            StateDictType::Full => OptimStateDictConfig::Full {
                offload_to_cpu: true,
                rank0_only: false,
            },
            StateDictType::Sharded => OptimStateDictConfig::Sharded {
                offload_to_cpu: true,
            },
            StateDictType::Local => OptimStateDictConfig::Local {
                offload_to_cpu: false,
            },
        }
    }
}

impl OptimStateDictConfig {
    /// Returns `true` if tensors are put on the CPU.
    #[must_use]
    pub const fn offload_to_cpu(&self) -> bool {
        match *self {
            OptimStateDictConfig::Full { offload_to_cpu, .. }
            | OptimStateDictConfig::Sharded { offload_to_cpu }
            | OptimStateDictConfig::Local { offload_to_cpu } => offload_to_cpu,
        }
    }

    /// Returns `true` if only rank 0 has the state dict.
    #[must_use]
    pub const fn rank0_only(&self) -> bool {
        matches!(
            self,
            OptimStateDictConfig::Full {
                rank0_only: true,
                ..
            }
        )
    }

    /// Returns the ranks of the model's group that get a state dict, and the device of its tensors.
    pub(crate) fn gather_options(&self) -> GatherOptions {
        gather_options(self.rank0_only(), self.offload_to_cpu())
    }

    /// Returns the name of torch's class, for messages.
    const fn class(&self) -> &'static str {
        match self {
            OptimStateDictConfig::Full { .. } => "FullOptimStateDictConfig",
            OptimStateDictConfig::Sharded { .. } => "ShardedOptimStateDictConfig",
            OptimStateDictConfig::Local { .. } => "LocalOptimStateDictConfig",
        }
    }
}

/// Returns which ranks get a full state dict and on which device, from torch's two options.
fn gather_options(rank0_only: bool, offload_to_cpu: bool) -> GatherOptions {
    let keep_on = if rank0_only {
        KeepOn::Ranks(vec![0])
    } else {
        KeepOn::All
    };
    GatherOptions {
        keep_on,
        device: offload_to_cpu.then_some(Device::Cpu),
    }
}

/// torch's `StateDictSettings`: a type and configs of its classes. The same on every rank. `Full`
/// by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateDictSettings {
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig,
    optim_state_dict_config: OptimStateDictConfig,
}

impl Default for StateDictSettings {
    fn default() -> Self {
        StateDictSettings::from(StateDictType::Full)
    }
}

impl From<StateDictType> for StateDictSettings {
    /// Returns a type with its default configs.
    fn from(state_dict_type: StateDictType) -> Self {
        StateDictSettings {
            state_dict_type,
            state_dict_config: StateDictConfig::from(state_dict_type),
            optim_state_dict_config: OptimStateDictConfig::from(state_dict_type),
        }
    }
}

impl StateDictSettings {
    /// Returns a type with these configs; `None` is the default one.
    ///
    /// # Errors
    /// [`StateDictError::ConfigType`] for a config of another type's class.
    ///
    /// ```
    /// use fsdp_nn::torch::{StateDictConfig, StateDictSettings, StateDictType};
    /// let config = StateDictConfig::Local { offload_to_cpu: false };
    /// let error = StateDictSettings::new(StateDictType::Full, Some(config), None).unwrap_err();
    /// assert!(error.to_string().starts_with("expected state_dict_config of type `FullStateDictConfig`"));
    /// ```
    pub fn new(
        state_dict_type: StateDictType,
        state_dict_config: Option<StateDictConfig>,
        optim_state_dict_config: Option<OptimStateDictConfig>,
    ) -> Result<Self> {
        // The default configs are of the classes that the type asks for.
        let default = StateDictSettings::from(state_dict_type);
        let model = state_dict_config.unwrap_or(default.state_dict_config);
        let optim = optim_state_dict_config.unwrap_or(default.optim_state_dict_config);
        check_class(
            "state_dict_config",
            default.state_dict_config.class(),
            model.class(),
        )?;
        check_class(
            "optim_state_dict_config",
            default.optim_state_dict_config.class(),
            optim.class(),
        )?;
        Ok(StateDictSettings {
            state_dict_config: model,
            optim_state_dict_config: optim,
            ..default
        })
    }

    /// Returns the type.
    #[must_use]
    pub const fn state_dict_type(&self) -> StateDictType {
        self.state_dict_type
    }

    /// Returns the config of model state dicts.
    #[must_use]
    pub const fn state_dict_config(&self) -> &StateDictConfig {
        &self.state_dict_config
    }

    /// Returns the config of optimizer state dicts.
    #[must_use]
    pub const fn optim_state_dict_config(&self) -> &OptimStateDictConfig {
        &self.optim_state_dict_config
    }
}

/// Refuses a config of another class than the type asks for.
fn check_class(which: &'static str, expected: &'static str, found: &'static str) -> Result<()> {
    if expected == found {
        Ok(())
    } else {
        Err(StateDictError::ConfigType {
            which,
            expected,
            found,
        }
        .into())
    }
}
