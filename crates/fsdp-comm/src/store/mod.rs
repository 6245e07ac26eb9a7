//! A key-value store over TCP, where the ranks of a job find each other: torch's `TCPStore`.
//!
//! Rank 0 [hosts](Store::host) it, all others [connect](Store::connect). A connection is greeted with the job and the
//! number of its ranks, so that processes of two jobs that use one port never meet. Where torchrun's agent has the
//! job's port, its store tells where rank 0's is.

mod agent;
mod protocol;
mod server;

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use self::protocol::{Hello, Reply, Request, read_blocking, write_blocking};
use self::server::Server;
use crate::error::CommError;

pub use self::protocol::{MAX_KEY_BYTES, MAX_VALUE_BYTES};

/// A client of the store, and on the rank that hosts it the store itself, which ends when this is dropped.
///
/// One request is under way at a time: a thread that [waits](Self::wait) keeps others waiting.
#[derive(Debug)]
pub struct Store {
    address: String,
    /// `None` after an exchange that broke off in the middle.
    connection: Mutex<Option<TcpStream>>,
    local_ip: IpAddr,
    deadline: Duration,
    _server: Option<Server>,
}

/// What a rank says about itself when it connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// What tells this job from others.
    pub job: String,
    /// This rank.
    pub rank: usize,
    /// How many ranks the job has.
    pub world_size: usize,
    /// How long connecting, and each request, may take.
    pub deadline: Duration,
}

/// How much longer than the store a client waits for the store's answer.
const GRACE: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(20);

impl Store {
    /// Opens the store at `address` (`host:port`, port 0 for any) and connects to it.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if the address is not this host's or the port is taken.
    pub fn host(address: &str, options: &StoreOptions) -> Result<Store, CommError> {
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

    /// Connects to the store at `address` (`host:port`), which may open later.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if there is no store there within the deadline, or one of another job, or one that a
    /// process of this rank is already connected to.
    pub fn connect(address: &str, options: &StoreOptions) -> Result<Store, CommError> {
        Self::open(address, options, None)
    }

    fn open(address: &str, options: &StoreOptions, server: Option<Server>) -> Result<Store, CommError> {
        let until = Instant::now() + options.deadline;
        let joined = match connect_until(address, until) {
            Ok(stream) => Self::join(stream, address, options, until),
            Err(error) => Err(no_store(options, &error)),
        };
        let store = joined.map_err(|message| rendezvous(address, message))?;
        Ok(Store { _server: server, ..store })
    }

    /// Greets the store at the other end. `Err` says why this rank is not let in.
    fn join(mut stream: TcpStream, address: &str, options: &StoreOptions, until: Instant) -> Result<Store, String> {
        let hello = Hello::new(options);
        let greeting = write_blocking(&mut stream, &hello, until).and_then(|()| read_blocking(&mut stream, until));
        match greeting.map_err(|error| no_store(options, &error))? {
            Reply::Welcome => {}
            Reply::Refused(reason) => return Err(format!("rank {}: {reason}", options.rank)),
            _ => return Err("what answers there is no store".to_owned()),
        }
        Ok(Store {
            address: address.to_owned(),
            local_ip: stream.local_addr().map_err(|error| no_store(options, &error))?.ip(),
            connection: Mutex::new(Some(stream)),
            deadline: options.deadline,
            _server: None,
        })
    }

    /// Where the store is.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The address of this host on the way to the store, at which other ranks may reach it.
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

    /// The value of a key, if it has been set.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, CommError> {
        match self.ask("get", Request::Get { key: key.to_owned() }, self.deadline)? {
            Reply::Value(value) => Ok(value),
            reply => Err(self.unexpected("get", &reply)),
        }
    }

    /// The values of these keys, once all have been set. `Err` of the keys that have not been, when the time is up.
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
    /// [`CommError::Store`]: the store is gone, or what is under the key is no number that `add` made.
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

    fn ask(&self, name: &str, request: Request, deadline: Duration) -> Result<Reply, CommError> {
        request.check().map_err(|message| self.error(name, message))?;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut stream) = connection.take() else {
            return Err(self.error(name, "the connection was lost in an earlier request"));
        };
        let until = Instant::now() + deadline + GRACE;
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

fn rendezvous(address: &str, message: String) -> CommError {
    CommError::Rendezvous { address: address.to_owned(), joined: Vec::new(), missing: Vec::new(), message }
}

fn no_store(options: &StoreOptions, error: &io::Error) -> String {
    format!("rank {} found no store within {:?}: {error}", options.rank, options.deadline)
}

/// Connects to what may open later.
fn connect_until(address: &str, until: Instant) -> io::Result<TcpStream> {
    loop {
        match connect_once(address, until) {
            Err(error) if Instant::now() + RETRY >= until => return Err(error),
            Err(_) => thread::sleep(RETRY),
            connected => return connected,
        }
    }
}

/// Tries all addresses of a name once.
fn connect_once(address: &str, until: Instant) -> io::Result<TcpStream> {
    let mut error = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        let left = until.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(1), GRACE);
        match TcpStream::connect_timeout(&address, left) {
            // A client that dials a free port of its own host can meet itself.
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

/// All addresses of a name.
fn resolve(address: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(address.to_socket_addrs()?.collect())
}
