//! Joins the local optimizer states of all ranks to one state dict, by the model's names.
//!
//! Every rank learns what all ranks have, and then computes the same result from it, or the same
//! error.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_layout::{KeyPath, PathPart, PlainValue};
use fsdp_state::{
    GatherCall, GatherOptions, Leaf, LoadError as _, StateDict, StateValue, gather, set_element,
};
use serde::{Deserialize, Serialize};

use super::OptimStateError;
use super::entry::SavedValue;
use super::local::PortableStates;
use crate::error::{NnError, Result, StateDictError};
use crate::optimizer::Optimizer;

/// The key of a local parameter that is the same on all ranks, whatever its id is there: torch's
/// `_OptimStateKey`. A model is sharded as a whole here, so that there is no `is_fsdp_managed`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OptimStateKey {
    /// Names of the model's parameters: one with `use_orig_params`, all of a FlatParameter without.
    pub unflat_param_names: Vec<String>,
}

impl OptimStateKey {
    /// Returns the key of the local parameter at position `local` of an optimizer.
    pub(crate) fn new(optimizer: &Optimizer, local: usize) -> Self {
        OptimStateKey {
            unflat_param_names: optimizer.locals()[local].fqns(),
        }
    }
}

/// Returns the keys in the order that all ranks follow. With `merge_keys` they are the union of the
/// keys of all ranks, sorted. Without it they are rank 0's; keys that only others have are dropped.
///
/// # Errors
/// [`OptimStateError::MissingOnRanks`] without `merge_keys`, if a rank lacks a key of rank 0.
pub(crate) fn resolve_keys(
    group: &ProcessGroup,
    keys_by_rank: &[Vec<OptimStateKey>],
    merge_keys: bool,
) -> Result<Vec<OptimStateKey>> {
    if merge_keys {
        // A rank may have nothing of a parameter, so the keys of all ranks count. Sort them, so
        // that all ranks have the same order.
        let mut keys: Vec<OptimStateKey> = keys_by_rank.iter().flatten().cloned().collect();
        keys.sort();
        keys.dedup();
        return Ok(keys);
    }
    // Every rank has a piece of each FlatParameter, so every rank must have the keys of rank 0.
    let keys = &keys_by_rank[0];
    let mut missing = Vec::new();
    for (rank, rank_keys) in group.global_ranks().iter().zip(keys_by_rank) {
        let rank_keys: HashSet<&OptimStateKey> = rank_keys.iter().collect();
        let missing_names: Vec<String> = keys
            .iter()
            .filter(|key| !rank_keys.contains(key))
            .flat_map(|key| key.unflat_param_names.iter().cloned())
            .collect();
        if !missing_names.is_empty() {
            missing.push((*rank, missing_names));
        }
    }
    if missing.is_empty() {
        Ok(keys.clone())
    } else {
        Err(OptimStateError::MissingOnRanks { missing }.into())
    }
}

/// A rank's part of the state, without the elements of tensors. All ranks gather these.
#[derive(Debug, Serialize, Deserialize)]
struct Contribution {
    /// The local parameters for which the rank has state, and the number of elements that it has of
    /// each.
    keys: Vec<(OptimStateKey, usize)>,
    /// The states of the model's parameters that they are made of, entries by name.
    states: Vec<(String, BTreeMap<String, Entry>)>,
}

/// An entry of a state, without its elements.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    leaf: Leaf,
    /// The value itself, if it is a small one.
    small_value: Option<PlainValue>,
}

impl Entry {
    /// Describes a state entry. The value itself goes with it if that is small.
    fn new(name: &str, value: &StateValue) -> Result<Self> {
        let leaf = Leaf::from_value(&KeyPath::from_key(name), value)?;
        Ok(Entry {
            leaf,
            small_value: value.to_plain()?,
        })
    }

    /// Returns `true` if two ranks report the same of an entry.
    fn is_same(&self, other: &Entry) -> bool {
        // The leaf tells whether the value is a small one, which is there on both ranks.
        self.leaf == other.leaf
            && self
                .small_value
                .as_ref()
                .zip(other.small_value.as_ref())
                .is_none_or(|(a, b)| a.same_bits(b))
    }

    /// Returns the value of a rank that lacks the entry: the small one, or a tensor without boxes.
    fn value_without_elements(&self) -> Result<StateValue> {
        Ok(self.leaf.without_elements(self.small_value.clone())?)
    }

    /// Returns the value, or its dtype and shape, for messages.
    fn describe(&self) -> Result<String> {
        if self.small_value.is_none() {
            return Ok(self.leaf.describe());
        }
        Ok(SavedValue::Scalar(self.value_without_elements()?).describe())
    }
}

/// The entries of one parameter on the ranks that have state of it: their positions in the group,
/// and the entries.
type Holders<'a> = Vec<(usize, &'a BTreeMap<String, Entry>)>;

/// Returns the states of all parameters for which some rank has state, with the same keys on every
/// rank: `{fqn: {entry: value}}`. Tensors shaped like parameters are views of this rank's boxes.
///
/// Scalars must agree on all ranks that have elements of the parameter; those of others are
/// ignored. Collectives: one object all-gather; for tensors of a shape of their own that some ranks
/// lack, a gather.
///
/// # Errors
/// The same on every rank: [`OptimStateError`] for state that differs between ranks or that some
/// ranks lack.
pub(crate) fn join(
    optimizer: &Optimizer,
    group: &ProcessGroup,
    operation: &'static str,
    own_state: Result<PortableStates>,
) -> Result<(StateDict, PortableStates)> {
    // A rank with an error brings `None`. The others then take part in an agreement, which gives
    // all ranks the error.
    let (contribution, own_state) = match own_state
        .and_then(|own_state| Ok((new_contribution(optimizer, &own_state)?, own_state)))
    {
        Ok((contribution, own_state)) => (Some(contribution), Ok(own_state)),
        Err(error) => (None, Err(error)),
    };
    let gathered: Vec<Option<Contribution>> = group.all_gather_object(&contribution)?;
    if gathered.iter().any(Option::is_none) {
        return NnError::agree(
            group,
            operation,
            None,
            own_state.map(|own_state| (StateDict::new(), own_state)),
        );
    }
    let portable = own_state?;
    // This rank's own values, to be found by name.
    let own_states: HashMap<&str, &StateDict> = portable
        .states
        .iter()
        .flat_map(|(_, states)| states)
        .map(|(fqn, state)| (fqn.as_str(), state))
        .collect();
    let contributions: Vec<Contribution> = gathered.into_iter().flatten().collect();
    // From here on every rank computes from the contributions of all ranks, so all find the same
    // errors.
    let merge_keys = optimizer.parameters().use_orig_params();
    let keys_of_ranks: Vec<Vec<OptimStateKey>> = contributions
        .iter()
        .map(|contribution| {
            contribution
                .keys
                .iter()
                .map(|(key, _)| key.clone())
                .collect()
        })
        .collect();
    let keys = resolve_keys(group, &keys_of_ranks, merge_keys)?;
    if merge_keys {
        check_elements(optimizer, &keys, &contributions)?;
    }
    let mut holders_by_fqn: HashMap<&str, Holders<'_>> = HashMap::new();
    for (rank, contribution) in contributions.iter().enumerate() {
        for (fqn, entries) in &contribution.states {
            holders_by_fqn.entry(fqn).or_default().push((rank, entries));
        }
    }
    let mut joined = StateDict::new();
    let mut partly_held = StateDict::new();
    for fqn in keys.iter().flat_map(|key| &key.unflat_param_names) {
        let Some(holders) = holders_by_fqn.remove(fqn.as_str()) else {
            continue;
        };
        check_same(group, fqn, &holders)?;
        let (_, entries) = holders[0];
        let own_entries = own_states.get(fqn.as_str());
        let mut state = StateDict::new();
        for (name, entry) in entries {
            let own_value = own_entries.and_then(|state| state.get(name)).cloned();
            // A whole tensor that is not on every rank is gathered from those that have it. All
            // ranks find out alike whether the others can hold it.
            if entry.small_value.is_none()
                && !entry.leaf.is_sharded()
                && holders.len() < contributions.len()
            {
                let Ok(absent) = entry.value_without_elements() else {
                    return Err(StateDictError::UnexpectedState {
                        fqn: fqn.clone(),
                        name: name.clone(),
                        kind: entry.leaf.to_string(),
                    }
                    .into());
                };
                let boxes = match own_value.as_ref().and_then(StateValue::as_tensor) {
                    Some(tensor) => ShardedTensor::from_whole(tensor).into(),
                    None => absent,
                };
                let path = KeyPath(vec![
                    PathPart::Key(fqn.clone()),
                    PathPart::Key(name.clone()),
                ]);
                set_element(&mut partly_held, &path, boxes)?;
            }
            let value = match own_value {
                Some(value) => value,
                None => entry.value_without_elements()?,
            };
            state.insert(name.as_str(), value);
        }
        joined.insert(fqn.as_str(), state);
    }
    if !partly_held.is_empty() {
        let call = GatherCall {
            operation,
            group,
            options: &GatherOptions::default(),
            boxes_on: None,
        };
        gather(&call, &partly_held, |path, value| {
            set_element(&mut joined, path, value)
        })?;
    }
    Ok((joined, portable))
}

/// Returns what this rank tells the others of its state.
fn new_contribution(optimizer: &Optimizer, own_state: &PortableStates) -> Result<Contribution> {
    let mut contribution = Contribution {
        keys: Vec::new(),
        states: Vec::new(),
    };
    for (index, states) in &own_state.states {
        for (fqn, state) in states {
            let mut entries = BTreeMap::new();
            for (name, value) in state {
                entries.insert(name.clone(), Entry::new(name, value)?);
            }
            contribution.states.push((fqn.clone(), entries));
        }
        let key = OptimStateKey::new(optimizer, *index);
        contribution
            .keys
            .push((key, optimizer.locals()[*index].numel));
    }
    Ok(contribution)
}

/// Checks that the ranks together have optimizer state for all elements of each parameter in
/// `keys`.
fn check_elements(
    optimizer: &Optimizer,
    keys: &[OptimStateKey],
    contributions: &[Contribution],
) -> Result<()> {
    let parameters = optimizer.parameters();
    let replicas = parameters.group().world_size()
        / parameters.shard_group().map_or(1, ProcessGroup::world_size);
    // Each replica of the model holds every element once, so with replicas every element is counted
    // several times.
    let mut held_counts: HashMap<&OptimStateKey, usize> = HashMap::new();
    for (key, numel) in contributions
        .iter()
        .flat_map(|contribution| &contribution.keys)
    {
        *held_counts.entry(key).or_default() += numel;
    }
    for key in keys {
        let [fqn] = key.unflat_param_names.as_slice() else {
            continue;
        };
        let expected = parameters.shape(fqn)?.iter().product::<usize>() * replicas;
        let found = held_counts[key];
        if found != expected {
            return Err(OptimStateError::NotOnAllRanks {
                fqn: fqn.clone(),
                found,
                expected,
            }
            .into());
        }
    }
    Ok(())
}

/// Checks that all ranks with state of a parameter have the same entries.
fn check_same(group: &ProcessGroup, fqn: &str, holders: &Holders<'_>) -> Result<()> {
    let ((reference, expected), others) = holders
        .split_first()
        .expect("a state that was gathered has a rank that has it");
    for (rank, found) in others {
        // In order, so that every rank finds the same difference first.
        let names: BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
        for name in names {
            let expected = expected.get(name);
            let found = found.get(name);
            if let (Some(expected), Some(found)) = (expected, found)
                && expected.is_same(found)
            {
                continue;
            }
            return Err(OptimStateError::DifferingOnRanks {
                fqns: vec![fqn.to_owned()],
                name: name.clone(),
                rank: group.global_ranks()[*rank],
                found: describe(found)?,
                reference: group.global_ranks()[*reference],
                expected: describe(expected)?,
            }
            .into());
        }
    }
    Ok(())
}

/// Returns the value of an entry, or its dtype and shape, for messages.
fn describe(entry: Option<&Entry>) -> Result<String> {
    entry.map_or_else(|| Ok("none".to_owned()), Entry::describe)
}
