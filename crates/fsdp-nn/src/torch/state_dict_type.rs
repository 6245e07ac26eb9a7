//! torch's `state_dict_type` and its relatives: the settings in force for one model.

use crate::guards::{OnDrop, lock};
use crate::model::ShardedParameters;
use crate::model::state_dict_type::StateDictSettings;

impl ShardedParameters {
    /// Returns the settings in force: torch's `get_state_dict_type`.
    #[must_use]
    pub fn get_state_dict_type(&self) -> StateDictSettings {
        *lock(&self.settings)
    }

    /// Changes the settings, until they are changed again, and returns those before: torch's
    /// `set_state_dict_type`.
    pub fn set_state_dict_type(&self, settings: StateDictSettings) -> StateDictSettings {
        std::mem::replace(&mut *lock(&self.settings), settings)
    }

    /// Runs `f` under these settings and puts the ones before back, also where `f` fails or panics:
    /// torch's `state_dict_type` context, which an exception leaves in force.
    ///
    /// ```
    /// use fsdp_nn::torch::{self, StateDictSettings, StateDictType};
    /// use fsdp_nn::{FsdpConfig, FullyShardedDataParallel};
    /// fsdp_comm::run_local(2, |group| {
    ///     let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
    ///         candle_nn::linear(3, 2, scope.vb())
    ///     })?;
    ///     let parameters = model.parameters();
    ///     let sharded = parameters.state_dict_type(StateDictSettings::from(StateDictType::Sharded), || {
    ///         torch::state_dict(parameters)
    ///     })?;
    ///     assert!(sharded.get("weight").unwrap().as_sharded().is_some());
    ///     assert_eq!(parameters.get_state_dict_type(), StateDictSettings::default());
    ///     Ok::<(), fsdp_nn::NnError>(())
    /// })?
    /// .into_iter()
    /// .collect::<Result<Vec<()>, _>>()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn state_dict_type<T>(&self, settings: StateDictSettings, f: impl FnOnce() -> T) -> T {
        let previous = self.set_state_dict_type(settings);
        let _restore = OnDrop(|| _ = self.set_state_dict_type(previous));
        f()
    }
}
