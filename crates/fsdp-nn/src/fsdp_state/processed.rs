//! What ranks tell each other of optimizer state before its tensors move.

use candle_core::{Device, Tensor};
use fsdp_flat::dtype;
use fsdp_flat::storage::with_bytes;
use fsdp_layout::{DType, PlainTensor, PlainValue};
use fsdp_state::{StateDict, StateValue};
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::OptimStateError;
use super::agree::agree;
use crate::optim_state::plain;
use crate::optimizer::Optimizer;
use crate::{NnError, Result};

/// A value of a parameter's state without the elements of tensors: what torch's `_PosDimTensorInfo` and the values
/// beside it are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ProcessedValue {
    /// A tensor that is moved by itself: one with dimensions, or the element of a parameter without.
    PosDim {
        /// Its dtype.
        dtype: DType,
        /// Its global shape.
        shape: Vec<usize>,
    },
    /// A tensor without dimensions, by value.
    ZeroDim(PlainTensor),
    /// A value that is no tensor.
    NonTensor(PlainValue),
}

/// Parameter name (or key of user state) to state entry to value.
pub type ProcessedState = IndexMap<String, IndexMap<String, ProcessedValue>>;

impl ProcessedValue {
    /// What a value is. `scalar_parameter` says that it belongs to a parameter without dimensions and is shaped like it.
    pub(crate) fn of(fqn: &str, name: &str, value: &StateValue, scalar_parameter: bool) -> Result<Self> {
        Ok(match value {
            StateValue::Tensor(tensor) if tensor.rank() == 0 && !scalar_parameter => {
                ProcessedValue::ZeroDim(plain_tensor(tensor)?)
            }
            StateValue::Tensor(tensor) => {
                ProcessedValue::PosDim { dtype: dtype::of(tensor)?, shape: tensor.dims().to_vec() }
            }
            StateValue::Sharded(tensor) => {
                ProcessedValue::PosDim { dtype: tensor.file_dtype()?, shape: tensor.shape().to_vec() }
            }
            other => match plain(other) {
                Some(value) => ProcessedValue::NonTensor(value),
                None => {
                    let (fqn, name) = (fqn.to_owned(), name.to_owned());
                    return Err(NnError::UnexpectedState { fqn, name, kind: other.kind() });
                }
            },
        })
    }

    /// The value that this is, if it is no tensor with dimensions; in memory of its own.
    pub(crate) fn scalar(&self) -> Result<Option<StateValue>> {
        Ok(match self {
            ProcessedValue::PosDim { .. } => None,
            ProcessedValue::ZeroDim(value) => {
                Some(Tensor::from_raw_buffer(&value.data, dtype::to_candle(value.dtype)?, &[], &Device::Cpu)?.into())
            }
            ProcessedValue::NonTensor(value) => Some(StateValue::Plain(value.clone())),
        })
    }

    pub(crate) fn same(&self, other: &ProcessedValue) -> bool {
        match (self, other) {
            (ProcessedValue::NonTensor(a), ProcessedValue::NonTensor(b)) => a.same_bits(b),
            (a, b) => a == b,
        }
    }

    /// For messages: what it is.
    pub(crate) fn type_name(&self) -> String {
        match self {
            ProcessedValue::PosDim { .. } => "tensor".to_owned(),
            ProcessedValue::ZeroDim(_) => "zero-dimension tensor".to_owned(),
            ProcessedValue::NonTensor(value) => value.type_name().to_owned(),
        }
    }

    /// For messages: its value, or dtype and shape.
    pub(crate) fn describe(&self) -> String {
        match self {
            ProcessedValue::PosDim { dtype, shape } => format!("{dtype} {shape:?}"),
            ProcessedValue::ZeroDim(value) => match self.scalar() {
                Ok(Some(StateValue::Tensor(tensor))) => match tensor.to_dtype(candle_core::DType::F64) {
                    Ok(tensor) => tensor.to_scalar::<f64>().map_or_else(|_| String::new(), |value| value.to_string()),
                    Err(_) => value.dtype.to_string(),
                },
                _ => value.dtype.to_string(),
            },
            ProcessedValue::NonTensor(value) => format!("{value:?}"),
        }
    }
}

fn plain_tensor(tensor: &Tensor) -> Result<PlainTensor> {
    let data = with_bytes(&tensor.force_contiguous()?, <[u8]>::to_vec)?;
    Ok(PlainTensor { dtype: dtype::of(tensor)?, shape: tensor.dims().to_vec(), data })
}

/// The states of an optimizer state dict by names, processed. Aliases of tied parameters become their first name.
pub(crate) fn process(optimizer: &Optimizer, state: &StateDict) -> Result<ProcessedState> {
    let states = state.dict("state").ok_or_else(|| OptimStateError::MissingKey { key: "state".to_owned() })?;
    let parameters = optimizer.parameters();
    let mut processed = ProcessedState::new();
    for (key, value) in states {
        let fqn = parameters.canonical_fqn(key);
        if fqn != key && states.contains_key(fqn) || !parameters.contains(fqn) {
            continue;
        }
        let Some(entries) = value.as_dict() else {
            let expected = format!("the state of parameter `{key}` is a {}", value.kind());
            return Err(OptimStateError::InvalidKeys { keys: vec![key.clone()], expected }.into());
        };
        processed.insert(fqn.to_owned(), process_entries(optimizer, fqn, entries)?);
    }
    Ok(processed)
}

/// One parameter's state, processed.
pub(crate) fn process_entries(
    optimizer: &Optimizer,
    fqn: &str,
    entries: &StateDict,
) -> Result<IndexMap<String, ProcessedValue>> {
    let is_scalar = optimizer.parameters().shape(fqn)?.is_empty();
    let entry = |(name, value): (&String, &StateValue)| {
        let like_parameter = is_scalar && is_like_parameter(optimizer, fqn, name);
        Ok((name.clone(), ProcessedValue::of(fqn, name, value, like_parameter)?))
    };
    entries.iter().map(entry).collect()
}

/// Whether a state entry is shaped like the parameter by the optimizer's schema.
pub(crate) fn is_like_parameter(optimizer: &Optimizer, fqn: &str, name: &str) -> bool {
    use crate::algorithm::StateKind;
    let schema = optimizer.state_schema(fqn);
    schema.iter().any(|entry| entry.name == name && entry.kind == StateKind::LikeParameter)
}

/// Rank 0's state, processed, on every rank: torch's `_broadcast_processed_state`. `state` is rank 0's
/// `{"state": {name: {entry: value}}}` and is ignored on all others; rank 0 is that of the model's group.
/// State under names that are no parameter's is left out.
///
/// Collectives: one agreement and one object broadcast.
///
/// # Errors
/// The same on every rank: no state dict on rank 0, or one that is malformed.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::Module;
/// # use fsdp_nn::algorithm::{AdamOptions, Algorithm};
/// use fsdp_nn::fsdp_state::{ProcessedValue, broadcast_processed_state, full_optim_state_dict};
/// # use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer};
/// fsdp_comm::run_local(2, |group| {
/// #   let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
/// #       candle_nn::linear(3, 2, scope.vb())
/// #   })?;
/// #   let mut optimizer = Optimizer::new(model.parameters(), Algorithm::Adam(AdamOptions::default()))?;
/// #   let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
/// #   let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.mean_all())?;
/// #   model.backward(&loss)?;
/// #   optimizer.step()?;
///     // A linear layer 3 -> 2 on two ranks, after one step of Adam.
///     let parameters = model.parameters();
///     let full = full_optim_state_dict(parameters, &optimizer, None, true)?;
///     let told = broadcast_processed_state(&optimizer, Some(&full))?;
///     assert!(matches!(&told["weight"]["exp_avg"], ProcessedValue::PosDim { shape, .. } if *shape == [2, 3]));
///     assert!(matches!(&told["weight"]["step"], ProcessedValue::ZeroDim(_)));
///     Ok::<(), fsdp_nn::NnError>(())
/// })?
/// .into_iter()
/// .collect::<Result<Vec<()>, _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn broadcast_processed_state(optimizer: &Optimizer, state: Option<&StateDict>) -> Result<ProcessedState> {
    let group = optimizer.parameters().group();
    let processed = match state.filter(|_| group.rank() == 0) {
        Some(state) => process(optimizer, state).map(Some),
        None if group.rank() == 0 => Err(OptimStateError::MissingKey { key: "state".to_owned() }.into()),
        None => Ok(None),
    };
    let processed = agree(group, "broadcast_processed_state", processed)?;
    Ok(group.broadcast_object(processed.as_ref(), 0)?)
}
