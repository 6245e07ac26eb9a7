//! The path that every load takes: compare, agree, lend, read, commit.

use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};

use fsdp_comm::{CommError, ProcessGroup, ReduceOp};
use fsdp_flat::ShardedTensor;
use fsdp_layout::Failure;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::options::LoadOptions;
use super::source::Source;
use super::target::{Plan, Target, Values, Wanted};
use crate::lend::{Lend, Memory};
use crate::{LoadReport, Schema, StateError};

/// An error that [`load_state`] can return. It knows how to turn one rank's error into an error on every rank.
pub trait LoadError: Failure + From<StateError> + From<CommError> {
    /// Returns the error of a collective, if this is one. Every rank has such an error already.
    fn comm(&self) -> Option<&CommError>;

    /// Turns an error of any rank into an error on every rank. If a `hash` is given, it must also be the same on all
    /// ranks.
    ///
    /// # Errors
    /// Any rank's error; [`CommError::SchemaMismatch`] for hashes that differ.
    fn agree<T>(group: &ProcessGroup, operation: &str, hash: Option<u64>, outcome: Result<T, Self>) -> Result<T, Self> {
        let agreed = match hash {
            Some(hash) => group.agree_on(operation, hash, outcome),
            None => group.agree(operation, outcome),
        };
        Ok(agreed?)
    }

    /// Returns this rank's error on every rank. A rank that cannot open its source or its target calls this in place of
    /// [`load_state`]: it takes part in the agreement in which the other ranks wait.
    ///
    /// # Errors
    /// Always.
    fn refuse<T>(group: &ProcessGroup, operation: &str, error: Self) -> Result<T, Self> {
        Self::agree(group, operation, Some(0), Err(error))
    }
}

impl LoadError for StateError {
    fn comm(&self) -> Option<&CommError> {
        match self {
            StateError::Comm(error) => Some(error),
            _ => None,
        }
    }
}

/// Loads the values of `source` into `target`. All loads and collectives on state use this function.
///
/// 1. **Compare**: each rank compares the source's schema with what its target can take.
/// 2. **Agree**: one round over the ranks. Any rank's error becomes every rank's, and all must have the same
///    contribution. Only values that ranks have of their own (running statistics, a random generator's state) may differ.
/// 3. **Lend**: the target gives memory for the boxes that it wants, live or fresh.
/// 4. **Read**: the source fills it, from files, from this rank's own values, or from other ranks.
/// 5. **Commit**: the target takes over the small values.
///
/// Collective over `group`: two agreements, and those of [`Source::locate`] and [`Source::read`]; where ranks differ, also an
/// object all-gather, an object broadcast, an all-reduce and an agreement. The report is the same on every rank, except for
/// missing values that a rank has of its own.
///
/// # Errors
/// The same on every rank. Before the first byte is read nothing has changed: [`StateError::Incompatible`] for values that
/// do not fit (and, if strict, names that only one side has); ranks that pass different arguments, names or values; any
/// rank's own error. After that it is [`StateError::PartlyLoaded`] if the target is live and the load is not staged.
pub fn load_state<S, T, E>(
    operation: &'static str,
    group: &ProcessGroup,
    source: &mut S,
    target: &mut T,
    options: &LoadOptions,
) -> Result<LoadReport, E>
where
    S: Source,
    T: Target,
    E: LoadError + From<S::Error> + From<T::Error>,
{
    // Compare. This is local: an error found here must not be returned before the other ranks know of it.
    let compared = compare::<S, T, E>(group, source, target, options);
    // Agree. From here on every rank has the same plan, except for the boxes in it and for values of its own.
    let plan = agree(operation, group, options, compared)?;
    let wanted_on = |index: usize, rank| target.wanted_on(index, &plan.wanted[index], rank);
    source.locate(group, operation, &plan.wanted, &wanted_on, options)?;

    // Lend and read. Live memory changes from here on.
    let is_live = target.is_live();
    let is_staged = options.staged && is_live;
    let mut lending = Lending { target, wanted: &plan.wanted, detours: HashMap::new(), staged: Vec::new(), is_staged };
    let read = source.read(group, operation, &plan.wanted, &mut lending, options).map_err(E::from);
    let mut outcome = match read {
        // If a collective has failed, every rank has this error already, and no further agreement is possible.
        Err(error) if error.comm().is_some() => return Err(partly_loaded(is_live && !is_staged, error)),
        outcome => outcome,
    };
    let staged = std::mem::take(&mut lending.staged);
    if !is_live && outcome.is_ok() {
        outcome = target.commit().map_err(E::from);
    }
    // A rank that failed to read has still taken part in the collectives. Now the others get its error.
    E::agree(group, operation, None, outcome).map_err(|error| partly_loaded(is_live && !is_staged, error))?;

    // Commit. The staged values are copied to the live memory, which cannot fail: they were made to fit it.
    for (memory, values) in staged {
        memory.fill_from(&values)?;
    }
    if is_live {
        target.commit()?;
    }
    Ok(plan.report)
}

/// Wraps an error in [`StateError::PartlyLoaded`] if some live values may be new and others old.
fn partly_loaded<E: LoadError>(is_partly_loaded: bool, error: E) -> E {
    if is_partly_loaded {
        StateError::PartlyLoaded { reason: error.to_string(), kind: error.kind() }.into()
    } else {
        error
    }
}

/// The data of a rank that must be the same on all ranks. The agreement compares its hash.
#[derive(Debug, Clone, Default, Hash, Serialize, Deserialize)]
struct Contribution {
    arguments: String,
    source: Schema,
    target: Schema,
    /// Values that must be the same on all ranks, as pairs of a key and a text: small values, whose floats are compared
    /// by their bits, and hashes of whole tensors.
    values: Vec<(String, String)>,
}

/// Compares source and target on this rank.
fn compare<S, T, E>(
    group: &ProcessGroup,
    source: &mut S,
    target: &mut T,
    options: &LoadOptions,
) -> Result<(Plan, Contribution), E>
where
    S: Source,
    T: Target,
    E: LoadError + From<S::Error> + From<T::Error>,
{
    let mut plan = target.plan::<E>(source.schema(), &|positions| small_values(source, positions), options)?;
    plan.report.sort();
    if target.is_live() {
        source.separate(&plan.wanted, &mut |index| target.memory(index, &plan.wanted[index]))?;
    }
    let mut contribution = Contribution { arguments: plan.arguments.clone(), ..Contribution::default() };
    // A rank that is alone has nobody to compare with.
    if group.world_size() == 1 {
        return Ok((plan, contribution));
    }
    plan.agreed.sort();
    contribution.source = source.schema().clone();
    contribution.target = std::mem::take(&mut plan.target);
    contribution.values = std::mem::take(&mut plan.agreed);
    for wanted in plan.wanted.iter().filter(|wanted| wanted.is_same_on_all || source.moves_between_ranks()) {
        let hash = if wanted.is_same_on_all { source.hash(wanted.position)? } else { None };
        let text = hash.map_or_else(|| "a tensor".to_owned(), |hash| format!("a tensor with the hash {hash:016x}"));
        contribution.values.push((wanted.key.clone(), text));
    }
    Ok((plan, contribution))
}

/// Returns the small values of a source among those at these positions.
fn small_values<S: Source, E: From<S::Error>>(source: &S, positions: &[usize]) -> Result<Values, E> {
    let mut positions = positions.to_vec();
    positions.retain(|&position| source.schema().is_small(position));
    let values = source.values(&positions)?;
    Ok(positions.into_iter().zip(values).collect())
}

/// Checks that no rank has an error, that all ranks have the same contribution, and that everything fits. Collectives: one
/// agreement; if ranks differ, also an object all-gather, and then either two object broadcasts to find the difference or, for
/// values that ranks have of their own, those of [`agree_on_own`].
fn agree<E: LoadError>(
    operation: &'static str,
    group: &ProcessGroup,
    options: &LoadOptions,
    compared: Result<(Plan, Contribution), E>,
) -> Result<Plan, E> {
    let (plan, contribution, outcome) = match compared {
        Ok((plan, contribution)) => (plan, contribution, Ok(())),
        Err(error) => (Plan::default(), Contribution::default(), Err(error)),
    };
    let hash = hash_of(&contribution);
    // The hash of a rank with an error does not matter: errors are checked before hashes are compared.
    let agreed = E::agree(group, operation, Some(hash_of(&(hash, &plan.report))), outcome);
    let error = match agreed {
        Ok(()) => return check_report(operation, plan, options),
        Err(error) => error,
    };
    if !matches!(error.comm(), Some(CommError::SchemaMismatch { .. })) {
        return Err(error);
    }
    let hashes: Vec<u64> = group.all_gather_object(&hash)?;
    let Some(other) = hashes.iter().position(|other| *other != hashes[0]) else {
        return agree_on_own(operation, group, options, plan);
    };
    // Contributions may be large, so only two are sent: that of the first rank, and the first that differs from it.
    let of = |rank: usize| group.broadcast_object((group.rank() == rank).then_some(&contribution), rank);
    let (first, second): (Contribution, Contribution) = (of(0)?, of(other)?);
    Err(difference(group, operation, &first, other, &second).map_or(error, E::from))
}

/// Checks the plans of ranks that differ only in what they have of their own. What does not fit one rank is every rank's error,
/// and a name is unexpected if no rank has a place for it. Collectives: an object broadcast, an all-reduce and an agreement.
fn agree_on_own<E: LoadError>(
    operation: &'static str,
    group: &ProcessGroup,
    options: &LoadOptions,
    mut plan: Plan,
) -> Result<Plan, E> {
    // Only names that are unexpected on the first rank can be so on all.
    let here = &plan.report.unexpected;
    let mut names: Vec<String> = group.broadcast_object((group.rank() == 0).then_some(here), 0)?;
    let mut has_place: Vec<u8> = names.iter().map(|name| here.binary_search(name).is_err().into()).collect();
    group.all_reduce(&mut has_place, ReduceOp::Max)?;
    let mut has_place = has_place.into_iter();
    names.retain(|_| has_place.next() == Some(0));
    plan.report.unexpected = names;
    E::agree(group, operation, None, check_report(operation, plan, options))
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = XxHash3_64::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Returns the first difference between the contributions of the first rank and of another. Every rank finds the same one.
fn difference(
    group: &ProcessGroup,
    operation: &'static str,
    first: &Contribution,
    other: usize,
    second: &Contribution,
) -> Option<StateError> {
    let (reference, rank) = (*group.global_ranks().first()?, *group.global_ranks().get(other)?);
    if first.arguments != second.arguments {
        let (found, expected) = (second.arguments.clone(), first.arguments.clone());
        return Some(StateError::ArgumentMismatch { operation, rank, found, reference, expected });
    }
    let schemas = [(&first.source, &second.source), (&first.target, &second.target)];
    if let Some(error) = schemas.iter().find_map(|(a, b)| a.difference(b, operation, rank, reference)) {
        return Some(error);
    }
    let of_first: HashSet<_> = first.values.iter().collect();
    let of_second: HashSet<_> = second.values.iter().collect();
    if let Some((key, expected)) = first.values.iter().find(|value| !of_second.contains(value)) {
        // The other rank has another value for the key, or none.
        let found = second.values.iter().find(|value| value.0 == *key && !of_first.contains(value));
        let (key, expected) = (key.clone(), expected.clone());
        return Some(match found.map(|(_, found)| found.clone()) {
            Some(found) => StateError::DifferingOnRanks { operation, key, rank, found, reference, expected },
            None => StateError::KeyMismatch { operation, rank, key, reference },
        });
    }
    let (key, _) = second.values.iter().find(|value| !of_first.contains(value))?;
    Some(StateError::KeyMismatch { operation, rank: reference, key: key.clone(), reference: rank })
}

/// Returns a plan if everything in it fits: an error for mismatches and, in a strict load, for names that only one side has.
fn check_report<E: LoadError>(operation: &'static str, plan: Plan, options: &LoadOptions) -> Result<Plan, E> {
    let report = &plan.report;
    let names = !report.missing.is_empty() || plan.refuses_unexpected && !report.unexpected.is_empty();
    if report.mismatched.is_empty() && !(options.strict && names) {
        return Ok(plan);
    }
    Err(StateError::Incompatible { operation, report: plan.report }.into())
}

/// Lends the target's memory to the source. If the target's own memory cannot be filled directly (it is on a GPU, has
/// another dtype, or the load is staged), the source gets temporary memory, and the values are copied afterwards: a
/// detour.
struct Lending<'a, T> {
    target: &'a mut T,
    wanted: &'a [Wanted],
    /// The target's memory of tensors whose values take a detour.
    detours: HashMap<usize, Memory>,
    /// The target's live memory, and the new values for it, in a staged load.
    staged: Vec<(Memory, ShardedTensor)>,
    is_staged: bool,
}

impl<T: Target> Lend for Lending<'_, T> {
    fn lend(&mut self, wanted: usize) -> Result<Memory, StateError> {
        let memory = self.target.memory(wanted, &self.wanted[wanted])?;
        let mut detour = memory.detour(self.wanted[wanted].dtype)?;
        if self.is_staged
            && self.target.lends_live(wanted)
            && detour.is_none()
            && let Memory::Tensors(tensor) = &memory
        {
            detour = Some(ShardedTensor::zeros(tensor.dtype(), tensor.shape(), &tensor.boxes())?);
        }
        let Some(detour) = detour else { return Ok(memory) };
        self.detours.insert(wanted, memory);
        Ok(Memory::Tensors(detour))
    }

    fn filled(&mut self, wanted: usize, memory: Memory) -> Result<(), StateError> {
        match (self.detours.remove(&wanted), memory) {
            (Some(home), Memory::Tensors(values)) if self.is_staged && self.target.lends_live(wanted) => {
                self.staged.push((home, values));
                Ok(())
            }
            (Some(home), Memory::Tensors(values)) => {
                home.fill_from(&values)?;
                self.target.filled(wanted, home)
            }
            (_, memory) => self.target.filled(wanted, memory),
        }
    }
}
