//! This process in its job: what its operations send to other ranks, and what they wait for.

use std::cell::Cell;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::acceptor::Acceptor;
use super::frame::{Kind, Notice, OutgoingFrame};
use super::inbox::{HEARTBEAT_TIMEOUT, InboxState, encode_failure, encode_ranks};
use super::inbox_lock::Inbox;
use super::links::{Directory, GOODBYE_TIMEOUT, Links};
use super::relay::Next;
use super::schedule::Schedule;
use crate::access::Port;
use crate::backend::Round;
use crate::error::CommError;
use crate::store::TcpStore;

/// The time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// The time between two checks of a rank that catches up after its process was stopped.
const CATCH_UP_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The longest time between two checks of a rank that waits for a connection.
const CONNECTION_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The time after which a rank that waits for records connects to those that send records to it.
const NEIGHBOUR_CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The outcome of the rendezvous on a rank.
#[derive(Debug)]
pub(super) struct Connections {
    /// This rank.
    pub(super) rank: usize,
    /// The deadline of the job.
    pub(super) timeout: Duration,
    /// The most ranks of a group that send their records to each other directly.
    pub(super) max_direct_group_size: usize,
    /// A token of each rank's host, see [`Node::hosts`].
    pub(super) hosts: Vec<Option<String>>,
    /// The connections by rank; `None` for ranks to which there is none.
    pub(super) streams: Vec<Option<TcpStream>>,
    /// The means to make other connections; `None` if every two ranks are connected.
    pub(super) on_demand: Option<(Directory, Acceptor)>,
}

/// This process in its job. When this is dropped, the process leaves the job.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) rank: usize,
    /// A token of each rank's host. Ranks with equal tokens can share memory.
    pub(super) hosts: Vec<Option<String>>,
    /// The most ranks of a group that send their records to each other directly.
    pub(super) max_direct_group_size: usize,
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
            max_direct_group_size,
            hosts,
            streams,
            on_demand,
        } = connections;
        let ranks = streams.len();
        let mut state =
            InboxState::new(rank, ranks, max_direct_group_size, timeout, Instant::now());
        let (directory, acceptor) = on_demand.unzip();
        if directory.is_some() {
            state.neighbours = Schedule::new(ranks, rank).neighbours();
        }
        // From here on, an error drops the node, which ends its connections and threads.
        let mut node = Node {
            rank,
            hosts,
            max_direct_group_size,
            links: Links::new(rank, ranks, Inbox::new(state), directory),
            port: None,
            notifier: None,
            _store: store,
        };
        for (other_rank, stream) in streams.into_iter().enumerate() {
            if let Some(stream) = stream {
                node.links.adopt(other_rank, stream)?;
            }
        }
        let beating = Arc::clone(&node.links);
        node.links.spawn("heartbeat".to_owned(), move || {
            while !beating.inbox.wait_for_next_heartbeat(HEARTBEAT_INTERVAL) {
                beating.send_heartbeats();
            }
        })?;
        if ranks > max_direct_group_size {
            let notifying = Arc::clone(&node.links);
            let thread = thread::Builder::new().name("notices".to_owned());
            node.notifier = Some(thread.spawn(move || notifying.send_notices())?);
        }
        if let Some(acceptor) = acceptor {
            let (port, admitted) = acceptor.split();
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

    /// Waits until there is a connection to a rank.
    ///
    /// # Errors
    /// The round cannot end: that rank has left or is silent, the group has failed, or the deadline
    /// is over.
    fn await_connection(
        &self,
        receiver: usize,
        group: u64,
        round: &Round<'_>,
    ) -> Result<(), CommError> {
        while !self.links.is_connected(receiver) {
            self.links.reach(receiver);
            let state = self.inbox().lock();
            if self.links.is_connected(receiver) {
                break;
            }
            if let Some(failure) = state.failure(group, round, &[receiver], Instant::now()) {
                return Err(failure);
            }
            drop(self.inbox().wait(state, CONNECTION_CHECK_INTERVAL));
        }
        Ok(())
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
        frame: &OutgoingFrame<'_>,
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
        frame: &OutgoingFrame<'_>,
        round: &Round<'_>,
    ) -> Result<(), CommError> {
        let &OutgoingFrame {
            receiver, group, ..
        } = frame;
        if let Some(failure) = self.failure(group, round, &[]) {
            return Err(failure);
        }
        self.await_connection(receiver, group, round)?;
        match self.write(frame, round) {
            Ok(()) => Ok(()),
            Err(Some(failure)) => Err(failure),
            // The rank is lost because of the failed write. Another one may have to be named as the
            // first to be lost.
            Err(None) => self.wait(group, round, |_| Err(vec![receiver])),
        }
    }

    /// Exchanges records with all ranks of a large group, waits for them, and returns them in rank
    /// order.
    /// [`InboxState::next`] decides each step, as [`relay`](super::relay) describes; this carries
    /// the steps out, without the lock while it sends.
    pub(super) fn relay_records(
        &self,
        group: u64,
        round: &Round<'_>,
        record: &[u8],
    ) -> Result<Vec<Bytes>, CommError> {
        let entered = Instant::now();
        let mut has_reached_neighbours = false;
        let mut state = self.inbox().lock();
        state.enter(group, round.number, record, entered);
        self.inbox().wake_notice_sender();
        loop {
            match state.next(group, round, Instant::now())? {
                Next::Done(records) => return Ok(records),
                Next::Wait(deadline) => {
                    let remaining = deadline.saturating_duration_since(Instant::now());
                    state = self.inbox().wait(state, remaining);
                    if !has_reached_neighbours && entered.elapsed() > NEIGHBOUR_CHECK_INTERVAL {
                        // If the group is only a part of a large job, a rank that should send to
                        // this one may not have connected yet. Without a connection, this rank
                        // would not notice that the other one leaves or stops.
                        has_reached_neighbours = true;
                        let neighbours = state.groups[&group].neighbours();
                        drop(state);
                        neighbours
                            .into_iter()
                            .for_each(|rank| self.links.reach(rank));
                        state = self.inbox().lock();
                    }
                }
                Next::Send { receiver, bundles } => {
                    drop(state);
                    for bundle in bundles {
                        let frame = OutgoingFrame {
                            receiver,
                            kind: Kind::Bundle,
                            group,
                            round: round.number,
                            body: bundle.into(),
                        };
                        self.forward(&frame, round)?;
                    }
                    state = self.inbox().lock();
                }
                Next::Ask(questions) => {
                    drop(state);
                    for (asked_rank, wanted_ranks) in questions {
                        let question = Notice {
                            receiver: asked_rank,
                            kind: Kind::Question,
                            group,
                            round: round.number,
                            body: encode_ranks(&wanted_ranks).into(),
                        };
                        if self.links.is_connected(asked_rank) {
                            self.forward(&question, round)?;
                        } else {
                            // Do not wait for a connection, because the rank that is asked may be
                            // the one at fault, and there are others to ask. The question is sent
                            // once there is a connection.
                            self.notify(question);
                        }
                    }
                    state = self.inbox().lock();
                }
            }
        }
    }

    /// Sends a frame of a relayed exchange. While the other rank does not read, this waits until
    /// the round's deadline. It is not an error if the other rank is gone: it may have all records
    /// already. If it is still needed, the exchange itself fails.
    fn forward(&self, frame: &OutgoingFrame<'_>, round: &Round<'_>) -> Result<(), CommError> {
        let &OutgoingFrame {
            receiver, group, ..
        } = frame;
        if let Some(failure) = self.failure(group, round, &[]) {
            return Err(failure);
        }
        if let Err(failure) = self.await_connection(receiver, group, round) {
            let state = self.inbox().lock();
            return if state.peers[receiver].departure.is_some() {
                state.group_error(group, round).map_or(Ok(()), Err)
            } else {
                Err(failure)
            };
        }
        match self.write(frame, round) {
            Err(Some(failure)) => Err(failure),
            Ok(()) | Err(None) => Ok(()),
        }
    }

    /// Hands a notice to the thread that sends notices, which sends it as soon as there is a
    /// connection.
    fn notify(&self, notice: Notice) {
        self.links.reach(notice.receiver);
        self.inbox().lock().notices.push(notice);
        self.inbox().wake_notice_sender();
    }

    /// Lets a group fail on this rank, and tells the other ranks that have to hear it from this
    /// one.
    pub(super) fn abort(&self, group: u64, round: u64, error: &CommError) {
        let receivers = self.inbox().change(|state| state.fail(group, round, error));
        // This rank may leave after this call, so try for a while to send the news here. What
        // cannot be sent is left to the thread that sends notices.
        let deadline = Instant::now() + GOODBYE_TIMEOUT;
        receivers
            .iter()
            .for_each(|&receiver| self.links.reach(receiver));
        let body = encode_failure(error);
        for receiver in receivers {
            let news = Notice {
                receiver,
                kind: Kind::Abort,
                group,
                round,
                body: body.clone().into(),
            };
            if self.wait_until_connected(receiver, deadline) {
                self.links.try_send(&news);
            } else {
                self.notify(news);
            }
        }
    }

    /// Waits until there is a connection to a rank that this one has reached out to. Returns
    /// `false` if there is none in time, or that rank has left.
    fn wait_until_connected(&self, receiver: usize, deadline: Instant) -> bool {
        let mut state = self.inbox().lock();
        while !self.links.is_connected(receiver) {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() || state.peers[receiver].departure.is_some() {
                return false;
            }
            state = self.inbox().wait(state, remaining);
        }
        true
    }

    /// Tells all ranks that this one leaves, and waits until all others have told the same, but no
    /// longer than `timeout` (`None` waits without end). Returns `true` if all have, and `false` if
    /// one of them is lost or the time is over.
    #[cfg(feature = "mpi")]
    pub(super) fn say_goodbye(&self, timeout: Option<Duration>) -> bool {
        self.links.say_goodbye();
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.inbox().lock();
        loop {
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            let mut staying = state
                .peers
                .iter()
                .enumerate()
                .filter(|&(rank, peer)| rank != self.rank && !peer.said_goodbye)
                .map(|(_, peer)| peer)
                .peekable();
            if staying.peek().is_none() {
                return true;
            }
            if is_over
                || staying.any(|peer| {
                    peer.departure.is_some() || peer.silence(Instant::now()) > HEARTBEAT_TIMEOUT
                })
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
            // The deadline may be over while this process catches up.
            let remaining = round.deadline.saturating_duration_since(Instant::now());
            state = self.inbox().wait(
                state,
                remaining.clamp(CATCH_UP_CHECK_INTERVAL, HEARTBEAT_INTERVAL),
            );
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
