//! The nested state dict.

use candle_core::{Device, Tensor};
use fsdp_flat::{RawTensor, ShardedTensor};
use fsdp_layout::{PlainValue, TensorBox};
use indexmap::IndexMap;
use indexmap::map::Entry;

use crate::error::StateError;

/// A value of a state dict.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum StateValue {
    /// A whole tensor on this rank.
    Tensor(Tensor),
    /// A tensor that is sharded over ranks. This rank has some boxes of it, or none.
    Sharded(ShardedTensor),
    /// A whole tensor of a dtype that candle does not compute with.
    Raw(RawTensor),
    /// Anything that is not a tensor and holds none.
    Plain(PlainValue),
    /// A nested dict.
    Dict(StateDict),
    /// A list that holds tensors or dicts.
    List(Vec<StateValue>),
    /// A tuple that holds tensors. In a checkpoint it is one object, tensors included.
    Tuple(Vec<StateValue>),
}

/// Names to values, in insertion order: torch's (nested) state dict. Order carries no meaning, and
/// may differ between ranks. Cloning shares the elements of tensors.
///
/// ```
/// use fsdp_state::{StateDict, StateValue};
/// let mut train = StateDict::new();
/// train.insert("step", 20i64);
/// let mut state = StateDict::new();
/// state.insert("train", train);
/// assert_eq!(state.plain_at(&["train", "step"]).and_then(|step| step.as_int()), Some(20));
/// ```
#[derive(Debug, Clone, Default)]
pub struct StateDict {
    entries: IndexMap<String, StateValue>,
    /// A note if a load in place would lose values; `None` if they are nowhere else.
    snapshot: Option<Snapshot>,
}

/// A note on a state dict of something live, of which only some values are views.
#[derive(Debug, Clone)]
struct Snapshot {
    /// The key below which all tensors are views; empty if there is none.
    live_key: &'static str,
    /// The way to load the rest.
    advice: &'static str,
}

impl StateDict {
    /// Makes an empty dict.
    #[must_use]
    pub fn new() -> Self {
        StateDict::default()
    }

    /// Notes that this is the state dict of something live. Values that are loaded in place reach
    /// it only below `live_key` (nowhere if that is empty); elsewhere they would end in copies and
    /// be lost, so that such a load is an error, which ends with `advice`.
    #[must_use]
    pub fn as_snapshot(mut self, live_key: &'static str, advice: &'static str) -> Self {
        self.snapshot = Some(Snapshot { live_key, advice });
        self
    }

    /// Takes the notes of [`Self::as_snapshot`] away, here and in all dicts below: for a dict whose
    /// values belong to nothing else.
    pub(crate) fn without_notes(mut self) -> Self {
        self.snapshot = None;
        let mut values: Vec<&mut StateValue> = self.entries.values_mut().collect();
        while let Some(value) = values.pop() {
            match value {
                StateValue::Dict(dict) => {
                    dict.snapshot = None;
                    values.extend(dict.entries.values_mut());
                }
                StateValue::List(items) | StateValue::Tuple(items) => values.extend(items),
                _ => {}
            }
        }
        self
    }

    /// Checks that a load in place of the keys that `is_loaded` selects would reach what the values
    /// belong to.
    ///
    /// # Errors
    /// [`StateError::LostInSnapshot`].
    pub fn check_reaches_owner(&self, is_loaded: impl Fn(&str) -> bool) -> Result<(), StateError> {
        // Dicts that are yet to be looked into, and the beginning of their keys.
        let mut remaining = vec![(String::new(), self)];
        // Values of dicts and lists, and the keys of these.
        let mut values: Vec<(String, &StateValue)> = Vec::new();
        while let Some((prefix, dict)) = remaining.pop() {
            for (key, value) in dict {
                let key_here = format!("{prefix}{key}");
                if let Some(snapshot) = &dict.snapshot
                    && key != snapshot.live_key
                    && is_loaded(&key_here)
                {
                    return Err(StateError::LostInSnapshot {
                        key: key_here,
                        advice: snapshot.advice,
                    });
                }
                values.push((key_here, value));
            }
            while let Some((key, value)) = values.pop() {
                match value {
                    StateValue::Dict(inner) => remaining.push((format!("{key}."), inner)),
                    StateValue::List(items) | StateValue::Tuple(items) => {
                        let keys = (0..).map(|index: usize| format!("{key}.{index}"));
                        values.extend(keys.zip(items));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Sets the value of a key, and returns its old value, if it had one.
    pub fn insert(
        &mut self,
        key: impl Into<String>,
        value: impl Into<StateValue>,
    ) -> Option<StateValue> {
        self.entries.insert(key.into(), value.into())
    }

    /// Adds a key that the dict does not have yet.
    ///
    /// # Errors
    /// [`StateError::DuplicateKey`], if it has the key.
    pub fn insert_new(
        &mut self,
        key: impl Into<String>,
        value: impl Into<StateValue>,
    ) -> Result<(), StateError> {
        match self.entries.entry(key.into()) {
            Entry::Occupied(entry) => Err(StateError::DuplicateKey {
                key: entry.key().clone(),
            }),
            Entry::Vacant(entry) => {
                entry.insert(value.into());
                Ok(())
            }
        }
    }

    /// Returns the value of a key; `None` if the dict does not have it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&StateValue> {
        self.entries.get(key)
    }

    /// Returns the value of a key, to change it; `None` if the dict does not have it.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut StateValue> {
        self.entries.get_mut(key)
    }

    /// Removes a key, and returns its value, if the dict has it. The other keys keep their order.
    pub fn remove(&mut self, key: &str) -> Option<StateValue> {
        self.entries.shift_remove(key)
    }

    /// Returns `true` if the dict has `key`.
    #[must_use]
    pub fn contains_key(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Returns the number of keys at this level.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the keys in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns keys and values in order.
    pub fn iter(&self) -> indexmap::map::Iter<'_, String, StateValue> {
        self.entries.iter()
    }

    /// Returns keys and values in order, to change the values.
    pub fn iter_mut(&mut self) -> indexmap::map::IterMut<'_, String, StateValue> {
        self.entries.iter_mut()
    }

    /// Returns the dict at a key; `None` if there is none.
    #[must_use]
    pub fn dict(&self, key: &str) -> Option<&StateDict> {
        self.get(key).and_then(StateValue::as_dict)
    }

    /// Returns the plain value at the end of a chain of dict keys; `None` if there is none.
    #[must_use]
    pub fn plain_at(&self, keys: &[&str]) -> Option<&PlainValue> {
        let (last_key, dict_keys) = keys.split_last()?;
        let dict = dict_keys
            .iter()
            .try_fold(self, |dict, key| dict.dict(key))?;
        match dict.get(last_key)? {
            StateValue::Plain(value) => Some(value),
            _ => None,
        }
    }

    /// Returns a copy of the dict in which each candle tensor has new memory on the same device. (A
    /// clone shares memory.)
    ///
    /// # Errors
    /// A tensor whose memory is released; candle's errors.
    pub fn copy(&self) -> Result<Self, StateError> {
        self.copy_to(None)
    }

    /// Copies the dict like [`Self::copy`], to a device if one is given.
    ///
    /// # Errors
    /// The errors of [`Self::copy`].
    pub fn copy_to(&self, device: Option<&Device>) -> Result<Self, StateError> {
        self.iter()
            .map(|(key, value)| Ok((key.clone(), value.copy_to(device)?)))
            .collect()
    }
}

impl StateValue {
    /// Returns the nested dict; `None` for any other value.
    #[must_use]
    pub const fn as_dict(&self) -> Option<&StateDict> {
        match self {
            StateValue::Dict(dict) => Some(dict),
            _ => None,
        }
    }

    /// Returns the whole candle tensor; `None` for any other value, a sharded or raw tensor
    /// included.
    #[must_use]
    pub const fn as_tensor(&self) -> Option<&Tensor> {
        match self {
            StateValue::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// Returns the sharded tensor; `None` for any other value.
    #[must_use]
    pub const fn as_sharded(&self) -> Option<&ShardedTensor> {
        match self {
            StateValue::Sharded(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// Returns this rank's part of a candle tensor, whole or sharded; `None` for other values.
    pub(crate) fn to_sharded(&self) -> Option<ShardedTensor> {
        match self {
            StateValue::Tensor(tensor) => Some(ShardedTensor::from_whole(tensor)),
            StateValue::Sharded(tensor) => Some(tensor.clone()),
            _ => None,
        }
    }

    /// Returns the plain value; `None` for any other value.
    #[must_use]
    pub const fn as_plain(&self) -> Option<&PlainValue> {
        match self {
            StateValue::Plain(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the candle tensors of this rank's part of a tensor; none for other values.
    #[must_use]
    pub fn candle_tensors(&self) -> Vec<&Tensor> {
        match self {
            StateValue::Tensor(tensor) => vec![tensor],
            StateValue::Sharded(tensor) => {
                tensor.shards().iter().map(|shard| &shard.tensor).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Returns the boxes of a tensor that this rank has; none for other values.
    pub(crate) fn boxes(&self) -> Vec<TensorBox> {
        match self {
            StateValue::Tensor(tensor) => vec![TensorBox::whole(tensor.dims())],
            StateValue::Raw(tensor) => vec![TensorBox::whole(tensor.shape())],
            StateValue::Sharded(tensor) => tensor.boxes(),
            _ => Vec::new(),
        }
    }

    /// Returns the dtype of a candle tensor, whole or sharded; `None` for other values.
    pub(crate) fn candle_dtype(&self) -> Option<candle_core::DType> {
        match self {
            StateValue::Tensor(tensor) => Some(tensor.dtype()),
            StateValue::Sharded(tensor) => Some(tensor.dtype()),
            _ => None,
        }
    }

    /// Returns the name of the value's kind, for messages.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            StateValue::Tensor(_) => "tensor",
            StateValue::Sharded(_) => "sharded tensor",
            StateValue::Raw(_) => "raw tensor",
            StateValue::Plain(value) => value.type_name(),
            StateValue::Dict(_) => "dict",
            StateValue::List(_) => "list",
            StateValue::Tuple(_) => "tuple",
        }
    }

    /// Returns `true` if the value is a tensor of any kind: whole, sharded or raw.
    #[must_use]
    pub const fn is_tensor(&self) -> bool {
        matches!(
            self,
            StateValue::Tensor(_) | StateValue::Sharded(_) | StateValue::Raw(_)
        )
    }
}

macro_rules! from {
    ($($type:ty => $value:ident $to:expr;)*) => {
        $(impl From<$type> for StateValue {
            fn from($value: $type) -> Self {
                $to
            }
        })*
    };
}

from! {
    Tensor => value StateValue::Tensor(value);
    ShardedTensor => value StateValue::Sharded(value);
    RawTensor => value StateValue::Raw(value);
    PlainValue => value StateValue::Plain(value);
    StateDict => value StateValue::Dict(value);
    bool => value StateValue::Plain(value.into());
    i64 => value StateValue::Plain(value.into());
    f64 => value StateValue::Plain(value.into());
    &str => value StateValue::Plain(value.into());
    String => value StateValue::Plain(value.into());
}

impl<K: Into<String>> FromIterator<(K, StateValue)> for StateDict {
    /// Makes a dict of keys and values, in their order. If a key occurs twice, the last value
    /// counts.
    fn from_iter<I: IntoIterator<Item = (K, StateValue)>>(iter: I) -> Self {
        StateDict {
            entries: iter
                .into_iter()
                .map(|(key, value)| (key.into(), value))
                .collect(),
            snapshot: None,
        }
    }
}

impl<K: Into<String>> Extend<(K, StateValue)> for StateDict {
    fn extend<I: IntoIterator<Item = (K, StateValue)>>(&mut self, iter: I) {
        self.entries
            .extend(iter.into_iter().map(|(key, value)| (key.into(), value)));
    }
}

impl IntoIterator for StateDict {
    type Item = (String, StateValue);
    type IntoIter = indexmap::map::IntoIter<String, StateValue>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

impl<'a> IntoIterator for &'a StateDict {
    type Item = (&'a String, &'a StateValue);
    type IntoIter = indexmap::map::Iter<'a, String, StateValue>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.iter()
    }
}
