//! A live model and its optimizers as the target of a load.

mod incoming;
mod optim;

use std::collections::{HashMap, HashSet};

use candle_core::Device;
use fsdp_layout::{KeyPath, TensorBox};
use fsdp_state::engine::{LoadOptions, Plan, Target, Values, Wanted};
use fsdp_state::{
    Memory, Mismatch, Schema, StateDict, StateError, StateValue, get_element, set_element,
};

pub(crate) use self::incoming::ExactLoad;
use self::incoming::Incoming;
use super::entry::MemoryKind;
use super::groups::to_number;
use super::names::{OptimKey, has_numbered_groups, names_that_count};
use super::saved::LoadContext;
use super::views::persistent_buffers;
use crate::error::{NnError, Result};
use crate::model::ShardedParameters;
use crate::optimizer::Optimizer;

/// The keys of a source that lead to the state of a model and of its optimizers.
#[derive(Debug, Clone, Default)]
pub struct StatePrefixes {
    /// Keys that lead to the model state dict; `None` if the model is not loaded.
    pub model: Option<Vec<String>>,
    /// Keys that lead to the optimizers' state dict; `None` if they are not loaded.
    pub optim: Option<Vec<String>>,
}

/// A live model, its optimizers, and values beside them, as the target of a load. Tensors are
/// filled where they are. Optimizers without state, which nobody uses yet, get fresh ones.
pub struct LiveTarget<'a> {
    parameters: &'a ShardedParameters,
    optimizers: Vec<&'a mut Optimizer>,
    /// The values beside them; `None` if these are not loaded.
    values: Option<&'a mut StateDict>,
    prefixes: StatePrefixes,
    rename: Box<Rename<'a>>,
    rename_in_optimizers: Box<Rename<'a>>,
    ignore_frozen: bool,
    exact: Option<ExactLoad>,
    /// Arguments of the call that all ranks must pass alike, for people to read.
    arguments: String,
    /// The destinations of the wanted tensors, which hold their indices as `place`.
    destinations: Vec<Destination>,
    /// The new state of each optimizer; empty if there is none to load.
    incoming: Vec<Incoming>,
    /// The new state under users' keys.
    user_state: StateDict,
    /// The values beside them, as they will be. Tensors that are filled where they are are shared.
    new_values: StateDict,
}

/// Turns a name of the source into the model's.
type Rename<'a> = dyn Fn(&str) -> String + 'a;

/// The positions of a source's leaves, by the part of the target that they belong to.
#[derive(Default)]
struct SortedLeaves {
    model: Vec<(String, usize)>,
    optim: Vec<(OptimKey, usize)>,
    /// Keys among the optimizers' that are nothing that these optimizers can take.
    unreadable: Vec<String>,
    values: Vec<usize>,
}

/// The destination of a wanted tensor.
struct Destination {
    /// The memory that it goes to, and its kind; `None` if it gets fresh memory, which is taken
    /// over when it is filled.
    memory: Option<(StateValue, MemoryKind)>,
    part: TargetPart,
}

/// The part of the target that a wanted tensor belongs to.
enum TargetPart {
    /// A parameter, by its own name.
    Parameter(String),
    /// A persistent buffer.
    Buffer,
    /// An entry of an optimizer's state that is shaped like this parameter.
    EntryLike(String),
    /// An entry of another shape: the positions of the optimizer and of the local parameter, and
    /// the entry's name.
    Entry {
        optimizer: usize,
        local: usize,
        name: String,
    },
    /// State under a user's key.
    UserState(KeyPath),
    /// A value beside the model and the optimizers.
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
        optimizers
            .iter()
            .try_for_each(|optimizer| optimizer.check_belongs_to(parameters))?;
        // A load writes into the live tensors.
        parameters.wait_for_readers()?;
        Ok(LiveTarget {
            parameters,
            optimizers,
            values: None,
            prefixes,
            rename: Box::new(str::to_owned),
            rename_in_optimizers: Box::new(str::to_owned),
            ignore_frozen: false,
            exact: None,
            arguments: String::new(),
            destinations: Vec::new(),
            incoming: Vec::new(),
            user_state: StateDict::new(),
            new_values: StateDict::new(),
        })
    }

    /// Loads plain values beside the model and the optimizers as well, and tensors that `values`
    /// has: everything under keys that lead to neither. Ranks may have tensors under different keys
    /// if the source is a checkpoint.
    #[must_use]
    pub fn with_values(mut self, values: &'a mut StateDict) -> Self {
        self.values = Some(values);
        self
    }

    /// Turns names of the source into the model's: those of the model's values, and those of
    /// parameters in the state of optimizers.
    #[must_use]
    pub fn with_names(
        mut self,
        in_model: impl Fn(&str) -> String + 'a,
        in_optimizers: impl Fn(&str) -> String + 'a,
    ) -> Self {
        self.rename = Box::new(in_model);
        self.rename_in_optimizers = Box::new(in_optimizers);
        self
    }

    /// Lets frozen parameters be missing from the source, if `ignore_frozen`.
    pub(crate) const fn ignore_frozen(mut self, ignore_frozen: bool) -> Self {
        self.ignore_frozen = ignore_frozen;
        self
    }

    /// Makes it an error if ranks call with different arguments. `arguments` lists those of this
    /// rank.
    #[must_use]
    pub(crate) fn with_arguments(mut self, arguments: String) -> Self {
        self.arguments = arguments;
        self
    }

    /// Lets the load end with an error at the first value that does not fit the optimizers, instead
    /// of a report of all such values. The optimizers must not be in use yet.
    pub(crate) fn with_exact_load(mut self, exact: ExactLoad) -> Self {
        self.arguments.clone_from(&exact.arguments);
        self.exact = Some(exact);
        self
    }

    /// Plans the parameters, each under one of its names, and the persistent buffers.
    fn plan_model(
        &mut self,
        load: &LoadContext<'_>,
        model: &[(String, usize)],
        plan: &mut Plan,
    ) -> Result<()> {
        // Renaming must not make one of two names.
        let mut positions_by_name: HashMap<&str, usize> = HashMap::new();
        for (name, position) in model {
            if positions_by_name.insert(name, *position).is_some() {
                return Err(StateError::DuplicateKey { key: name.clone() }.into());
            }
        }
        let parameters = self.parameters;
        // A tied parameter is loaded once, from the name that counts. Its other names must have the
        // same values.
        let saved_names = || {
            let names = positions_by_name.keys().copied();
            names.filter(|name| parameters.contains(name))
        };
        let chosen = names_that_count(parameters, saved_names());
        let mut other_names: HashMap<&str, Vec<&str>> = HashMap::new();
        for name in saved_names() {
            let fqn = parameters.canonical_fqn(name);
            if chosen.get(fqn) != Some(&name) {
                other_names.entry(fqn).or_default().push(name);
            }
        }
        for fqn in parameters.fqns() {
            let Some(name) = chosen.get(fqn) else {
                if !self.ignore_frozen || parameters.requires_grad(fqn)? {
                    plan.report.missing.push(fqn.to_owned());
                }
                continue;
            };
            let value: StateValue = parameters.parameter(fqn)?.into();
            let fit = |name: &str| {
                let position = positions_by_name[name];
                Wanted::fit(
                    load.schema,
                    position,
                    || name.to_owned(),
                    &value,
                    load.options,
                )
            };
            let mut wanted = fit(name);
            for other_name in other_names.get(fqn).into_iter().flatten() {
                match (&mut wanted, fit(other_name)) {
                    (Ok(wanted), Ok(other)) => wanted.tied_positions.push(other.position),
                    (_, Err(mismatch)) => plan.report.mismatched.push(mismatch),
                    (Err(_), Ok(_)) => {}
                }
            }
            if let Ok(wanted) = &mut wanted {
                wanted.tied_positions.sort_unstable();
            }
            self.request_live(wanted, value, TargetPart::Parameter(fqn.to_owned()), plan);
        }
        for (name, value) in persistent_buffers(parameters) {
            match positions_by_name.remove(name) {
                None => plan.report.missing.push(name.to_owned()),
                Some(position) => {
                    let wanted = Wanted::fit(
                        load.schema,
                        position,
                        || name.to_owned(),
                        &value,
                        load.options,
                    );
                    self.request_live(wanted, value, TargetPart::Buffer, plan);
                }
            }
        }
        // Parameters are left, some under several names of which one is loaded, and what the model
        // does not have.
        let unknown = positions_by_name
            .into_keys()
            .filter(|name| !parameters.contains(name));
        plan.report.unexpected.extend(unknown.map(str::to_owned));
        Ok(())
    }

    /// Asks for a tensor that fits a live value, and reports one that does not.
    fn request_live(
        &mut self,
        wanted: Result<Wanted, Mismatch>,
        value: StateValue,
        part: TargetPart,
        plan: &mut Plan,
    ) {
        match wanted {
            // The live tensor, or each shard of it, is filled where it is, so it has to be
            // contiguous.
            Ok(Wanted { key, .. })
                if value
                    .candle_tensors()
                    .iter()
                    .any(|tensor| !tensor.is_contiguous()) =>
            {
                plan.report.mismatched.push(Mismatch {
                    fqn: key,
                    saved: "a tensor".to_owned(),
                    current: "a tensor that is not contiguous".to_owned(),
                });
            }
            Ok(wanted) => {
                let destination = Destination {
                    memory: Some((value, MemoryKind::Live)),
                    part,
                };
                request_tensor(wanted, destination, &mut self.destinations, plan);
            }
            Err(mismatch) => plan.report.mismatched.push(mismatch),
        }
    }

    /// Plans the values beside model and optimizers. Tensors are filled where they are, plain
    /// values replaced on commit. A tensor of one element becomes a number where the target has a
    /// plain value: other programs save the number of steps as either. A value that only the source
    /// has is taken too.
    fn plan_values(
        &mut self,
        load: &LoadContext<'_>,
        positions: &[usize],
        plan: &mut Plan,
    ) -> Result<()> {
        let Some(current) = self.values.take() else {
            let unexpected = positions
                .iter()
                .filter_map(|&position| load.schema.get(position));
            plan.report
                .unexpected
                .extend(unexpected.map(|(path, _)| path.flat_key()));
            return Ok(());
        };
        // Names that are still unexpected are refused on all ranks alike, because tensors here are
        // each rank's own.
        plan.refuses_unexpected = true;
        let mut new_values = current.clone();
        let mut saved_paths: HashSet<KeyPath> = HashSet::new();
        // The paths of the containers that were saved around the values which only the source has.
        let mut opened_paths: HashSet<KeyPath> = HashSet::new();
        for &position in positions {
            let Some((path, leaf)) = load.schema.get(position) else {
                continue;
            };
            saved_paths.insert(path.clone());
            match (get_element(current, path), load.values.get(&position)) {
                (Some(StateValue::Plain(_)), Some(StateValue::Tensor(tensor))) => {
                    set_element(&mut new_values, path, to_number(tensor)?)?;
                }
                (
                    Some(StateValue::Plain(_) | StateValue::List(_) | StateValue::Tuple(_)),
                    Some(value),
                ) => {
                    set_element(&mut new_values, path, value.copy()?)?;
                }
                (None, Some(value)) => match set_element(&mut new_values, path, value.copy()?) {
                    Ok(()) => opened_paths
                        .extend((1..path.0.len()).map(|depth| KeyPath(path.0[..depth].to_vec()))),
                    // A value that is no container lies on the way.
                    Err(StateError::WrongContainer { expected, .. }) => {
                        plan.report.mismatched.push(Mismatch {
                            fqn: path.flat_key(),
                            saved: leaf.to_string(),
                            current: format!("a value where the checkpoint has a {expected}"),
                        });
                    }
                    Err(error) => return Err(error.into()),
                },
                (
                    Some(
                        current_value @ (StateValue::Tensor(_)
                        | StateValue::Sharded(_)
                        | StateValue::Raw(_)),
                    ),
                    _,
                ) => {
                    let wanted = Wanted::fit(
                        load.schema,
                        position,
                        || path.flat_key(),
                        current_value,
                        load.options,
                    );
                    self.request_live(
                        wanted,
                        current_value.clone(),
                        TargetPart::Value(path.clone()),
                        plan,
                    );
                }
                (Some(current_value), _) => {
                    plan.report.mismatched.push(Mismatch {
                        fqn: path.flat_key(),
                        saved: leaf.to_string(),
                        current: current_value.kind().to_owned(),
                    });
                }
                (None, None) => plan.report.unexpected.push(path.flat_key()),
            }
        }
        // A list of plain values is one value in some formats, and its elements are in others.
        for (path, _) in Schema::from_state(current)?.iter() {
            let is_saved = (1..=path.0.len())
                .any(|depth| saved_paths.contains(&KeyPath(path.0[..depth].to_vec())));
            if !is_saved && !opened_paths.contains(path) {
                plan.report.missing.push(path.flat_key());
            }
        }
        self.values = Some(current);
        self.new_values = new_values;
        Ok(())
    }

    /// Sorts the positions of a source's leaves by the part of the target that they belong to.
    fn sort_leaves(&self, schema: &Schema) -> SortedLeaves {
        let optim = self.prefixes.optim.as_ref();
        let model = self.prefixes.model.as_ref();
        let mut sorted = SortedLeaves::default();
        let optim_paths = schema.iter().filter_map(|(path, _)| path.below(optim?));
        let has_numbered_groups = has_numbered_groups(optim_paths.map(|path| path.flat_key()));
        for (position, (path, _)) in schema.iter().enumerate() {
            if let Some(inner_path) = optim.and_then(|prefix| path.below(prefix)) {
                let key = OptimKey::read(&inner_path.0, has_numbered_groups, &|name| {
                    self.parameters.contains(&(self.rename_in_optimizers)(name))
                });
                match key {
                    // Without an optimizer nothing can be taken.
                    Some(key) if !self.optimizers.is_empty() => sorted.optim.push((key, position)),
                    _ => sorted.unreadable.push(inner_path.flat_key()),
                }
            } else if let Some(inner_path) = model.and_then(|prefix| path.below(prefix)) {
                let name = (self.rename)(&inner_path.flat_key());
                sorted.model.push((name, position));
            } else {
                sorted.values.push(position);
            }
        }
        sorted
    }
}

impl Target for LiveTarget<'_> {
    type Error = NnError;

    fn plan<E: From<NnError>>(
        &mut self,
        schema: &Schema,
        read_small_values: &dyn Fn(&[usize]) -> Result<Values, E>,
        options: &LoadOptions,
    ) -> Result<Plan, E> {
        let mut sorted = self.sort_leaves(schema);
        let mut positions: Vec<usize> =
            sorted.optim.iter().map(|(_, position)| *position).collect();
        if self.values.is_some() {
            positions.extend(&sorted.values);
        }
        let load = LoadContext {
            schema,
            values: &read_small_values(&positions)?,
            options,
        };
        if self.is_live() {
            // On the next swap the loaded values would become the average.
            self.parameters.check_not_swapped()?;
            // Units that are gathered would continue with the old values.
            self.parameters.reshard()?;
        }
        let mut plan = Plan::default();
        plan.common.arguments.clone_from(&self.arguments);
        if self.prefixes.model.is_some() {
            self.plan_model(&load, &sorted.model, &mut plan)?;
            plan.refuses_unexpected = !plan.report.unexpected.is_empty();
        }
        if self.prefixes.optim.is_some() {
            self.plan_optimizers(&load, &sorted.optim, &mut plan)?;
            plan.refuses_unexpected |= !sorted.unreadable.is_empty();
            plan.report.unexpected.append(&mut sorted.unreadable);
        }
        self.plan_values(&load, &sorted.values, &mut plan)?;
        // All ranks go by the order of the schema. An average repeats the buffers of the model. Of
        // two names of one live tensor the first counts, so the model's come before the values.
        plan.wanted.sort_by_key(|wanted| {
            let destination = &self.destinations[wanted.place];
            let is_value = matches!(destination.part, TargetPart::Value(_));
            (is_value, wanted.position)
        });
        Ok(plan)
    }

    fn is_on_gpu(&self) -> bool {
        let mut handles = self.parameters.handles.iter();
        handles.any(|handle| handle.shard_device().is_cuda())
    }

    fn memory(&mut self, wanted: &Wanted) -> Result<Memory, StateError> {
        match &self.destinations[wanted.place].memory {
            Some((StateValue::Sharded(tensor), MemoryKind::Unfilled)) => {
                Ok(Memory::Unfilled(tensor.clone()))
            }
            Some((value, _)) => Memory::live(value),
            None => Memory::fresh(wanted.dtype, &wanted.shape, &wanted.boxes),
        }
    }

    fn filled(&mut self, wanted: &Wanted, memory: Memory) -> Result<(), StateError> {
        match &self.destinations[wanted.place].part {
            &TargetPart::Entry {
                optimizer,
                local,
                ref name,
            } => {
                // The copies that all parameters of a FlatParameter have are compared there.
                let tensor = memory.into_value(true, &Device::Cpu)?;
                if let (Some(plan), StateValue::Tensor(tensor)) =
                    (&mut self.incoming[optimizer].plans[local], tensor)
                {
                    plan.set_whole_tensor(
                        &self.optimizers[optimizer].locals()[local],
                        name,
                        tensor,
                    )?;
                }
            }
            TargetPart::UserState(path) => set_element(
                &mut self.user_state,
                path,
                memory.into_value(true, &Device::Cpu)?,
            )?,
            TargetPart::Value(path) if matches!(memory, Memory::Raw { .. }) => {
                set_element(
                    &mut self.new_values,
                    path,
                    memory.into_value(true, &Device::Cpu)?,
                )?;
            }
            TargetPart::Parameter(_)
            | TargetPart::Buffer
            | TargetPart::EntryLike(_)
            | TargetPart::Value(_) => {}
        }
        Ok(())
    }

    fn is_live(&self) -> bool {
        self.exact.is_none()
    }

    fn lends_live(&self, wanted: &Wanted) -> bool {
        matches!(
            self.destinations[wanted.place].memory,
            Some((_, MemoryKind::Live))
        )
    }

    fn may_be_tied(&self, wanted: &Wanted) -> bool {
        // The names of parameters are known, and an average has the model's buffers too, whose
        // names in the model count.
        let is_value = matches!(self.destinations[wanted.place].part, TargetPart::Value(_));
        is_value && self.lends_live(wanted)
    }

    fn wanted_on(&self, wanted: &Wanted, rank: usize) -> Option<Vec<TensorBox>> {
        match &self.destinations[wanted.place].part {
            TargetPart::Parameter(fqn) | TargetPart::EntryLike(fqn) => {
                self.parameters.boxes_on(fqn, rank).ok()
            }
            TargetPart::Buffer | TargetPart::Entry { .. } => {
                Some(vec![TensorBox::whole(&wanted.shape)])
            }
            TargetPart::UserState(_) | TargetPart::Value(_) => None,
        }
    }

    fn commit(&mut self) -> Result<()> {
        // A backward of what was computed with the old values would be wrong.
        for destination in &self.destinations {
            if let TargetPart::Parameter(fqn) = &destination.part {
                self.parameters.begin_change(fqn)?;
            }
        }
        let has_loaded_state = !self.incoming.is_empty() || !self.user_state.is_empty();
        for (optimizer, incoming) in self
            .optimizers
            .iter_mut()
            .zip(std::mem::take(&mut self.incoming))
        {
            let states = incoming
                .plans
                .into_iter()
                .map(|plan| plan.map(|plan| plan.state))
                .collect();
            optimizer.replace_state(states, incoming.groups)?;
        }
        if has_loaded_state {
            give_user_state(&mut self.optimizers, std::mem::take(&mut self.user_state));
        }
        if let Some(values) = &mut self.values {
            **values = std::mem::take(&mut self.new_values);
        }
        Ok(())
    }
}

/// Asks for a tensor that goes to a destination.
fn request_tensor(
    wanted: Wanted,
    destination: Destination,
    destinations: &mut Vec<Destination>,
    plan: &mut Plan,
) {
    // Each rank has buffers of its own, such as running statistics, and values and user state of
    // its own.
    let is_same_on_all = !matches!(
        destination.part,
        TargetPart::Buffer | TargetPart::UserState(_) | TargetPart::Value(_)
    );
    plan.wanted.push(Wanted {
        place: destinations.len(),
        is_same_on_all,
        ..wanted
    });
    destinations.push(destination);
}

/// Gives state under users' keys to the optimizers that had it before, or else to the first.
fn give_user_state(optimizers: &mut [&mut Optimizer], user_state: StateDict) {
    let mut states: Vec<StateDict> = optimizers.iter().map(|_| StateDict::new()).collect();
    for (key, value) in user_state {
        let holder = optimizers
            .iter()
            .position(|optimizer| optimizer.user_state().contains_key(&key))
            .unwrap_or(0);
        if let Some(state) = states.get_mut(holder) {
            state.insert(key, value);
        }
    }
    for (optimizer, state) in optimizers.iter_mut().zip(states) {
        optimizer.set_user_state(state);
    }
}
