//! Everything that can be wrong with an optimizer state dict. These errors travel between ranks, so
//! that all return the same one.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::NnError;

/// An optimizer state dict that does not fit: the model, the optimizer, or other ranks.
///
/// Names are those of parameters in the model; ranks are global ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum OptimStateError {
    /// Without `use_orig_params`, a rank has no state for a FlatParameter that rank 0 has state
    /// for.
    #[error(
        "FSDP currently requires each rank to have at least the optimizer states needed by rank \
         0's optimizer but some ranks are missing some of those states: {}; give all ranks' \
         optimizers the same parameters",
        describe_missing(missing)
    )]
    MissingOnRanks {
        /// For each such rank the parameters that it has no state for.
        missing: Vec<(usize, Vec<String>)>,
    },
    /// Ranks that hold elements of a parameter have different state of it where they must have the
    /// same, on save. (On load it is
    /// [`StateError::DifferingOnRanks`](fsdp_state::StateError::DifferingOnRanks).)
    #[error(
        "rank {rank} has different values for `{name}` of parameters {fqns:?}: {found}, but rank \
         {reference} has {expected}"
    )]
    DifferingOnRanks {
        /// The parameters.
        fqns: Vec<String>,
        /// The state entry.
        name: String,
        /// The first rank that differs.
        rank: usize,
        /// Its value there.
        found: String,
        /// The rank it is compared with.
        reference: usize,
        /// The value on that rank.
        expected: String,
    },
    /// With `use_orig_params`, ranks that hold elements of a parameter have no state for them,
    /// while others do.
    #[error(
        "ranks have state for {found} of the {expected} elements (of all replicas) of parameter \
         `{fqn}`: give all ranks' optimizers the same parameters"
    )]
    NotOnAllRanks {
        /// The parameter.
        fqn: String,
        /// Elements with state, over all ranks.
        found: usize,
        /// Elements over all ranks.
        expected: usize,
    },
    /// Parameters of one FlatParameter have different state entries.
    #[error(
        "differing optimizer state names for the unflattened parameters: {fqns:?} have {names:?}"
    )]
    DifferingNames {
        /// The parameters.
        fqns: Vec<String>,
        /// The names that each has; empty for one without state.
        names: Vec<Vec<String>>,
    },
    /// One state entry is a tensor for some parameters of a FlatParameter and something else for
    /// others.
    #[error(
        "differing optimizer state types for state `{name}`: {types:?} for the unflattened \
         parameters {fqns:?}"
    )]
    DifferingTypes {
        /// The state entry.
        name: String,
        /// The type for each parameter.
        types: Vec<String>,
        /// The parameters.
        fqns: Vec<String>,
    },
    /// One state entry has several dtypes within a FlatParameter.
    #[error(
        "all unflattened parameters comprising a single flat parameter must have \
         positive-dimension tensor state with the same dtype but got dtypes {dtypes:?} for state \
         `{name}` and unflattened parameter names {fqns:?}"
    )]
    DifferingDTypes {
        /// The state entry.
        name: String,
        /// The dtypes.
        dtypes: Vec<String>,
        /// The parameters.
        fqns: Vec<String>,
    },
    /// Parameters of one FlatParameter share their scalar state, so none may lack it or differ.
    #[error(
        "all unflattened parameters comprising a single flat parameter must have scalar state with \
         the same value and dtype but got values {values:?} and dtypes {dtypes:?} for state \
         `{name}` and unflattened parameter names {fqns:?}"
    )]
    DifferingScalars {
        /// The state entry.
        name: String,
        /// The value of each parameter; `None` for one without state.
        values: Vec<String>,
        /// The dtypes.
        dtypes: Vec<String>,
        /// The parameters.
        fqns: Vec<String>,
    },
    /// A state tensor that should be shaped like its parameter is not.
    #[error(
        "tensor optimizer state does not have same shape as its parameter: {found:?} {expected:?} \
         (state `{name}` of parameter `{fqn}`)"
    )]
    WrongShape {
        /// The parameter.
        fqn: String,
        /// The state entry.
        name: String,
        /// The shape in the state dict.
        found: Vec<usize>,
        /// The parameter's; in a local state dict that of this rank's piece.
        expected: Vec<usize>,
    },
    /// A state tensor has not the parameter's dtype. Nothing is cast unasked.
    #[error(
        "state `{name}` of parameter `{fqn}` is {found}, but the parameter is {expected}: cast it \
         before loading"
    )]
    WrongDType {
        /// The parameter.
        fqn: String,
        /// The state entry.
        name: String,
        /// The dtype in the state dict.
        found: String,
        /// The parameter's dtype.
        expected: String,
    },
    /// The number of steps of a parameter is none.
    #[error("the step of parameter `{fqn}` is {found}, which is not a number of steps")]
    MalformedStep {
        /// The parameter, or the FlatParameter.
        fqn: String,
        /// The saved value.
        found: String,
    },
    /// Zeros cannot stand for the missing state of a parameter without dimensions.
    #[error(
        "flattening a zero-dimension parameter is not supported: `{fqn}` has no state `{name}`"
    )]
    ZeroDimParameter {
        /// The parameter.
        fqn: String,
        /// The state entry that it lacks.
        name: String,
    },
    /// A parameter that is trained has no state, while others of its unit have.
    #[error(
        "missing optimizer state for parameter `{fqn}` in the state dict, which has state of \
         `{other}` of the same unit"
    )]
    MissingState {
        /// The parameter.
        fqn: String,
        /// One of the same unit that has state.
        other: String,
    },
    /// A parameter's state lacks an entry that its optimizer needs.
    #[error("missing optimizer state `{name}` for parameter `{fqn}` in the state dict")]
    MissingEntry {
        /// The parameter.
        fqn: String,
        /// The entry.
        name: String,
    },
    /// The state dict lacks one of its two parts, or a group one of its hyperparameters.
    #[error("`optim_state_dict` must have the keys \"{key}\" to be a valid optimizer state dict")]
    MissingKey {
        /// `state`, `param_groups`, or such as `param_groups.0.lr`.
        key: String,
    },
    /// A param group names what the optimizer does not hold.
    #[error(
        "param group {index} of the state dict names `{key}`, which is no parameter of this \
         optimizer"
    )]
    UnknownParam {
        /// The group.
        index: usize,
        /// The name or id.
        key: String,
    },
    /// State of a parameter that is not there.
    #[error(
        "the state dict has state of parameter `{key}`, which is none of the {count} parameters \
         here"
    )]
    UnknownState {
        /// The name or id.
        key: String,
        /// The parameters that there are.
        count: usize,
    },
    /// Parameters must be named by names, or all by ids.
    #[error("invalid parameter keys: {keys:?}; {expected}")]
    InvalidKeys {
        /// Some of them.
        keys: Vec<String>,
        /// The keys that there should be.
        expected: String,
    },
    /// An optimizer keeps its number of groups.
    #[error(
        "loaded state dict has a different number of parameter groups: {saved}, but the optimizer \
         has {current}"
    )]
    GroupCount {
        /// Groups of the state dict.
        saved: usize,
        /// Groups of the optimizer.
        current: usize,
    },
    /// A group keeps its number of parameters.
    #[error(
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's \
         group: group {index} has {saved} parameters, but the optimizer's has {current}"
    )]
    GroupSize {
        /// The group.
        index: usize,
        /// The number of its parameters in the state dict.
        saved: usize,
        /// The number of parameters of the optimizer's group.
        current: usize,
    },
}

impl OptimStateError {
    /// Makes the error of a state dict that lacks a key.
    pub(crate) fn missing_key(key: impl Into<String>) -> NnError {
        OptimStateError::MissingKey { key: key.into() }.into()
    }
}

/// Returns a text on the parameters that each rank is missing.
fn describe_missing(missing: &[(usize, Vec<String>)]) -> String {
    let ranks: Vec<String> = missing
        .iter()
        .map(|(rank, fqns)| format!("rank {rank} is missing {fqns:?}"))
        .collect();
    ranks.join(", ")
}
