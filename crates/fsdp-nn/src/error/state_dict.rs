//! The errors of state dicts and of settings for them, but for those of optimizer state that travel
//! between ranks.

use thiserror::Error;

/// A state dict, or settings for it, that cannot be used with a model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StateDictError {
    /// A config of another class than the state dict type asks for.
    #[error("expected {which} of type `{expected}`, but got `{found}`")]
    ConfigType {
        /// `state_dict_config` or `optim_state_dict_config`.
        which: &'static str,
        /// The class for the state dict type.
        expected: &'static str,
        /// The class given.
        found: &'static str,
    },
    /// Local state dicts, which hold FlatParameters, do not support a mesh.
    #[error(
        "DeviceMesh is not compatible with LOCAL_STATE_DICT: use `StateDictType::Sharded`, or \
         shard without a mesh"
    )]
    MeshWithLocal,
    /// Parameters that are whole on every rank have no local state dict.
    #[error(
        "`local_state_dict` can only be used when parameters are flatten and sharded: use \
         `StateDictType::Full` with NoShard or a single rank"
    )]
    LocalWithoutSharding,
    /// The names are not the parameters of a unit.
    #[error("{fqns:?} are not the parameters of one FlatParameter")]
    NotAFlatParameter {
        /// The names.
        fqns: Vec<String>,
    },
    /// A submodule that the model does not have, in the options of a state dict.
    #[error(
        "the model has no parameter or buffer in the submodule `{module}`; give a name such as \
         `layers.0`"
    )]
    UnknownSubmodule {
        /// The name in the options.
        module: String,
    },
    /// A state dict of FlatParameters cannot be loaded by name.
    #[error(
        "`{key}` is a FlatParameter: this is a state dict of type Local, or its model was not the \
         root module"
    )]
    FlatParameterKey {
        /// The key.
        key: String,
    },
    /// A state dict is not the one that it is compared with.
    #[error("state dicts differ at `{key}`: {problem}")]
    Differs {
        /// The flat key.
        key: String,
        /// The difference.
        problem: String,
    },
    /// A param group of a state dict that cannot be read.
    #[error("param group {index} of the optimizer state dict is malformed: {problem}")]
    MalformedGroup {
        /// Its position.
        index: usize,
        /// The problem.
        problem: String,
    },
    /// Several saved groups meet in one live group with different hyperparameters.
    #[error(
        "parameters of group {index} were saved in groups with different hyperparameters \
         ({first:?} and {second:?}): make them one group before saving, or separate groups before \
         loading"
    )]
    ConflictingGroups {
        /// The live group.
        index: usize,
        /// Parameters of one saved group.
        first: Vec<String>,
        /// Parameters of another.
        second: Vec<String>,
    },
    /// A container where a tensor or a plain value should be.
    #[error("optimizer state `{name}` of parameter `{fqn}` cannot be a {kind}")]
    UnexpectedState {
        /// The parameter.
        fqn: String,
        /// The state entry.
        name: String,
        /// The kind that was found.
        kind: String,
    },
}
