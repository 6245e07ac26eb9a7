//! The path that every load takes: compare, agree, lend, read, commit.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher as _, BuildHasherDefault, Hash};

use fsdp_comm::{CommError, ProcessGroup, ReduceOp};
use fsdp_flat::ShardedTensor;
use fsdp_flat::storage::{finish_uploads, storage_id};
use fsdp_layout::Failure;
use itertools::{EitherOrBoth, Itertools as _};
use twox_hash::XxHash3_64;

use super::lending::Lending;
use super::options::LoadOptions;
use super::source::{LoadCall, Source};
use super::target::{Common, Plan, Target, Values};
use crate::error::StateError;
use crate::lend::Memory;
use crate::report::LoadReport;

/// An error that [`load_state`] can return. It knows how to turn one rank's error into an error on
/// every rank.
pub trait LoadError: Failure + From<StateError> + From<CommError> {
    /// Returns the error of a collective, if this is one. Every rank has such an error already.
    fn comm(&self) -> Option<&CommError>;

    /// Turns an error of any rank into an error on every rank. If a `hash` is given, it must also
    /// be the same on all ranks.
    ///
    /// # Errors
    /// Any rank's error; [`CommError::SchemaMismatch`] for hashes that differ.
    fn agree<T>(
        group: &ProcessGroup,
        operation: &str,
        hash: Option<u64>,
        outcome: Result<T, Self>,
    ) -> Result<T, Self> {
        let agreed = match hash {
            Some(hash) => group.agree_on(operation, hash, outcome),
            None => group.agree(operation, outcome),
        };
        Ok(agreed?)
    }

    /// Returns the source or the target that this rank has opened. A rank that could not open it
    /// does not come to [`load_state`], but takes part in the agreement there, in which the other
    /// ranks wait. Otherwise there is no communication.
    ///
    /// # Errors
    /// This rank's error, on every rank.
    fn or_refuse<T>(
        group: &ProcessGroup,
        operation: &str,
        opened: Result<T, impl Into<Self>>,
    ) -> Result<T, Self> {
        opened.or_else(|error| Self::agree(group, operation, Some(0), Err(error.into())))
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

/// Loads the values of `source` into `target`. All loads and collectives on state use this
/// function.
///
/// 1. **Compare**: each rank compares the source's schema with what its target can take, and checks
///    that it can read what it wants.
/// 2. **Agree**: one round over the ranks. Any rank's error becomes every rank's, and all must have
///    the same contribution. Only values that ranks have of their own (running statistics, a random
///    generator's state) may differ.
/// 3. **Lend**: the target gives memory for the boxes that it wants, live or fresh.
/// 4. **Read**: the source fills it, from files, from this rank's own values, or from other ranks.
/// 5. **Commit**: the target takes over the small values.
///
/// Collective over `group`: two agreements (three for a live target), and those of
/// [`Source::locate`] and [`Source::read`]; where ranks differ, also an object all-gather, an
/// object broadcast, an all-reduce and an agreement. The report is the same on every rank, except
/// for missing values that a rank has of its own.
///
/// # Errors
/// The same on every rank. Before the first byte is read nothing has changed:
/// [`StateError::Incompatible`] for values that do not fit (and, if strict, names that only one
/// side has); ranks that pass different arguments, names or values; any rank's own error. After
/// that it is [`StateError::PartlyLoaded`] if the target is live, and the load is not staged or
/// fails while it copies the staged values into place.
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
    // Compare. This is local: an error found here must not be returned before the other ranks know
    // of it.
    let call = LoadCall {
        operation,
        group,
        options,
    };
    let compared = compare::<S, T, E>(&call, source, target);
    // Agree. From here on every rank has the same plan, except for the boxes in it and for values
    // of its own.
    let plan = agree(&call, compared)?;
    source.locate(&call, &plan.wanted, &|wanted, rank| {
        target.wanted_on(wanted, rank)
    })?;

    // Lend and read. Live memory changes from here on.
    let is_live = target.is_live();
    let is_staged = options.staged && is_live;
    let mut lending = Lending::new(target, &plan.wanted, is_staged);
    let read_outcome = source
        .read(&call, &plan.wanted, &mut lending)
        .map_err(E::from);
    let mut outcome = match read_outcome {
        // If a collective has failed, every rank has this error already, and no further agreement
        // is possible.
        Err(error) if error.comm().is_some() => {
            return Err(partly_loaded(is_live && !is_staged, true, error));
        }
        outcome => outcome,
    };
    let staged = lending.into_staged();
    // What GPUs have been given to copy must be in its place. A copy that fails is an error here.
    outcome = outcome.and_then(|()| Ok(finish_uploads().map_err(StateError::from)?));
    if !is_live && outcome.is_ok() {
        outcome = target.commit().map_err(E::from);
    }
    // A rank that failed to read has still taken part in the collectives. This agreement gives its
    // error to the others.
    E::agree(group, operation, None, outcome)
        .map_err(|error| partly_loaded(is_live && !is_staged, true, error))?;

    if !is_live {
        return Ok(plan.report);
    }
    // Commit. The staged values are copied to the live memory. They were made to fit it, but a
    // device may still refuse them, so the ranks agree once more.
    let filled = staged
        .into_iter()
        .try_for_each(|(memory, values)| memory.fill_from(&values));
    let committed = filled
        .map_err(E::from)
        .and_then(|()| target.commit().map_err(E::from));
    E::agree(group, operation, None, committed)
        .map_err(|error| partly_loaded(true, false, error))?;
    Ok(plan.report)
}

/// Checks that [`load_state`] can load the values of `source` into `target`, as far as that is
/// known before the first byte is read, and returns the report. The values of the target stay as
/// they are. Collective over `group`: the first agreement of [`load_state`].
///
/// # Errors
/// Those of [`load_state`] before the first byte is read.
pub fn check_state<S, T, E>(
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
    let call = LoadCall {
        operation,
        group,
        options,
    };
    let compared = compare::<S, T, E>(&call, source, target);
    Ok(agree(&call, compared)?.report)
}

/// Wraps an error in [`StateError::PartlyLoaded`] if some live values may be new and others old.
fn partly_loaded<E: LoadError>(is_partly_loaded: bool, can_be_staged: bool, error: E) -> E {
    if is_partly_loaded {
        StateError::PartlyLoaded {
            reason: error.to_string(),
            can_be_staged,
            kind: error.kind(),
        }
        .into()
    } else {
        error
    }
}

/// Compares source and target on this rank, and has the source copy values that the load would
/// overwrite before it reads them. No communication.
///
/// # Errors
/// Options that select nothing; lists with long gaps; values that the source cannot read, or that
/// no target could take.
fn compare<S, T, E>(call: &LoadCall<'_>, source: &mut S, target: &mut T) -> Result<Plan, E>
where
    S: Source,
    T: Target,
    E: LoadError + From<S::Error> + From<T::Error>,
{
    if call.options.only.as_ref().is_some_and(Vec::is_empty) {
        return Err(StateError::NothingSelected.into());
    }
    source.schema().check_gaps()?;
    let mut plan = target.plan::<E>(
        source.schema(),
        &|positions| small_values(source, positions),
        call.options,
    )?;
    plan.report.sort();
    if target.is_live() && !source.moves_between_ranks() {
        tie_names_of_one_memory(target, &mut plan)?;
    }
    // Values that do not fit are an error of the load already, which says more than one about their
    // elements.
    if plan.report.mismatched.is_empty() {
        source.check(&plan.wanted)?;
    }
    if target.is_live() {
        source.separate(&plan.wanted, &mut |wanted| target.memory(wanted))?;
    }
    // A rank that is alone has nobody to compare with.
    if call.group.world_size() == 1 {
        return Ok(plan);
    }
    let common = &mut plan.common;
    common.options = call.options.describe_common();
    common.source = source.schema().clone();
    common.contents = source.contents();
    for wanted in plan
        .wanted
        .iter()
        .filter(|wanted| wanted.is_same_on_all || source.moves_between_ranks())
    {
        let hash = if wanted.is_same_on_all {
            source.hash(wanted.position)?
        } else {
            None
        };
        let text = hash.map_or_else(
            || "a tensor".to_owned(),
            |hash| format!("a tensor with the hash {hash:016x}"),
        );
        common.values.push((wanted.key.clone(), text));
    }
    common.values.sort();
    Ok(plan)
}

/// Ties names whose memory in the target is one and the same, so that the source compares their
/// values: only those of the first name will be filled in.
///
/// # Errors
/// Memory that the target cannot lend.
fn tie_names_of_one_memory<T: Target>(target: &mut T, plan: &mut Plan) -> Result<(), StateError> {
    let mut first_names: HashMap<(usize, usize), (usize, ShardedTensor)> = HashMap::new();
    for index in 0..plan.wanted.len() {
        if !target.may_be_tied(&plan.wanted[index]) {
            continue;
        }
        let Memory::Tensors(tensor) = target.memory(&plan.wanted[index])? else {
            continue;
        };
        let mut shards = tensor.shards().iter();
        let Some(shard) = shards.find(|shard| !shard.bounds.is_empty()) else {
            continue;
        };
        let offset = shard.tensor.layout().start_offset();
        match first_names.entry((storage_id(&shard.tensor), offset)) {
            Entry::Vacant(entry) => _ = entry.insert((index, tensor)),
            Entry::Occupied(entry) => {
                let (first_index, first_tensor) = entry.get();
                let position = plan.wanted[index].position;
                if first_tensor.is_same_view(&tensor) {
                    plan.wanted[*first_index].tied_positions.push(position);
                }
            }
        }
    }
    Ok(())
}

/// Returns the small values of a source among those at `positions`.
fn small_values<S: Source, E: From<S::Error>>(
    source: &S,
    positions: &[usize],
) -> Result<Values, E> {
    let mut positions = positions.to_vec();
    positions.retain(|&position| source.schema().is_small(position));
    let values = source.values(&positions)?;
    Ok(positions.into_iter().zip(values).collect())
}

/// Checks that no rank has an error, that all ranks have the same common data, and that everything
/// fits. Collectives: one agreement; if ranks differ, also an object all-gather, and then either
/// two object broadcasts to find the difference or, for values that ranks have of their own, those
/// of [`agree_on_reports`].
fn agree<E: LoadError>(call: &LoadCall<'_>, compared: Result<Plan, E>) -> Result<Plan, E> {
    let group = call.group;
    let (mut plan, outcome) = match compared {
        Ok(plan) => (plan, Ok(())),
        Err(error) => (Plan::default(), Err(error)),
    };
    let common = std::mem::take(&mut plan.common);
    let hash = hash_of(&common);
    // The hash of a rank with an error does not matter: errors are checked before hashes are
    // compared.
    let agreed = E::agree(
        group,
        call.operation,
        Some(hash_of(&(hash, &plan.report))),
        outcome,
    );
    let error = match agreed {
        Ok(()) => return check_report(call, plan),
        Err(error) => error,
    };
    if !matches!(error.comm(), Some(CommError::SchemaMismatch { .. })) {
        return Err(error);
    }
    let hashes: Vec<u64> = group.all_gather_object(&hash)?;
    let Some(other_rank) = hashes
        .iter()
        .position(|other_hash| *other_hash != hashes[0])
    else {
        return agree_on_reports(call, plan);
    };
    // These data may be large, so only two ranks send theirs: the first, and the first that differs
    // from it.
    let first_common: Common = group.broadcast_object((group.rank() == 0).then_some(&common), 0)?;
    let second_common: Common =
        group.broadcast_object((group.rank() == other_rank).then_some(&common), other_rank)?;
    Err(find_difference(call, &first_common, other_rank, &second_common).map_or(error, E::from))
}

/// Checks the plans of ranks that differ only in their reports, because each rank asks for names of
/// its own. If something does not fit on one rank, all ranks get its error. A name of the source is
/// unexpected only if no rank asks for it. Collectives: an object broadcast, an all-reduce and an
/// agreement.
fn agree_on_reports<E: LoadError>(call: &LoadCall<'_>, mut plan: Plan) -> Result<Plan, E> {
    let group = call.group;
    // Only names that are unexpected on the first rank can be unexpected on all ranks.
    let own_unexpected = &plan.report.unexpected;
    let mut names: Vec<String> =
        group.broadcast_object((group.rank() == 0).then_some(own_unexpected), 0)?;
    // An entry is 1 if this rank asks for the name. After the reduction it is 1 if any rank does.
    // Reports are sorted, so a binary search finds the names.
    let mut asked_for: Vec<u8> = names
        .iter()
        .map(|name| own_unexpected.binary_search(name).is_err().into())
        .collect();
    group.all_reduce(&mut asked_for, ReduceOp::Max)?;
    let mut flags = asked_for.into_iter();
    names.retain(|_| flags.next() == Some(0));
    plan.report.unexpected = names;
    E::agree(group, call.operation, None, check_report(call, plan))
}

fn hash_of(value: &impl Hash) -> u64 {
    BuildHasherDefault::<XxHash3_64>::new().hash_one(value)
}

/// Returns the first difference between the data of the first rank and of another. Every rank finds
/// the same one.
fn find_difference(
    call: &LoadCall<'_>,
    first: &Common,
    other_rank: usize,
    second: &Common,
) -> Option<StateError> {
    let operation = call.operation;
    let reference = call.group.global_ranks()[0];
    let rank = call.group.global_ranks()[other_rank];
    let arguments = [
        (&first.options, &second.options),
        (&first.arguments, &second.arguments),
        (&first.contents, &second.contents),
    ];
    if let Some((expected, found)) = arguments
        .into_iter()
        .find(|(first, second)| first != second)
    {
        return Some(StateError::ArgumentMismatch {
            operation,
            rank,
            found: found.clone(),
            reference,
            expected: expected.clone(),
        });
    }
    let schemas = [
        (&first.source, &second.source),
        (&first.target, &second.target),
    ];
    if let Some(leaves) = schemas
        .into_iter()
        .find_map(|(first, second)| first_difference(first.iter(), second.iter()))
    {
        return Some(match leaves {
            EitherOrBoth::Left((path, _)) => {
                missing_key_error(operation, path.flat_key(), rank, reference)
            }
            EitherOrBoth::Right((path, _)) => {
                missing_key_error(operation, path.flat_key(), reference, rank)
            }
            EitherOrBoth::Both((path, expected), (_, found)) => StateError::ValueMismatch {
                operation,
                key: path.flat_key(),
                rank,
                found: found.to_string(),
                reference,
                expected: expected.to_string(),
            },
        });
    }
    let values = first_difference(first.values.iter(), second.values.iter())?;
    Some(match values {
        EitherOrBoth::Left((key, _)) => missing_key_error(operation, key.clone(), rank, reference),
        EitherOrBoth::Right((key, _)) => missing_key_error(operation, key.clone(), reference, rank),
        EitherOrBoth::Both((key, expected), (_, found)) => StateError::DifferingOnRanks {
            operation,
            key: key.clone(),
            rank,
            found: found.clone(),
            reference,
            expected: expected.clone(),
        },
    })
}

/// Returns the error of a rank that lacks a key which another has.
const fn missing_key_error(
    operation: &'static str,
    key: String,
    rank: usize,
    reference: usize,
) -> StateError {
    StateError::KeyMismatch {
        operation,
        rank,
        key,
        reference,
    }
}

/// Returns the first item that only one of two sorted lists has, or that has another value in the
/// other.
fn first_difference<'a, K: Ord, V: PartialEq>(
    first: impl Iterator<Item = &'a (K, V)>,
    second: impl Iterator<Item = &'a (K, V)>,
) -> Option<EitherOrBoth<&'a (K, V)>> {
    let mut pairs = first.merge_join_by(second, |(key, _), (other_key, _)| key.cmp(other_key));
    pairs.find(|pair| !matches!(pair, EitherOrBoth::Both((_, value), (_, other)) if value == other))
}

/// Returns a plan if everything in it fits: an error for mismatches and, in a strict load, for
/// names that only one side has.
fn check_report<E: LoadError>(call: &LoadCall<'_>, plan: Plan) -> Result<Plan, E> {
    let report = &plan.report;
    let has_lone_names =
        !report.missing.is_empty() || plan.refuses_unexpected && !report.unexpected.is_empty();
    if report.mismatched.is_empty() && !(call.options.strict && has_lone_names) {
        return Ok(plan);
    }
    Err(StateError::Incompatible {
        operation: call.operation,
        report: plan.report,
    }
    .into())
}
