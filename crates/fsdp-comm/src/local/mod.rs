//! The `local` backend: ranks are threads of one process.
//!
//! A rank publishes the slice that it sends for the duration of a round, and the others copy
//! straight from it into their own slices, or reduce it there: bytes are copied once, by all ranks
//! at the same time.

mod board;
mod ranks;
#[expect(
    unsafe_code,
    reason = "other threads read a slice that a rank lends for the duration of a round"
)]
mod slot;
mod turns;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use self::board::Board;
use self::slot::Slot;
use crate::backend::{Backend, Members, Plan, Planner, Round, Vote};
use crate::error::CommError;
use crate::sync::lock;

pub use self::ranks::{LocalRanks, run_local};
pub use self::turns::Turns;

/// The state that all ranks of one process share: the ranks that have left, and the groups.
#[derive(Debug, Default)]
struct Hub {
    state: Mutex<HubState>,
    turns: Option<Arc<dyn Turns>>,
}

#[derive(Debug, Default)]
struct HubState {
    /// The ranks that have left, with the reasons.
    departures: HashMap<usize, String>,
    groups: HashMap<u64, Weak<Group>>,
}

/// The state that the ranks of one group share.
#[derive(Debug)]
struct Group {
    board: Board,
    slots: Vec<Slot>,
}

impl Hub {
    /// Returns the group with this id. The first rank to ask for it creates it.
    fn group(&self, id: u64, global_ranks: &[usize]) -> Arc<Group> {
        let mut state = lock(&self.state);
        if let Some(group) = state.groups.get(&id).and_then(Weak::upgrade) {
            return group;
        }
        let group = Arc::new(Group {
            board: Board::new(global_ranks.to_vec(), self.turns.clone()),
            slots: global_ranks.iter().map(|_| Slot::default()).collect(),
        });
        for (&rank, reason) in &state.departures {
            group.board.leave(rank, reason);
        }
        state.groups.retain(|_, group| group.strong_count() > 0);
        state.groups.insert(id, Arc::downgrade(&group));
        group
    }

    /// Records in all groups, also in those that are made later, that a rank takes no further part.
    /// If a rank leaves more than once, the first reason is kept.
    fn leave(&self, rank: usize, reason: &str) {
        let mut state = lock(&self.state);
        if state.departures.contains_key(&rank) {
            return;
        }
        state.departures.insert(rank, reason.to_owned());
        for group in state.groups.values().filter_map(Weak::upgrade) {
            group.board.leave(rank, reason);
        }
    }
}

/// A rank's membership in the job. All groups of the rank share it, and the rank leaves when the
/// last of them is dropped.
#[derive(Debug)]
struct Membership {
    hub: Arc<Hub>,
    rank: usize,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.hub.leave(self.rank, "has left the group");
    }
}

/// One rank of one group.
#[derive(Debug)]
struct LocalBackend {
    membership: Arc<Membership>,
    group: Arc<Group>,
    members: Members,
}

impl Backend for LocalBackend {
    fn name(&self) -> &'static str {
        "local"
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn round<'p>(
        &self,
        round: &Round<'_>,
        vote: &Vote<'_>,
        send: &[u8],
        plan: Planner<'p, '_>,
    ) -> Result<(), CommError> {
        let Group { board, slots } = &*self.group;
        let own_rank = self.members.rank;
        // Other ranks may read `send` until the end of the closure.
        slots[own_rank].lend(round.number, send, || {
            let Some(plan) = plan(&*board.vote(round, own_rank, vote)?)? else {
                return Ok(());
            };
            let others = (0..slots.len()).filter(|&rank| rank != own_rank);
            let readers: Vec<usize> = others
                .clone()
                .filter(|&rank| !plan.sent_ranges[rank].is_empty())
                .collect();
            let owners: Vec<usize> = others
                .filter(|&rank| !plan.received_ranges[rank].is_empty())
                .collect();
            self.read_published(round, plan)?;
            // The slice must stay until all its readers are done.
            board.finish(round, own_rank, &owners, &readers)
        })
    }

    fn subgroup(
        &self,
        _round: &Round<'_>,
        members: Members,
    ) -> Result<Arc<dyn Backend>, CommError> {
        let membership = Arc::clone(&self.membership);
        Ok(Arc::new(LocalBackend::new(membership, members)))
    }

    fn abort(&self, _round: u64, error: &CommError) {
        self.group.board.fail(error.clone());
    }
}

impl LocalBackend {
    /// Opens a group on a rank, which is one of its members.
    fn new(membership: Arc<Membership>, members: Members) -> LocalBackend {
        LocalBackend {
            group: membership.hub.group(members.id, &members.global_ranks),
            membership,
            members,
        }
    }

    /// Fills this rank's destination from the slices that the ranks have published.
    ///
    /// # Errors
    /// A rank that has taken its slice back, because the round has failed, or has published too
    /// little.
    fn read_published(&self, round: &Round<'_>, plan: Plan<'_>) -> Result<(), CommError> {
        let Group { board, slots } = &*self.group;
        let mut loans = Vec::with_capacity(slots.len());
        for (rank, slot) in slots.iter().enumerate() {
            if plan.received_ranges[rank].is_empty() {
                loans.push(None);
                continue;
            }
            let Some(loan) = slot.borrow(round.number) else {
                // The slice is not published any more although this rank has not read it. Its owner
                // withdraws it early only if the round has failed.
                return Err(board.withdrawn_error(round, self.members.rank, rank));
            };
            loans.push(Some(loan));
        }
        let sources: Vec<&[u8]> = loans
            .iter()
            .map(|loan| match loan {
                Some(loan) => loan.bytes(),
                None => &[],
            })
            .collect();
        plan.deliver(&sources, &self.members, round)
    }
}
