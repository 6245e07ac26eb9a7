//! The errors of tensors that do not fit their layouts, and of their memory.

use fsdp_layout::{DType, FlatLayoutError, TensorBox};
use thiserror::Error;

/// An error of this crate.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FlatError {
    /// candle refused.
    #[error("{}", candle_message(.0))]
    Candle(candle_core::Error),
    /// The parameters cannot be laid out.
    #[error(transparent)]
    Layout(#[from] FlatLayoutError),
    /// Integers have no gradient, so a FlatParameter cannot hold them.
    #[error("cannot flatten integer dtype {dtype}: parameter `{fqn}`")]
    IntegerDType {
        /// The parameter.
        fqn: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A rank beyond those that share a FlatParameter: its number in the whole job, perhaps.
    #[error("there is no rank {rank} among the {world_size} that share a FlatParameter")]
    NoSuchRank {
        /// The rank given.
        rank: usize,
        /// Ranks that share it.
        world_size: usize,
    },
    /// One FlatParameter has one dtype.
    #[error(
        "must flatten tensors with uniform dtype, but got {expected} and {found} (parameter `{fqn}`)"
    )]
    MixedDType {
        /// The first parameter that differs.
        fqn: String,
        /// The dtype before it.
        expected: DType,
        /// Its dtype.
        found: DType,
    },
    /// Without `use_orig_params` the whole FlatParameter is trained or is frozen.
    #[error(
        "must flatten tensors with uniform `requires_grad` when `use_orig_params` is false (parameter `{fqn}` differs)"
    )]
    MixedRequiresGrad {
        /// The first parameter that differs.
        fqn: String,
    },
    /// The dtype exists in files only.
    #[error("candle has no dtype {dtype}: keep the tensor as raw bytes")]
    NotInCandle {
        /// The dtype.
        dtype: DType,
    },
    /// The memory of a sharded parameter was read while it is not gathered.
    #[error(
        "the storage of a tensor of shape {shape:?} is freed: use a parameter only inside the forward of its unit"
    )]
    Freed {
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// Memory that this build cannot reach.
    #[error(
        "the memory of a tensor on {device} cannot be reached: move it to the CPU, or build with `--features cuda`"
    )]
    UnsupportedDevice {
        /// The tensor's device.
        device: String,
    },
    /// In-place access needs elements that lie side by side; a new storage, a tensor that begins
    /// where it does.
    #[error("a tensor of shape {shape:?} is not contiguous")]
    NotContiguous {
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// The bytes and the shape disagree.
    #[error("{given} bytes for a {dtype} tensor of shape {shape:?}, which takes {needed}")]
    WrongSize {
        /// Bytes given.
        given: usize,
        /// The dtype.
        dtype: DType,
        /// The shape.
        shape: Vec<usize>,
        /// Bytes it takes.
        needed: usize,
    },
    /// More than the machine has.
    #[error("there is no memory for a {dtype} tensor of shape {shape:?}")]
    OutOfMemory {
        /// The dtype.
        dtype: String,
        /// The shape.
        shape: Vec<usize>,
    },
    /// A value does not fit where it should go.
    #[error("`{name}`: expected shape {expected:?}, but got {found:?}")]
    ShapeMismatch {
        /// The thing that has the shape.
        name: String,
        /// The shape there.
        expected: Vec<usize>,
        /// The shape given.
        found: Vec<usize>,
    },
    /// A box lies outside the tensor.
    #[error("box {bounds} lies outside a tensor of shape {shape:?}")]
    OutOfBounds {
        /// The box.
        bounds: TensorBox,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// Two boxes share elements.
    #[error("boxes {first} and {second} of one tensor overlap")]
    Overlap {
        /// One of them.
        first: TensorBox,
        /// The other.
        second: TensorBox,
    },
    /// The local boxes do not hold all that is asked for.
    #[error("box {wanted} is not covered by the boxes that are here")]
    NotCovered {
        /// The box asked for.
        wanted: TensorBox,
    },
}

impl From<candle_core::Error> for FlatError {
    fn from(error: candle_core::Error) -> Self {
        FlatError::Candle(error)
    }
}

/// Returns the message of an error of candle in one line, without the stack of calls that candle
/// adds to it if `RUST_BACKTRACE` is set.
#[must_use]
pub fn candle_message(error: &candle_core::Error) -> String {
    use candle_core::Error;
    match error {
        Error::WithBacktrace { inner, .. } => candle_message(inner),
        Error::Context { inner, context } => format!("{context}: {}", candle_message(inner)),
        Error::WithPath { inner, path } => {
            format!("`{}`: {}", path.display(), candle_message(inner))
        }
        // candle prints the error that it wraps as programmers see it.
        Error::WrappedContext { wrapped, context } => format!("{context}: {wrapped}"),
        error => error.to_string(),
    }
}

impl FlatError {
    /// Makes the error of a thing of this name that has another shape than it must have.
    pub(crate) fn shape(name: impl Into<String>, expected: &[usize], found: &[usize]) -> Self {
        FlatError::ShapeMismatch {
            name: name.into(),
            expected: expected.to_vec(),
            found: found.to_vec(),
        }
    }

    /// Makes the error of a tensor on the wrong device.
    pub(crate) fn device(tensor: &candle_core::Tensor) -> Self {
        FlatError::UnsupportedDevice {
            device: format!("{:?}", tensor.device().location()),
        }
    }
}
