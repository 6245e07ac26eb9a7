//! This process in its job: a socket to each other process, and the threads that read and write them.

use std::io::{self, IoSlice, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::{self, Frame, Kind};
use super::inbox::{SILENCE, State, rank_body};
use super::relay::{Answer, Next};
use crate::backend::Round;
use crate::error::CommError;
use crate::store::TcpStore;
use crate::wire;

/// The time between two heartbeats, which a rank sends to all others.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(500);

/// The time after which a blocked write checks whether it should go on.
const WRITE_SLICE: Duration = Duration::from_millis(100);

/// The time for which a rank that leaves or aborts tries to tell the others.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);

/// The time after which an answer is offered again to a rank whose socket was busy.
const OFFER_AGAIN: Duration = Duration::from_millis(20);

/// This process in its job, which it leaves when this is dropped.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) rank: usize,
    /// A token of each rank's host. Ranks with equal tokens can share memory.
    pub(super) hosts: Vec<Option<String>>,
    /// The most ranks of a group that send their records to each other directly.
    pub(super) direct_up_to: usize,
    writers: Writers,
    inbox: Arc<Inbox>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The store, kept for as long as the job runs, because rank 0 hosts it.
    _store: TcpStore,
}

/// The sockets to all other ranks; `None` for this one.
type Writers = Arc<Vec<Option<Mutex<Arc<TcpStream>>>>>;

/// The state that all threads share.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
    /// Notified when there may be something to answer.
    asked: Condvar,
}

impl Inbox {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive(&self, from: usize, frame: Frame) -> io::Result<()> {
        let kind = frame.kind;
        let mut state = self.lock();
        state.receive(from, frame, Instant::now())?;
        let may_answer = matches!(kind, Kind::Bundle | Kind::Question | Kind::Goodbye) && !state.questions.is_empty();
        drop(state);
        if kind != Kind::Heartbeat {
            self.changed.notify_all();
        }
        if may_answer {
            self.asked.notify_one();
        }
        Ok(())
    }

    /// Records that the connection to the rank `from` ended with this error, and wakes all who wait for that rank.
    fn lose(&self, from: usize, error: &io::Error) {
        self.lock().lose(from, error);
        self.changed.notify_all();
        self.asked.notify_one();
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
        direct_up_to: usize,
    ) -> io::Result<Arc<Node>> {
        let state = State::new(rank, streams.len(), direct_up_to, deadline, Instant::now());
        let inbox = Arc::new(Inbox { state: Mutex::new(state), changed: Condvar::new(), asked: Condvar::new() });
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
        if writers.len() > direct_up_to {
            let (own_inbox, sockets) = (Arc::clone(&inbox), Arc::clone(&writers));
            let thread = thread::Builder::new().name("answers".to_owned());
            threads.push(thread.spawn(move || answer_all(&own_inbox, &sockets))?);
        }
        let threads = Mutex::new(threads);
        Ok(Arc::new(Node { rank, hosts, direct_up_to, writers, inbox, threads, _store: store }))
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

    /// Exchanges records with all ranks of a large group: see [`relay`](super::relay). Returns them in rank order.
    pub(super) fn gather(&self, group: u64, round: &Round<'_>, record: &[u8]) -> Result<Vec<Bytes>, CommError> {
        let mut state = self.inbox.lock();
        state.enter(group, round.number, record, Instant::now());
        self.inbox.asked.notify_one();
        loop {
            match state.next(group, round, Instant::now())? {
                Next::Done(records) => return Ok(records),
                Next::Wait(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    let waited = self.inbox.changed.wait_timeout(state, left);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                Next::Send { to, bundles } => {
                    drop(state);
                    for bundle in bundles {
                        self.pass_on(to, Kind::Bundle, group, round, &bundle)?;
                    }
                    state = self.inbox.lock();
                }
                Next::Ask(questions) => {
                    drop(state);
                    for (of, about) in questions {
                        self.pass_on(of, Kind::Question, group, round, &rank_body(about))?;
                    }
                    state = self.inbox.lock();
                }
            }
        }
    }

    /// Sends a frame of a relayed exchange, and waits until the round's deadline if the other rank does not read. A rank
    /// that is gone is no error here: it may have all records already, and if it is still needed, the exchange fails.
    fn pass_on(&self, to: usize, kind: Kind, group: u64, round: &Round<'_>, body: &[u8]) -> Result<(), CommError> {
        if let Some(failure) = self.failure(group, round, &[]) {
            return Err(failure);
        }
        let go_on = || self.failure(group, round, &[to]).is_none();
        let Err(error) = self.write(to, kind, (group, round.number), body, go_on) else { return Ok(()) };
        let failure = {
            let state = self.inbox.lock();
            let missing = if state.ranks[to].left.is_some() { &[][..] } else { &[to] };
            state.failure(group, round, missing, Instant::now())
        };
        self.inbox.lose(to, &error);
        self.hang_up(to);
        failure.map_or(Ok(()), Err)
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
    pub(super) fn abort(&self, group: u64, round: u64, error: &CommError) {
        let told = self.inbox.lock().fail(group, round, error);
        self.inbox.changed.notify_all();
        let Ok(body) = wire::encode(error) else { return };
        for rank in told {
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
        self.inbox.lock().open(group, ranks);
    }

    /// Drops a group of this process.
    pub(super) fn close(&self, group: u64) {
        self.inbox.lock().close(group);
    }

    /// Returns the reason that a round which still waits for these ranks cannot end, if there is one.
    pub(super) fn failure(&self, group: u64, round: &Round<'_>, missing: &[usize]) -> Option<CommError> {
        self.inbox.lock().failure(group, round, missing, Instant::now())
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
            if let Some(failure) = state.failure(group, round, &missing, Instant::now()) {
                return Err(failure);
            }
            let left = round.until.saturating_duration_since(Instant::now());
            let waited = self.inbox.changed.wait_timeout(state, left.min(HEARTBEAT));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
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

    /// Waits until there are answers to send, or with `has_others` until it is time to offer other ones again. Returns
    /// `None` if the node leaves.
    fn wait_for_answers(&self, has_others: bool) -> Option<Vec<Answer>> {
        let mut state = self.lock();
        let mut is_first = true;
        loop {
            let answers = state.answers();
            if state.leaving {
                return None;
            }
            if !answers.is_empty() || (has_others && !is_first) {
                return Some(answers);
            }
            is_first = false;
            state = if has_others {
                self.asked.wait_timeout(state, OFFER_AGAIN).unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.asked.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
        }
    }
}

/// Hands the frames of a rank to the inbox until its connection ends.
fn receive_all(stream: &TcpStream, from: usize, inbox: &Inbox) {
    let mut reader = io::BufReader::with_capacity(64 << 10, stream);
    loop {
        let received = frame::read(&mut reader).and_then(|frame| inbox.receive(from, frame));
        if let Err(error) = received {
            return inbox.lose(from, &error);
        }
    }
}

/// Answers the questions of other ranks until this one leaves. An answer that cannot be sent yet is offered again later, so that
/// a rank that does not read keeps nobody else from an answer.
fn answer_all(inbox: &Inbox, writers: &Writers) {
    let mut due: Vec<Answer> = Vec::new();
    while let Some(answers) = inbox.wait_for_answers(!due.is_empty()) {
        due.extend(answers);
        due.retain(|answer| !offer(inbox, writers, answer));
    }
}

/// Sends an answer, unless the socket is busy or takes nothing: then this returns `false`.
fn offer(inbox: &Inbox, writers: &Writers, answer: &Answer) -> bool {
    let &Answer { to, kind, group, round, ref body } = answer;
    let Some(Some(writer)) = writers.get(to).filter(|_| inbox.lock().ranks[to].left.is_none()) else { return true };
    let Ok(writer) = writer.try_lock() else { return false };
    let header = frame::header(kind, group, round, body.len());
    let sent = match begin_frame(&writer, &header, body) {
        Ok(0) => return false,
        Ok(written) => {
            // The frame has begun, so the rest of it must follow.
            let go_on = || {
                let state = inbox.lock();
                !state.leaving && state.silence(to, Instant::now()) <= state.patience
            };
            finish_frame(&writer, &header, body, written, go_on)
        }
        Err(error) => Err(error),
    };
    if let Err(error) = sent {
        inbox.lose(to, &error);
        writer.shutdown(Shutdown::Both).ok();
    }
    true
}

/// Writes a frame. After each timeout of the socket, `go_on` says whether to try again.
fn write_frame(
    writer: &TcpStream,
    kind: Kind,
    (group, round): (u64, u64),
    body: &[u8],
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
    let header = frame::header(kind, group, round, body.len());
    let written = begin_frame(writer, &header, body)?;
    finish_frame(writer, &header, body, written, go_on)
}

/// Writes as much of a frame as the socket takes at once, and returns how much that was. Usually it is everything.
fn begin_frame(mut writer: &TcpStream, header: &[u8], body: &[u8]) -> io::Result<usize> {
    match writer.write_vectored(&[IoSlice::new(header), IoSlice::new(body)]) {
        Err(error) if frame::is_retryable(&error) => Ok(0),
        written => written,
    }
}

/// Writes the rest of a frame of which so much is written.
fn finish_frame(
    mut writer: &TcpStream,
    header: &[u8],
    body: &[u8],
    written: usize,
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
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
        self.inbox.asked.notify_all();
        for rank in 0..self.writers.len() {
            self.send_goodbye(rank);
            self.hang_up(rank);
        }
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            thread.join().ok();
        }
    }
}
