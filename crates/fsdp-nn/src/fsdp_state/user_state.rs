//! State under keys that are no parameter's, on its way from rank 0 to the others: by value, tensors included.

use candle_core::{Device, Tensor};
use fsdp_flat::storage::with_bytes;
use fsdp_flat::{RawTensor, dtype};
use fsdp_layout::{PlainTensor, PlainValue};
use fsdp_state::{StateDict, StateValue};
use serde::{Deserialize, Serialize};

use crate::{NnError, Result};

/// A value that travels whole.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Carried {
    Tensor(PlainTensor),
    Raw(PlainTensor),
    Plain(PlainValue),
    Dict(Vec<(String, Carried)>),
    List(Vec<Carried>),
    Tuple(Vec<Carried>),
}

impl Carried {
    /// The value at `key`, by value. A sharded tensor cannot be carried: no rank has it whole.
    pub(crate) fn of(key: &str, value: &StateValue) -> Result<Self> {
        let all = |list: &[StateValue]| list.iter().map(|value| Carried::of(key, value)).collect::<Result<_>>();
        Ok(match value {
            StateValue::Tensor(tensor) => Carried::Tensor(PlainTensor {
                dtype: dtype::of(tensor)?,
                shape: tensor.dims().to_vec(),
                data: with_bytes(&tensor.force_contiguous()?, <[u8]>::to_vec)?,
            }),
            StateValue::Raw(tensor) => Carried::Raw(PlainTensor {
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
                data: tensor.bytes().to_vec(),
            }),
            StateValue::Plain(value) => Carried::Plain(value.clone()),
            StateValue::Dict(dict) => {
                let entry = |(name, value): (&String, &StateValue)| Ok((name.clone(), Carried::of(key, value)?));
                Carried::Dict(dict.iter().map(entry).collect::<Result<_>>()?)
            }
            StateValue::List(list) => Carried::List(all(list)?),
            StateValue::Tuple(list) => Carried::Tuple(all(list)?),
            other => {
                let (fqn, name) = (key.to_owned(), "user state".to_owned());
                return Err(NnError::UnexpectedState { fqn, name, kind: other.kind() });
            }
        })
    }

    /// The value again, in memory of its own.
    pub(crate) fn into_value(self) -> Result<StateValue> {
        let all = |list: Vec<Carried>| list.into_iter().map(Carried::into_value).collect::<Result<_>>();
        Ok(match self {
            Carried::Tensor(tensor) => {
                let dtype = dtype::to_candle(tensor.dtype)?;
                Tensor::from_raw_buffer(&tensor.data, dtype, &tensor.shape, &Device::Cpu)?.into()
            }
            Carried::Raw(tensor) => RawTensor::new(tensor.dtype, tensor.shape, tensor.data)?.into(),
            Carried::Plain(value) => StateValue::Plain(value),
            Carried::Dict(entries) => {
                let entry = |(name, value): (String, Carried)| Ok((name, value.into_value()?));
                StateValue::Dict(entries.into_iter().map(entry).collect::<Result<StateDict>>()?)
            }
            Carried::List(list) => StateValue::List(all(list)?),
            Carried::Tuple(list) => StateValue::Tuple(all(list)?),
        })
    }
}
