//! Plans how the saved state of a parameter, or of a FlatParameter, is converted to an optimizer's
//! state entries, and lends the memory for them. Nothing else reads saved entries.

use std::collections::BTreeSet;

use candle_core::Tensor;
use fsdp_flat::storage::{HostBytes, unfilled, zeros_on};
use fsdp_flat::{ShardedTensor, dtype};
use fsdp_layout::{DType, PlainValue};
use fsdp_state::{Memory, StateValue};
use indexmap::IndexMap;

use super::OptimStateError;
use super::groups::to_plain;
use crate::algorithm::{Algorithm, Initial, StateKind};
use crate::error::{NnError, Result, StateDictError};
use crate::optimizer::{LocalParam, LocalState, ParamState};

/// One saved state entry of one parameter.
#[derive(Debug, Clone)]
pub(crate) enum SavedValue {
    /// A tensor: its position in the source, its dtype, its shape, and its value if the tensor is
    /// small.
    Tensor {
        position: usize,
        dtype: DType,
        shape: Vec<usize>,
        small: Option<StateValue>,
        /// Positions of the same entry under the parameter's other names.
        tied_positions: Vec<usize>,
    },
    /// A value that is no tensor, or a tensor of one element that is not shaped like its parameter.
    Scalar(StateValue),
}

impl SavedValue {
    /// Returns the entry as its algorithm takes it: a small tensor becomes a scalar, unless it is
    /// shaped like a parameter without dimensions.
    fn as_kind(&self, kind: Option<StateKind>, parameter_shape: &[usize]) -> Self {
        let SavedValue::Tensor {
            small: Some(value),
            shape,
            ..
        } = self
        else {
            return self.clone();
        };
        let is_scalar = match kind {
            // A step may have been saved with a dimension of one element.
            Some(StateKind::Scalar) => true,
            Some(StateKind::LikeParameter) => shape.is_empty() && !parameter_shape.is_empty(),
            None => shape.is_empty(),
        };
        if is_scalar {
            SavedValue::Scalar(value.clone())
        } else {
            self.clone()
        }
    }

    /// Returns the shape; that of a value that is no tensor has no dimensions.
    fn shape(&self) -> &[usize] {
        match self {
            SavedValue::Tensor { shape, .. } => shape,
            SavedValue::Scalar(_) => &[],
        }
    }

    /// Makes `other` a further name's value of the entry: tensors are compared when they are read,
    /// and small values here.
    ///
    /// # Errors
    /// Descriptions of both, if they are known to differ already.
    pub(crate) fn tie(&mut self, other: &SavedValue) -> Result<(), (String, String)> {
        let is_same = match (self.small_text(), other.small_text()) {
            (Some(text), Some(other_text)) => text == other_text,
            _ => self.type_name() == other.type_name() && self.describe() == other.describe(),
        };
        if !is_same {
            return Err((self.describe_small(), other.describe_small()));
        }
        if let (
            SavedValue::Tensor { tied_positions, .. },
            SavedValue::Tensor {
                position: other_position,
                ..
            },
        ) = (self, other)
        {
            tied_positions.push(*other_position);
        }
        Ok(())
    }

    /// Returns the value of an entry that is small, or else its dtype and shape.
    fn describe_small(&self) -> String {
        match self {
            SavedValue::Tensor {
                small: Some(value), ..
            } => SavedValue::Scalar(value.clone()).describe(),
            value => value.describe(),
        }
    }

    /// Returns a text that is the same for two small values only if they are equal and of one
    /// dtype; `None` for a tensor of several elements.
    fn small_text(&self) -> Option<String> {
        match self {
            SavedValue::Tensor { small, .. } => {
                SavedValue::Scalar(small.clone()?).comparable_text()
            }
            SavedValue::Scalar(_) => self.comparable_text(),
        }
    }

    /// Returns the kind of the entry, for messages.
    const fn type_name(&self) -> &'static str {
        match self {
            SavedValue::Tensor { .. } => "tensor",
            SavedValue::Scalar(StateValue::Tensor(_)) => "zero-dimension tensor",
            SavedValue::Scalar(value) => value.kind(),
        }
    }

    /// Returns the value of the entry, or its dtype and shape, for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            SavedValue::Tensor { dtype, shape, .. } => format!("{dtype} {shape:?}"),
            SavedValue::Scalar(value @ StateValue::Tensor(_)) => to_plain(value)
                .and_then(|number| number.as_float())
                .map_or_else(String::new, |number| number.to_string()),
            SavedValue::Scalar(StateValue::Plain(value)) => format!("{value:?}"),
            SavedValue::Scalar(other) => other.kind().to_owned(),
        }
    }

    /// Returns a text that is the same for two scalars only if they are equal and of one dtype;
    /// `None` for tensors.
    fn comparable_text(&self) -> Option<String> {
        match self {
            SavedValue::Tensor { .. } => None,
            SavedValue::Scalar(value) => value
                .to_plain()
                .ok()
                .flatten()
                .map(|value| format!("{value:?}")),
        }
    }
}

/// Returns the number of steps that a value holds, as a number or as a tensor of one element.
/// Returns `None` if it is negative, not finite, or not a number.
pub(crate) fn as_step(value: &StateValue) -> Option<f32> {
    let step = to_plain(value)?.as_float()?;
    (step.is_finite() && step >= 0.0).then_some(step as f32)
}

/// A parameter's saved entries, by name.
pub(crate) type SavedEntries = IndexMap<String, SavedValue>;

/// A tensor that a plan asks for.
#[derive(Debug)]
pub(crate) struct EntryTensor {
    /// Its position in the source.
    pub(crate) position: usize,
    /// Positions of the same entry under the parameter's other names, which must have its values.
    pub(crate) tied_positions: Vec<usize>,
    /// The dtype that it becomes.
    pub(crate) target_dtype: DType,
    /// The name of the entry that it becomes, or that it becomes a part of.
    pub(crate) name: String,
    /// The parameter that it is shaped like, and the memory to fill. `None` for a tensor of another
    /// shape, which becomes an entry once it has been read.
    pub(crate) parameter: Option<(String, ShardedTensor, MemoryKind)>,
}

/// The kind of memory that a load fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// Memory of the live model or its optimizers.
    Live,
    /// New memory, which is zero where nothing is loaded.
    New,
    /// New tensors that take no memory until they are filled.
    Unfilled,
}

/// The state of one local parameter while it is loaded. It is complete once all its tensors are
/// filled.
#[derive(Debug)]
pub(crate) struct EntryPlan {
    pub(crate) state: ParamState,
    pub(crate) tensors: Vec<EntryTensor>,
    /// Entries that the algorithm needs and that were not saved.
    pub(crate) missing: Vec<&'static str>,
    /// Saved entries of another algorithm, which are left out.
    pub(crate) foreign: Vec<String>,
}

/// One state entry of a local parameter, as it was saved for each of the model's parameters that it
/// is made of.
struct SavedEntry<'a> {
    local: &'a LocalParam,
    name: &'a str,
    /// The kind that the algorithm gives to this entry; `None` for an entry that has a shape of its
    /// own, such as Adafactor's averages, and for one that the algorithm does not know.
    kind: Option<StateKind>,
    values: Vec<Option<SavedValue>>,
    /// `true` if parameters of a FlatParameter may lack state that others of it have.
    allow_missing: bool,
    /// `true` if tensors of another dtype than the parameter are converted.
    cast: bool,
}

impl SavedEntry<'_> {
    /// Returns `true` if its algorithm has it in the parameter's shape.
    fn is_like_parameter(&self) -> bool {
        self.kind == Some(StateKind::LikeParameter)
    }
}

impl EntryPlan {
    /// Plans the state of a local parameter; `None` if nothing was saved for it. `saved` has an
    /// item for each of the model's parameters that the local parameter is made of: nothing for
    /// some of them only if `allow_missing`, and then entries of other algorithms are left out.
    /// Tensors of another dtype are converted if `cast`.
    pub(crate) fn new(
        local: &LocalParam,
        algorithm: &Algorithm,
        saved: &[Option<&SavedEntries>],
        allow_missing: bool,
        cast: bool,
    ) -> Result<Option<Self>> {
        let Some(first_entries) = saved.iter().flatten().next() else {
            return Ok(None);
        };
        // One flat tensor holds an entry of all these parameters. So if one of them has the entry,
        // all others with state must have it too.
        let names: BTreeSet<&String> = first_entries.keys().collect();
        if saved
            .iter()
            .flatten()
            .any(|entries| entries.keys().collect::<BTreeSet<_>>() != names)
        {
            let names = saved.iter().map(|entries| {
                entries.map_or_else(Vec::new, |entries| entries.keys().cloned().collect())
            });
            return Err(OptimStateError::DifferingNames {
                fqns: local.fqns(),
                names: names.collect(),
            }
            .into());
        }
        // Adafactor's averages have shapes of their own, and exist from the first step on. Its
        // parameters are never flat.
        let params = local.params();
        let shapes = local.handle.layout().shapes();
        let averages = if let [param] = params[..] {
            algorithm.averages_of(&shapes[param])
        } else {
            Vec::new()
        };
        for (name, expected) in &averages {
            if let Some(found) = first_entries.get(*name).map(SavedValue::shape)
                && found != expected.as_slice()
            {
                return Err(OptimStateError::WrongShape {
                    fqn: local.name(),
                    name: (*name).to_owned(),
                    found: found.to_vec(),
                    expected: expected.clone(),
                }
                .into());
            }
        }
        // Take the entries in the algorithm's order, whatever order they were saved in, so that
        // equal state is saved as equal bytes again.
        let mut known_names: Vec<&'static str> =
            algorithm.state_entries().map(|entry| entry.name).collect();
        known_names.extend(averages.iter().map(|(name, _)| *name));
        let mut ordered_names: Vec<&String> = first_entries.keys().collect();
        ordered_names.sort_by_key(|name| {
            known_names
                .iter()
                .position(|entry| entry == name)
                .unwrap_or(known_names.len())
        });
        let mut plan = EntryPlan {
            state: ParamState::default(),
            tensors: Vec::new(),
            missing: Vec::new(),
            foreign: Vec::new(),
        };
        for name in ordered_names {
            // Such an entry would never be updated, but saved again and again.
            if allow_missing && algorithm.is_foreign_entry(name) {
                plan.foreign.push(name.clone());
                continue;
            }
            // The algorithm knows which entries are shaped like the parameter; others are kept as
            // they are.
            let kind = params
                .first()
                .and_then(|&param| algorithm.kind_of(name, &shapes[param]));
            let values = saved.iter().zip(&params).map(|(entries, &param)| {
                Some(entries.as_ref()?.get(name)?.as_kind(kind, &shapes[param]))
            });
            plan.plan_entry(&SavedEntry {
                local,
                name,
                kind,
                values: values.collect(),
                allow_missing,
                cast,
            })?;
        }
        // Note which entries are missing. Those that are made with the first gradient may be
        // absent, because there may have been no gradient yet.
        let mut missing: Vec<&'static str> = algorithm
            .state_entries()
            .filter(|entry| entry.initial != Initial::FirstGradient)
            .map(|entry| entry.name)
            .collect();
        if plan.state.step.is_some_and(|step| step > 0.0) {
            missing.extend(averages.iter().map(|(name, _)| *name));
        }
        missing.retain(|name| !first_entries.contains_key(*name));
        plan.missing = missing;
        Ok(Some(plan))
    }

    /// Plans one `entry`: adds its value to the state, or its tensors to those to be loaded.
    fn plan_entry(&mut self, entry: &SavedEntry<'_>) -> Result<()> {
        let &SavedEntry {
            local,
            name,
            kind,
            ref values,
            ..
        } = entry;
        let first_value = values
            .iter()
            .flatten()
            .next()
            .expect("an entry is the state of one of the parameters");
        // All parameters of a FlatParameter must agree, since it has one entry for all.
        let is_one_type = values
            .iter()
            .flatten()
            .all(|value| value.type_name() == first_value.type_name());
        let is_tensor = matches!(first_value, SavedValue::Tensor { .. });
        if is_one_type && kind == Some(StateKind::Scalar) && is_tensor {
            return Err(malformed_step_error(local, first_value));
        }
        if !is_one_type || entry.is_like_parameter() && !is_tensor {
            let types = values
                .iter()
                .map(|value| {
                    value
                        .as_ref()
                        .map_or("None", SavedValue::type_name)
                        .to_owned()
                })
                .collect();
            return Err(OptimStateError::DifferingTypes {
                name: name.to_owned(),
                types,
                fqns: local.fqns(),
            }
            .into());
        }
        let SavedValue::Scalar(value) = first_value else {
            return self.add_tensors(entry);
        };
        // A FlatParameter has one scalar for all its parameters, so their scalars must be the same.
        let comparable_text = first_value.comparable_text();
        let is_same = values.iter().all(|value| match value {
            Some(value) => value.comparable_text() == comparable_text,
            None => entry.allow_missing,
        });
        if !is_same {
            let mut dtypes = BTreeSet::new();
            for value in values.iter().flatten() {
                if let SavedValue::Scalar(StateValue::Tensor(tensor)) = value {
                    dtypes.insert(tensor.dtype().as_str().to_owned());
                }
            }
            return Err(OptimStateError::DifferingScalars {
                name: name.to_owned(),
                values: values
                    .iter()
                    .map(|value| {
                        value
                            .as_ref()
                            .map_or("None".to_owned(), SavedValue::describe)
                    })
                    .collect(),
                dtypes: dtypes.into_iter().collect(),
                fqns: local.fqns(),
            }
            .into());
        }
        if kind == Some(StateKind::Scalar) {
            let Some(step) = as_step(value) else {
                return Err(malformed_step_error(local, first_value));
            };
            self.state.step = Some(step);
            return Ok(());
        }
        // An entry that the algorithm does not know is kept, and saved again.
        let kept = match (value.copy()?, value.to_plain()?) {
            (StateValue::Tensor(tensor), _) => LocalState::Whole(tensor),
            (_, Some(plain)) => LocalState::Plain(plain),
            (other, None) => return Err(unexpected_state_error(local, name, other.kind())),
        };
        self.state.entries.insert(name.to_owned(), kept);
        Ok(())
    }

    /// Plans an entry that is a tensor for every parameter that has it.
    fn add_tensors(&mut self, entry: &SavedEntry<'_>) -> Result<()> {
        let &SavedEntry {
            local,
            name,
            ref values,
            ..
        } = entry;
        let is_like_parameter = entry.is_like_parameter();
        let params = local.params();
        let fqns = local.fqns();
        let shapes = local.handle.layout().shapes();
        let mut dtypes: BTreeSet<DType> = BTreeSet::new();
        // Step 1: look at all values before choosing the error. It names the first value that does
        // not fit. Zeros take the place of absent values, but not for a parameter without
        // dimensions: torch refuses that.
        let mut wrong_shape = None;
        let mut absent_scalar = None;
        for ((&param, fqn), value) in params.iter().zip(&fqns).zip(values) {
            let Some(SavedValue::Tensor { dtype, shape, .. }) = value else {
                if shapes[param].is_empty() && value.is_none() && !entry.allow_missing {
                    absent_scalar = Some(fqn);
                }
                continue;
            };
            dtypes.insert(*dtype);
            if *shape != shapes[param] && wrong_shape.is_none() {
                wrong_shape = Some((fqn, shape, &shapes[param]));
            }
        }
        if !is_like_parameter
            && let Some(dtype) = dtypes
                .iter()
                .find(|dtype| dtype::to_candle(**dtype).is_err())
        {
            return Err(unexpected_state_error(
                local,
                name,
                &format!("tensor of {dtype}"),
            ));
        }
        if wrong_shape.is_some() && !is_like_parameter && have_one_dtype_and_shape(values) {
            // The FlatParameter has one such tensor, and the state of each of its parameters was
            // saved with a copy of it. Until the copies are read and compared, a placeholder keeps
            // the entry's place.
            self.state
                .entries
                .insert(name.to_owned(), LocalState::Plain(PlainValue::None));
            for value in values.iter().flatten() {
                let SavedValue::Tensor {
                    position,
                    dtype,
                    tied_positions,
                    ..
                } = value
                else {
                    continue;
                };
                self.tensors.push(EntryTensor {
                    position: *position,
                    tied_positions: tied_positions.clone(),
                    target_dtype: *dtype,
                    name: name.to_owned(),
                    parameter: None,
                });
            }
            return Ok(());
        }
        if dtypes.len() > 1 {
            return Err(OptimStateError::DifferingDTypes {
                name: name.to_owned(),
                dtypes: dtypes.iter().map(DType::to_string).collect(),
                fqns,
            }
            .into());
        }
        if let Some((fqn, found, expected)) = wrong_shape {
            return Err(OptimStateError::WrongShape {
                fqn: fqn.clone(),
                name: name.to_owned(),
                found: found.clone(),
                expected: expected.clone(),
            }
            .into());
        }
        if let Some(fqn) = absent_scalar {
            return Err(OptimStateError::ZeroDimParameter {
                fqn: fqn.clone(),
                name: name.to_owned(),
            }
            .into());
        }
        let found = *dtypes.first().expect("an entry of tensors has one");
        let expected = local.handle.file_dtype();
        let can_cast = entry.cast && Memory::converts(found, local.handle.dtype());
        if is_like_parameter && found != expected && !can_cast {
            return Err(OptimStateError::WrongDType {
                fqn: fqns[0].clone(),
                name: name.to_owned(),
                found: found.to_string(),
                expected: expected.to_string(),
            }
            .into());
        }
        // An entry of the parameter's shape takes the parameter's dtype. Other entries keep the
        // dtype that was saved.
        let target_dtype = if is_like_parameter { expected } else { found };
        let dtype = dtype::to_candle(target_dtype)?;
        // Step 2: find memory for the entry of the whole local parameter. Its live memory is filled
        // only if the values cover all of it. What is not covered must become zero, so it needs new
        // memory.
        let live_piece = local
            .live_piece(name)
            .filter(|live_piece| live_piece.dtype() == dtype);
        let device = local.handle.shard_device();
        let (flat, memory_kind) = match live_piece.filter(|_| values.iter().all(Option::is_some)) {
            Some(live_piece) => (live_piece.clone(), MemoryKind::Live),
            None if device.is_cpu() && local.is_one_box() => {
                (unfilled(&[local.numel], dtype)?, MemoryKind::Unfilled)
            }
            None => (zeros_on(&[local.numel], dtype, device)?, MemoryKind::New),
        };
        // Step 3: give each parameter its part of that memory.
        for ((&param, fqn), value) in params.iter().zip(fqns).zip(values) {
            let Some(SavedValue::Tensor {
                position,
                tied_positions,
                ..
            }) = value
            else {
                continue;
            };
            self.tensors.push(EntryTensor {
                position: *position,
                tied_positions: tied_positions.clone(),
                target_dtype,
                name: name.to_owned(),
                parameter: Some((fqn, local.sharded_piece(&flat, param)?, memory_kind)),
            });
        }
        self.state
            .entries
            .insert(name.to_owned(), LocalState::Piece(flat));
        Ok(())
    }

    /// Adds the scalars of parameter `fqn`, which must be the same on all ranks, as text under
    /// `state.<fqn>.<entry>`.
    pub(crate) fn add_scalars(&self, fqn: &str, scalars: &mut Vec<(String, String)>) {
        if let Some(step) = self.state.step {
            scalars.push((format!("state.{fqn}.step"), format!("{step:?}")));
        }
        for (name, value) in &self.state.entries {
            let value = match value {
                LocalState::Plain(value) => format!("{value:?}"),
                LocalState::Whole(tensor) => SavedValue::Scalar(tensor.clone().into())
                    .comparable_text()
                    .unwrap_or_else(|| "a tensor of many elements".to_owned()),
                LocalState::Piece(_) => continue,
            };
            scalars.push((format!("state.{fqn}.{name}"), value));
        }
    }

    /// Sets an entry to a tensor that has been read. It is called once for each parameter of a
    /// FlatParameter, and all parameters must have the same tensor.
    pub(crate) fn set_whole_tensor(
        &mut self,
        local: &LocalParam,
        name: &str,
        tensor: Tensor,
    ) -> Result<()> {
        if let Some(LocalState::Whole(earlier)) = self.state.entries.get(name)
            && *HostBytes::read(earlier)? != *HostBytes::read(&tensor)?
        {
            return Err(OptimStateError::DifferingScalars {
                name: name.to_owned(),
                values: vec!["tensors with other elements".to_owned()],
                dtypes: vec![tensor.dtype().as_str().to_owned()],
                fqns: local.fqns(),
            }
            .into());
        }
        self.state
            .entries
            .insert(name.to_owned(), LocalState::Whole(tensor));
        Ok(())
    }
}

/// Returns the error for a saved step that is no number of steps.
fn malformed_step_error(local: &LocalParam, step: &SavedValue) -> NnError {
    let error = OptimStateError::MalformedStep {
        fqn: local.name(),
        found: step.describe(),
    };
    error.into()
}

/// Returns the error for an entry of a kind that no optimizer can keep.
pub(crate) fn unexpected_state_error(local: &LocalParam, name: &str, kind: &str) -> NnError {
    let error = StateDictError::UnexpectedState {
        fqn: local.name(),
        name: name.to_owned(),
        kind: kind.to_owned(),
    };
    error.into()
}

/// Returns `true` if there is a value for every parameter, and all are tensors of the same dtype
/// and shape. Then they may be copies of one tensor, which the FlatParameter has as a whole.
fn have_one_dtype_and_shape(values: &[Option<SavedValue>]) -> bool {
    let mut tensors = values.iter().map(|value| match value {
        Some(SavedValue::Tensor { dtype, shape, .. }) => Some((dtype, shape)),
        _ => None,
    });
    let first_tensor = tensors.next().flatten();
    first_tensor.is_some() && tensors.all(|tensor| tensor == first_tensor)
}
