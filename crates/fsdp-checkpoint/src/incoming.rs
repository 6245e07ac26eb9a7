//! State dicts on their way into a model and its optimizers.

use fsdp_nn::ShardedParameters;
use fsdp_state::StateDict;

use crate::{CheckpointError, StateDictOptions, names, optim_format};

/// State dicts on their way in, nested and under the model's names.
pub(crate) struct Incoming {
    pub(crate) model: Option<StateDict>,
    pub(crate) optim: Option<StateDict>,
}

impl Incoming {
    pub(crate) fn new(
        parameters: &ShardedParameters,
        model: Option<&StateDict>,
        optim: Option<&StateDict>,
        options: &StateDictOptions,
    ) -> Result<Self, CheckpointError> {
        let flat_parameter = model.into_iter().flat_map(StateDict::keys).find(|key| key.contains("_flat_param"));
        if let Some(key) = flat_parameter {
            return Err(CheckpointError::FlatParameterKey { key: key.to_owned() });
        }
        let model = model.map(|model| {
            model.iter().map(|(name, value)| (names::to_model(name, options), value.clone())).collect::<StateDict>()
        });
        let optim = optim.map(|optim| optim_format::to_model(optim, parameters, options)).transpose()?;
        Ok(Incoming { model, optim })
    }
}
