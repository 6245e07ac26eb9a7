//! The errors of hyperparameters, param groups and slices.

use fsdp_layout::DType;

/// Hyperparameters that cannot be, a param group that cannot be read, or slices that do not fit.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AlgorithmError {
    /// A hyperparameter is outside its range.
    #[error("{algorithm} cannot work with `{key}` = `{value}`: it must be {range}")]
    OutOfRange {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The param-group key; for one of two betas with its index.
        key: &'static str,
        /// The value found.
        value: f64,
        /// The values allowed.
        range: &'static str,
    },
    /// Nesterov momentum without momentum, or with dampening.
    #[error(
        "SGD with `nesterov` needs a positive `momentum` and zero `dampening`, but they are \
         `{momentum}` and `{dampening}`"
    )]
    Nesterov {
        /// The momentum found.
        momentum: f64,
        /// The dampening found.
        dampening: f64,
    },
    /// A param group holds a value of another type under this key.
    #[error("`{key}` in a parameter group of {algorithm} is {found}, but must be {expected}")]
    WrongType {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The param-group key.
        key: &'static str,
        /// The kind of value that belongs there.
        expected: &'static str,
        /// The Python type found.
        found: &'static str,
    },
    /// Parameters of this dtype cannot be updated.
    #[error(
        "{algorithm} cannot update parameters of dtype `{dtype}`: use float32, float64, bfloat16 \
         or float16"
    )]
    UnsupportedDType {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The parameter's dtype.
        dtype: DType,
    },
    /// `eps` is positive, but zero in the parameter's dtype.
    #[error(
        "{algorithm} would compute with `eps` = 0 instead of `{eps}`, because {dtype} rounds it to \
         zero, and a zero gradient would then give NaN: raise `eps` or keep the parameters in \
         float32"
    )]
    VanishingEps {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The eps found.
        eps: f64,
        /// The parameter's dtype.
        dtype: DType,
    },
    /// An optimizer steps while its parameters are those of an evaluation.
    #[error(
        "{algorithm} cannot step in `eval` mode: call `Optimizer::train` before training, and \
         `eval` before evaluations"
    )]
    NotTraining {
        /// The optimizer, by its class name.
        algorithm: &'static str,
    },
    /// A learning rate that falls has no steps to fall in.
    #[error(
        "the learning rate would be 0 right after its warm-up: of {steps} steps the warm-up takes \
         {warmup}; set `steps` of the schedule to those of the run, or keep the rate constant"
    )]
    Schedule {
        /// The steps of the warm-up.
        warmup: u64,
        /// The steps of the schedule.
        steps: u64,
    },
    /// A parameter is no matrix.
    #[error(
        "{algorithm} updates matrices only, but a parameter of its group has the shape {shape:?}: \
         give it another optimizer"
    )]
    NotAMatrix {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The parameter's shape.
        shape: Vec<usize>,
    },
    /// An optimizer that keeps state for each parameter is given FlatParameters.
    #[error(
        "{algorithm} needs `use_orig_params`: its state belongs to rows and columns of the model's \
         own parameters"
    )]
    FlatParameters {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
    },
    /// An update that needs the whole parameter was asked to work on a slice.
    #[error(
        "{algorithm} updates whole matrices, which `Optimizer::step` does, and no slices of them"
    )]
    NotElementwise {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
    },
    /// The step number is not one that an update can have.
    #[error(
        "{algorithm} cannot make update number `{step}`: the first one is 1, and `step` is \
         incremented before the update"
    )]
    Step {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The step found.
        step: f32,
    },
    /// An update was given another number of state slices than the schema has.
    #[error(
        "{algorithm} keeps {expected} state entries per element of a parameter, but the update was \
         given {found}"
    )]
    StateCount {
        /// The optimizer, by torch's name.
        algorithm: &'static str,
        /// The number of entries of [`StateKind::LikeParameter`](super::StateKind::LikeParameter)
        /// the schema has.
        expected: usize,
        /// The number that were given.
        found: usize,
    },
    /// A gradient or state slice is longer or shorter than the parameter.
    #[error("`{name}` has {found} elements, but its parameter has {expected}")]
    Length {
        /// `grad`, or a state entry.
        name: &'static str,
        /// The parameter's number of elements.
        expected: usize,
        /// The slice's.
        found: usize,
    },
}

/// Refuses a hyperparameter unless it is in its range, which the text `range` describes.
pub(super) fn check_range(
    algorithm: &'static str,
    key: &'static str,
    value: f64,
    is_in_range: bool,
    range: &'static str,
) -> Result<(), AlgorithmError> {
    if is_in_range {
        return Ok(());
    }
    Err(AlgorithmError::OutOfRange {
        algorithm,
        key,
        value,
        range,
    })
}

/// Refuses the first of these hyperparameters that is negative, infinite or NaN.
pub(super) fn check_at_least_zero(
    algorithm: &'static str,
    values: &[(&'static str, f64)],
) -> Result<(), AlgorithmError> {
    values.iter().try_for_each(|&(key, value)| {
        let is_in_range = value.is_finite() && value >= 0.0;
        check_range(algorithm, key, value, is_in_range, "finite and at least 0")
    })
}
