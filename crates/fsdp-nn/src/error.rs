//! What can go wrong in sharded modules and optimizers.

use std::io;

use fsdp_comm::CommError;
use fsdp_flat::FlatError;
use fsdp_layout::{ErrorKind, Failure, FlatLayoutError};
use fsdp_state::StateError;
use thiserror::Error;

use crate::algorithm::AlgorithmError;
use crate::fsdp_state::OptimStateError;

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NnError {
    /// candle refused, in the model's own code or in a hook.
    #[error(transparent)]
    Candle(candle_core::Error),
    /// A tensor does not fit its layout.
    #[error(transparent)]
    Flat(#[from] FlatError),
    /// The parameters of a unit cannot be laid out.
    #[error(transparent)]
    Layout(#[from] FlatLayoutError),
    /// A collective failed, or another rank did.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A state dict is malformed.
    #[error(transparent)]
    State(#[from] StateError),
    /// An optimizer was asked for something impossible.
    #[error(transparent)]
    Algorithm(#[from] AlgorithmError),
    /// One name, two shapes or dtypes.
    #[error("parameter `{fqn}` is asked for as {asked}, but it exists as {existing}")]
    Conflict {
        /// The parameter.
        fqn: String,
        /// What was asked for.
        asked: String,
        /// What is there.
        existing: String,
    },
    /// `HybridShard` needs to know which ranks are replicas.
    #[error(
        "HybridShard needs a 2-D device mesh (replicas, shards) over all {world_size} ranks, but got shape {shape:?}"
    )]
    Mesh {
        /// The mesh's shape; empty if there is none.
        shape: Vec<usize>,
        /// Ranks of the process group.
        world_size: usize,
    },
    /// A name that the model does not have.
    #[error("the model has no parameter `{fqn}`")]
    UnknownParameter {
        /// The name.
        fqn: String,
    },
    /// Two parameter groups hold one parameter.
    #[error("parameter `{fqn}` is in more than one parameter group")]
    DuplicateParameter {
        /// The parameter.
        fqn: String,
    },
    /// Without `use_orig_params` the optimizer sees whole FlatParameters.
    #[error(
        "parameters `{first}` and `{second}` are of one FlatParameter, so they must be in one parameter group: \
         set `use_orig_params` or group them together"
    )]
    SplitFlatParameter {
        /// A parameter.
        first: String,
        /// One of the same unit in another group, or in none.
        second: String,
    },
    /// An optimizer state dict that does not fit.
    #[error("{error}{}", on_ranks(ranks))]
    OptimState {
        /// What is wrong.
        error: OptimStateError,
        /// The global ranks that it is wrong on, where other ranks found nothing; empty if it concerns all.
        ranks: Vec<usize>,
    },
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
    /// A flat parameter knows no mesh.
    #[error(
        "DeviceMesh is not compatible with LOCAL_STATE_DICT: use `StateDictType::Sharded`, or shard without a mesh"
    )]
    MeshWithLocal,
    /// Parameters that are whole on every rank have no local state dict.
    #[error(
        "`local_state_dict` can only be used when parameters are flatten and sharded: use `StateDictType::Full` with \
         NoShard or a single rank"
    )]
    LocalWithoutSharding,
    /// The optimizer steps on the parameters of another model.
    #[error("the optimizer was made for the parameters of another model")]
    ForeignOptimizer,
    /// The names are no unit's parameters.
    #[error("{fqns:?} are not the parameters of one FlatParameter")]
    NotAFlatParameter {
        /// The names.
        fqns: Vec<String>,
    },
    /// A param group of a state dict that cannot be read.
    #[error("param group {index} of the optimizer state dict is malformed: {problem}")]
    MalformedGroup {
        /// Its position.
        index: usize,
        /// What is wrong.
        problem: String,
    },
    /// Several saved groups meet in one live group with different hyperparameters.
    #[error(
        "parameters of group {index} were saved in groups with different hyperparameters \
         ({first:?} and {second:?}): make them one group before saving, or separate groups before loading"
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
        /// What was found.
        kind: &'static str,
    },
}

fn on_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => String::new(),
        [rank] => format!(" (on rank {rank})"),
        ranks => format!(" (on ranks {ranks:?})"),
    }
}

impl From<OptimStateError> for NnError {
    fn from(error: OptimStateError) -> Self {
        NnError::OptimState { error, ranks: Vec::new() }
    }
}

/// The result of this crate's functions.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

impl NnError {
    /// As candle's error, to pass through code that candle calls. It comes out as what it is: see `From`.
    pub(crate) fn into_candle(self) -> candle_core::Error {
        match self {
            NnError::Candle(error) => error,
            // Of candle's errors this one keeps another's type.
            other => candle_core::Error::Io(io::Error::other(other)),
        }
    }
}

impl From<candle_core::Error> for NnError {
    /// candle's error, or the one of this crate that went through candle.
    fn from(error: candle_core::Error) -> Self {
        use candle_core::Error;
        match error {
            Error::Io(error) => match error.downcast::<NnError>() {
                Ok(error) => error,
                Err(error) => NnError::Candle(Error::Io(error)),
            },
            Error::WithBacktrace { inner, .. } if is_ours(&inner) => Self::from(*inner),
            Error::Context { inner, .. } if is_ours(&inner) => Self::from(*inner),
            error => NnError::Candle(error),
        }
    }
}

fn is_ours(error: &candle_core::Error) -> bool {
    use candle_core::Error;
    match error {
        Error::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<NnError>()),
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } => is_ours(inner),
        _ => false,
    }
}

impl Failure for NnError {
    fn kind(&self) -> ErrorKind {
        match self {
            NnError::Comm(error) => error.kind(),
            NnError::State(error) => error.kind(),
            NnError::OptimState { .. } => ErrorKind::Difference,
            _ => ErrorKind::Other,
        }
    }
}
