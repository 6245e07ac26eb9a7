//! Joins the local optimizer states of all ranks to one state dict, by the model's names.
//!
//! Every rank learns what all ranks have, and then computes the same result from it, or the same error.

use std::collections::HashMap;

use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_state::{GatherOptions, Leaf, Schema, StateDict, StateValue, gather_state_dict};
use serde::{Deserialize, Serialize};

use super::OptimStateError;
use super::agree::agree;
use super::local::{LocalStates, portable_state};
use crate::optimizer::Optimizer;
use crate::{NnError, Result};

/// The key of a local parameter that is the same on all ranks, whatever its id is there: torch's `_OptimStateKey`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OptimStateKey {
    /// Names of the model's parameters: one with `use_orig_params`, all of a FlatParameter without.
    pub unflat_param_names: Vec<String>,
    /// `true` if it belongs to a sharded unit. It is always `true` here, because a model is sharded as a whole.
    pub is_fsdp_managed: bool,
}

impl OptimStateKey {
    /// Returns the key of the local parameter at position `local` of an optimizer.
    pub(crate) fn of(optimizer: &Optimizer, local: usize) -> Self {
        OptimStateKey { unflat_param_names: optimizer.locals()[local].fqns(), is_fsdp_managed: true }
    }
}

/// Returns the keys in the order that all ranks follow. `all` has the keys of each rank. With `merge_keys` the result
/// is the union of them; without, all ranks must have the same keys.
pub(crate) fn resolve_keys(
    group: &ProcessGroup,
    all: &[Vec<OptimStateKey>],
    merge_keys: bool,
) -> Result<Vec<OptimStateKey>> {
    if merge_keys {
        // A rank may have nothing of a parameter, so the keys of all ranks count. Sorted, they have one order
        // everywhere.
        let mut keys: Vec<OptimStateKey> = all.iter().flatten().cloned().collect();
        keys.sort();
        keys.dedup();
        return Ok(keys);
    }
    // Every rank has a piece of each FlatParameter, so every rank must have the keys of rank 0.
    let Some(keys) = all.first() else { return Ok(Vec::new()) };
    let mut missing = Vec::new();
    for (rank, has) in group.global_ranks().iter().zip(all) {
        let lacks: Vec<String> = keys
            .iter()
            .filter(|key| !has.contains(key))
            .flat_map(|key| key.unflat_param_names.iter().cloned())
            .collect();
        if !lacks.is_empty() {
            missing.push((*rank, lacks));
        }
    }
    if missing.is_empty() { Ok(keys.clone()) } else { Err(OptimStateError::MissingOnRanks { missing }.into()) }
}

/// The part of the state that one rank brings, without the elements of tensors.
#[derive(Debug, Serialize, Deserialize)]
struct Brought {
    /// The local parameters of which it has state, and how many elements of each it has.
    keys: Vec<(OptimStateKey, usize)>,
    /// Their states by the model's names.
    schema: Schema,
    /// The small values among them.
    small: Vec<Option<PlainValue>>,
}

/// Returns the states of all parameters that some rank has state for, with the same keys on every rank:
/// `{fqn: {entry: value}}`. Tensors like parameters are this rank's boxes, as views.
///
/// Scalars must agree on all ranks that have elements of the parameter; those of others are ignored. Collectives: one
/// object all-gather; for tensors of a shape of their own that some ranks lack, a gather.
///
/// # Errors
/// The same on every rank: [`OptimStateError`] for state that differs between ranks or that some ranks lack.
pub(crate) fn join<'a>(
    optimizer: &Optimizer,
    group: &ProcessGroup,
    operation: &'static str,
    local: Result<LocalStates<'a>>,
) -> Result<(StateDict, LocalStates<'a>)> {
    let parameters = optimizer.parameters();
    let brought = local.and_then(|local| {
        let (brought, own) = bring(optimizer, &local)?;
        Ok((brought, (own, local)))
    });
    // A rank with an error brings `None`. The others then take part in an agreement, which gives all ranks the error.
    let (brought, own) = match brought {
        Ok((brought, own)) => (Some(brought), Ok(own)),
        Err(error) => (None, Err(error)),
    };
    let all: Vec<Option<Brought>> = group.all_gather_object(&brought)?;
    if all.iter().any(Option::is_none) {
        return agree(group, operation, own);
    }
    let (own, local) = own?;
    let all: Vec<Brought> = all.into_iter().flatten().collect();
    // From here on every rank computes from what all ranks brought, so all meet the same errors.
    let merge_keys = parameters.use_orig_params();
    let keys: Vec<Vec<OptimStateKey>> =
        all.iter().map(|brought| brought.keys.iter().map(|(key, _)| key.clone()).collect()).collect();
    let keys = resolve_keys(group, &keys, merge_keys)?;
    if merge_keys {
        check_elements(optimizer, &keys, &all)?;
    }
    // A rank takes what it lacks from the schemas and small values of the others. Only larger tensors need a gather.
    let mut known = Known::new(&all);
    let mut joined = StateDict::new();
    let mut lacking = StateDict::new();
    for fqn in keys.iter().flat_map(|key| &key.unflat_param_names) {
        let state = known.entries_of(optimizer, fqn, &own, &mut lacking)?;
        if !state.is_empty() {
            joined.insert(fqn.as_str(), state);
        }
    }
    if lacking.is_empty() {
        return Ok((joined, local));
    }
    // Tensors that are not shaped like their parameter, and that some ranks lack, come from the ranks that have them.
    let whole = gather_state_dict(&lacking, group, &GatherOptions::default())?;
    for (fqn, entries) in whole {
        for (name, value) in entries.as_dict().into_iter().flatten() {
            if let Some(StateValue::Dict(state)) = joined.get_mut(&fqn) {
                state.insert(name.as_str(), value.clone());
            }
        }
    }
    Ok((joined, local))
}

/// Returns what this rank tells the others, and its states by the model's names. Parameters of which it has no element
/// are left out.
fn bring(optimizer: &Optimizer, local: &LocalStates<'_>) -> Result<(Brought, StateDict)> {
    let mut keys = Vec::new();
    let mut own = StateDict::new();
    for &index in &local.order {
        let param = &optimizer.locals()[index];
        let Some((_, entries)) = local.states[index].filter(|(_, entries)| !entries.is_empty()) else { continue };
        if param.is_empty() {
            continue;
        }
        for (fqn, state) in param.fqns().into_iter().zip(portable_state(optimizer, index, entries)?) {
            own.insert(fqn, state);
        }
        keys.push((OptimStateKey::of(optimizer, index), param.numel));
    }
    let schema = Schema::of(&own)?;
    let mut small = Vec::with_capacity(schema.len());
    for (position, (path, _)) in schema.iter().enumerate() {
        let value = fsdp_state::get_element(&own, path).filter(|_| schema.is_small(position));
        small.push(value.map_or(Ok(None), StateValue::to_plain)?);
    }
    Ok((Brought { keys, schema, small }, own))
}

/// Checks that the ranks together have state for all elements of each parameter, or for none.
fn check_elements(optimizer: &Optimizer, keys: &[OptimStateKey], all: &[Brought]) -> Result<()> {
    let parameters = optimizer.parameters();
    let replicas = parameters.group().world_size() / parameters.shard_group().map_or(1, ProcessGroup::world_size);
    // Each replica of the model holds every element once.
    let mut held: HashMap<&OptimStateKey, usize> = HashMap::new();
    for (key, numel) in all.iter().flat_map(|brought| &brought.keys) {
        *held.entry(key).or_default() += numel;
    }
    for key in keys {
        let [fqn] = key.unflat_param_names.as_slice() else { continue };
        let expected = parameters.shape(fqn)?.iter().product::<usize>() * replicas;
        let found = held.get(key).copied().unwrap_or(0);
        if found != expected {
            return Err(OptimStateError::NotOnAllRanks { fqn: fqn.clone(), found, expected }.into());
        }
    }
    Ok(())
}

/// An entry that some ranks have: their positions in the group, and its leaf and small value on each.
type Holders<'a> = Vec<(usize, &'a Leaf, Option<&'a PlainValue>)>;

/// The entries of all ranks, by parameter and name.
struct Known<'a> {
    entries: HashMap<&'a str, Vec<(KeyPath, Holders<'a>)>>,
    /// The ranks that have any state of a parameter.
    ranks: HashMap<&'a str, Vec<usize>>,
    world_size: usize,
}

impl<'a> Known<'a> {
    /// Sorts the entries that ranks brought by parameter, in the order in which they first appear.
    fn new(all: &'a [Brought]) -> Self {
        let mut positions: HashMap<&'a KeyPath, usize> = HashMap::new();
        let mut known = Known { entries: HashMap::new(), ranks: HashMap::new(), world_size: all.len() };
        for (rank, brought) in all.iter().enumerate() {
            for ((path, leaf), small) in brought.schema.iter().zip(&brought.small) {
                let Some(PathPart::Key(fqn)) = path.0.first() else { continue };
                let entries = known.entries.entry(fqn).or_default();
                let at = *positions.entry(path).or_insert_with(|| {
                    entries.push((path.clone(), Holders::new()));
                    entries.len() - 1
                });
                entries[at].1.push((rank, leaf, small.as_ref()));
                let ranks = known.ranks.entry(fqn).or_default();
                if ranks.last() != Some(&rank) {
                    ranks.push(rank);
                }
            }
        }
        known
    }

    /// Returns one parameter's state on this rank. `lacking` gets tensors that some ranks have whole and others lack.
    fn entries_of(
        &mut self,
        optimizer: &Optimizer,
        fqn: &str,
        own: &StateDict,
        lacking: &mut StateDict,
    ) -> Result<StateDict> {
        let group = optimizer.parameters().group();
        let holders_of_state = self.ranks.get(fqn).cloned().unwrap_or_default();
        let own = own.dict(fqn);
        let mut state = StateDict::new();
        let mut lacking_here = StateDict::new();
        for (path, holders) in self.entries.remove(fqn).unwrap_or_default() {
            let name = KeyPath(path.0[1..].to_vec()).flat_key();
            check_same(group, fqn, &name, &holders_of_state, &holders)?;
            let Some((_, leaf, small)) = holders.first() else { continue };
            let own = own.and_then(|own| own.get(&name));
            let value = match (own, leaf, small) {
                // A whole tensor that is not on every rank is gathered: this rank brings it.
                (Some(value), Leaf::Whole { shape, .. }, None)
                    if !shape.is_empty() && holders.len() < self.world_size =>
                {
                    if let StateValue::Tensor(tensor) = value {
                        lacking_here.insert(name.as_str(), ShardedTensor::from_whole(tensor));
                    }
                    value.clone()
                }
                (Some(value), ..) => value.clone(),
                // A small value travelled with the schema.
                (None, _, Some(PlainValue::Tensor(tensor))) => {
                    let dtype = fsdp_flat::dtype::to_candle(tensor.dtype)?;
                    let device = candle_core::Device::Cpu;
                    candle_core::Tensor::from_raw_buffer(&tensor.data, dtype, &tensor.shape, &device)?.into()
                }
                (None, _, Some(value)) => StateValue::Plain((*value).clone()),
                // This rank has no box of a tensor that others have.
                (None, Leaf::Whole { dtype, shape } | Leaf::Sharded { dtype, shape }, None) => {
                    let nothing = ShardedTensor::new(fsdp_flat::dtype::to_candle(*dtype)?, shape.clone(), Vec::new())?;
                    if matches!(leaf, Leaf::Whole { .. }) {
                        lacking_here.insert(name.as_str(), nothing.clone());
                    }
                    nothing.into()
                }
                (None, Leaf::Plain, None) => continue,
            };
            state.insert(name, value);
        }
        if !lacking_here.is_empty() {
            lacking.insert(fqn, lacking_here);
        }
        Ok(state)
    }
}

/// Checks that all ranks with state of a parameter have an entry, and that it is the same on all of them.
fn check_same(group: &ProcessGroup, fqn: &str, name: &str, ranks: &[usize], holders: &Holders<'_>) -> Result<()> {
    let global = |rank: usize| group.global_ranks().get(rank).copied().unwrap_or(rank);
    let find = |rank: usize| holders.iter().find(|(holder, ..)| *holder == rank);
    let Some(&reference) = ranks.first() else { return Ok(()) };
    let expected = find(reference);
    for &rank in ranks {
        let found = find(rank);
        let same = match (expected, found) {
            (Some((_, a, x)), Some((_, b, y))) => {
                a == b && x.zip(*y).map_or(x.is_none() == y.is_none(), |(x, y)| x.same_bits(y))
            }
            _ => false,
        };
        if !same {
            return Err(NnError::from(OptimStateError::DifferingOnRanks {
                fqns: vec![fqn.to_owned()],
                name: name.to_owned(),
                rank: global(rank),
                found: describe(found),
                reference: global(reference),
                expected: describe(expected),
            }));
        }
    }
    Ok(())
}

/// Returns the value of an entry, or its dtype and shape, for messages.
fn describe(entry: Option<&(usize, &Leaf, Option<&PlainValue>)>) -> String {
    match entry {
        None => "none".to_owned(),
        Some((_, _, Some(PlainValue::Tensor(tensor)))) => {
            let dtype = fsdp_flat::dtype::to_candle(tensor.dtype);
            let number = dtype.ok().and_then(|dtype| {
                let device = candle_core::Device::Cpu;
                let tensor = candle_core::Tensor::from_raw_buffer(&tensor.data, dtype, &[], &device).ok()?;
                tensor.to_dtype(candle_core::DType::F64).ok()?.to_scalar::<f64>().ok()
            });
            number.map_or_else(|| tensor.dtype.to_string(), |number| number.to_string())
        }
        Some((_, _, Some(value))) => format!("{value:?}"),
        Some((_, leaf, None)) => leaf.tensor().map_or_else(String::new, |(dtype, shape)| format!("{dtype} {shape:?}")),
    }
}
