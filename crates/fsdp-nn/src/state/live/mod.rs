//! A live model and its optimizers as the target of a load.

mod optim;

use std::collections::{HashMap, HashSet};

use fsdp_layout::{DType, Failure as _, KeyPath, TensorBox};
use fsdp_state::engine::{LoadOptions, Plan, Target, Values, Wanted};
use fsdp_state::{Memory, Mismatch, Schema, StateDict, StateError, StateValue, get_element, set_element};

use super::incoming::{EntryPlace, Incoming};
use super::names::{OptimKey, TiedNames, below};
use super::saved::sort_by_schema;
use crate::optimizer::Optimizer;
use crate::parameters::ShardedParameters;
use crate::{NnError, Result};

/// The keys of a source that lead to the state of a model and of its optimizers.
#[derive(Debug, Clone, Default)]
pub struct StatePrefixes {
    /// Keys that lead to the model state dict; `None` if the model is not loaded.
    pub model: Option<Vec<String>>,
    /// Keys that lead to the optimizers' state dict; `None` if they are not loaded.
    pub optim: Option<Vec<String>>,
}

/// A live model, its optimizers, and values beside them, as the target of a load. Tensors are filled where they are.
pub struct LiveTarget<'a> {
    parameters: &'a ShardedParameters,
    optimizers: Vec<&'a mut Optimizer>,
    /// The values beside them; `None` if these are not loaded.
    values: Option<&'a mut StateDict>,
    prefixes: StatePrefixes,
    rename: Box<Rename<'a>>,
    rename_in_optimizers: Box<Rename<'a>>,
    ignore_frozen: bool,
    sorted: Sorted,
    /// The place of each wanted tensor.
    places: Vec<Place>,
    /// The new state of each optimizer; empty if there is none to load.
    incoming: Vec<Incoming>,
    /// The new state under users' keys.
    user_state: StateDict,
    /// The values that are replaced on commit, rather than filled where they are.
    new_values: StateDict,
}

/// Turns a name of the source into the model's.
type Rename<'a> = dyn Fn(&str) -> String + 'a;

/// The positions of a source's leaves, by the part of the target that they belong to.
#[derive(Default)]
struct Sorted {
    model: Vec<(String, usize)>,
    optim: Vec<(OptimKey, usize)>,
    /// Keys among the optimizers' that are nothing that these optimizers can take.
    unreadable: Vec<String>,
    values: Vec<usize>,
}

/// The place of a wanted tensor.
enum Place {
    /// A parameter, by its own name.
    Parameter(String),
    /// A persistent buffer, by its name.
    Buffer(String),
    /// An entry of an optimizer's state, by the optimizer's position.
    Entry { optimizer: usize, place: EntryPlace },
    /// State under a user's key.
    User(KeyPath),
    /// A tensor among the values.
    Value(KeyPath),
}

impl<'a> LiveTarget<'a> {
    /// Returns a target over a model and its optimizers, which must be over that model.
    ///
    /// # Errors
    /// [`NnError::ForeignOptimizer`].
    pub fn new(
        parameters: &'a ShardedParameters,
        optimizers: Vec<&'a mut Optimizer>,
        prefixes: StatePrefixes,
    ) -> Result<Self> {
        if optimizers.iter().any(|optimizer| !optimizer.parameters().is_same_model(parameters)) {
            return Err(NnError::ForeignOptimizer);
        }
        Ok(LiveTarget {
            parameters,
            optimizers,
            values: None,
            prefixes,
            rename: Box::new(str::to_owned),
            rename_in_optimizers: Box::new(str::to_owned),
            ignore_frozen: false,
            sorted: Sorted::default(),
            places: Vec::new(),
            incoming: Vec::new(),
            user_state: StateDict::new(),
            new_values: StateDict::new(),
        })
    }

    /// Loads plain values beside the model and the optimizers as well, and tensors that `values` has: everything under
    /// keys that lead to neither.
    #[must_use]
    pub fn with_values(mut self, values: &'a mut StateDict) -> Self {
        self.values = Some(values);
        self
    }

    /// Turns names of the source into the model's: those of the model's values, and those of parameters in the state of
    /// optimizers.
    #[must_use]
    pub fn with_names(
        mut self,
        in_model: impl Fn(&str) -> String + 'a,
        in_optimizers: impl Fn(&str) -> String + 'a,
    ) -> Self {
        (self.rename, self.rename_in_optimizers) = (Box::new(in_model), Box::new(in_optimizers));
        self
    }

    /// Lets frozen parameters be missing from the source, if `ignore_frozen`.
    #[must_use]
    pub const fn ignore_frozen(mut self, ignore_frozen: bool) -> Self {
        self.ignore_frozen = ignore_frozen;
        self
    }

    /// Plans the parameters, each under one of its names, and the persistent buffers.
    fn plan_model(&mut self, schema: &Schema, options: &LoadOptions, plan: &mut Plan) -> Result<()> {
        let model = std::mem::take(&mut self.sorted.model);
        // Renaming must not make one of two names.
        let mut named: HashMap<&str, usize> = HashMap::new();
        for (name, position) in &model {
            if named.insert(name, *position).is_some() {
                return Err(StateError::DuplicateKey { key: name.clone() }.into());
            }
        }
        let parameters = self.parameters;
        // A tied parameter is loaded once, from the name that counts.
        let chosen = TiedNames::new(parameters).choose(named.keys().copied().filter(|name| parameters.contains(name)));
        for fqn in parameters.fqns() {
            let Some(name) = chosen.get(fqn) else {
                if !self.ignore_frozen || parameters.requires_grad(fqn)? {
                    plan.report.missing.push(fqn.to_owned());
                }
                continue;
            };
            let (shape, dtype) = (parameters.shape(fqn)?, parameters.dtype(fqn)?);
            let fitting = fit(schema, named[name], dtype, shape, parameters.boxes(fqn)?, options);
            self.add(fitting, Place::Parameter(fqn.to_owned()), name, plan);
        }
        for (name, (value, persistent)) in parameters.buffers() {
            match named.get(name.as_str()) {
                _ if !persistent => {}
                None => plan.report.missing.push(name.clone()),
                Some(&position) => {
                    let boxes = vec![TensorBox::whole(value.dims())];
                    let mut fitting = fit(schema, position, value.dtype(), value.dims(), boxes, options);
                    if let (Ok(_), false) = (&fitting, value.is_contiguous()) {
                        fitting = Err(("a tensor".to_owned(), "a buffer that is not contiguous".to_owned()));
                    }
                    // Each rank has buffers of its own, such as running statistics.
                    let fitting = fitting.map(|wanted| Wanted { is_same_on_all: false, ..wanted });
                    self.add(fitting, Place::Buffer(name.clone()), name, plan);
                }
            }
        }
        // The other names of a tied parameter are not loaded, but they are the model's.
        let is_known = |name: &str| {
            parameters.contains(name) || parameters.buffers().get(name).is_some_and(|(_, persistent)| *persistent)
        };
        let unknown = model.iter().filter(|(name, _)| !is_known(name));
        plan.report.unexpected.extend(unknown.map(|(name, _)| name.clone()));
        Ok(())
    }

    /// Asks for a tensor that fits, and reports one that does not.
    fn add(&mut self, fitting: Fitting, place: Place, name: &str, plan: &mut Plan) {
        match fitting {
            Ok(wanted) => {
                plan.wanted.push(wanted);
                self.places.push(place);
            }
            Err((saved, current)) => plan.report.mismatched.push(Mismatch { fqn: name.to_owned(), saved, current }),
        }
    }

    /// Plans the values beside model and optimizers. Tensors are filled where they are, plain values replaced on
    /// commit.
    fn plan_values(&mut self, schema: &Schema, values: &Values, options: &LoadOptions, plan: &mut Plan) -> Result<()> {
        let Some(current) = self.values.take() else { return Ok(()) };
        let positions = std::mem::take(&mut self.sorted.values);
        let mut saved: HashSet<KeyPath> = HashSet::new();
        for &position in &positions {
            let Some((path, leaf)) = schema.get(position) else { continue };
            saved.insert(path.clone());
            match (get_element(current, path), values.get(&position)) {
                (None | Some(StateValue::Plain(_) | StateValue::List(_) | StateValue::Tuple(_)), Some(value)) => {
                    set_element(&mut self.new_values, path, value.copy()?)?;
                }
                (Some(here @ (StateValue::Tensor(_) | StateValue::Sharded(_) | StateValue::Raw(_))), _) => {
                    let fitting = fit_value(schema, position, here, options)?;
                    self.add(fitting, Place::Value(path.clone()), &path.flat_key(), plan);
                }
                (Some(here), _) => {
                    let (saved, current) = (leaf.to_string(), here.kind().to_owned());
                    plan.report.mismatched.push(Mismatch { fqn: path.flat_key(), saved, current });
                }
                (None, None) => {
                    plan.refuses_unexpected = true;
                    plan.report.unexpected.push(path.flat_key());
                }
            }
        }
        // A list of plain values is one value in some formats, and its elements are in others.
        let is_saved =
            |path: &KeyPath| (1..=path.0.len()).any(|depth| saved.contains(&KeyPath(path.0[..depth].to_vec())));
        let missing = Schema::of(current)?;
        let missing = missing.iter().filter(|(path, _)| !is_saved(path));
        plan.report.missing.extend(missing.map(|(path, _)| path.flat_key()));
        self.values = Some(current);
        Ok(())
    }
}

/// A request for a tensor that fits, or the saved and the current description of one that does not.
type Fitting = std::result::Result<Wanted, (String, String)>;

/// Compares a tensor of the source with a live one.
fn fit(
    schema: &Schema,
    position: usize,
    dtype: candle_core::DType,
    shape: &[usize],
    boxes: Vec<TensorBox>,
    options: &LoadOptions,
) -> Fitting {
    let becomes = file_dtype(dtype);
    let saved = schema.get(position).and_then(|(_, leaf)| leaf.tensor());
    if let (Some((from, found)), Some(becomes)) = (saved, becomes)
        && found == shape
        && (from == becomes || options.cast && Memory::converts(from, dtype))
        && let Some(wanted) = Wanted::of(schema, position, becomes, boxes)
    {
        return Ok(wanted);
    }
    let saved = schema.get(position).map_or_else(String::new, |(_, leaf)| match leaf.tensor() {
        Some((dtype, shape)) => format!("{dtype} {shape:?}"),
        None => leaf.to_string(),
    });
    Err((saved, format!("{} {shape:?}", becomes.map_or_else(String::new, |dtype| dtype.to_string()))))
}

/// Compares a tensor of the source with one among the values beside model and optimizers.
fn fit_value(schema: &Schema, position: usize, here: &StateValue, options: &LoadOptions) -> Result<Fitting> {
    let fitting = match here {
        StateValue::Sharded(tensor) => fit(schema, position, tensor.dtype(), tensor.shape(), tensor.boxes(), options),
        StateValue::Tensor(tensor) => {
            let boxes = vec![TensorBox::whole(tensor.dims())];
            fit(schema, position, tensor.dtype(), tensor.dims(), boxes, options)
        }
        StateValue::Raw(tensor) => {
            let boxes = vec![TensorBox::whole(tensor.shape())];
            let saved = schema.get(position).and_then(|(_, leaf)| leaf.tensor());
            let wanted = Wanted::of(schema, position, tensor.dtype(), boxes);
            let is_same = saved == Some((tensor.dtype(), tensor.shape()));
            let describe = |(dtype, shape): (DType, &[usize])| format!("{dtype} {shape:?}");
            let saved = saved.map_or_else(String::new, describe);
            wanted.filter(|_| is_same).ok_or_else(|| (saved, describe((tensor.dtype(), tensor.shape()))))
        }
        other => Err((String::new(), other.kind().to_owned())),
    };
    Ok(fitting.map(|wanted| Wanted { is_same_on_all: false, ..wanted }))
}

/// Returns the dtype that files have for one of candle's; `None` if there is none.
fn file_dtype(dtype: candle_core::DType) -> Option<DType> {
    fsdp_flat::dtype::from_candle(dtype)
}

impl Target for LiveTarget<'_> {
    type Error = NnError;

    fn select(&mut self, schema: &Schema) -> Vec<usize> {
        self.sorted = Sorted::default();
        let mut selected = Vec::new();
        for (position, (path, _)) in schema.iter().enumerate() {
            if let Some(inside) = self.prefixes.optim.as_ref().and_then(|prefix| below(path, prefix)) {
                let is_parameter = |name: &str| self.parameters.contains(&(self.rename_in_optimizers)(name));
                // Without an optimizer nothing can.
                let key = OptimKey::read(&inside, &is_parameter).filter(|_| !self.optimizers.is_empty());
                if let Some(key) = key {
                    self.sorted.optim.push((key, position));
                    selected.push(position);
                } else {
                    self.sorted.unreadable.push(KeyPath(inside).flat_key());
                }
                continue;
            }
            if let Some(inside) = self.prefixes.model.as_ref().and_then(|prefix| below(path, prefix)) {
                self.sorted.model.push(((self.rename)(&KeyPath(inside).flat_key()), position));
                continue;
            }
            self.sorted.values.push(position);
            selected.extend(self.values.as_ref().map(|_| position));
        }
        selected
    }

    fn plan(&mut self, schema: &Schema, values: &Values, options: &LoadOptions) -> Result<Plan> {
        // Units that are gathered would go on with the old values.
        self.parameters.reshard()?;
        let strict = if options.strict { "strict" } else { "not strict" };
        let mut plan = Plan { arguments: strict.to_owned(), ..Plan::default() };
        if self.prefixes.model.is_some() {
            self.plan_model(schema, options, &mut plan)?;
            plan.refuses_unexpected = !plan.report.unexpected.is_empty();
        }
        if self.prefixes.optim.is_some() {
            self.plan_optimizers(schema, values, options, &mut plan)?;
            plan.refuses_unexpected |= !self.sorted.unreadable.is_empty();
            plan.report.unexpected.append(&mut self.sorted.unreadable);
        }
        if self.values.is_some() {
            self.plan_values(schema, values, options, &mut plan)?;
        } else {
            let others = self.sorted.values.iter().filter_map(|&position| schema.get(position));
            plan.report.unexpected.extend(others.map(|(path, _)| path.flat_key()));
        }
        sort_by_schema(&mut plan, &mut self.places);
        Ok(plan)
    }

    fn memory(&mut self, wanted: usize, tensor: &Wanted) -> std::result::Result<Memory, StateError> {
        let other = |error: NnError| StateError::Other { message: error.to_string(), kind: error.kind() };
        match &self.places[wanted] {
            Place::Parameter(fqn) => Ok(Memory::Tensors(self.parameters.parameter(fqn).map_err(other)?)),
            Place::Buffer(name) => match self.parameters.buffers().get(name) {
                Some((value, _)) => Ok(Memory::of_tensor(value)),
                None => Memory::fresh(DType::U8, &[0], &[]),
            },
            Place::Entry { optimizer, place } => self.incoming[*optimizer].memory(self.optimizers[*optimizer], *place),
            Place::User(_) => Memory::fresh(tensor.dtype, &tensor.shape, &tensor.boxes),
            Place::Value(path) => match self.values.as_ref().and_then(|values| get_element(values, path)) {
                Some(StateValue::Tensor(tensor)) => Ok(Memory::of_tensor(tensor)),
                Some(StateValue::Sharded(tensor)) => Ok(Memory::Tensors(tensor.clone())),
                Some(StateValue::Raw(tensor)) => Memory::raw(tensor.dtype(), tensor.shape()),
                _ => Memory::fresh(DType::U8, &[0], &[]),
            },
        }
    }

    fn filled(&mut self, wanted: usize, memory: Memory) -> std::result::Result<(), StateError> {
        match &self.places[wanted] {
            Place::Entry { optimizer, place } => {
                self.incoming[*optimizer].filled(self.optimizers[*optimizer], *place, memory)
            }
            Place::User(path) => {
                let value = memory.into_value(true, &candle_core::Device::Cpu)?;
                set_element(&mut self.user_state, path, value)
            }
            Place::Value(path) if matches!(memory, Memory::Raw(_)) => {
                let value = memory.into_value(true, &candle_core::Device::Cpu)?;
                set_element(&mut self.new_values, path, value)
            }
            Place::Parameter(_) | Place::Buffer(_) | Place::Value(_) => Ok(()),
        }
    }

    fn is_live(&self) -> bool {
        true
    }

    fn lends_live(&self, wanted: usize) -> bool {
        match &self.places[wanted] {
            Place::Parameter(_) | Place::Buffer(_) | Place::Value(_) => true,
            Place::Entry { optimizer, place } => self.incoming[*optimizer].may_be_live(*place),
            Place::User(_) => false,
        }
    }

    fn wanted_on(&self, wanted: usize, rank: usize) -> Option<Vec<TensorBox>> {
        match self.places.get(wanted)? {
            Place::Parameter(fqn) => self.parameters.boxes_on(fqn, rank).ok(),
            Place::Buffer(name) => {
                let (value, _) = self.parameters.buffers().get(name)?;
                Some(vec![TensorBox::whole(value.dims())])
            }
            Place::Entry { optimizer, place } => {
                self.incoming[*optimizer].wanted_on(self.optimizers[*optimizer], *place, rank)
            }
            Place::User(_) | Place::Value(_) => None,
        }
    }

    fn commit(&mut self) -> Result<()> {
        // A backward of what was computed with the old values would be wrong.
        for place in &self.places {
            if let Place::Parameter(fqn) = place {
                self.parameters.begin_change(fqn)?;
            }
        }
        let is_loaded = !self.incoming.is_empty();
        for (optimizer, incoming) in self.optimizers.iter_mut().zip(std::mem::take(&mut self.incoming)) {
            let (states, groups) = incoming.into_parts();
            optimizer.replace_state(states, groups)?;
        }
        if is_loaded {
            give_user_state(&mut self.optimizers, std::mem::take(&mut self.user_state));
        }
        if let Some(values) = &mut self.values {
            for (path, _) in Schema::of(&self.new_values)?.iter() {
                if let Some(value) = get_element(&self.new_values, path) {
                    set_element(values, path, value.clone())?;
                }
            }
        }
        Ok(())
    }
}

/// Gives state under users' keys to the optimizers that had it before, or else to the first.
fn give_user_state(optimizers: &mut [&mut Optimizer], user_state: StateDict) {
    let mut of_optimizer: Vec<StateDict> = optimizers.iter().map(|_| StateDict::new()).collect();
    for (key, value) in user_state {
        let holder = optimizers.iter().position(|optimizer| optimizer.user_state().contains_key(&key)).unwrap_or(0);
        if let Some(state) = of_optimizer.get_mut(holder) {
            state.insert(key, value);
        }
    }
    for (optimizer, state) in optimizers.iter_mut().zip(of_optimizer) {
        optimizer.set_user_state(state);
    }
}
