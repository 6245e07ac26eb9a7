//! A process among the processes of its job: one socket to each other, and what has come in over them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::frame::{self, Frame, Kind};
use crate::backend::Round;
use crate::error::CommError;
use crate::store::Store;
use crate::wire;

/// How often a rank tells all others that it is alive.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(500);

/// A rank that has said nothing for longer than this is stopped or unreachable, and not merely slow.
pub(super) const SILENCE: Duration = Duration::from_millis(1750);

/// How long a blocked write goes before it looks whether it should go on.
const WRITE_SLICE: Duration = Duration::from_millis(100);

/// How long a rank that leaves or aborts tries to tell the others.
const FAREWELL: Duration = Duration::from_millis(500);

/// This process. It leaves the job when this is dropped.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) rank: usize,
    /// A token of each rank's host; equal ones can share memory.
    pub(super) hosts: Vec<Option<String>>,
    writers: Writers,
    inbox: Arc<Inbox>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Kept for as long as the job runs: rank 0 hosts it.
    _store: Store,
}

/// The sockets to all other ranks; `None` is this one.
type Writers = Arc<Vec<Option<Mutex<TcpStream>>>>;

/// What all sockets fill.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
pub(super) struct State {
    ranks: Vec<RankState>,
    /// A rank that is silent for longer than this is lost, however long an operation may take: the job's own deadline.
    patience: Duration,
    /// When this process last told the others that it is alive.
    beaten: Instant,
    groups: HashMap<u64, GroupState>,
    /// Groups that this process is done with, for which something may still come in.
    closed: HashSet<u64>,
    leaving: bool,
}

#[derive(Debug)]
struct RankState {
    left: Option<String>,
    said_goodbye: bool,
    heard: Instant,
}

#[derive(Debug, Default)]
struct GroupState {
    /// In which round the group failed, and why.
    failure: Option<(u64, CommError)>,
    /// By global rank and round.
    rounds: HashMap<(usize, u64), Incoming>,
}

/// What one rank sent in one round.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    pub(super) record: Option<Vec<u8>>,
    pub(super) chunks: VecDeque<Vec<u8>>,
}

impl State {
    /// What this rank sent in this round so far.
    pub(super) fn incoming(&mut self, group: u64, rank: usize, round: u64) -> &mut Incoming {
        self.groups.entry(group).or_default().rounds.entry((rank, round)).or_default()
    }

    /// Forgets what was sent in this round.
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
        state.ranks[from].heard = Instant::now();
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

    fn lose(&self, from: usize, error: &io::Error) {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "died: its connection was closed without a word".to_owned()
            }
            _ => format!("was lost: {error}"),
        };
        let mut state = self.lock();
        if !state.leaving {
            tracing::debug!(rank = from, reason, "a rank left");
        }
        state.ranks[from].left.get_or_insert(reason);
        drop(state);
        self.changed.notify_all();
    }
}

impl Node {
    /// Takes over the sockets to all other ranks (`None` for this one).
    pub(super) fn start(
        rank: usize,
        hosts: Vec<Option<String>>,
        streams: Vec<Option<TcpStream>>,
        store: Store,
        deadline: Duration,
    ) -> io::Result<Arc<Node>> {
        let heard = Instant::now();
        let ranks = streams.iter().map(|_| RankState { left: None, said_goodbye: false, heard }).collect();
        let patience = deadline.max(SILENCE);
        let state =
            State { ranks, patience, beaten: heard, groups: HashMap::new(), closed: HashSet::new(), leaving: false };
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
            let mut reader = io::BufReader::with_capacity(64 << 10, stream.try_clone()?);
            writers.push(Some(Mutex::new(stream)));
            let inbox = Arc::clone(&inbox);
            let listen = move || loop {
                match frame::read(&mut reader) {
                    Ok(frame) => inbox.receive(from, frame),
                    Err(error) => return inbox.lose(from, &error),
                }
            };
            threads.push(thread::Builder::new().name(format!("from-rank-{from}")).spawn(listen)?);
        }
        let writers = Arc::new(writers);
        let (beating, sockets) = (Arc::clone(&inbox), Arc::clone(&writers));
        let beat = move || {
            while !beating.sleep(HEARTBEAT) {
                sockets.iter().flatten().for_each(beat);
            }
        };
        threads.push(thread::Builder::new().name("heartbeat".to_owned()).spawn(beat)?);
        Ok(Arc::new(Node { rank, hosts, writers, inbox, threads: Mutex::new(threads), _store: store }))
    }

    pub(super) fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    /// Sends a frame, waiting for as long as the round allows.
    pub(super) fn send(
        &self,
        to: usize,
        kind: Kind,
        group: u64,
        round: &Round<'_>,
        body: &[u8],
    ) -> Result<(), CommError> {
        if let Some(trouble) = self.trouble(group, round, &[]) {
            return Err(trouble);
        }
        let Err(error) = self.write(to, kind, (group, round.number), body, || Instant::now() < round.until) else {
            return Ok(());
        };
        let trouble = self.trouble(group, round, &[to]);
        // In the middle of a frame the connection is of no more use.
        self.inbox.lose(to, &error);
        self.hang_up(to);
        Err(trouble.or_else(|| self.trouble(group, round, &[to])).unwrap_or_else(|| CommError::RankLeft {
            rank: to,
            operation: round.operation.to_owned(),
            sequence: round.sequence,
            reason: format!("was lost: {error}"),
        }))
    }

    fn hang_up(&self, from: usize) {
        if let Some(Some(writer)) = self.writers.get(from) {
            // Ends the reader of this socket, and the other rank's after it has read what was sent before.
            if let Ok(writer) = writer.lock() {
                writer.shutdown(Shutdown::Both).ok();
            }
        }
    }

    fn write(&self, to: usize, kind: Kind, about: (u64, u64), body: &[u8], go_on: impl Fn() -> bool) -> io::Result<()> {
        let Some(Some(writer)) = self.writers.get(to) else { return Ok(()) };
        write_frame(&mut writer.lock().unwrap_or_else(PoisonError::into_inner), kind, about, body, go_on)
    }

    /// Sends what must not hold this rank up for long, not even if another thread waits for a rank that does not read.
    fn tell(&self, to: usize, kind: Kind, about: (u64, u64), body: &[u8]) {
        let until = Instant::now() + FAREWELL;
        let Some(Some(writer)) = self.writers.get(to) else { return };
        while Instant::now() < until {
            match writer.try_lock() {
                Ok(mut writer) => {
                    if write_frame(&mut writer, kind, about, body, || Instant::now() < until).is_err() {
                        // Perhaps in the middle of a frame.
                        writer.shutdown(Shutdown::Both).ok();
                    }
                    return;
                }
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
                Err(TryLockError::Poisoned(_)) => return,
            }
        }
    }

    /// Ends a group here and, if it has not already ended, on all its ranks.
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
            self.tell(rank, Kind::Abort, (group, round), &body);
        }
    }

    fn tell_goodbye(&self, to: usize) {
        let reason: &[u8] = if thread::panicking() { b"panicked" } else { b"has left the group" };
        self.tell(to, Kind::Goodbye, (0, 0), reason);
    }

    /// Tells all ranks that this one leaves, and waits until all others do: forever, or for this long. Whether they did.
    #[cfg(feature = "mpi")]
    pub(super) fn say_goodbye(&self, limit: Option<Duration>) -> bool {
        (0..self.writers.len()).for_each(|rank| self.tell_goodbye(rank));
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
            if staying().any(|state| state.left.is_some() || state.heard.elapsed() > SILENCE)
                || until.is_some_and(|until| Instant::now() >= until)
            {
                return false;
            }
            state = self.inbox.changed.wait_timeout(state, FAREWELL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// This process is done with a group.
    pub(super) fn close(&self, group: u64) {
        let mut state = self.inbox.lock();
        state.groups.remove(&group);
        state.closed.insert(group);
    }

    /// Why a round that still waits for these ranks cannot come to an end, if so.
    pub(super) fn trouble(&self, group: u64, round: &Round<'_>, missing: &[usize]) -> Option<CommError> {
        self.inbox.lock().trouble(group, round, missing)
    }

    /// Waits until `ready` gives an answer, and fails if the ranks that it still waits for cannot give what it needs.
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
            if let Some(trouble) = state.trouble(group, round, &missing) {
                return Err(trouble);
            }
            let left = round.until.saturating_duration_since(Instant::now());
            let waited = self.inbox.changed.wait_timeout(state, left.min(HEARTBEAT));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    pub(super) fn trouble(&self, group: u64, round: &Round<'_>, missing: &[usize]) -> Option<CommError> {
        match self.groups.get(&group).and_then(|group| group.failure.as_ref()) {
            // If it failed later, what this round still waits for has been sent.
            Some((failed, failure)) if *failed <= round.number => return Some(failure.clone()),
            _ => {}
        }
        let left = |rank: usize, reason: String| CommError::RankLeft {
            rank,
            operation: round.operation.to_owned(),
            sequence: round.sequence,
            reason,
        };
        for &rank in missing {
            if let Some(reason) = &self.ranks[rank].left {
                return Some(left(rank, reason.clone()));
            }
        }
        let is_over = Instant::now() >= round.until;
        let limit = match is_over {
            true => SILENCE,
            false if self.beaten.elapsed() > SILENCE => Duration::MAX,
            false => self.patience,
        };
        let silent = missing.iter().find(|&&rank| self.ranks[rank].heard.elapsed() > limit);
        if missing.is_empty() || (!is_over && silent.is_none()) {
            return None;
        }
        Some(match silent {
            Some(&rank) => {
                let seconds = self.ranks[rank].heard.elapsed().as_secs_f64();
                left(rank, format!("has given no heartbeat for {seconds:.1} s: it is stopped or cannot be reached"))
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
    /// Sleeps, unless the node leaves, and tells whether it does.
    fn sleep(&self, duration: Duration) -> bool {
        let until = Instant::now() + duration;
        let mut state = self.lock();
        if state.beaten.elapsed() > SILENCE {
            // It was this process that was stopped. What the others said meanwhile is still to be read.
            state.ranks.iter_mut().for_each(|rank| rank.heard = Instant::now());
        }
        state.beaten = Instant::now();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.leaving || left.is_zero() {
                return state.leaving;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn write_frame(
    writer: &mut TcpStream,
    kind: Kind,
    (group, round): (u64, u64),
    body: &[u8],
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
    let header = frame::header(kind, group, round, body.len());
    let written = match writer.write_vectored(&[IoSlice::new(&header), IoSlice::new(body)]) {
        Ok(written) => written,
        Err(error) if frame::is_patient(&error) => 0,
        Err(error) => return Err(error),
    };
    if written < header.len() {
        frame::write(writer, &header[written..], &go_on)?;
    }
    frame::write(writer, &body[written.saturating_sub(header.len())..], &go_on)
}

fn beat(writer: &Mutex<TcpStream>) {
    // Whoever holds the socket is sending something, which says as much.
    if let Ok(mut writer) = writer.try_lock() {
        let heartbeat = frame::header(Kind::Heartbeat, 0, 0, 0);
        // So small a write is done whole or not at all, and if not, the rank at the other end is not reading anyway.
        match writer.write(&heartbeat) {
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
            self.tell_goodbye(rank);
            self.hang_up(rank);
        }
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            thread.join().ok();
        }
    }
}
