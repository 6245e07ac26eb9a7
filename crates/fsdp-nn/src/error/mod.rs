//! The errors of sharded modules and optimizers.

mod build;
mod optim_state;
mod state_dict;
mod training;

use std::io;

use fsdp_comm::CommError;
use fsdp_flat::{FlatError, candle_message};
use fsdp_layout::{ErrorKind, Failure, FlatLayoutError};
use fsdp_state::StateError;
use thiserror::Error;

use crate::algorithm::AlgorithmError;

pub use build::BuildError;
use build::unit_name;
pub use optim_state::OptimStateError;
pub use state_dict::StateDictError;
pub use training::{SamplerError, ScalerError};

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NnError {
    /// candle refused, in the model's own code or in a hook.
    #[error("{}", describe_candle(.0))]
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
    /// A gradient scaler was asked for something impossible.
    #[error(transparent)]
    Scaler(#[from] ScalerError),
    /// A sampler cannot continue with a state.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    /// A model cannot be built as it was declared.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A state dict, or the settings for it, cannot be used with this model.
    #[error(transparent)]
    StateDict(#[from] StateDictError),
    /// Options or arguments that are out of range, contradict each other, or do not fit the model.
    #[error("{problem}")]
    Options {
        /// The problem, and a way out.
        problem: String,
    },
    /// The model computes with the average of its weights.
    #[error(
        "the model has the average of its weights now: call `swap` of the `AveragedModel` that has \
         the weights first"
    )]
    Swapped,
    /// Gradients of some rank hold NaN or infinities, which an update would spread to the
    /// parameters of all.
    #[error("the norm of the gradients is {norm}: gradients of some rank are not finite")]
    NonFiniteGradients {
        /// The norm of the gradients of all ranks.
        norm: f64,
    },
    /// A forward computes with the parameters of the unit.
    #[error(
        "the parameters of {} are in use: a forward computes with them",
        unit_name(unit)
    )]
    UnitInUse {
        /// The unit's name; empty for the root.
        unit: String,
    },
    /// A collective of a unit that ran in the background, while the model was computing, has
    /// failed: see `FsdpConfig::backward_prefetch`.
    #[error(
        "the {operation} of {} failed while the model was computing: {error}",
        unit_name(unit)
    )]
    BackgroundCollective {
        /// The unit's name; empty for the root.
        unit: String,
        /// The collective.
        operation: &'static str,
        /// The error.
        #[source]
        error: Box<NnError>,
    },
    /// A backward came to a unit whose values are not those that its forward computed with.
    #[error(
        "the parameters of {} have changed since the forward: run backward before a step or a \
         load, or the forward again after it",
        unit_name(unit)
    )]
    ChangedSinceForward {
        /// The unit's name; empty for the root.
        unit: String,
    },
    /// A computation read a parameter that was not gathered.
    #[error(
        "parameter {} is sharded here; {} ({error})",
        list_candidates(parameters),
        advise_on_computing(units)
    )]
    ParametersSharded {
        /// The parameters that were sharded at that time: the one that was used is among them. The
        /// likeliest comes first.
        parameters: Vec<String>,
        /// Their units; the root's name is empty. None if the model was being built.
        units: Vec<String>,
        /// candle's error.
        error: String,
    },
    /// The ranks have built different models, been given different options, or chosen different
    /// parameters to train.
    #[error("the ranks do not have the same model: {}", differences.join("; "))]
    DifferentModels {
        /// The first difference, by groups of ranks that have the same there.
        differences: Vec<String>,
    },
    /// A name that the model does not have.
    #[error("the model has no parameter `{fqn}`")]
    UnknownParameter {
        /// The name.
        fqn: String,
    },
    /// An optimizer was to step while gradients had come to a unit that were not reduced yet.
    #[error(
        "the backward of {} has not ended: run it by `FullyShardedDataParallel::backward`, not by \
         candle's `loss.backward()`",
        unit_name(unit)
    )]
    BackwardNotEnded {
        /// The unit's name; empty for the root.
        unit: String,
    },
    /// A step was to end while gradients waited for a reduction that no backward has made.
    #[error(
        "gradients of {} have not been reduced over the ranks: the last backward before the end of \
         a step must run outside of `no_sync`, with `set_requires_gradient_sync` and \
         `set_requires_all_reduce` on",
        unit_name(unit)
    )]
    GradientsNotReduced {
        /// The unit's name; empty for the root.
        unit: String,
    },
    /// An optimizer state dict that does not fit.
    #[error("{error}{}", describe_ranks(ranks))]
    OptimState {
        /// The problem.
        error: OptimStateError,
        /// The global ranks that it is wrong on, where other ranks found nothing; empty if it
        /// concerns all.
        ranks: Vec<usize>,
    },
    /// The optimizer steps on the parameters of another model.
    #[error("the optimizer was made for the parameters of another model")]
    ForeignOptimizer,
}

/// The most names of a large model that a message has.
const MAX_NAMED: usize = 4;

/// Lists the candidates for a parameter whose name is not known exactly, for a message: "`a`, `b`
/// or one of 3 more".
fn list_candidates(names: &[String]) -> String {
    let mut named: Vec<String> = names
        .iter()
        .take(MAX_NAMED)
        .map(|name| format!("`{name}`"))
        .collect();
    if names.len() > MAX_NAMED {
        named.push(format!("one of {} more", names.len() - MAX_NAMED));
    }
    match named.pop() {
        Some(last) if named.is_empty() => last,
        Some(last) => format!("{} or {last}", named.join(", ")),
        None => String::new(),
    }
}

/// Returns the advice for a computation with a parameter that is sharded.
fn advise_on_computing(units: &[String]) -> String {
    if units.is_empty() {
        return "a model that is being built can take views of its parameters (`t`, `reshape`), but \
                neither compute with them nor copy them"
            .to_owned();
    }
    let mut names: Vec<String> = units
        .iter()
        .take(MAX_NAMED)
        .map(|unit| unit_name(unit))
        .collect();
    if units.len() > MAX_NAMED {
        names.push(format!("{} more", units.len() - MAX_NAMED));
    }
    format!(
        "compute with parameters of {} only inside the forward of their unit",
        names.join(", ")
    )
}

/// Returns the end of a message that names ranks.
fn describe_ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => String::new(),
        [rank] => format!(" (on rank {rank})"),
        ranks => format!(" (on ranks {ranks:?})"),
    }
}

impl NnError {
    pub(crate) fn unknown_parameter(fqn: &str) -> Self {
        NnError::UnknownParameter {
            fqn: fqn.to_owned(),
        }
    }

    /// Makes the error of options or arguments that cannot be.
    pub(crate) fn options(problem: impl Into<String>) -> Self {
        NnError::Options {
            problem: problem.into(),
        }
    }
}

impl From<OptimStateError> for NnError {
    fn from(error: OptimStateError) -> Self {
        NnError::OptimState {
            error,
            ranks: Vec::new(),
        }
    }
}

impl From<NnError> for StateError {
    /// Passes an error through the traits of sources and targets, which know only the errors of
    /// state dicts.
    fn from(error: NnError) -> Self {
        match error {
            // Its own errors pass as they are; of others the text and the kind.
            NnError::State(error) => error,
            error => StateError::Other {
                message: error.to_string(),
                kind: error.kind(),
            },
        }
    }
}

/// The result of this crate's functions.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

impl Failure for NnError {
    fn kind(&self) -> ErrorKind {
        match self {
            NnError::Comm(error) => error.kind(),
            NnError::BackgroundCollective { error, .. } => error.kind(),
            NnError::State(error) => error.kind(),
            NnError::OptimState { .. } => ErrorKind::Difference,
            _ => ErrorKind::Other,
        }
    }
}

impl NnError {
    /// Returns the error of a computation, which is [`NnError::ParametersSharded`] if candle read
    /// released memory. `sharded` returns the parameters that are not there, and their units.
    pub(crate) fn from_computation(
        error: candle_core::Error,
        sharded: impl FnOnce() -> (Vec<String>, Vec<String>),
    ) -> Self {
        if !reads_released(&error) {
            return error.into();
        }
        let (parameters, units) = sharded();
        // Everything is gathered, so the dtype was the model's own.
        if parameters.is_empty() {
            return error.into();
        }
        NnError::ParametersSharded {
            parameters,
            units,
            error: describe_operation(&error),
        }
    }
}

impl From<candle_core::Error> for NnError {
    /// Takes candle's error, or the one of this crate that went through candle.
    fn from(error: candle_core::Error) -> Self {
        use candle_core::Error;
        match error {
            Error::Io(error) => match error.downcast::<NnError>() {
                Ok(error) => error,
                Err(error) => NnError::Candle(Error::Io(error)),
            },
            Error::WithBacktrace { inner, .. }
            | Error::Context { inner, .. }
            | Error::WithPath { inner, .. }
                if wraps_nn_error(&inner) =>
            {
                Self::from(*inner)
            }
            error => NnError::Candle(error),
        }
    }
}

/// Returns the error inside of what candle has added to it on its way.
fn find_innermost(error: &candle_core::Error) -> &candle_core::Error {
    use candle_core::Error;
    match error {
        Error::WithBacktrace { inner, .. }
        | Error::Context { inner, .. }
        | Error::WithPath { inner, .. } => find_innermost(inner),
        error => error,
    }
}

/// Returns `true` if an operation met the dummy dtype of released memory, or may have.
fn reads_released(error: &candle_core::Error) -> bool {
    use candle_core::{DType::F4, Error};
    match find_innermost(error) {
        Error::UnexpectedDType { got, .. } => *got == F4,
        Error::DTypeMismatchBinaryOp { lhs, rhs, .. } => *lhs == F4 || *rhs == F4,
        Error::UnsupportedDTypeForOp(dtype, _) => *dtype == F4,
        // candle's fused norms name the dtype of their input, and not that of the weight that is
        // not there. They know three dtypes.
        Error::Msg(message) => ["F32", "F16", "BF16"]
            .iter()
            .any(|dtype| *message == format!("unsupported dtype for rmsnorm {dtype}")),
        _ => false,
    }
}

/// Returns the operation that met released memory, for messages. The dtype of that memory says
/// nothing to whoever wrote the model; another dtype may be the true cause.
fn describe_operation(error: &candle_core::Error) -> String {
    use candle_core::Error;
    match find_innermost(error) {
        Error::UnexpectedDType { msg, .. } => (*msg).to_owned(),
        Error::DTypeMismatchBinaryOp { op, .. } | Error::UnsupportedDTypeForOp(_, op) => {
            format!("in {op}")
        }
        error => candle_message(error),
    }
}

/// Returns the message of candle's error. If candle lacks an operation, it says what to do: candle
/// names only an inner operation, such as the product in a convolution.
fn describe_candle(error: &candle_core::Error) -> String {
    let message = candle_message(error);
    match find_innermost(error) {
        candle_core::Error::UnsupportedDTypeForOp(dtype, op) if dtype.is_float() => format!(
            "{message}: candle does not compute {op} in {name} here, which is a part of other \
             operations too, such as convolutions; convert their inputs and weights with `to_dtype`",
            name = dtype.as_str()
        ),
        _ => message,
    }
}

/// Returns `true` if an error of candle's type wraps an [`NnError`], at any depth.
fn wraps_nn_error(error: &candle_core::Error) -> bool {
    match find_innermost(error) {
        candle_core::Error::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<NnError>()),
        _ => false,
    }
}

impl From<NnError> for candle_core::Error {
    /// Passes an error through code that candle calls. The conversion back gives this error again.
    fn from(error: NnError) -> Self {
        match error {
            NnError::Candle(error) => error,
            // candle's variant for I/O is the one that keeps the type of the error inside.
            other => candle_core::Error::Io(io::Error::other(other)),
        }
    }
}
