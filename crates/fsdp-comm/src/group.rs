//! The process group itself: operations take turns, all ranks compare what they call, and errors
//! that end the group stay.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::backend::{Backend, Plan, Round};
use crate::blame;
use crate::deadline::{MAX_DEADLINE, until};
use crate::error::{CommError, RankCall, RankFailure, bounded};
use crate::record::{Call, Fault, Header, Operation, Record};
use crate::traffic::{Counters, Traffic};
use crate::wire;

/// The time that an operation may take unless [`ProcessGroup::with_deadline`] says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(60);

/// The largest payload that a rank sends along with its record.
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
    shared: Arc<Shared>,
    deadline: Duration,
    /// The object of the operations called through this handle.
    label: Option<Arc<str>>,
    /// The number of ranks of the job on this rank's host.
    ranks_on_host: usize,
}

/// The part of a group that all handles of this rank share.
struct Shared {
    backend: Arc<dyn Backend>,
    id: u64,
    counters: Arc<Counters>,
    state: Mutex<State>,
}

/// The progress of a group on this rank.
#[derive(Debug, Default)]
struct State {
    /// The number of operations so far.
    sequence: u64,
    /// The number of rounds so far.
    rounds: u64,
    /// The error that ended the group, if one has.
    failure: Option<CommError>,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("backend", &self.backend_name())
            .field("rank", &self.rank())
            .field("global_ranks", &self.global_ranks())
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl ProcessGroup {
    /// Creates the group of all ranks of a backend.
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        Self::with_counters(backend, 0, Arc::new(Counters::new()), DEFAULT_DEADLINE)
    }

    /// Creates a group whose traffic is counted by `counters`, which it may share with the group
    /// that it is a part of.
    fn with_counters(
        backend: Arc<dyn Backend>,
        id: u64,
        counters: Arc<Counters>,
        deadline: Duration,
    ) -> Self {
        ProcessGroup {
            shared: Arc::new(Shared {
                backend,
                id,
                counters,
                state: Mutex::default(),
            }),
            deadline,
            label: None,
            ranks_on_host: 1,
        }
    }

    /// Returns the same group, which now knows how many ranks of the job are on this rank's host.
    pub(crate) fn with_ranks_on_host(&self, ranks: usize) -> ProcessGroup {
        ProcessGroup {
            ranks_on_host: ranks.max(1),
            ..self.clone()
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.shared.id
    }

    /// Returns this rank, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shared.backend.rank()
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.global_ranks().len()
    }

    /// Returns the global rank of each rank of this group: `0..world_size` except in a sub-group.
    #[must_use]
    pub fn global_ranks(&self) -> &[usize] {
        self.shared.backend.global_ranks()
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
        self.deadline
    }

    /// Returns a handle on the same group with another deadline.
    #[must_use]
    pub fn with_deadline(&self, deadline: Duration) -> ProcessGroup {
        ProcessGroup {
            deadline,
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

    /// Returns a handle on the same group with its own deadline, or with this one if it is longer.
    #[must_use]
    pub fn with_deadline_at_least(&self, deadline: Duration) -> ProcessGroup {
        self.with_deadline(self.deadline.max(deadline))
    }

    /// Returns the traffic of this rank so far, over all its groups.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.shared.counters.read()
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// A rank that does not call it.
    pub fn barrier(&self) -> Result<(), CommError> {
        self.begin(Call::new(Operation::Barrier), Ok(()))?
            .round(None, Vec::new(), &[], |_| Ok(None))
    }

    /// Aborts the group: running and later operations fail with [`CommError::Aborted`] on every
    /// rank, this one included.
    ///
    /// This is not a collective. A rank calls it when it cannot go on to the next operation, so
    /// that the others do not wait for it until the deadline. If the group has already failed,
    /// nothing happens.
    pub fn abort(&self, message: impl Into<String>) {
        let rank = self.global_rank();
        self.shared.backend.abort(
            0,
            &CommError::Aborted {
                rank,
                message: bounded(&message.into()),
            },
        );
    }

    /// Returns this rank's number in the group of all ranks.
    fn global_rank(&self) -> usize {
        self.global_ranks()
            .get(self.rank())
            .copied()
            .unwrap_or_default()
    }

    /// Begins an operation: takes this rank's turn and its sequence number.
    ///
    /// If the rank's own `arguments` are wrong, it tells the others, so that the operation fails on
    /// all ranks. This rank gets its own error back.
    pub(crate) fn begin(
        &self,
        mut call: Call,
        arguments: Result<(), CommError>,
    ) -> Result<Turn<'_>, CommError> {
        let mut state = self
            .shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        call.sequence = state.sequence;
        if call.label.is_none() {
            call.label = self.label.as_deref().map(bounded);
        }
        state.sequence += 1;
        self.shared.counters.called(call.operation);
        let deadline = self.deadline.min(MAX_DEADLINE);
        let mut turn = Turn {
            group: self,
            state,
            call,
            deadline,
            until: until(deadline),
        };
        match arguments {
            Ok(()) => Ok(turn),
            Err(error) => {
                let fault = Fault::new(&error);
                // Wrong arguments may be of any size, and need not match.
                turn.call.sizes.clear();
                // The caller gets the error of its own arguments, also if the round fails in
                // another way.
                turn.round(Some(fault), Vec::new(), &[], |_| Ok(None)).err();
                Err(error)
            }
        }
    }
}

/// A rank's turn at one operation. No other operation of this group runs on this rank meanwhile.
pub(crate) struct Turn<'g> {
    group: &'g ProcessGroup,
    state: MutexGuard<'g, State>,
    pub(crate) call: Call,
    deadline: Duration,
    until: Instant,
}

impl<'g> Turn<'g> {
    pub(crate) fn group(&self) -> &'g ProcessGroup {
        self.group
    }

    /// Creates a group of some ranks of this one, with the same deadline.
    pub(crate) fn child(&self, id: u64, ranks: &[usize]) -> Result<ProcessGroup, CommError> {
        let shared = &self.group.shared;
        let backend = blame::noted(
            self.group.global_rank(),
            shared.backend.subgroup(&self.next_round(), id, ranks),
        )?;
        let child = ProcessGroup::with_counters(
            backend,
            id,
            Arc::clone(&shared.counters),
            self.group.deadline,
        );
        Ok(child.with_ranks_on_host(self.group.ranks_on_host))
    }

    /// Returns the next round of this operation.
    fn next_round(&self) -> Round<'_> {
        Round {
            number: self.state.rounds,
            sequence: self.call.sequence,
            operation: self.call.name(),
            deadline: self.deadline,
            until: self.until,
        }
    }

    /// Carries out one round: compares the calls of all ranks, lets `plan` decide from all records,
    /// and moves the bytes.
    ///
    /// `plan` must come to fitting results on all ranks. It is not called if a rank has a fault.
    pub(crate) fn round<'p>(
        &mut self,
        fault: Option<Fault>,
        own: Vec<u64>,
        send: &[u8],
        plan: impl FnOnce(&[Record<'_>]) -> Result<Option<Plan<'p>>, CommError>,
    ) -> Result<(), CommError> {
        let Turn {
            group,
            state,
            call,
            deadline,
            until,
        } = self;
        let (backend, counters) = (&group.shared.backend, &group.shared.counters);
        let (rank, ranks) = (backend.rank(), backend.global_ranks());
        let inline = send.len() <= INLINE_BYTES;
        let header = Header {
            call: call.clone(),
            fault,
            own,
            inline,
        };
        let mut record = wire::encode(&header).map_err(|message| CommError::Object {
            operation: call.name().to_owned(),
            action: "encode".to_owned(),
            message,
        })?;
        counters.control(record.len() * (ranks.len() - 1));
        let header_bytes = record.len();
        if inline {
            record.extend_from_slice(send);
        }
        let round = Round {
            number: state.rounds,
            sequence: call.sequence,
            operation: call.name(),
            deadline: *deadline,
            until: *until,
        };
        state.rounds += 1;
        let planner = |records: &[&[u8]]| {
            let own = (&header, &record[..header_bytes]);
            let records = records
                .iter()
                .map(|bytes| Record::decode(bytes, own, call.name()));
            let records: Vec<Record<'_>> = records.collect::<Result<_, _>>()?;
            compare(&records, ranks)?;
            let Some(plan) = plan(&records)? else {
                return Ok(None);
            };
            let (sent, received) = plan.moved(rank);
            counters.moved(call.operation, sent, received);
            if !records.iter().all(|record| record.header.inline) {
                return Ok(Some(plan));
            }
            let payloads: Vec<&[u8]> = records.iter().map(|record| record.payload).collect();
            plan.deliver(&payloads, rank)
                .map_err(|(from, published)| too_short(call, ranks, from, published))?;
            Ok(None)
        };
        let outcome = backend.round(&round, &record, send, Box::new(planner));
        blame::noted(ranks[rank], outcome).inspect_err(|error| {
            if error.ends_group() {
                state.failure = Some(error.clone());
                backend.abort(round.number, error);
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

#[cfg(feature = "nccl")]
impl Turn<'_> {
    /// Moves GPU memory, after all ranks have agreed on the call. `moved` is the number of bytes to
    /// and from other ranks.
    pub(crate) fn transfer(
        &mut self,
        moved: (usize, usize),
        transfer: impl FnOnce(&Round<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let number = self.state.rounds;
        self.round(None, Vec::new(), &[], |_| Ok(None))?;
        self.group
            .shared
            .counters
            .moved(self.call.operation, moved.0, moved.1);
        let outcome = transfer(&Round {
            number,
            ..self.next_round()
        });
        blame::noted(self.group.global_rank(), outcome).inspect_err(|error| {
            if error.ends_group() {
                self.state.failure = Some(error.clone());
                self.group.shared.backend.abort(number, error);
            }
        })
    }
}

/// Compares the records of all ranks. A fault of any rank is the error of all; otherwise all calls
/// must be the same.
fn compare(records: &[Record<'_>], ranks: &[usize]) -> Result<(), CommError> {
    let failures: Vec<RankFailure> = records
        .iter()
        .zip(ranks)
        .filter_map(|(record, &rank)| {
            let Fault { kind, message } = record.header.fault.as_ref()?;
            Some(RankFailure {
                rank,
                kind: *kind,
                message: bounded(message),
            })
        })
        .collect();
    let Some(first) = records.first().map(|record| &record.header.call) else {
        return Ok(());
    };
    if !failures.is_empty() {
        return Err(CommError::RankFailed {
            operation: first.name().to_owned(),
            failures,
        });
    }
    if records.iter().any(|record| record.header.call != *first) {
        let calls = records
            .iter()
            .zip(ranks)
            .map(|(record, &rank)| (rank, &record.header.call));
        return Err(CommError::Mismatch {
            sequence: first.sequence,
            calls: RankCall::collect(calls),
        });
    }
    Ok(())
}

/// Returns the error for a rank that published fewer bytes than its record promised. Only a bug in
/// a backend can cause it. `from` is the rank's position in `ranks`.
fn too_short(call: &Call, ranks: &[usize], from: usize, published: usize) -> CommError {
    let rank = ranks.get(from).copied().unwrap_or(from);
    let called = format!("{call}, but published only {published} bytes");
    CommError::Mismatch {
        sequence: call.sequence,
        calls: vec![RankCall {
            ranks: vec![rank],
            call: called,
        }],
    }
}
