//! The connections of this process to the other ranks, and the threads that read them and make new
//! ones.
//!
//! In a small job every two ranks are connected from the start. In a large one a rank connects to
//! another one when it first needs to, and takes connections for as long as the job runs. Three
//! rules keep the frames of a rank in order, and make sure that others notice its end only after
//! its last frame:
//! - A rank sends all its frames to another one on the same connection, the first that it had. If
//!   two ranks have connected to each other at the same time, both connections stay open, and each
//!   rank may send on a different one.
//! - If rank A has made a connection to rank B, A sends frames on it only once B has *registered*
//!   the connection (counted it as one to A) and has said so. So if B has registered no connection
//!   to A, no frames of A are on their way. If A then refuses a connection from B, A has ended.
//! - A rank that has made a connection does not give it up once the other side may have registered
//!   it, because that would look like the end of this rank.
//!
//! A new connection goes through these steps, after the handshake:
//!
//! ```text
//! A (connects)                                B (admits)
//! offers the connection: a heartbeat  ───▶    takes that first frame, and registers the connection
//! registers the connection            ◀───    answers with a frame, a heartbeat if it has nothing else to send
//! sends frames                        ◀──▶    sends frames
//! ```

use std::collections::HashSet;
use std::io::{self, BufReader, IoSlice, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::acceptor::Admitted;
use super::frame::{self, Frame, Kind, Notice, OutgoingFrame};
use super::inbox_lock::{Inbox, OFFER_INTERVAL};
use crate::access::{Hello, Key, Refusal, handshake_as_client};
use crate::blocking::is_end;
use crate::sync::lock;

/// The time after which a blocked write checks whether it should go on.
const WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// The time for which a rank that leaves or aborts tries to tell the others, and then the time for
/// which one that leaves waits until they have closed their ends.
pub(super) const GOODBYE_TIMEOUT: Duration = Duration::from_millis(500);

/// The time that one attempt to connect may take, so that it does not hold up a rank that leaves.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// The time that the handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time between two attempts to connect to a rank.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

const READ_BUFFER_BYTES: usize = 64 << 10;

/// The means of a rank to connect to all others.
#[derive(Debug)]
pub(super) struct Directory {
    /// The address of each rank.
    pub(super) addresses: Vec<SocketAddr>,
    /// The key of the connections between ranks.
    pub(super) key: Key,
}

/// The connections of this process. All of its threads share them.
#[derive(Debug)]
pub(super) struct Links {
    rank: usize,
    pub(super) inbox: Inbox,
    /// For each rank the connection on which this one sends to it, which never changes once it is
    /// set. It is locked while a frame is written.
    writers: Vec<OnceLock<Mutex<Arc<TcpStream>>>>,
    /// All connections, also those that carry no frames yet. `None` once this rank has left.
    open_connections: Mutex<Option<Vec<Connection>>>,
    /// The ranks that this one is connecting to.
    attempts: Mutex<HashSet<usize>>,
    /// `None` if every two ranks are connected from the start.
    directory: Option<Directory>,
    /// The threads that read connections, make them, or send heartbeats.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Connection {
    /// The rank at the other end.
    rank: usize,
    stream: Arc<TcpStream>,
    /// `true` once the other side may have registered the connection. From then on, if it ended
    /// without a goodbye, the other side would think that this rank has ended.
    is_offered: bool,
}

/// The connections themselves.
impl Links {
    /// Creates the links of a rank that is not connected to any of the others.
    pub(super) fn new(
        rank: usize,
        ranks: usize,
        inbox: Inbox,
        directory: Option<Directory>,
    ) -> Arc<Links> {
        Arc::new(Links {
            rank,
            inbox,
            writers: (0..ranks).map(|_| OnceLock::new()).collect(),
            open_connections: Mutex::new(Some(Vec::new())),
            attempts: Mutex::default(),
            directory,
            threads: Mutex::default(),
        })
    }

    /// Starts a thread for which [`close`](Self::close) waits.
    pub(super) fn spawn(
        &self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        let thread = thread::Builder::new().name(name).spawn(run)?;
        let mut threads = lock(&self.threads);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Takes over a connection that both sides have made in the rendezvous.
    pub(super) fn adopt(self: &Arc<Self>, other_rank: usize, stream: TcpStream) -> io::Result<()> {
        prepare(&stream)?;
        // Both directions use one file descriptor, of which a process may have a limited number.
        let stream = Arc::new(stream);
        self.add(other_rank, &stream)?;
        self.register(other_rank, &stream);
        let links = Arc::clone(self);
        self.spawn(format!("from-rank-{other_rank}"), move || {
            links.receive_all(other_rank, &stream, make_reader(&stream), None)
        })
    }

    /// Takes the connections that other ranks make, until the port is closed.
    pub(super) fn admit_all(self: &Arc<Self>, connections: Admitted) {
        for (stream, other_rank) in connections {
            let links = Arc::clone(self);
            let started = self.spawn(format!("from-rank-{other_rank}"), move || {
                if let Err(error) = links.admit(other_rank, Arc::new(stream)) {
                    tracing::debug!(%error, rank = other_rank, "a connection ended before it was used");
                }
            });
            if let Err(error) = started {
                tracing::warn!(%error, rank = other_rank, "a connection was lost");
            }
        }
    }

    /// Takes a connection that another rank has made, and then the frames of that rank until the
    /// connection ends.
    fn admit(&self, other_rank: usize, stream: Arc<TcpStream>) -> io::Result<()> {
        prepare(&stream)?;
        self.add(other_rank, &stream)?;
        let mut reader = make_reader(&stream);
        // Step 1: wait for the first frame. Until the other rank has sent it, it may give the
        // connection up and try again.
        let first_frame = frame::read(&mut reader).inspect_err(|_| self.end(&stream))?;
        // Step 2: register the connection before any frame of an operation is on its way.
        match self.register(other_rank, &stream) {
            // Step 3: tell the other rank that the connection is registered. Any frame does that.
            Registration::SendsHere => self.send_heartbeat(other_rank),
            // `send_heartbeat` would use the other connection. No other thread writes to this one.
            Registration::SendsElsewhere => {
                drop((&*stream).write(&frame::header(Kind::Heartbeat, 0, 0, 0)))
            }
            // The other rank will try again, and be refused.
            Registration::Leaves => {
                self.end(&stream);
                return Ok(());
            }
        }
        // Step 4: take everything else.
        self.receive_all(other_rank, &stream, reader, Some(first_frame));
        Ok(())
    }

    /// Starts a thread that connects to a rank, unless there is a connection already, or that rank
    /// is gone. This does not wait for the connection.
    pub(super) fn reach(self: &Arc<Self>, other_rank: usize) {
        if self.directory.is_none() || other_rank == self.rank || self.is_connected(other_rank) {
            return;
        }
        {
            let mut state = self.inbox.lock();
            if state.peers[other_rank].departure.is_some() {
                return;
            }
            state.expect_frames_from(other_rank, Instant::now());
        }
        // One attempt at a time is enough.
        if !lock(&self.attempts).insert(other_rank) {
            return;
        }
        let links = Arc::clone(self);
        if let Err(error) = self.spawn(format!("to-rank-{other_rank}"), move || {
            links.connect(other_rank)
        }) {
            tracing::warn!(%error, rank = other_rank, "no thread for a connection; trying again");
            self.end_attempt(other_rank);
        }
    }

    /// Connects to a rank, and takes its frames until the connection ends. Tries again until that
    /// rank refuses, or there is another connection to it, or one of the two leaves.
    fn connect(&self, other_rank: usize) {
        while lock(&self.open_connections).is_some()
            && !self.is_connected(other_rank)
            && self.inbox.lock().peers[other_rank].departure.is_none()
        {
            match self.try_to_connect(other_rank) {
                Ok(stream) => {
                    let mut reader = make_reader(&stream);
                    // Wait until the other side has registered the connection. However long that
                    // takes, this rank must not give it up now: only the other side may end it, or
                    // this rank when it leaves.
                    if let Ok(first_frame) = frame::read(&mut reader) {
                        self.register(other_rank, &stream);
                        self.end_attempt(other_rank);
                        return self.receive_all(other_rank, &stream, reader, Some(first_frame));
                    }
                    self.end(&stream);
                }
                Err(Refusal::Io(error)) if error.kind() != io::ErrorKind::ConnectionRefused => {
                    tracing::debug!(%error, rank = other_rank, "not connected; trying again");
                }
                // The other rank listened before it published its address. So now it is gone, and
                // another process may have its port.
                Err(Refusal::Io(_) | Refusal::OtherJob) => {
                    self.inbox
                        .change(|state| state.record_refusal(other_rank, Instant::now()));
                    break;
                }
            }
            thread::sleep(RETRY_INTERVAL);
        }
        self.end_attempt(other_rank);
    }

    /// Makes a connection to a rank, and offers it to that rank with the first frame.
    fn try_to_connect(&self, other_rank: usize) -> Result<Arc<TcpStream>, Refusal> {
        let Directory { addresses, key } = self
            .directory
            .as_ref()
            .expect("only a rank that is not connected to all others connects later");
        let stream = Arc::new(TcpStream::connect_timeout(
            &addresses[other_rank],
            CONNECT_TIMEOUT,
        )?);
        stream.set_nodelay(true)?;
        self.add(other_rank, &stream)?;
        self.offer_connection(&stream, key)
            .inspect_err(|_| self.end(&stream))?;
        Ok(stream)
    }

    /// Completes the handshake of a connection that this rank has made, and sends the first frame
    /// on it, unless this rank is leaving.
    fn offer_connection(&self, stream: &Arc<TcpStream>, key: &Key) -> Result<(), Refusal> {
        let hello = Hello {
            rank: self.rank,
            world_size: self.writers.len(),
        };
        handshake_as_client(stream, key, hello, Instant::now() + HANDSHAKE_TIMEOUT)?;
        prepare(stream)?;
        {
            // A rank that leaves says goodbye on all connections that it has offered. So none may
            // be offered after that: both locks are held while this is checked and recorded.
            let state = self.inbox.lock();
            let mut open_connections = lock(&self.open_connections);
            let mut connections = open_connections.iter_mut().flatten();
            match connections.find(|connection| Arc::ptr_eq(&connection.stream, stream)) {
                Some(connection) if !state.leaving => connection.is_offered = true,
                _ => return Err(io::Error::from(io::ErrorKind::NotConnected).into()),
            }
        }
        (&**stream).write_all(&frame::header(Kind::Heartbeat, 0, 0, 0))?;
        Ok(())
    }

    /// Records that no thread is connecting to a rank any more, and wakes those that wait for the
    /// connection.
    fn end_attempt(&self, other_rank: usize) {
        lock(&self.attempts).remove(&other_rank);
        self.inbox.change(|_| ());
    }

    /// Registers a connection that carries frames from now on. This rank sends on it if it had no
    /// connection to that rank before.
    fn register(&self, other_rank: usize, stream: &Arc<TcpStream>) -> Registration {
        self.inbox.change(|state| {
            if state.leaving {
                return Registration::Leaves;
            }
            state.connect(other_rank, Instant::now());
            match self.writers[other_rank].set(Mutex::new(Arc::clone(stream))) {
                Ok(()) => Registration::SendsHere,
                Err(_) => Registration::SendsElsewhere,
            }
        })
    }

    /// Hands the frames of a rank to the inbox until the connection ends. If its first frame has
    /// been read already, it is passed as `first_frame`.
    fn receive_all(
        &self,
        other_rank: usize,
        stream: &Arc<TcpStream>,
        mut reader: BufReader<&TcpStream>,
        mut first_frame: Option<Frame>,
    ) {
        loop {
            let frame = first_frame
                .take()
                .map_or_else(|| frame::read(&mut reader), Ok);
            if let Err(error) = frame.and_then(|frame| self.inbox.receive(other_rank, frame)) {
                self.end(stream);
                return self
                    .inbox
                    .change(|state| state.disconnect(other_rank, &error, Instant::now()));
            }
        }
    }

    /// Adds a connection to those that end when this rank leaves; an error once it has left.
    fn add(&self, other_rank: usize, stream: &Arc<TcpStream>) -> io::Result<()> {
        let mut open_connections = lock(&self.open_connections);
        let connections = open_connections
            .as_mut()
            .ok_or(io::ErrorKind::NotConnected)?;
        connections.push(Connection {
            rank: other_rank,
            stream: Arc::clone(stream),
            is_offered: false,
        });
        Ok(())
    }

    /// Ends a connection before this rank leaves.
    fn end(&self, stream: &Arc<TcpStream>) {
        stream.shutdown(Shutdown::Both).ok();
        if let Some(open_connections) = lock(&self.open_connections).as_mut() {
            open_connections.retain(|connection| !Arc::ptr_eq(&connection.stream, stream));
        }
        // Wake the thread that waits for the end of all connections.
        self.inbox.change(|_| ());
    }

    /// Gives up `rank`, to which a frame could not be written as a whole, because of `error`:
    /// ends the connections to it, and sees to it that the rank counts as lost.
    pub(super) fn give_up(&self, rank: usize, error: &io::Error) {
        let directions = if is_end(error) {
            // The rank has ended, maybe as it should. Its last frames may not have been read yet,
            // and this rank may still need them. The thread that reads them records the end of the
            // rank after the last one.
            Shutdown::Write
        } else {
            self.inbox
                .change(|state| state.record_loss(rank, error, Instant::now()));
            Shutdown::Both
        };
        for connection in lock(&self.open_connections).iter().flatten() {
            if connection.rank == rank {
                connection.stream.shutdown(directions).ok();
            }
        }
    }

    /// Ends all connections and all threads. There are no new ones after this.
    pub(super) fn close(&self) {
        // Step 1: send no more, but read on. If a frame came for a socket that is closed, the
        // system would drop the frames of this rank that have not arrived yet, and its goodbye may
        // be among them.
        for connection in lock(&self.open_connections).iter().flatten() {
            connection.stream.shutdown(Shutdown::Write).ok();
        }
        // Step 2: let the other ranks close their ends, which they do once they have read
        // everything.
        self.wait_for_others_to_close();
        // Step 3: close what is still open, because the other rank is stopped or cannot be reached.
        for connection in lock(&self.open_connections).take().into_iter().flatten() {
            connection.stream.shutdown(Shutdown::Both).ok();
        }
        // Step 4: wait for all threads. A thread may still start others, which end at once.
        loop {
            let Some(thread) = lock(&self.threads).pop() else {
                return;
            };
            thread.join().ok();
        }
    }

    /// Waits until the other ranks have closed their ends of all connections, but no longer than
    /// [`GOODBYE_TIMEOUT`].
    fn wait_for_others_to_close(&self) {
        let deadline = Instant::now() + GOODBYE_TIMEOUT;
        self.inbox.wait_until(deadline, |_| {
            let open_connections = lock(&self.open_connections);
            open_connections.as_ref().is_none_or(Vec::is_empty)
        });
    }

    /// Returns `true` if this rank can send to another one now.
    pub(super) fn is_connected(&self, other_rank: usize) -> bool {
        self.writers[other_rank].get().is_some()
    }
}

/// The frames that this rank sends.
impl Links {
    /// Writes a frame to a rank, if there is a connection to it. After each timeout of the socket,
    /// `go_on` says whether to try again.
    pub(super) fn write(
        &self,
        frame: &OutgoingFrame<impl AsRef<[u8]>>,
        go_on: impl Fn() -> bool,
    ) -> io::Result<()> {
        match self.writers[frame.receiver].get() {
            Some(writer) => write_frame(&lock(writer), frame, go_on),
            None => Ok(()),
        }
    }

    /// Tells all ranks to which there are connections that this one leaves.
    pub(super) fn say_goodbye(self: &Arc<Self>) {
        let reason: &'static [u8] = if thread::panicking() {
            b"panicked"
        } else {
            b"has left the group"
        };
        let connected = (0..self.writers.len()).filter(|&rank| self.is_connected(rank));
        self.offer_all(
            connected
                .map(|rank| Notice::new(rank, Kind::Goodbye, reason))
                .collect(),
        );
        // These went only over the connections on which this rank sends. On the others that it
        // has offered, no thread writes any more, and the other side may have registered them
        // although this one has not. So say goodbye there too.
        for connection in lock(&self.open_connections).iter().flatten() {
            if connection.is_offered && !self.sends_on(connection) {
                let goodbye = Notice::new(connection.rank, Kind::Goodbye, reason);
                write_frame(&connection.stream, &goodbye, || false).ok();
            }
        }
    }

    /// Returns `true` if this is the connection on which this rank sends to the other one.
    fn sends_on(&self, connection: &Connection) -> bool {
        match self.writers[connection.rank].get() {
            Some(writer) => Arc::ptr_eq(&lock(writer), &connection.stream),
            None => false,
        }
    }

    /// Sends notices until this rank leaves. A notice that cannot be sent yet is tried again later,
    /// so that a rank that does not read does not hold up the notices to others.
    pub(super) fn send_notices(self: &Arc<Self>) {
        let mut due: Vec<Notice> = Vec::new();
        while let Some(notices) = self.inbox.wait_for_notices(!due.is_empty()) {
            due.extend(notices);
            due.retain(|notice| !self.offer(notice));
            self.inbox.change(|state| state.unsent_notices = due.len());
        }
        // The others must learn that a group has failed, or that a rank has ended, before they see
        // this one leave.
        due.extend(self.inbox.lock().notices());
        due.retain(|notice| matches!(notice.kind, Kind::Abort | Kind::Absent));
        self.offer_all(due);
    }

    /// Sends the last notices of this rank, as far as that is possible within [`GOODBYE_TIMEOUT`].
    fn offer_all(self: &Arc<Self>, mut due: Vec<Notice>) {
        let deadline = Instant::now() + GOODBYE_TIMEOUT;
        loop {
            due.retain(|notice| !self.offer(notice));
            if due.is_empty() || Instant::now() >= deadline {
                return;
            }
            thread::sleep(OFFER_INTERVAL);
        }
    }

    /// Tries to send a notice. Returns `false` if it has to be tried again: there is no connection
    /// yet, or the socket is busy or takes nothing.
    fn offer(self: &Arc<Self>, notice: &Notice) -> bool {
        let receiver = notice.receiver;
        // A rank that has left needs no notice, but it may wait for the goodbyes of all others.
        if notice.kind != Kind::Goodbye && self.inbox.lock().peers[receiver].departure.is_some() {
            return true;
        }
        let Some(writer) = self.writers[receiver].get() else {
            self.reach(receiver);
            return false;
        };
        let Ok(writer) = writer.try_lock() else {
            return false;
        };
        let outcome = match write_start(&writer, notice) {
            Ok(0) => return false,
            // The frame has begun, so the rest of it must follow.
            Ok(written) => write_rest(&writer, notice, written, || {
                let state = self.inbox.lock();
                !state.leaving && state.peers[receiver].silence(Instant::now()) <= state.max_silence
            }),
            Err(error) => Err(error),
        };
        drop(writer);
        if let Err(error) = outcome {
            self.give_up(receiver, &error);
        }
        true
    }

    /// Sends heartbeats to all ranks to which there are connections.
    pub(super) fn send_heartbeats(&self) {
        for other_rank in 0..self.writers.len() {
            // A rank that does not read holds up this thread for a while. So say before each
            // heartbeat that this process runs, lest it is taken for one that was stopped.
            self.inbox
                .lock()
                .record_heartbeat_thread_ran(Instant::now());
            self.send_heartbeat(other_rank);
        }
    }

    /// Sends a heartbeat to a rank, if there is a connection to it and its socket is free.
    fn send_heartbeat(&self, other_rank: usize) {
        let Some(writer) = self.writers[other_rank].get() else {
            return;
        };
        // A thread that holds the socket is sending a frame, which is as good as a heartbeat.
        if let Ok(writer) = writer.try_lock() {
            let heartbeat = frame::header(Kind::Heartbeat, 0, 0, 0);
            // So small a write nearly always succeeds as a whole or not at all. If nothing is
            // written, the other rank is not reading, and need not be told. If a part is written,
            // no frame can follow it, so the connection is of no use any more.
            if let Ok(written) = (&**writer).write(&heartbeat)
                && written < heartbeat.len()
            {
                writer.shutdown(Shutdown::Both).ok();
            }
        }
    }
}

/// The outcome of [`Links::register`].
enum Registration {
    /// This rank sends on the connection.
    SendsHere,
    /// This rank sends on the connection that it had before.
    SendsElsewhere,
    /// This rank is leaving, and has not registered the connection.
    Leaves,
}

/// Returns a buffered reader of a connection.
fn make_reader(stream: &TcpStream) -> BufReader<&TcpStream> {
    BufReader::with_capacity(READ_BUFFER_BYTES, stream)
}

/// Prepares a socket for frames: they are sent without delay, reads wait without end, and writes
/// return now and then.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))
}

/// Writes a frame. After each timeout of the socket, `go_on` says whether to try again.
fn write_frame(
    writer: &TcpStream,
    frame: &OutgoingFrame<impl AsRef<[u8]>>,
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
    let written_bytes = write_start(writer, frame)?;
    write_rest(writer, frame, written_bytes, go_on)
}

/// Writes as much of `frame` as one system call takes, and returns the number of bytes: usually
/// all, and none if the socket's timeout passes first. [`write_rest`] writes the rest.
fn write_start(
    mut writer: &TcpStream,
    frame: &OutgoingFrame<impl AsRef<[u8]>>,
) -> io::Result<usize> {
    let body = IoSlice::new(frame.body.as_ref());
    match writer.write_vectored(&[IoSlice::new(&frame.header()), body]) {
        Err(error) if frame::is_retryable(&error) => Ok(0),
        outcome => outcome,
    }
}

/// Writes the rest of `frame`, of which [`write_start`] has written the first `written_bytes`
/// bytes. After each timeout of the socket, `go_on` says whether to try again.
fn write_rest(
    mut writer: &TcpStream,
    frame: &OutgoingFrame<impl AsRef<[u8]>>,
    written_bytes: usize,
    go_on: impl Fn() -> bool,
) -> io::Result<()> {
    let header = frame.header();
    if let Some(header_rest) = header.get(written_bytes..) {
        frame::write(&mut writer, header_rest, &go_on)?;
    }
    let body_written = written_bytes.saturating_sub(header.len());
    frame::write(&mut writer, &frame.body.as_ref()[body_written..], &go_on)
}
