//! The state that a job saves: that of a published model with its optimizer, or that of a
//! checkpoint.

use anyhow::Result;
use clap::ValueEnum;
use fsdp_formats::checkpoint;
use fsdp_formats::metadata::Entry;
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::writer::value_item_length;
use fsdp_formats::{FileError, Location};
use fsdp_layout::boxes::saturating_bytes;
use fsdp_layout::{DType, KeyPath, PathPart, PlainValue};
use indexmap::IndexMap;

use super::models::Parameter;

/// The state that an optimizer keeps for each parameter.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum OptimizerState {
    /// Two moments in the parameters' type, and a step
    Adamw,
    /// The same in float32, with a float32 copy of the parameters, as for mixed precision
    AdamwMaster,
    /// A momentum in the parameters' type
    Sgd,
    /// Nothing: the model alone
    None,
}

impl OptimizerState {
    /// Lists the tensors that are kept for each parameter, with their types.
    fn slot_dtypes(self, parameter_dtype: DType) -> Vec<(&'static str, DType)> {
        match self {
            OptimizerState::Adamw => vec![
                ("exp_avg", parameter_dtype),
                ("exp_avg_sq", parameter_dtype),
            ],
            OptimizerState::AdamwMaster => {
                vec![
                    ("master_param", DType::F32),
                    ("exp_avg", DType::F32),
                    ("exp_avg_sq", DType::F32),
                ]
            }
            OptimizerState::Sgd => vec![("momentum_buffer", parameter_dtype)],
            OptimizerState::None => Vec::new(),
        }
    }

    /// Lists the names of the values of its parameter group.
    const fn group_values(self) -> &'static [&'static str] {
        match self {
            OptimizerState::Adamw | OptimizerState::AdamwMaster => {
                &["lr", "betas.0", "betas.1", "eps", "weight_decay"]
            }
            OptimizerState::Sgd => &["lr", "momentum", "dampening", "weight_decay"],
            OptimizerState::None => &[],
        }
    }
}

/// A key of the state.
#[derive(Debug, Clone)]
pub(super) struct Key {
    pub(super) fqn: String,
    pub(super) path: Option<KeyPath>,
}

/// Parameters that are sharded together, and all tensors that are sharded as they are.
#[derive(Debug, Clone, Default)]
pub(super) struct Unit {
    pub(super) parameters: Vec<Parameter>,
    /// The tensors of each kind (the parameters themselves, the first moments, …), one for each
    /// parameter.
    pub(super) kinds: Vec<(DType, Vec<Key>)>,
}

/// The state of a job.
#[derive(Debug, Clone, Default)]
pub(super) struct JobState {
    /// The elements of the model's parameters, where these are known from the other tensors.
    pub(super) parameter_count: Option<u64>,
    pub(super) units: Vec<Unit>,
    /// The tensors that every rank holds, with types and shapes.
    pub(super) unsharded: Vec<(Key, DType, Vec<usize>)>,
    /// The values that every rank holds, with the bytes of their items.
    pub(super) values: Vec<(Key, u64)>,
    /// The flat keys in the order of the state dict; empty if that is the order above, kind by
    /// kind.
    pub(super) order: Vec<String>,
}

impl Key {
    /// Returns the key with this path, whose flat key is the parts joined by dots.
    fn from_parts(parts: &[&str]) -> Self {
        let path = KeyPath(
            parts
                .iter()
                .map(|part| PathPart::Key((*part).to_owned()))
                .collect(),
        );
        Key {
            fqn: path.flat_key(),
            path: Some(path),
        }
    }
}

impl JobState {
    /// Returns the state of a model and its optimizer, under the keys that `fsdp train` and torch
    /// give it.
    ///
    /// # Errors
    /// A value that cannot be encoded. All those here can.
    pub(super) fn from_model(
        units: Vec<Vec<Parameter>>,
        dtype: DType,
        optimizer: OptimizerState,
    ) -> Result<Self> {
        let mut state = JobState::default();
        let mut element_count = 0;
        for parameters in units {
            // The keys are in the order of state dicts: the model first, then each kind of state.
            let mut model_keys = Vec::with_capacity(parameters.len());
            for (name, shape) in &parameters {
                model_keys.push(Key::from_parts(&["model", name]));
                element_count += shape.iter().product::<usize>() as u64;
                if matches!(
                    optimizer,
                    OptimizerState::Adamw | OptimizerState::AdamwMaster
                ) {
                    let step = Key::from_parts(&["optim", "state", name, "step"]);
                    state.unsharded.push((step, DType::F32, Vec::new()));
                }
            }
            let mut kinds = vec![(dtype, model_keys)];
            for (slot, dtype) in optimizer.slot_dtypes(dtype) {
                let keys = parameters
                    .iter()
                    .map(|(name, _)| Key::from_parts(&["optim", "state", name, slot]))
                    .collect();
                kinds.push((dtype, keys));
            }
            state.units.push(Unit { parameters, kinds });
        }
        state.parameter_count = Some(element_count);
        // All floats take the same number of bytes, whatever their values.
        let float_bytes = value_item_length(&PlainValue::Float(0.1))?;
        for name in optimizer.group_values() {
            state.values.push((
                Key::from_parts(&["optim", "param_groups", "0", name]),
                float_bytes,
            ));
        }
        state.values.push((
            Key::from_parts(&["train", "step"]),
            value_item_length(&PlainValue::Int(100_000))?,
        ));
        Ok(state)
    }

    /// Returns the state that a checkpoint holds, from its metadata.
    ///
    /// Tensors of one type whose names are equal up to their first number are a unit:
    /// `model.layers.3.`. State of an optimizer is told apart by the last part of its name. Tensors
    /// without dimensions are on all ranks.
    ///
    /// # Errors
    /// There is no committed checkpoint.
    pub(super) fn from_checkpoint(location: &Location) -> Result<Self, FileError> {
        let checkpoint = checkpoint::open(location, OpenOptions::default())?;
        let metadata = checkpoint.metadata();
        let mut state = JobState {
            order: metadata.entries.keys().cloned().collect(),
            ..JobState::default()
        };
        let mut units: IndexMap<(&str, &str, DType), Unit> = IndexMap::new();
        for (fqn, entry) in &metadata.entries {
            // Only DCP records the path of a flat key. For other formats the key is split when it
            // is planned.
            let paths = metadata.planner_data.as_ref();
            let key = Key {
                fqn: fqn.clone(),
                path: paths.and_then(|paths| paths.get(fqn)).cloned(),
            };
            match entry {
                Entry::Bytes(value) => {
                    // A value that is stored nowhere takes no bytes.
                    let length = value.stored.as_ref().map_or(0, |stored| stored.length);
                    state.values.push((key, length));
                }
                // A scalar cannot be cut, so every rank holds it.
                Entry::Tensor(tensor) if tensor.shape.is_empty() => {
                    state
                        .unsharded
                        .push((key, tensor.properties.dtype, Vec::new()));
                }
                Entry::Tensor(tensor) => {
                    let dtype = tensor.properties.dtype;
                    let (prefix, kind) = unit_prefix_and_kind(fqn);
                    let unit = units.entry((prefix, kind, dtype)).or_default();
                    unit.parameters.push((fqn.clone(), tensor.shape.clone()));
                    match unit.kinds.first_mut() {
                        Some((_, keys)) => keys.push(key),
                        None => unit.kinds.push((dtype, vec![key])),
                    }
                }
            }
        }
        state.units = units.into_values().collect();
        Ok(state)
    }

    /// Returns the bytes of all tensors, each once.
    pub(super) fn total_bytes(&self) -> u64 {
        // The shapes may come from a file, so their product may be too large for a number.
        let mut bytes: u64 = 0;
        for unit in &self.units {
            for (dtype, _) in &unit.kinds {
                for (_, shape) in &unit.parameters {
                    bytes = bytes.saturating_add(saturating_bytes(shape, *dtype));
                }
            }
        }
        for (_, dtype, shape) in &self.unsharded {
            bytes = bytes.saturating_add(saturating_bytes(shape, *dtype));
        }
        bytes
    }

    /// Returns the number of tensors.
    pub(super) fn tensor_count(&self) -> usize {
        let sharded: usize = self
            .units
            .iter()
            .map(|unit| unit.kinds.len() * unit.parameters.len())
            .sum();
        sharded + self.unsharded.len()
    }
}

/// Returns the name up to its first number, with that, and for state of an optimizer the last part;
/// empty texts where there is none.
fn unit_prefix_and_kind(fqn: &str) -> (&str, &str) {
    // Moments have the shapes of their parameters, but are sharded in FlatParameters of their own.
    let kind = if fqn.starts_with("optim") {
        fqn.rsplit('.')
            .next()
            .expect("a split text has a last part")
    } else {
        ""
    };
    let mut end = 0;
    // Layers are numbered, and the first number of a key is that of its layer.
    for part in fqn.split('.') {
        end += part.len() + 1;
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return (&fqn[..end.min(fqn.len())], kind);
        }
    }
    ("", kind)
}

#[cfg(test)]
mod tests {
    use super::super::models::find_units;
    use super::*;

    #[test]
    fn layers_are_units_and_moments_are_apart() {
        assert_eq!(
            unit_prefix_and_kind("model.layers.12.mlp.weight"),
            ("model.layers.12.", "")
        );
        assert_eq!(
            unit_prefix_and_kind("optim.state.h.3.w.exp_avg"),
            ("optim.state.h.3.", "exp_avg")
        );
        assert_eq!(unit_prefix_and_kind("model.embed.weight"), ("", ""));
        assert_eq!(
            unit_prefix_and_kind("optim.state.embed.exp_avg_sq"),
            ("", "exp_avg_sq")
        );
        assert_eq!(unit_prefix_and_kind("7"), ("7", ""));
    }

    /// MLPerf Storage gives its checkpoints in GiB, of the model and of the optimizer.
    #[test]
    fn states_are_as_large_as_the_checkpoints_of_mlperf_storage() {
        for (name, model, optimizer) in [
            ("llama-8b", 15, 90),
            ("llama-70b", 130, 781),
            ("llama-405b", 755, 4533),
        ] {
            let of = |state| {
                JobState::from_model(find_units(name).unwrap(), DType::BF16, state)
                    .unwrap()
                    .total_bytes()
            };
            let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
            let alone = gib(of(OptimizerState::None));
            let kept = gib(of(OptimizerState::AdamwMaster)) - alone;
            assert!(
                (alone / f64::from(model) - 1.0).abs() < 0.02,
                "{name}: {alone} GiB"
            );
            assert!(
                (kept / f64::from(optimizer) - 1.0).abs() < 0.02,
                "{name}: {kept} GiB"
            );
        }
    }
}
