//! This process in its job: what its operations send to other ranks, and what they wait for.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::acceptor::Admitted;
use super::agreement::Next;
use super::frame::{Kind, OutgoingFrame};
use super::inbox::{HEARTBEAT_TIMEOUT, InboxState, JOB};
use super::inbox_lock::Inbox;
use super::links::{Directory, GOODBYE_TIMEOUT, Links};
use crate::access::Port;
use crate::backend::{Round, Tally, Vote};
use crate::deadline::time_left;
#[cfg(feature = "mpi")]
use crate::deadline::{MAX_TIMEOUT, deadline_after};
use crate::error::CommError;
use crate::store::TcpStore;

/// The time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// The time between two checks of a rank that catches up after its process was stopped.
const CATCH_UP_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The longest time between two checks of a rank that waits for a connection, or for a rank that
/// has left.
const CONNECTION_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The time after which a rank that waits for ballots connects to those that send ballots to it.
const NEIGHBOUR_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The outcome of the rendezvous on a rank.
#[derive(Debug)]
pub(super) struct Connections {
    /// This rank.
    pub(super) rank: usize,
    /// The deadline of the job.
    pub(super) timeout: Duration,
    /// A token of each rank's host, see [`Node::hosts`].
    pub(super) hosts: Vec<Option<String>>,
    /// The connections, by rank.
    pub(super) streams: HashMap<usize, TcpStream>,
    /// The means to make other connections; `None` if every two ranks are connected.
    pub(super) on_demand: Option<(Directory, (Port, Admitted))>,
}

/// This process in its job. When this is dropped, the process leaves the job.
#[derive(Debug)]
pub(super) struct Node {
    /// A token of each rank's host. Ranks with equal tokens can share memory.
    pub(super) hosts: Vec<Option<String>>,
    links: Arc<Links>,
    /// The port at which others connect to this rank.
    port: Option<Port>,
    /// The thread that sends notices.
    notifier: Option<JoinHandle<()>>,
    /// The store, kept for as long as the job runs, because rank 0 hosts it.
    _store: TcpStore,
}

impl Node {
    /// Takes over the connections to other ranks, and starts the threads that read them, that send
    /// heartbeats and notices, and that take other connections.
    pub(super) fn start(connections: Connections, store: TcpStore) -> io::Result<Arc<Node>> {
        let Connections {
            rank,
            timeout,
            hosts,
            streams,
            on_demand,
        } = connections;
        let ranks = hosts.len();
        let mut state = InboxState::new(rank, ranks, timeout, Instant::now());
        let (directory, listening) = on_demand.unzip();
        if directory.is_some() {
            state.open(JOB, &(0..ranks).collect::<Vec<_>>());
        }
        // From here on, an error drops the node, which ends its connections and threads.
        let mut node = Node {
            hosts,
            links: Links::new(rank, ranks, Inbox::new(state), directory),
            port: None,
            notifier: None,
            _store: store,
        };
        for (other_rank, stream) in streams {
            node.links.adopt(other_rank, stream)?;
        }
        let beating = Arc::clone(&node.links);
        node.links.spawn("heartbeat".to_owned(), move || {
            while !beating.inbox.wait_for_next_heartbeat(HEARTBEAT_INTERVAL) {
                beating.send_heartbeats();
            }
        })?;
        let notifying = Arc::clone(&node.links);
        let thread = thread::Builder::new().name("notices".to_owned());
        node.notifier = Some(thread.spawn(move || notifying.send_notices())?);
        if let Some((port, admitted)) = listening {
            node.port = Some(port);
            let admitting = Arc::clone(&node.links);
            node.links.spawn("admits".to_owned(), move || {
                admitting.admit_all(admitted);
            })?;
        }
        Ok(Arc::new(node))
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.links.inbox
    }

    /// Waits until there is a connection to a rank. Returns `false` if there can be none, because
    /// that rank has left.
    ///
    /// # Errors
    /// The round cannot end: that rank is silent, the group has failed, or the deadline is over.
    fn await_connection(
        &self,
        receiver: usize,
        group: u64,
        round: &Round<'_>,
    ) -> Result<bool, CommError> {
        while !self.links.is_connected(receiver) {
            self.links.reach(receiver);
            let state = self.inbox().lock();
            if self.links.is_connected(receiver) {
                break;
            }
            if state.peers[receiver].departure.is_some() {
                return Ok(false);
            }
            if let Some(failure) = state.failure(group, round, &[receiver], Instant::now()) {
                return Err(failure);
            }
            drop(self.inbox().wait(state, CONNECTION_CHECK_INTERVAL));
        }
        Ok(true)
    }

    /// Writes a frame to a rank. While that rank does not read, this waits until the round cannot
    /// end any more.
    ///
    /// # Errors
    /// The frame could not be written as a whole, so the connection can carry no other one, and the
    /// rank counts as lost once all of its frames have been read. With the reason that the round
    /// cannot end, if there was one before.
    pub(super) fn write(
        &self,
        frame: &OutgoingFrame<impl AsRef<[u8]>>,
        round: &Round<'_>,
    ) -> Result<(), Option<CommError>> {
        let &OutgoingFrame {
            receiver, group, ..
        } = frame;
        let failing_since = Cell::new(None);
        let outcome = self.links.write(frame, || {
            let state = self.inbox().lock();
            let now = Instant::now();
            if state.failure(group, round, &[receiver], now).is_none() {
                return true;
            }
            // Other groups use the connection too, so a frame should not end in the middle because
            // this one has failed. A rank that is well reads on soon.
            let since = failing_since.get().unwrap_or(now);
            failing_since.set(Some(since));
            state.peers[receiver].departure.is_none()
                && state.peers[receiver].silence(now) <= HEARTBEAT_TIMEOUT
                && now <= since + HEARTBEAT_TIMEOUT
        });
        outcome.map_err(|error| {
            let failure = {
                let state = self.inbox().lock();
                let missing = if state.peers[receiver].departure.is_some() {
                    &[][..]
                } else {
                    &[receiver]
                };
                state.failure(group, round, missing, Instant::now())
            };
            self.links.give_up(receiver, &error);
            failure
        })
    }

    /// Sends a frame. While the other rank does not read, this waits until the round's deadline.
    ///
    /// # Errors
    /// The round cannot end: the group has failed, that rank has left or is silent, or the deadline
    /// is over.
    pub(super) fn send(
        &self,
        frame: &OutgoingFrame<impl AsRef<[u8]>>,
        round: &Round<'_>,
    ) -> Result<(), CommError> {
        let &OutgoingFrame {
            receiver, group, ..
        } = frame;
        if let Some(failure) = self.failure(group, round, &[]) {
            return Err(failure);
        }
        if self.await_connection(receiver, group, round)? {
            match self.write(frame, round) {
                Ok(()) => return Ok(()),
                Err(Some(failure)) => return Err(failure),
                Err(None) => {}
            }
        }
        // That rank has left, or is lost because of the failed write. Another one may have to be
        // named as the first to be lost.
        self.wait(group, round, |_| Err(vec![receiver]))
    }

    /// Votes in a round with all ranks of a group, and returns the result.
    /// [`InboxState::next`] decides each step, as [`agreement`](super::agreement) describes; this
    /// carries the steps out, without the lock while it sends.
    pub(super) fn vote(
        &self,
        group: u64,
        round: &Round<'_>,
        vote: &Vote<'_>,
    ) -> Result<Tally, CommError> {
        let entered = Instant::now();
        let mut has_reached_neighbours = false;
        let mut state = self.inbox().lock();
        state.enter(group, round.number, vote, entered);
        loop {
            let next = state.next(group, round, Instant::now());
            if state.has_news {
                self.inbox().wake_notice_sender();
            }
            match next? {
                Next::Done(tally) => return Ok(tally),
                Next::Wait(deadline) => {
                    state = self.inbox().wait(state, time_left(deadline));
                    if !has_reached_neighbours && entered.elapsed() > NEIGHBOUR_CHECK_INTERVAL {
                        // If the group is only a part of a large job, a rank that should send to
                        // this one may not have connected yet. Without a connection, this rank
                        // would not notice that the other one leaves or stops.
                        has_reached_neighbours = true;
                        let neighbours = state.groups[&group].neighbours();
                        drop(state);
                        for rank in neighbours {
                            self.links.reach(rank);
                        }
                        state = self.inbox().lock();
                    }
                }
                Next::Send { receiver, messages } => {
                    drop(state);
                    for body in &messages {
                        let ballots = OutgoingFrame {
                            receiver,
                            kind: Kind::Ballot,
                            group,
                            round: round.number,
                            body,
                        };
                        self.pass_on(&ballots, round)?;
                    }
                    state = self.inbox().lock();
                }
            }
        }
    }

    /// Sends ballots. While there is no connection, or the other rank does not read, this waits
    /// until the round's deadline. It is not an error if the other rank is gone: it may have all
    /// ballots already. If it is still needed, the vote itself fails.
    fn pass_on(
        &self,
        ballots: &OutgoingFrame<impl AsRef<[u8]>>,
        round: &Round<'_>,
    ) -> Result<(), CommError> {
        let outcome = match self.await_connection(ballots.receiver, ballots.group, round) {
            Ok(true) => self.write(ballots, round),
            Ok(false) => Ok(()),
            Err(failure) => Err(Some(failure)),
        };
        // If the group has failed, the vote fails next.
        if let Err(Some(failure)) = outcome
            && self.inbox().lock().peers[ballots.receiver]
                .departure
                .is_none()
        {
            return Err(failure);
        }
        Ok(())
    }

    /// Lets a group fail on this rank, and tells its neighbours in the group. This rank may end
    /// right after this call, so this waits for a while until they are told.
    pub(super) fn abort(&self, group: u64, round: u64, error: &CommError) {
        self.inbox().change(|state| state.fail(group, round, error));
        let deadline = Instant::now() + GOODBYE_TIMEOUT;
        self.inbox().wait_until(deadline, |state| {
            state.notices.is_empty() && state.unsent_notices == 0
        });
    }

    /// Tells all ranks that this one leaves, and waits until all others have told the same, but no
    /// longer than `timeout` (`None` waits without end). Returns `true` if all have, and `false` if
    /// one of them is lost or the time is over.
    #[cfg(feature = "mpi")]
    pub(super) fn say_goodbye(&self, timeout: Option<Duration>) -> bool {
        self.links.say_goodbye();
        let deadline = deadline_after(timeout.unwrap_or(MAX_TIMEOUT));
        let mut state = self.inbox().lock();
        loop {
            let now = Instant::now();
            let mut staying = state
                .peers
                .iter()
                .enumerate()
                .filter(|&(rank, peer)| rank != state.rank && !peer.said_goodbye)
                .map(|(_, peer)| peer)
                .peekable();
            if staying.peek().is_none() {
                return true;
            }
            if now >= deadline
                || staying.any(|peer| peer.departure.is_some() || peer.is_silent(now))
            {
                return false;
            }
            state = self.inbox().wait(state, GOODBYE_TIMEOUT);
        }
    }

    /// Returns the reason that a round which still waits for the `missing` ranks cannot end, if
    /// there is one.
    pub(super) fn failure(
        &self,
        group: u64,
        round: &Round<'_>,
        missing: &[usize],
    ) -> Option<CommError> {
        self.inbox()
            .lock()
            .failure(group, round, missing, Instant::now())
    }

    /// Waits until `ready` returns a result. While it cannot, `ready` returns the ranks that are
    /// missing.
    ///
    /// # Errors
    /// One of the missing ranks is lost, the group has failed, or the deadline is over.
    pub(super) fn wait<R>(
        &self,
        group: u64,
        round: &Round<'_>,
        mut ready: impl FnMut(&mut InboxState) -> Result<R, Vec<usize>>,
    ) -> Result<R, CommError> {
        let mut has_reached_missing = false;
        let mut state = self.inbox().lock();
        loop {
            let missing = match ready(&mut state) {
                Ok(result) => return Ok(result),
                Err(missing) => missing,
            };
            if let Some(failure) = state.failure(group, round, &missing, Instant::now()) {
                return Err(failure);
            }
            // Connect to the missing ranks. Without a connection, this rank would not notice that
            // they leave or stop.
            if !has_reached_missing && !missing.iter().all(|&rank| self.links.is_connected(rank)) {
                has_reached_missing = true;
                drop(state);
                missing.iter().for_each(|&rank| self.links.reach(rank));
                state = self.inbox().lock();
                continue;
            }
            // A rank that has left may be blamed soon.
            let has_departed = |&rank: &usize| state.peers[rank].departure.is_some();
            let longest = if missing.iter().any(has_departed) {
                CONNECTION_CHECK_INTERVAL
            } else {
                HEARTBEAT_INTERVAL
            };
            // The deadline may be over while this process catches up.
            let interval = time_left(round.deadline).clamp(CATCH_UP_CHECK_INTERVAL, longest);
            state = self.inbox().wait(state, interval);
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.inbox().change(|state| state.leaving = true);
        // Step 1: let the notices out. The others must get the news that this rank has to forward
        // before they see it leave.
        if let Some(notifier) = self.notifier.take() {
            notifier.join().ok();
        }
        // Step 2: close the port, because a rank that connects later would not hear the goodbye.
        drop(self.port.take());
        // Step 3: say goodbye, and end the connections and the threads that read them.
        self.links.say_goodbye();
        self.links.close();
    }
}
