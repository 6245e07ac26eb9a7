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

/// The config of a state dict of a model or an optimizer, for the [`StateDictType`] of the same
/// name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDictConfig {
    /// torch's `FullStateDictConfig` and `FullOptimStateDictConfig`.
    Full {
        /// `true` if tensors are put on the CPU; by default those of an optimizer are.
        offload_to_cpu: bool,
        /// `true` if only rank 0 gets the state dict and the others an empty one; on load, if only
        /// rank 0 has one.
        rank0_only: bool,
    },
    /// torch's `ShardedStateDictConfig` and `ShardedOptimStateDictConfig`.
    Sharded {
        /// `true` if tensors are put on the CPU; by default those of an optimizer are.
        offload_to_cpu: bool,
    },
    /// torch's `LocalStateDictConfig` and `LocalOptimStateDictConfig`.
    Local {
        /// `true` if tensors are put on the CPU; they are not by default.
        offload_to_cpu: bool,
    },
}

impl StateDictConfig {
    /// Makes a config of a type, by which all ranks get the state dict.
    const fn new(state_dict_type: StateDictType, offload_to_cpu: bool) -> Self {
        match state_dict_type {
            StateDictType::Full => StateDictConfig::Full {
                offload_to_cpu,
                rank0_only: false,
            },
            StateDictType::Sharded => StateDictConfig::Sharded { offload_to_cpu },
            StateDictType::Local => StateDictConfig::Local { offload_to_cpu },
        }
    }

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
        let keep_on = if self.rank0_only() {
            KeepOn::Ranks(vec![0])
        } else {
            KeepOn::All
        };
        GatherOptions {
            keep_on,
            device: self.offload_to_cpu().then_some(Device::Cpu),
        }
    }

    /// Returns the name of torch's class, for messages.
    const fn class(&self, is_optim: bool) -> &'static str {
        match (self, is_optim) {
            (StateDictConfig::Full { .. }, false) => "FullStateDictConfig",
            (StateDictConfig::Sharded { .. }, false) => "ShardedStateDictConfig",
            (StateDictConfig::Local { .. }, false) => "LocalStateDictConfig",
            (StateDictConfig::Full { .. }, true) => "FullOptimStateDictConfig",
            (StateDictConfig::Sharded { .. }, true) => "ShardedOptimStateDictConfig",
            (StateDictConfig::Local { .. }, true) => "LocalOptimStateDictConfig",
        }
    }
}

/// torch's `StateDictSettings`: a type and configs of its classes. The same on every rank. `Full`
/// by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateDictSettings {
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig,
    optim_state_dict_config: StateDictConfig,
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
            state_dict_config: StateDictConfig::new(state_dict_type, false),
            optim_state_dict_config: StateDictConfig::new(
                state_dict_type,
                state_dict_type != StateDictType::Local,
            ),
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
        optim_state_dict_config: Option<StateDictConfig>,
    ) -> Result<Self> {
        // The default configs are of the classes that the type asks for.
        let default = StateDictSettings::from(state_dict_type);
        let model = state_dict_config.unwrap_or(default.state_dict_config);
        let optim = optim_state_dict_config.unwrap_or(default.optim_state_dict_config);
        for (which, is_optim, expected, config) in [
            ("state_dict_config", false, default.state_dict_config, model),
            (
                "optim_state_dict_config",
                true,
                default.optim_state_dict_config,
                optim,
            ),
        ] {
            let expected = expected.class(is_optim);
            let found = config.class(is_optim);
            if expected != found {
                return Err(StateDictError::ConfigType {
                    which,
                    expected,
                    found,
                }
                .into());
            }
        }
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
    pub const fn optim_state_dict_config(&self) -> &StateDictConfig {
        &self.optim_state_dict_config
    }
}
