//! The client of the store. Every rank is one, including the rank that hosts the store.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::protocol::{Reply, Request, StoreOptions, read_blocking, write_blocking};
use super::server::Server;
use crate::access::{Hello, Key, Refusal, knock};
use crate::deadline::until;
use crate::error::CommError;

/// A connection to the store. On the rank that hosts the store it owns the store too, which ends when this is dropped.
///
/// One request is carried out at a time, so a thread that [waits](Self::wait) keeps other threads waiting.
#[derive(Debug)]
pub struct TcpStore {
    address: String,
    key: Key,
    /// The connection; `None` after a request that failed in the middle.
    connection: Mutex<Option<TcpStream>>,
    local_ip: IpAddr,
    deadline: Duration,
    _server: Option<Server>,
}

/// The time that a client waits for the store's answer after the store's own deadline.
const GRACE: Duration = Duration::from_secs(2);
/// The time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(20);

impl TcpStore {
    /// Opens the store at `address` (`host:port`, port 0 for any) and connects to it.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if the address is not this host's, or the port is taken, or other hosts reach the address
    /// and there is no secret.
    pub fn host(address: &str, options: &StoreOptions) -> Result<TcpStore, CommError> {
        for found in address.to_socket_addrs().into_iter().flatten() {
            let allowed = options.check_address(found.ip());
            allowed.map_err(|message| rendezvous(address, format!("rank {}: {message}", options.rank)))?;
        }
        let server = Server::start(address, options).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse => "; is another job using this port? choose another MASTER_PORT",
                ErrorKind::AddrNotAvailable => "; MASTER_ADDR must be an address of the host of rank 0",
                _ => "",
            };
            rendezvous(address, format!("rank {} could not listen: {error}{hint}", options.rank))
        })?;
        let address = server.address().to_string();
        Self::open(&address, options, Some(server))
    }

    /// Connects to the store at `address` (`host:port`), and retries until the store opens or the deadline is over.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if no store answers within the deadline, if it is the store of another job, or if
    /// another process has already joined it as this rank.
    pub fn connect(address: &str, options: &StoreOptions) -> Result<TcpStore, CommError> {
        Self::open(address, options, None)
    }

    /// Connects to a store and joins it. `server` is the store itself, if this rank hosts it; the result keeps it.
    fn open(address: &str, options: &StoreOptions, server: Option<Server>) -> Result<TcpStore, CommError> {
        let until = until(options.deadline);
        loop {
            let stream = connect_until(address, until)
                .map_err(|error| rendezvous(address, NotJoined::Lost(error).message(options)))?;
            match Self::join(stream, address, options, until) {
                Ok(store) => return Ok(TcpStore { _server: server, ..store }),
                // The store drops connections if too many arrive at once, so try again until the deadline.
                Err(NotJoined::Lost(error)) if Instant::now() + RETRY < until => {
                    tracing::debug!(address, %error, "the store hung up; trying again");
                    thread::sleep(RETRY);
                }
                Err(reason) => return Err(rendezvous(address, reason.message(options))),
            }
        }
    }

    /// Joins the store at the other end of a connection.
    pub(super) fn join(
        mut stream: TcpStream,
        address: &str,
        options: &StoreOptions,
        until: Instant,
    ) -> Result<TcpStore, NotJoined> {
        options.check_address(stream.peer_addr()?.ip()).map_err(NotJoined::Refused)?;
        // Step 1: both sides show that they belong to the same job.
        let hello = Hello::new(options.rank, options.world_size);
        let key = options.key();
        knock(&mut stream, &key, hello, until)?;
        // Step 2: the store of this job accepts this rank or refuses it, for example because the rank has already
        // joined.
        match read_blocking(&mut stream, until)? {
            Reply::Welcome => {}
            Reply::Refused(reason) => return Err(NotJoined::Refused(reason)),
            _ => return Err(NotJoined::Refused("the program at this address is not a store".to_owned())),
        }
        Ok(TcpStore {
            address: address.to_owned(),
            key,
            local_ip: stream.local_addr()?.ip(),
            connection: Mutex::new(Some(stream)),
            deadline: options.deadline,
            _server: None,
        })
    }

    /// Returns the address of the store.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the key of the job.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    /// Returns the address of this host in the connection to the store. Other ranks can usually reach this host at it.
    #[must_use]
    pub fn local_ip(&self) -> IpAddr {
        self.local_ip
    }

    /// Sets a key.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone, or key or value are too long.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        let request = Request::Set { key: key.to_owned(), value: value.to_vec() };
        self.ask("set", request, self.deadline).map(drop)
    }

    /// Returns the value of a key, if it has been set.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, CommError> {
        match self.ask("get", Request::Get { key: key.to_owned() }, self.deadline)? {
            Reply::Value(value) => Ok(value),
            reply => Err(self.unexpected("get", &reply)),
        }
    }

    /// Waits until all these keys have been set, and returns their values. At the deadline it returns `Err` with the keys
    /// that have not been set.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone.
    pub fn wait(&self, keys: &[String], deadline: Duration) -> Result<Result<Vec<Vec<u8>>, Vec<String>>, CommError> {
        let request = Request::Wait { keys: keys.to_vec(), milliseconds: deadline.as_millis() as u64 };
        match self.ask("wait", request, deadline)? {
            Reply::Values(values) => Ok(Ok(values)),
            Reply::Missing(keys) => Ok(Err(keys)),
            reply => Err(self.unexpected("wait", &reply)),
        }
    }

    /// Adds to the number under a key, 0 if it has not been set, and returns the sum.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone, or what is under the key is not a number that `add` made.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, CommError> {
        match self.ask("add", Request::Add { key: key.to_owned(), amount }, self.deadline)? {
            Reply::Number(number) => Ok(number),
            reply => Err(self.unexpected("add", &reply)),
        }
    }

    /// Sets a key if its value is `expected` (`None`: if it has not been set). Returns its value after that.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone, or key or value are too long.
    pub fn compare_and_set(&self, key: &str, expected: Option<&[u8]>, value: &[u8]) -> Result<Vec<u8>, CommError> {
        let expected = expected.map(<[u8]>::to_vec);
        let request = Request::CompareAndSet { key: key.to_owned(), expected, value: value.to_vec() };
        match self.ask("compare_and_set", request, self.deadline)? {
            Reply::Value(value) => Ok(value.unwrap_or_default()),
            reply => Err(self.unexpected("compare_and_set", &reply)),
        }
    }

    /// Sends a request and waits for the reply; `name` is the operation, for errors. A connection that broke in the middle of
    /// a request is not used again: the next reply could be that of the one before.
    fn ask(&self, name: &str, request: Request, deadline: Duration) -> Result<Reply, CommError> {
        request.check().map_err(|message| self.error(name, message))?;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut stream) = connection.take() else {
            return Err(self.error(name, "the connection was lost in an earlier request"));
        };
        let until = until(deadline.saturating_add(GRACE));
        let reply = write_blocking(&mut stream, &request, until).and_then(|()| read_blocking(&mut stream, until));
        match reply.map_err(|error| self.error(name, error.to_string()))? {
            Reply::Refused(reason) => {
                *connection = Some(stream);
                Err(self.error(name, reason))
            }
            reply => {
                *connection = Some(stream);
                Ok(reply)
            }
        }
    }

    fn unexpected(&self, request: &str, reply: &Reply) -> CommError {
        self.error(request, format!("unexpected reply {reply:?}"))
    }

    fn error(&self, request: &str, message: impl Into<String>) -> CommError {
        CommError::Store { address: self.address.clone(), request: request.to_owned(), message: message.into() }
    }
}

pub(super) fn rendezvous(address: &str, message: String) -> CommError {
    CommError::Rendezvous { address: address.to_owned(), joined: Vec::new(), missing: Vec::new(), message }
}

/// The reason that a rank could not join a store.
#[derive(Debug)]
pub(super) enum NotJoined {
    /// The store is of another job.
    OtherJob,
    /// The store of this job refused this rank, or its address is not allowed without a secret.
    Refused(String),
    /// There is no store, or the connection to it was lost.
    Lost(io::Error),
}

impl From<io::Error> for NotJoined {
    fn from(error: io::Error) -> Self {
        NotJoined::Lost(error)
    }
}

impl From<Refusal> for NotJoined {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::OtherJob => NotJoined::OtherJob,
            Refusal::Io(error) => NotJoined::Lost(error),
        }
    }
}

impl NotJoined {
    pub(super) fn message(&self, options: &StoreOptions) -> String {
        let StoreOptions { job, rank, deadline, .. } = options;
        match self {
            NotJoined::OtherJob => format!(
                "rank {rank} of job `{job}` found the store of another job, or of one with another secret: choose another \
                 MASTER_PORT, or see that FSDP_JOB_ID and FSDP_SECRET are the same on all ranks"
            ),
            NotJoined::Refused(reason) => format!("rank {rank}: {reason}"),
            NotJoined::Lost(error) => format!("rank {rank} found no store within {deadline:?}: {error}"),
        }
    }
}

/// Connects to an address, and retries until `until`.
pub(super) fn connect_until(address: &str, until: Instant) -> io::Result<TcpStream> {
    loop {
        match connect_once(address, until) {
            Err(error) if Instant::now() + RETRY >= until => return Err(error),
            Err(_) => thread::sleep(RETRY),
            connected => return connected,
        }
    }
}

/// Tries all addresses of a name once.
pub(super) fn connect_once(address: &str, until: Instant) -> io::Result<TcpStream> {
    let mut error = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        let left = until.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), GRACE);
        match TcpStream::connect_timeout(&address, left) {
            // A client that connects to a free port of its own host can be given that port itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                error = io::Error::new(ErrorKind::ConnectionRefused, "nobody listens");
            }
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(failed) => error = failed,
        }
    }
    Err(error)
}
