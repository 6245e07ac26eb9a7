//! What all ranks' local optimizer states make together, by arithmetic that every rank does alike.

use fsdp_comm::ProcessGroup;
use fsdp_layout::DType;
use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::keys::resolve_keys;
use super::local::{LocalStateDict, key_of};
use super::processed::{ProcessedValue, is_like_parameter};
use super::{OptimStateError, OptimStateKey};
use crate::Result;
use crate::optimizer::Optimizer;

/// What one rank has for one local parameter, but for the elements of its tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Brought {
    key: OptimStateKey,
    /// Elements of the local parameter.
    numel: usize,
    /// The shape of its pieces.
    dims: Vec<usize>,
    states: IndexMap<String, ProcessedValue>,
}

/// What the ranks have together for one local parameter.
#[derive(Debug)]
pub(crate) struct Resolved {
    pub(crate) key: OptimStateKey,
    /// By name, sorted.
    pub(crate) states: Vec<(String, Entry)>,
}

/// One state entry.
#[derive(Debug, Clone)]
pub(crate) enum Entry {
    /// A tensor like the parameter, of which each rank has its piece.
    Piece(DType),
    /// A tensor of another shape, whole on the ranks that say true.
    Whole { dtype: DType, shape: Vec<usize>, on: Vec<bool> },
    /// The same small value everywhere.
    Scalar(ProcessedValue),
}

/// What this rank brings. A parameter that it has nothing of is left out.
pub(crate) fn bring(optimizer: &Optimizer, local: &LocalStateDict<'_>) -> Result<Vec<Brought>> {
    let mut brought = Vec::with_capacity(local.params.len());
    for &(key, index, entries) in &local.params {
        let of = &optimizer.locals()[index];
        if of.is_empty() || entries.is_empty() {
            continue;
        }
        let mut states = IndexMap::new();
        for (name, value) in entries {
            let is_like = of.fqns().first().is_some_and(|fqn| is_like_parameter(optimizer, fqn, name));
            let scalar_parameter = of.dims().is_empty() && is_like;
            states.insert(name.clone(), ProcessedValue::of(key, name, value, scalar_parameter)?);
        }
        states.sort_keys();
        brought.push(Brought { key: key_of(optimizer, index), numel: of.numel, dims: of.dims(), states });
    }
    Ok(brought)
}

/// Joins what all ranks brought: the same result, or error, on every rank.
pub(crate) fn resolve(optimizer: &Optimizer, all: &[Vec<Brought>]) -> Result<Vec<Resolved>> {
    let parameters = optimizer.parameters();
    let group = parameters.group();
    let merge_keys = parameters.use_orig_params();
    let keys: Vec<Vec<OptimStateKey>> =
        all.iter().map(|brought| brought.iter().map(|one| one.key.clone()).collect()).collect();
    let mut resolved = Vec::new();
    for key in resolve_keys(group, &keys, merge_keys)? {
        let ranks = group.global_ranks().iter().copied().zip(all);
        let holders: Vec<(usize, &Brought)> =
            ranks.filter_map(|(rank, brought)| Some((rank, brought.iter().find(|one| one.key == key)?))).collect();
        if merge_keys && let [fqn] = key.unflat_param_names.as_slice() {
            let numel: usize = parameters.shape(fqn)?.iter().product();
            let replicas = group.world_size() / parameters.shard_group().map_or(1, ProcessGroup::world_size);
            let (found, expected) = (holders.iter().map(|(_, one)| one.numel).sum(), numel * replicas);
            if found != expected {
                return Err(OptimStateError::NotOnAllRanks { fqn: fqn.clone(), found, expected }.into());
            }
        }
        let states = join(optimizer, &key, &holders)?;
        resolved.push(Resolved { key, states });
    }
    Ok(resolved)
}

/// The state of one local parameter, from the ranks that have it.
fn join(optimizer: &Optimizer, key: &OptimStateKey, holders: &[(usize, &Brought)]) -> Result<Vec<(String, Entry)>> {
    let group = optimizer.parameters().group();
    let Some(&(reference, first)) = holders.first() else { return Ok(Vec::new()) };
    let differs = |name: &str, rank, found: String, expected: String| OptimStateError::DifferingOnRanks {
        fqns: key.unflat_param_names.clone(),
        name: name.to_owned(),
        rank,
        found,
        reference,
        expected,
    };
    for &(rank, other) in holders {
        for (name, _) in first.states.iter().chain(&other.states) {
            let (expected, found) = (first.states.get(name), other.states.get(name));
            let describe = |value: Option<&ProcessedValue>| value.map_or("none".to_owned(), ProcessedValue::describe);
            let same = match (expected, found) {
                (Some(ProcessedValue::PosDim { dtype: a, .. }), Some(ProcessedValue::PosDim { dtype: b, .. })) => {
                    a == b
                }
                (Some(a), Some(b)) => a.same(b),
                _ => false,
            };
            if !same {
                return Err(differs(name, rank, describe(found), describe(expected)).into());
            }
        }
    }
    let mut states = Vec::with_capacity(first.states.len());
    for (name, value) in &first.states {
        let ProcessedValue::PosDim { dtype, shape } = value else {
            states.push((name.clone(), Entry::Scalar(value.clone())));
            continue;
        };
        let shape_of = |one: &Brought| match one.states.get(name) {
            Some(ProcessedValue::PosDim { shape, .. }) => shape.clone(),
            _ => Vec::new(),
        };
        if holders.iter().all(|(_, one)| shape_of(one) == one.dims) {
            states.push((name.clone(), Entry::Piece(*dtype)));
            continue;
        }
        if let Some(&(rank, one)) = holders.iter().find(|(_, one)| shape_of(one) != *shape) {
            return Err(differs(name, rank, format!("{dtype} {:?}", shape_of(one)), value.describe()).into());
        }
        if let Some(fqn) = key.unflat_param_names.first().filter(|fqn| is_like_parameter(optimizer, fqn, name)) {
            return Err(OptimStateError::WrongShape {
                fqn: fqn.clone(),
                name: name.clone(),
                found: shape.clone(),
                expected: first.dims.clone(),
            }
            .into());
        }
        let on = group.global_ranks().iter().map(|rank| holders.iter().any(|(holder, _)| holder == rank)).collect();
        states.push((name.clone(), Entry::Whole { dtype: *dtype, shape: shape.clone(), on }));
    }
    Ok(states)
}
