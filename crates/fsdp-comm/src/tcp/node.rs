//! This process in its job: a socket to each other process, and the frames that have been received.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::frame::{self, Frame, Kind};
use crate::backend::Round;
use crate::error::CommError;
use crate::store::TcpStore;
use crate::wire;

/// The time between two heartbeats, which a rank sends to all others.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(500);

/// The time without any frame after which a rank counts as stopped or unreachable, and not merely slow.
pub(super) const SILENCE: Duration = Duration::from_millis(1750);

/// The time after which a blocked write checks whether it should go on.
const WRITE_SLICE: Duration = Duration::from_millis(100);

/// The time for which a rank that leaves or aborts tries to tell the others.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);

/// This process in its job, which it leaves when this is dropped.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) rank: usize,
    /// A token of each rank's host. Ranks with equal tokens can share memory.
    pub(super) hosts: Vec<Option<String>>,
    writers: Writers,
    inbox: Arc<Inbox>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The store, kept for as long as the job runs, because rank 0 hosts it.
    _store: TcpStore,
}

/// The sockets to all other ranks; `None` for this one.
type Writers = Arc<Vec<Option<Mutex<Arc<TcpStream>>>>>;

/// The received frames of all sockets.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    ranks: Vec<RankState>,
    /// The time of silence after which a rank is lost even if an operation may take longer: the job's own deadline.
    patience: Duration,
    /// The time of this process's last heartbeat.
    last_heartbeat_sent: Instant,
    groups: HashMap<u64, GroupState>,
    /// The ranks whose connections have ended without a goodbye, in the order in which they ended.
    lost: Vec<usize>,
    /// Groups that this process has dropped. Frames for them may still arrive, and are ignored.
    closed: HashSet<u64>,
    leaving: bool,
}

#[derive(Debug)]
struct RankState {
    left: Option<String>,
    said_goodbye: bool,
    last_frame_received: Instant,
}

#[derive(Debug, Default)]
struct GroupState {
    /// The ranks of the group.
    ranks: Vec<usize>,
    /// The round in which the group failed, and the error.
    failure: Option<(u64, CommError)>,
    /// The received frames, by global rank and round.
    rounds: HashMap<(usize, u64), Incoming>,
}

/// The frames of one rank in one round.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    pub(super) record: Option<Vec<u8>>,
    pub(super) chunks: VecDeque<Vec<u8>>,
}

impl State {
    /// Returns the frames that a rank has sent in a round so far.
    pub(super) fn incoming(&mut self, group: u64, rank: usize, round: u64) -> &mut Incoming {
        self.groups.entry(group).or_default().rounds.entry((rank, round)).or_default()
    }

    /// Returns the largest number of chunks of one rank that wait to be taken.
    #[cfg(test)]
    pub(super) fn most_waiting_chunks(&self) -> usize {
        let incoming = self.groups.values().flat_map(|group| group.rounds.values());
        incoming.map(|incoming| incoming.chunks.len()).max().unwrap_or(0)
    }

    /// Drops the frames of a round.
    pub(super) fn forget(&mut self, group: u64, round: u64) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.rounds.retain(|&(_, number), _| number != round);
        }
    }
}

impl Inbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive(&self, from: usize, frame: Frame) {
        let mut state = self.lock();
        state.ranks[from].last_frame_received = Instant::now();
        match frame.kind {
            Kind::Heartbeat => return,
            Kind::Goodbye => {
                state.ranks[from].said_goodbye = true;
                state.ranks[from].left.get_or_insert_with(|| String::from_utf8_lossy(&frame.body).into_owned());
            }
            _ if state.closed.contains(&frame.group) => return,
            Kind::Abort => {
                let unreadable = |message| CommError::Aborted { rank: from, message };
                let failure = wire::decode(&frame.body).unwrap_or_else(unreadable);
                state.groups.entry(frame.group).or_default().failure.get_or_insert((frame.round, failure));
            }
            Kind::Record => state.incoming(frame.group, from, frame.round).record = Some(frame.body),
            Kind::Chunk => state.incoming(frame.group, from, frame.round).chunks.push_back(frame.body),
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Records that the connection to the rank `from` ended with this error, and wakes all who wait for that rank.
    fn lose(&self, from: usize, error: &io::Error) {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "exited without leaving the group (its connection was closed)".to_owned()
            }
            _ => format!("was lost: {error}"),
        };
        let mut state = self.lock();
        if !state.leaving {
            tracing::debug!(rank = from, reason, "a rank left");
        }
        if state.ranks[from].left.is_none() {
            state.ranks[from].left = Some(reason);
            state.lost.push(from);
        }
        drop(state);
        self.changed.notify_all();
    }
}

impl Node {
    /// Takes over the sockets to all other ranks (`None` for this one), and starts the threads that read them and that
    /// send heartbeats.
    pub(super) fn start(
        rank: usize,
        hosts: Vec<Option<String>>,
        streams: Vec<Option<TcpStream>>,
        store: TcpStore,
        deadline: Duration,
    ) -> io::Result<Arc<Node>> {
        let last_frame_received = Instant::now();
        let ranks =
            streams.iter().map(|_| RankState { left: None, said_goodbye: false, last_frame_received }).collect();
        let patience = deadline.max(SILENCE);
        let (groups, lost, closed) = (HashMap::new(), Vec::new(), HashSet::new());
        let state =
            State { ranks, patience, last_heartbeat_sent: last_frame_received, groups, lost, closed, leaving: false };
        let inbox = Arc::new(Inbox { state: Mutex::new(state), changed: Condvar::new() });
        let mut writers = Vec::with_capacity(streams.len());
        let mut threads = Vec::with_capacity(streams.len());
        for (from, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                writers.push(None);
                continue;
            };
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(WRITE_SLICE))?;
            // Both directions use one file descriptor, of which a process may have a limited number.
            let stream = Arc::new(stream);
            writers.push(Some(Mutex::new(Arc::clone(&stream))));
            let inbox = Arc::clone(&inbox);
            let thread = thread::Builder::new().name(format!("from-rank-{from}"));
            threads.push(thread.spawn(move || receive_all(&stream, from, &inbox))?);
        }
        let writers = Arc::new(writers);
        let (own_inbox, sockets) = (Arc::clone(&inbox), Arc::clone(&writers));
        let send_heartbeats = move || {
            while !own_inbox.sleep(HEARTBEAT) {
                sockets.iter().flatten().for_each(send_heartbeat);
            }
        };
        threads.push(thread::Builder::new().name("heartbeat".to_owned()).spawn(send_heartbeats)?);
        Ok(Arc::new(Node { rank, hosts, writers, inbox, threads: Mutex::new(threads), _store: store }))
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Sends a frame, and waits until the round's deadline if the other rank does not read.
    pub(super) fn send(
        &self,
        to: usize,
        kind: Kind,
        group: u64,
        round: &Round<'_>,
        body: &[u8],
    ) -> Result<(), CommError> {
        if let Some(failure) = self.failure(group, round, &[]) {
            return Err(failure);
        }
        // While the other rank does not read, this looks whether it is lost, and whether the group has failed.
        let go_on = || self.failure(group, round, &[to]).is_none();
        let Err(error) = self.write(to, kind, (group, round.number), body, go_on) else { return Ok(()) };
        let failure = self.failure(group, round, &[to]);
        // The connection may be in the middle of a frame, so it cannot be used any more.
        self.inbox.lose(to, &error);
        self.hang_up(to);
        Err(failure.or_else(|| self.failure(group, round, &[to])).unwrap_or_else(|| CommError::RankLeft {
            rank: to,
            operation: round.operation.to_owned(),
            sequence: round.sequence,
            reason: format!("was lost: {error}"),
        }))
    }

    fn hang_up(&self, from: usize) {
        if let Some(Some(writer)) = self.writers.get(from) {
            // This ends the thread that reads the socket here, and the one of the other rank after it has read everything
            // that was sent before.
            if let Ok(writer) = writer.lock() {
                writer.shutdown(Shutdown::Both).ok();
            }
        }
    }

    fn write(&self, to: usize, kind: Kind, about: (u64, u64), body: &[u8], go_on: impl Fn() -> bool) -> io::Result<()> {
        let Some(Some(writer)) = self.writers.get(to) else { return Ok(()) };
        write_frame(&writer.lock().unwrap_or_else(PoisonError::into_inner), kind, about, body, go_on)
    }

    /// Sends a frame if that is possible within [`GOODBYE_TIMEOUT`]. Another thread may hold the socket for longer, because it
    /// waits for a rank that does not read; then the frame is not sent.
    fn try_send(&self, to: usize, kind: Kind, about: (u64, u64), body: &[u8]) {
        let until = Instant::now() + GOODBYE_TIMEOUT;
        let Some(Some(writer)) = self.writers.get(to) else { return };
        while Instant::now() < until {
            match writer.try_lock() {
                Ok(writer) => {
                    if write_frame(&writer, kind, about, body, || Instant::now() < until).is_err() {
                        // The connection may be in the middle of a frame.
                        writer.shutdown(Shutdown::Both).ok();
                    }
                    return;
                }
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
                Err(TryLockError::Poisoned(_)) => return,
            }
        }
    }

    /// Ends a group on this rank and on all others, unless it has already ended.
    pub(super) fn abort(&self, group: u64, round: u64, ranks: &[usize], error: &CommError) {
        let mut state = self.inbox.lock();
        let failure = &mut state.groups.entry(group).or_default().failure;
        if failure.is_some() {
            return;
        }
        *failure = Some((round, error.clone()));
        drop(state);
        self.inbox.changed.notify_all();
        let Ok(body) = wire::encode(error) else { return };
        for &rank in ranks.iter().filter(|&&rank| rank != self.rank) {
            self.try_send(rank, Kind::Abort, (group, round), &body);
        }
    }

    fn send_goodbye(&self, to: usize) {
        let reason: &[u8] = if thread::panicking() { b"panicked" } else { b"has left the group" };
        self.try_send(to, Kind::Goodbye, (0, 0), reason);
    }

    /// Tells all ranks that this one leaves, and waits until all others have told the same, but no longer than `limit`
    /// (`None` waits without end). Returns `true` if all have, and `false` if one of them is lost or the time is over.
    #[cfg(feature = "mpi")]
    pub(super) fn say_goodbye(&self, limit: Option<Duration>) -> bool {
        (0..self.writers.len()).for_each(|rank| self.send_goodbye(rank));
        let until = limit.map(|limit| Instant::now() + limit);
        let mut state = self.inbox.lock();
        loop {
            let staying = || {
                let others = state.ranks.iter().enumerate().filter(|&(rank, _)| rank != self.rank);
                others.map(|(_, state)| state).filter(|state| !state.said_goodbye)
            };
            if staying().next().is_none() {
                return true;
            }
            if staying().any(|state| state.left.is_some() || state.last_frame_received.elapsed() > SILENCE)
                || until.is_some_and(|until| Instant::now() >= until)
            {
                return false;
            }
            state = self.inbox.changed.wait_timeout(state, GOODBYE_TIMEOUT).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records the ranks of a new group.
    pub(super) fn open(&self, group: u64, ranks: &[usize]) {
        // Frames for it may have arrived already.
        self.inbox.lock().groups.entry(group).or_default().ranks = ranks.to_vec();
    }

    /// Drops a group of this process.
    pub(super) fn close(&self, group: u64) {
        let mut state = self.inbox.lock();
        state.groups.remove(&group);
        state.closed.insert(group);
    }

    /// Returns the reason that a round which still waits for these ranks cannot end, if there is one.
    pub(super) fn failure(&self, group: u64, round: &Round<'_>, missing: &[usize]) -> Option<CommError> {
        self.inbox.lock().failure(group, round, missing)
    }

    /// Waits until `ready` returns a result. Until then it returns the ranks that are missing; this fails if one of them
    /// is lost, or at the deadline.
    pub(super) fn wait<R>(
        &self,
        group: u64,
        round: &Round<'_>,
        mut ready: impl FnMut(&mut State) -> Result<R, Vec<usize>>,
    ) -> Result<R, CommError> {
        let mut state = self.inbox.lock();
        loop {
            let missing = match ready(&mut state) {
                Ok(result) => return Ok(result),
                Err(missing) => missing,
            };
            if let Some(failure) = state.failure(group, round, &missing) {
                return Err(failure);
            }
            let left = round.until.saturating_duration_since(Instant::now());
            let waited = self.inbox.changed.wait_timeout(state, left.min(HEARTBEAT));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    /// Returns the rank to blame if one of the `missing` ranks has left: the one that left first. Returns `None` if
    /// none of them has left.
    fn first_lost(&self, group: u64, missing: &[usize]) -> Option<usize> {
        let gone = missing.iter().find(|&&rank| self.ranks[rank].left.is_some())?;
        // The rank of the group that was lost first is probably why this one has left, even if it is not missing
        // itself.
        let ranks = self.groups.get(&group).map_or(&[][..], |group| &group.ranks);
        Some(*self.lost.iter().find(|rank| ranks.contains(rank)).unwrap_or(gone))
    }

    /// Returns the error for which a round of a group must end while the data of the `missing` ranks has not arrived;
    /// `None` if it can go on waiting. In this order: the group has failed, a missing rank has left, one of them has
    /// been silent for too long, or the deadline is over.
    pub(super) fn failure(&self, group: u64, round: &Round<'_>, missing: &[usize]) -> Option<CommError> {
        match self.groups.get(&group).and_then(|group| group.failure.as_ref()) {
            // A group that failed in a later round has sent all frames of this one, so this round can still succeed.
            Some((failed, failure)) if *failed <= round.number => return Some(failure.clone()),
            _ => {}
        }
        let left = |rank: usize, reason: String| CommError::RankLeft {
            rank,
            operation: round.operation.to_owned(),
            sequence: round.sequence,
            reason,
        };
        if let Some(rank) = self.first_lost(group, missing)
            && let Some(reason) = &self.ranks[rank].left
        {
            return Some(left(rank, reason.clone()));
        }
        let is_over = Instant::now() >= round.until;
        // After the deadline, a rank without recent heartbeats is blamed before one that is only slow. Before the
        // deadline, a rank is lost once it has been silent for `patience`. But if this process itself was stopped for a
        // while, it has not read the others' heartbeats yet, and blames nobody.
        let limit = if is_over {
            SILENCE
        } else if self.last_heartbeat_sent.elapsed() > SILENCE {
            Duration::MAX
        } else {
            self.patience
        };
        let silent = missing.iter().find(|&&rank| self.ranks[rank].last_frame_received.elapsed() > limit);
        if missing.is_empty() || (!is_over && silent.is_none()) {
            return None;
        }
        Some(match silent {
            Some(&rank) => {
                let seconds = self.ranks[rank].last_frame_received.elapsed().as_secs_f64();
                left(rank, format!("has sent no heartbeat for {seconds:.1} s: it is stopped or cannot be reached"))
            }
            None => CommError::Timeout {
                operation: round.operation.to_owned(),
                sequence: round.sequence,
                missing: missing.to_vec(),
                deadline: round.deadline,
            },
        })
    }
}

impl Inbox {
    /// Sleeps between two heartbeats. Returns `true` if the node leaves.
    fn sleep(&self, duration: Duration) -> bool {
        let until = Instant::now() + duration;
        let mut state = self.lock();
        if state.last_heartbeat_sent.elapsed() > SILENCE {
            // This process was stopped. The frames that the others sent meanwhile have not been read yet.
            state.ranks.iter_mut().for_each(|rank| rank.last_frame_received = Instant::now());
        }
        state.last_heartbeat_sent = Instant::now();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.leaving || left.is_zero() {
                return state.leaving;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Hands the frames of a rank to the inbox until its connection ends.
fn receive_all(stream: &TcpStream, from: usize, inbox: &Inbox) {
    let mut reader = io::BufReader::with_capacity(64 << 10, stream);
    loop {
        match frame::read(&mut reader) {
            Ok(frame) => inbox.receive(from, frame),
            Err(error) => return inbox.lose(from, &error),
        }
    }
}

/// Writes a frame. After each timeout of the socket, `go_on` says whether to try again.
fn write_frame(
    mut writer: &TcpStream,
    kind: Kind,
    (group, round): (u64, u64),
    body: &[u8],
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
    let header = frame::header(kind, group, round, body.len());
    // Usually one system call sends everything. Otherwise the rest of the header and of the body follows.
    let written = match writer.write_vectored(&[IoSlice::new(&header), IoSlice::new(body)]) {
        Ok(written) => written,
        Err(error) if frame::is_retryable(&error) => 0,
        Err(error) => return Err(error),
    };
    if written < header.len() {
        frame::write(&mut writer, &header[written..], &go_on)?;
    }
    frame::write(&mut writer, &body[written.saturating_sub(header.len())..], &go_on)
}

fn send_heartbeat(writer: &Mutex<Arc<TcpStream>>) {
    // A thread that holds the socket is sending a frame, which is as good as a heartbeat.
    if let Ok(writer) = writer.try_lock() {
        let heartbeat = frame::header(Kind::Heartbeat, 0, 0, 0);
        // So small a write is nearly always done whole or not at all. If it is not done, the other rank is not reading; if
        // it is done in part, the connection cannot be used any more.
        match (&**writer).write(&heartbeat) {
            Ok(written) if written < heartbeat.len() => drop(writer.shutdown(Shutdown::Both)),
            _ => {}
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.inbox.lock().leaving = true;
        self.inbox.changed.notify_all();
        for rank in 0..self.writers.len() {
            self.send_goodbye(rank);
            self.hang_up(rank);
        }
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rank_of_a_group_that_died_is_named_and_not_one_that_left_after_it() {
        let rank = || RankState { left: None, said_goodbye: false, last_frame_received: Instant::now() };
        let groups = [(7, GroupState { ranks: vec![0, 1, 2], ..GroupState::default() })].into();
        let (ranks, lost, closed) = ((0..4).map(|_| rank()).collect(), Vec::new(), HashSet::new());
        let state = State {
            ranks,
            patience: SILENCE,
            last_heartbeat_sent: Instant::now(),
            groups,
            lost,
            closed,
            leaving: false,
        };
        let inbox = Inbox { state: Mutex::new(state), changed: Condvar::new() };
        let died = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let first_lost = |missing: &[usize]| inbox.lock().first_lost(7, missing);
        // A rank of another group has nothing to do with it.
        inbox.lose(3, &died());
        assert_eq!(first_lost(&[1, 2]), None);
        inbox.receive(1, Frame { kind: Kind::Goodbye, group: 0, round: 0, body: Vec::new() });
        assert_eq!(first_lost(&[1, 2]), Some(1));
        assert_eq!(first_lost(&[2]), None);
        inbox.lose(2, &died());
        // It said goodbye, and then its connection ended too.
        inbox.lose(1, &died());
        assert_eq!(first_lost(&[1]), Some(2));
        assert_eq!(first_lost(&[0]), None);
    }
}
