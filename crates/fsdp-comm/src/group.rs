//! The process group itself: operations take turns, all ranks compare what they call, and errors
//! that end the group stay.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::backend::{Backend, Members, Plan, Round, SETUP_ROUNDS, Tally, Vote};
use crate::ballot::{Ballot, MESSAGE_BYTES, NO_RANK};
use crate::blame;
#[cfg(feature = "nccl")]
use crate::call_order::{CallOrder, Expectation};
use crate::deadline::{MAX_TIMEOUT, deadline_after};
use crate::error::{CommError, RankCall, RankFailure, bounded};
use crate::record::{Attachment, Call, Fault, Operation, Record};
use crate::sync::lock;
use crate::traffic::Traffic;
use crate::wire;

/// The largest payload that a rank attaches to its ballot.
pub(crate) const INLINE_BYTES: usize = 4096;

/// One rank's handle on a group of ranks that call the same operations in the same order.
///
/// Clones are the same group; only their deadlines and labels may differ. Operations of one group
/// on one rank run one after the other, whichever threads call them. A rank leaves the job when the
/// last handle on any of its groups is dropped.
///
/// Unless a method says otherwise, all ranks of the group must call it, ranks are ranks *of this
/// group*, and every rank returns an error if any does ([`CommError`] tells which errors end the
/// group). `root` is a rank of this group.
#[derive(Clone)]
pub struct ProcessGroup {
    shared: Arc<SharedGroup>,
    timeout: Duration,
    /// The object of the operations called through this handle.
    label: Option<Arc<str>>,
    /// The number of ranks of the job on this rank's host.
    ranks_on_host: usize,
}

/// The part of a group that all handles of this rank share.
struct SharedGroup {
    backend: Arc<dyn Backend>,
    progress: Mutex<Progress>,
    /// The traffic of this rank, which all its groups count together.
    traffic: Arc<Mutex<Traffic>>,
}

/// The progress of a group on this rank.
#[derive(Debug, Default)]
struct Progress {
    /// The number of operations so far.
    sequence: u64,
    /// The number of rounds so far, without those in which ranks show why they are not unanimous.
    rounds: u64,
    /// The error that ended the group, if one has.
    failure: Option<CommError>,
    /// The calls on GPU memory in this step.
    #[cfg(feature = "nccl")]
    calls: CallOrder,
    /// The numbers of the groups to which this one was shrunk.
    shrunk: HashSet<u64>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("backend", &self.backend_name())
            .field("rank", &self.rank())
            .field("global_ranks", &self.global_ranks())
            .field("deadline", &self.timeout)
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// Creates the group of all ranks of a backend, of which `ranks_on_host` are on this rank's
    /// host.
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        timeout: Duration,
        ranks_on_host: usize,
    ) -> ProcessGroup {
        ProcessGroup::open(backend, Arc::default(), timeout, ranks_on_host.max(1))
    }

    /// Creates the first handle of a rank on a group, which counts its traffic there.
    fn open(
        backend: Arc<dyn Backend>,
        traffic: Arc<Mutex<Traffic>>,
        timeout: Duration,
        ranks_on_host: usize,
    ) -> ProcessGroup {
        ProcessGroup {
            shared: Arc::new(SharedGroup {
                backend,
                progress: Mutex::default(),
                traffic,
            }),
            timeout,
            label: None,
            ranks_on_host,
        }
    }

    /// Returns this rank, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.members().rank
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.global_ranks().len()
    }

    /// Returns the global rank of each rank of this group: `0..world_size` except in a sub-group.
    #[must_use]
    pub fn global_ranks(&self) -> &[usize] {
        &self.members().global_ranks
    }

    /// Returns the number of ranks of the job that run on this rank's host, itself included, also
    /// those that are not in this group. They share the cores of the host. It is 1 where the
    /// launcher does not tell
    /// ([`Environment::local_world_size`](crate::Environment::local_world_size)); ranks of the
    /// `local` backend are all on one host.
    #[must_use]
    pub fn ranks_on_host(&self) -> usize {
        self.ranks_on_host
    }

    /// Returns the name of the backend: `local`, `tcp`, …
    #[must_use]
    pub fn backend_name(&self) -> &'static str {
        self.shared.backend.name()
    }

    /// Returns the time that each operation called through this handle may take.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.timeout
    }

    /// Returns a handle on the same group with another deadline: each operation may take `timeout`.
    #[must_use]
    pub fn with_deadline(&self, timeout: Duration) -> ProcessGroup {
        ProcessGroup {
            timeout,
            ..self.clone()
        }
    }

    /// Returns the same group. Operations that are called through this handle are on the object of
    /// this name. Ranks that call an operation on different objects get [`CommError::Mismatch`], as
    /// for any other difference between their calls.
    #[must_use]
    pub fn with_label(&self, label: &str) -> ProcessGroup {
        ProcessGroup {
            label: Some(label.into()),
            ..self.clone()
        }
    }

    /// Returns the traffic of this rank so far, over all its groups.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        lock(&self.shared.traffic).clone()
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// A rank that does not call it.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.begin(Call::new(Operation::Barrier), Ok(()))?
            .synchronize()
    }

    /// Aborts the group: running and later operations fail with [`CommError::Aborted`] on every
    /// rank, this one included.
    ///
    /// This is not a collective. A rank calls it when it cannot go on to the next operation, so
    /// that the others do not wait for it until the deadline. If the group has already failed,
    /// nothing happens.
    pub fn abort(&self, message: impl Into<String>) {
        let error = CommError::Aborted {
            rank: self.global_rank(),
            message: bounded(&message.into()),
        };
        self.shared.backend.abort(SETUP_ROUNDS, &error);
    }

    /// Creates the group of the `members` that remain of this one, which may have failed, with the
    /// same deadline, and waits until all of them have.
    ///
    /// # Errors
    /// This rank has called it for the same members before; one of them is missing.
    pub(crate) fn create_shrunk(&self, members: Members) -> Result<ProcessGroup, CommError> {
        const OPERATION: &str = "shrink";
        // Frames of the earlier attempt may still be under way, and have the same number.
        if !lock(&self.shared.progress).shrunk.insert(members.id) {
            return Err(CommError::invalid_argument(
                OPERATION,
                "the group was shrunk to these ranks before: use that group, or leave out also the \
                 rank that its error names"
                    .to_owned(),
            ));
        }
        let timeout = self.timeout.min(MAX_TIMEOUT);
        let round = Round {
            operation: OPERATION,
            ..Round::rendezvous(timeout, deadline_after(timeout))
        };
        let created = self.shared.backend.shrink(&round, members);
        let group = self.with_backend(blame::record(self.global_rank(), created)?);
        group.barrier()?;
        Ok(group)
    }

    /// Returns a group on another backend of the same rank, with the same deadline.
    fn with_backend(&self, backend: Arc<dyn Backend>) -> ProcessGroup {
        let traffic = Arc::clone(&self.shared.traffic);
        ProcessGroup::open(backend, traffic, self.timeout, self.ranks_on_host)
    }

    /// Returns the ranks of the group.
    pub(crate) fn members(&self) -> &Members {
        self.shared.backend.members()
    }

    /// Returns this rank's number in the group of all ranks.
    fn global_rank(&self) -> usize {
        self.global_ranks()[self.rank()]
    }

    /// Begins an operation: takes this rank's turn and its sequence number.
    ///
    /// A group that has failed returns that failure, and no sequence number is taken. If the rank's
    /// own `arguments` are wrong, it tells the others in a round, so that the operation fails on
    /// all ranks. This rank gets its own error back.
    pub(crate) fn begin(
        &self,
        mut call: Call,
        arguments: Result<(), CommError>,
    ) -> Result<Turn<'_>, CommError> {
        let mut progress = lock(&self.shared.progress);
        if progress.failure.is_none()
            && let Some(failure) = self.shared.backend.queued_failure()
        {
            blame::record(self.global_rank(), Err::<(), _>(failure.clone())).ok();
            progress.failure = Some(failure);
        }
        if let Some(failure) = &progress.failure {
            return Err(failure.clone());
        }
        call.sequence = progress.sequence;
        if call.label.is_none() {
            call.label = self.label.as_deref().map(bounded);
        }
        progress.sequence += 1;
        *lock(&self.shared.traffic)
            .collectives
            .entry(call.operation)
            .or_default() += 1;
        let timeout = self.timeout.min(MAX_TIMEOUT);
        let mut turn = Turn {
            group: self,
            progress,
            call,
            timeout,
            deadline: deadline_after(timeout),
            votes_by_message: false,
            #[cfg(feature = "nccl")]
            agreement: Agreement::Due,
        };
        if let Err(error) = arguments {
            // Wrong arguments may be of any size, and need not match.
            turn.call.sizes.clear();
            let fault = Fault::new(&error);
            // The caller gets the error of its own arguments, also if the round fails in another
            // way.
            turn.follow_order(Some(&fault))
                .and_then(|()| turn.round(Some(fault), Vec::new(), &[], |_| Ok(None)))
                .ok();
            return Err(error);
        }
        turn.follow_order(None)?;
        Ok(turn)
    }
}

/// A rank's turn at one operation. No other operation of this group runs on this rank meanwhile.
pub(crate) struct Turn<'g> {
    pub(crate) group: &'g ProcessGroup,
    progress: MutexGuard<'g, Progress>,
    pub(crate) call: Call,
    timeout: Duration,
    deadline: Instant,
    /// `true` if the ranks expect a call on GPU memory next. Another rank may make that one, and
    /// vote on this call only by its watcher, by messages.
    votes_by_message: bool,
    /// The state of the agreement on the call.
    #[cfg(feature = "nccl")]
    agreement: Agreement,
}

/// The state of the agreement on a call on GPU memory.
#[cfg(feature = "nccl")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Agreement {
    /// The ranks have to agree on it.
    Due,
    /// All ranks expect the call.
    LeftOut,
    /// The ranks have agreed on it when they left the order of the step before.
    Done,
}

impl Turn<'_> {
    /// Creates the group of `members`, which are ranks of this one, with the same deadline. A rank
    /// that is in none of the groups that are created at once passes `None`, and does its part.
    pub(crate) fn create_subgroup(
        &self,
        members: Option<Members>,
    ) -> Result<Option<ProcessGroup>, CommError> {
        let backend = &self.group.shared.backend;
        let round = self.current_round();
        let created = match members {
            Some(members) => backend.subgroup(&round, members).map(Some),
            None => backend.without_subgroup(&round).map(|()| None),
        };
        let backend = blame::record(self.group.global_rank(), created)?;
        Ok(backend.map(|backend| self.group.with_backend(backend)))
    }

    /// Returns the last round that has begun.
    fn current_round(&self) -> Round<'_> {
        Round {
            // The odd number after this one is that of the round in which ranks show their records.
            number: SETUP_ROUNDS + 2 * (self.progress.rounds - 1),
            sequence: self.call.sequence,
            operation: self.call.name(),
            timeout: self.timeout,
            deadline: self.deadline,
            votes_by_message: self.votes_by_message,
        }
    }

    /// Begins a round in which this rank agrees on a call with the others.
    fn begin_round(&mut self) {
        self.progress.rounds += 1;
        let has_others = self.group.world_size() > 1;
        lock(&self.group.shared.traffic).agreements += u64::from(has_others);
    }

    /// Carries out a round in which no bytes move: all ranks compare their calls.
    pub(crate) fn synchronize(&mut self) -> Result<(), CommError> {
        self.round(None, Vec::new(), &[], |_| Ok(None))
    }

    /// Moves bytes as `plan` says, in a round for which the ranks need nothing of each other but
    /// that they make the same call.
    pub(crate) fn move_bytes(&mut self, send: &[u8], plan: Plan<'_>) -> Result<(), CommError> {
        self.round(None, Vec::new(), send, |_| Ok(Some(plan)))
    }

    /// Carries out one round: compares the calls of all ranks, lets `plan` decide from all
    /// attachments, and moves the bytes.
    ///
    /// `own_numbers` are numbers of this rank that the plans need, besides the call. `plan` must
    /// come to fitting results on all ranks. It is not called if a rank has a fault, or if the
    /// calls differ, which both are errors on all ranks.
    pub(crate) fn round<'p>(
        &mut self,
        fault: Option<Fault>,
        own_numbers: Vec<u64>,
        send: &[u8],
        plan: impl FnOnce(&[Attachment<'_>]) -> Result<Option<Plan<'p>>, CommError>,
    ) -> Result<(), CommError> {
        self.begin_round();
        let traffic = &self.group.shared.traffic;
        let members = self.group.members();
        let round = self.current_round();
        let call = &self.call;
        let is_inline = send.len() <= INLINE_BYTES;
        let attachment = Attachment {
            numbers: own_numbers,
            payload: if is_inline { send } else { &[] },
        };
        let encoded = attachment.encode();
        let ballot = Ballot {
            is_partial: !is_inline,
            ..own_ballot(call, fault.as_ref(), members.rank)
        };
        let vote = Vote {
            ballot,
            attachment: &encoded,
        };
        let control_bytes = encoded.len() - attachment.payload.len();
        let mut is_unanimous = true;
        let outcome = self.vote(0, &vote, control_bytes, send, |tally| {
            is_unanimous = tally.ballot.is_unanimous();
            if !is_unanimous {
                return Ok(None);
            }
            let decoded = tally.attachments.iter();
            let attachments = decoded
                .map(|bytes| Attachment::decode(bytes, call.name()))
                .collect::<Result<Vec<_>, _>>()?;
            let Some(plan) = plan(&attachments)? else {
                return Ok(None);
            };
            let (sent, received) = plan.moved_bytes(members.rank);
            lock(traffic).record_payload(call.dtype.is_some(), sent, received);
            if tally.ballot.is_partial {
                return Ok(Some(plan));
            }
            let payloads: Vec<&[u8]> = attachments
                .iter()
                .map(|attachment| attachment.payload)
                .collect();
            plan.deliver(&payloads, members, &round)?;
            Ok(None)
        });
        let outcome = if is_unanimous {
            outcome
        } else {
            outcome.and_then(|()| self.show_records(fault))
        };
        self.end_round(outcome)
    }

    /// Shows the record of this rank to all others, and returns the error that follows from those
    /// of all ranks. All ranks call this after a vote in which they were not unanimous.
    fn show_records(&self, fault: Option<Fault>) -> Result<(), CommError> {
        let name = self.call.name();
        let encoded = encode_record(&self.call, fault);
        let vote = Vote {
            ballot: Ballot::blank(),
            attachment: &encoded,
        };
        self.vote(1, &vote, encoded.len(), &[], |tally| {
            Err(difference_error(tally, name, self.group.global_ranks()))
        })
    }

    /// Votes in the current round or, if `part` is 1, in the one after it in which ranks show their
    /// records. Of the attachment, `control_bytes` are no payload.
    fn vote<'p>(
        &self,
        part: u64,
        vote: &Vote<'_>,
        control_bytes: usize,
        send: &[u8],
        plan: impl FnOnce(&Tally) -> Result<Option<Plan<'p>>, CommError>,
    ) -> Result<(), CommError> {
        let shared = &self.group.shared;
        let mut round = self.current_round();
        round.number += part;
        let others = self.group.world_size() - 1;
        let planner = Box::new(|tally: &Tally| {
            let sent_bytes = tally.sent_ballots * MESSAGE_BYTES + control_bytes * others;
            lock(&shared.traffic).control_bytes_sent += sent_bytes as u64;
            plan(tally)
        });
        shared.backend.round(&round, vote, send, planner)
    }

    /// Ends the current round. If it has failed in a way that ends the group, all ranks are told.
    fn end_round<R>(&mut self, outcome: Result<R, CommError>) -> Result<R, CommError> {
        let round_number = self.current_round().number;
        blame::record(self.group.global_rank(), outcome).inspect_err(|error| {
            if error.ends_group() {
                self.progress.failure = Some(error.clone());
                self.group.shared.backend.abort(round_number, error);
            }
        })
    }
}

#[cfg(feature = "nccl")]
impl ProcessGroup {
    pub(crate) fn device_transfer(&self) -> Option<&dyn crate::backend::DeviceTransfer> {
        self.shared.backend.device()
    }
}

#[cfg(not(feature = "nccl"))]
impl Turn<'_> {
    /// Does nothing: without calls on GPU memory no order is known.
    #[expect(clippy::unnecessary_wraps, reason = "it can fail with GPUs")]
    const fn follow_order(&mut self, _fault: Option<&Fault>) -> Result<(), CommError> {
        Ok(())
    }
}

#[cfg(feature = "nccl")]
impl ProcessGroup {
    /// Returns a hash of the calls on GPU memory in this step so far.
    pub(crate) fn calls_hash(&self) -> u64 {
        lock(&self.shared.progress).calls.hash()
    }

    /// Begins a step: see [`DeviceGroup::begin_step`](crate::device::DeviceGroup::begin_step).
    pub(crate) fn begin_step(&self, is_same: bool) -> Result<(), CommError> {
        if !is_same {
            // The ranks that made other calls may all be in other groups. If some are in this one,
            // the error of the barrier names them.
            self.barrier()?;
        }
        lock(&self.shared.progress).calls.begin_step(is_same);
        if let Some(device) = self.device_transfer() {
            device.forget_left_out();
        }
        Ok(())
    }
}

#[cfg(feature = "nccl")]
impl Turn<'_> {
    /// Records the call among those of the step if it is on GPU memory. If all ranks expect another
    /// one, all of them vote on whether they leave the order here. `fault` is the error of this
    /// rank, if it has one. A call on the host's memory leaves the order as it is.
    ///
    /// # Errors
    /// Other ranks have not left the order; a fault of any rank.
    fn follow_order(&mut self, fault: Option<&Fault>) -> Result<(), CommError> {
        let Some(device) = self.group.device_transfer() else {
            return Ok(());
        };
        if !self.call.on_device {
            // The ranks agree on every call on the host's memory.
            self.votes_by_message = self.progress.calls.is_followed();
            return Ok(());
        }
        match (self.progress.calls.record(&self.call), fault) {
            (Expectation::Unknown, _) => return Ok(()),
            (Expectation::Expected, None) => {
                self.agreement = Agreement::LeftOut;
                return Ok(());
            }
            (Expectation::Expected, Some(_)) | (Expectation::Left, _) => {}
        }
        self.begin_round();
        // Ranks that follow the order are in no round: the vote reaches those that make up for it.
        let outcome = device.agree_late(&self.current_round(), &self.call, fault);
        self.agreement = Agreement::Done;
        self.end_round(outcome)
    }

    /// Queues a transfer of GPU memory, after all ranks have agreed on the call, unless all of them
    /// expect it. This rank sends and receives so many bytes to and from other ranks.
    pub(crate) fn transfer<R>(
        &mut self,
        (sent, received): (usize, usize),
        queue: impl FnOnce(&Round<'_>, &Call) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        match self.agreement {
            Agreement::Due => self.synchronize()?,
            Agreement::LeftOut => {
                self.progress.rounds += 1;
                let device = self.group.device_transfer();
                let device = device.expect("only a group that moves GPU memory has an order");
                device.leave_out(&self.current_round(), &self.call);
            }
            Agreement::Done => {}
        }
        lock(&self.group.shared.traffic).record_payload(true, sent, received);
        let outcome = queue(&self.current_round(), &self.call);
        self.end_round(outcome)
    }
}

/// Returns the ballot of a rank of the group for a call.
pub(crate) fn own_ballot(call: &Call, fault: Option<&Fault>, rank: usize) -> Ballot {
    Ballot {
        // A group has far fewer ranks than this type has numbers.
        failed_rank: fault.map_or(NO_RANK, |_| rank as u32),
        ..Ballot::new(call)
    }
}

/// Returns the record of a rank, as it shows it to others after a vote that was not unanimous.
pub(crate) fn encode_record(call: &Call, fault: Option<Fault>) -> Vec<u8> {
    wire::encode_plain(&Record {
        call: call.clone(),
        fault,
    })
}

/// Returns the error of ranks that are not unanimous. The attachments in `tally` are the records of
/// all. A fault of any rank is the error of all; otherwise their calls differ.
pub(crate) fn difference_error(tally: &Tally, operation: &str, ranks: &[usize]) -> CommError {
    let decoded = tally.attachments.iter().map(|bytes| wire::decode(bytes));
    let records: Vec<Record> = match decoded.collect() {
        Ok(records) => records,
        Err(message) => return CommError::object(operation, "decode", message),
    };
    let first_call = &records[0].call;
    let records_and_ranks = records.iter().zip(ranks.iter().copied());
    let failures = records_and_ranks.clone().filter_map(|(record, rank)| {
        let Fault { kind, message } = record.fault.as_ref()?;
        Some(RankFailure {
            rank,
            kind: *kind,
            message: bounded(message),
        })
    });
    let failures: Vec<RankFailure> = failures.collect();
    if !failures.is_empty() {
        return CommError::RankFailed {
            operation: first_call.name().to_owned(),
            failures,
        };
    }
    let calls = records_and_ranks.map(|(record, rank)| (rank, &record.call));
    CommError::Mismatch {
        sequence: first_call.sequence,
        calls: RankCall::collect(calls),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use fsdp_layout::DeviceMesh;

    use super::*;
    use crate::run_local;

    /// Returns the number of a group, and its ranks.
    fn identity(group: &ProcessGroup) -> (u64, Vec<usize>) {
        let members = group.shared.backend.members();
        (members.id, members.global_ranks.clone())
    }

    #[test]
    fn no_two_groups_of_a_job_have_the_same_number() {
        let groups_of_ranks = run_local(4, |world| {
            let mesh = DeviceMesh::new(&[2, 2], &["replicate", "shard"], 4).unwrap();
            let mut groups = vec![world.clone()];
            for _ in 0..3 {
                groups.extend(world.subgroup(&[0, 1, 3]).unwrap());
                groups.extend(world.subgroup(&[2, 3]).unwrap());
                groups.push(world.mesh_group(&mesh, 0).unwrap());
                groups.push(world.mesh_group(&mesh, 1).unwrap());
            }
            // The ranks of these groups have made different numbers of groups before.
            let pair = groups[groups.len() - 1].clone();
            groups.extend(pair.subgroup(&[1]).unwrap());
            groups.push(
                pair.mesh_group(&DeviceMesh::new(&[2], &["shard"], 2).unwrap(), 0)
                    .unwrap(),
            );
            groups.iter().map(identity).collect::<Vec<_>>()
        });
        let mut ranks_of_groups = HashMap::new();
        for groups in groups_of_ranks.unwrap() {
            let numbers: HashSet<u64> = groups.iter().map(|(number, _)| *number).collect();
            assert_eq!(numbers.len(), groups.len(), "{groups:?}");
            for (number, ranks) in groups {
                let known = ranks_of_groups.entry(number).or_insert(ranks.clone());
                assert_eq!(*known, ranks, "group {number}");
            }
        }
    }
}
