//! Param groups: reading and writing hyperparameters as `torch.optim` keeps them.

use fsdp_layout::PlainValue;

use super::error::AlgorithmError;

/// Switches between torch's implementations of a step. They do nothing here, and are kept so that
/// a checkpoint that came from torch goes back to it unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Switches {
    /// `foreach`: many tensors in one kernel.
    pub foreach: Option<bool>,
    /// `capturable`: the step can be recorded in a CUDA graph; Adam and AdamW only.
    pub capturable: bool,
    /// `differentiable`: autograd runs through the step.
    pub differentiable: bool,
    /// `fused`: the whole step in one kernel.
    pub fused: Option<bool>,
}

/// Reads hyperparameters from a param group, and records which keys it knew and which were missing.
pub(super) struct Reader<'a> {
    algorithm: &'static str,
    group: &'a [(String, PlainValue)],
    known_keys: Vec<&'static str>,
    missing_keys: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    /// Makes a reader of a group of `algorithm`, by torch's name.
    pub(super) fn new(algorithm: &'static str, group: &'a [(String, PlainValue)]) -> Self {
        Self {
            algorithm,
            group,
            known_keys: Vec::new(),
            missing_keys: Vec::new(),
        }
    }

    /// Returns the converted value under `key`, or `current` if the group does not have the key.
    /// The last of several values counts.
    ///
    /// # Errors
    /// A value that `convert` does not accept; the message says that it is not `expected`.
    pub(super) fn read<T>(
        &mut self,
        key: &'static str,
        current: T,
        expected: &'static str,
        convert: impl FnOnce(&PlainValue) -> Option<T>,
    ) -> Result<T, AlgorithmError> {
        self.known_keys.push(key);
        // Of a key that is there twice, the last counts, as in a Python dict.
        let Some((_, value)) = self.group.iter().rev().find(|(name, _)| name == key) else {
            self.missing_keys.push(key);
            return Ok(current);
        };
        let found = value.type_name();
        convert(value).ok_or(AlgorithmError::WrongType {
            algorithm: self.algorithm,
            key,
            expected,
            found,
        })
    }

    /// Returns the float under `key`, or `current` if the group does not have the key.
    pub(super) fn read_float(
        &mut self,
        key: &'static str,
        current: f64,
    ) -> Result<f64, AlgorithmError> {
        self.read(key, current, "a float", PlainValue::as_float)
    }

    /// Returns the bool under `key`, or `current` if the group does not have the key.
    pub(super) fn read_bool(
        &mut self,
        key: &'static str,
        current: bool,
    ) -> Result<bool, AlgorithmError> {
        self.read(key, current, "a bool", PlainValue::as_bool)
    }

    /// Returns the count under `key`, or `current` if the group does not have the key.
    pub(super) fn read_count(
        &mut self,
        key: &'static str,
        current: u64,
    ) -> Result<u64, AlgorithmError> {
        self.read(key, current, "a count", |value| {
            u64::try_from(value.as_int()?).ok()
        })
    }

    /// Returns the value under `key`, or `default` in a group of an older version of torch, which
    /// did not have it: torch adds it when it loads such a group.
    fn read_or_default<T>(
        &mut self,
        key: &'static str,
        default: T,
        expected: &'static str,
        convert: impl FnOnce(&PlainValue) -> Option<T>,
    ) -> Result<T, AlgorithmError> {
        // An older torch did not save the key. Then the default is what it did.
        let value = self.read(key, default, expected, convert);
        self.missing_keys.retain(|missing_key| *missing_key != key);
        value
    }

    /// Returns a switch that older versions of torch did not have.
    pub(super) fn read_switch(
        &mut self,
        key: &'static str,
        default: bool,
    ) -> Result<bool, AlgorithmError> {
        self.read_or_default(key, default, "a bool", PlainValue::as_bool)
    }

    /// Returns a switch that may be `None`, and that older versions of torch did not have.
    pub(super) fn read_optional_switch(
        &mut self,
        key: &'static str,
        default: Option<bool>,
    ) -> Result<Option<bool>, AlgorithmError> {
        self.read_or_default(key, default, "None or a bool", |value| match value {
            PlainValue::None => Some(None),
            value => value.as_bool().map(Some),
        })
    }

    /// Returns the switches between torch's implementations, with its defaults for a group that
    /// lacks them.
    pub(super) fn read_switches(&mut self, default: Switches) -> Result<Switches, AlgorithmError> {
        Ok(Switches {
            foreach: self.read_optional_switch("foreach", default.foreach)?,
            capturable: default.capturable,
            differentiable: self.read_switch("differentiable", default.differentiable)?,
            fused: self.read_optional_switch("fused", default.fused)?,
        })
    }

    /// Returns the two floats under `key`, such as Adam's `betas`.
    pub(super) fn read_float_pair(
        &mut self,
        key: &'static str,
        current: (f64, f64),
    ) -> Result<(f64, f64), AlgorithmError> {
        self.read(key, current, "a tuple of two floats", |value| {
            let [first, second] = tuple_items(value)?;
            first.as_float().zip(second.as_float())
        })
    }

    /// Returns the keys that nobody asked for, with their values, and those that were asked for and
    /// are missing.
    pub(super) fn finish(self) -> (Vec<(String, PlainValue)>, Vec<&'static str>) {
        // A scheduler, for example, keeps its own keys in the group.
        let unknown = self
            .group
            .iter()
            .filter(|(key, _)| !self.known_keys.contains(&key.as_str()))
            .cloned()
            .collect();
        (unknown, self.missing_keys)
    }
}

/// Returns the items of a tuple of `N`; `None` for anything else. A list counts as well, as JSON
/// has no tuples.
pub(super) fn tuple_items<const N: usize>(value: &PlainValue) -> Option<&[PlainValue; N]> {
    match value {
        PlainValue::Tuple(items) | PlainValue::List(items) => items.as_slice().try_into().ok(),
        _ => None,
    }
}

/// Returns a hyperparameter whose default in torch is the integer 0: zero is written as that.
pub(super) fn float_or_zero(value: f64) -> PlainValue {
    if value == 0.0 {
        PlainValue::Int(0)
    } else {
        PlainValue::Float(value)
    }
}

/// Returns `None`, `True` or `False`.
pub(super) fn optional_bool(value: Option<bool>) -> PlainValue {
    value.map_or(PlainValue::None, PlainValue::Bool)
}

/// Gives the keys of a list of literals the type that groups have.
pub(super) fn make_group<const N: usize>(
    entries: [(&str, PlainValue); N],
) -> Vec<(String, PlainValue)> {
    entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}
