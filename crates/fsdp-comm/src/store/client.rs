//! The client of the store. Every rank is one, including the rank that hosts the store.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use super::listening;
use super::protocol::{Reply, Request, StoreOptions, read_blocking, to_bytes};
use super::server;
use crate::access::{Hello, Key, Port, Refusal, VERSION, handshake_as_client};
use crate::blocking::write_all;
use crate::deadline::{MAX_TIMEOUT, deadline_after, time_left};
use crate::error::CommError;
use crate::open_files;
use crate::sync::lock;

/// A connection to the store. On the rank that hosts the store it owns the store too, which ends
/// when this is dropped.
///
/// One request is carried out at a time.
#[derive(Debug)]
pub struct TcpStore {
    address: String,
    /// The key of the job.
    pub(crate) key: Key,
    /// The connection; `None` after a request that failed in the middle.
    connection: Mutex<Option<TcpStream>>,
    /// The address of this end of the connection. Usually other ranks can reach this host at the
    /// same address.
    pub(crate) local: SocketAddr,
    /// The address of the other end.
    pub(crate) peer: SocketAddr,
    /// `true` if the store, and the ranks on its host, listen at every address of that host.
    pub(crate) listens_everywhere: bool,
    timeout: Duration,
    _server: Option<Port>,
}

/// The outcome of a wait for all ranks.
#[derive(Debug)]
pub(crate) enum RankValues {
    /// The value of each rank.
    Complete(Vec<Vec<u8>>),
    /// The ranks that had not set their keys at the deadline.
    Missing(Vec<usize>),
    /// The first rank that has ended its connection to the store.
    Departed(usize),
}

/// The time that a client waits for the store's answer after the store's own deadline.
const GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The shortest time between two attempts of a rank to join, in milliseconds.
const MIN_RETRY_MILLISECONDS: usize = 20;

/// The longest time between two attempts of a rank to join, in milliseconds.
const MAX_RETRY_MILLISECONDS: usize = 1000;

/// Returns the time between two attempts of a rank to join. It grows with the number of ranks, so
/// that a store which is not open yet, or its name server, gets about a thousand requests in a
/// second at most.
pub(super) fn retry_pause(options: &StoreOptions) -> Duration {
    // Ranks that were started together do not try together for ever.
    let offset_of_rank = options.rank % MIN_RETRY_MILLISECONDS;
    let pause_of_job = options
        .world_size
        .clamp(MIN_RETRY_MILLISECONDS, MAX_RETRY_MILLISECONDS);
    Duration::from_millis((pause_of_job + offset_of_rank) as u64)
}

impl TcpStore {
    /// Opens the store at `address` (`host:port`, port 0 for any) and connects to it.
    ///
    /// If `host` is a name, and not an address or `localhost`, and there is a secret or `insecure`,
    /// the store listens at every address of this host: its name may lead elsewhere here than on
    /// other hosts, or nowhere yet.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if the address is not this host's, or the port is taken, or other
    /// hosts reach the address and there is no secret.
    pub fn host(address: &str, options: &StoreOptions) -> Result<TcpStore, CommError> {
        let StoreOptions {
            rank, world_size, ..
        } = options;
        let failed =
            |message: String| CommError::rendezvous(address, &[], format!("rank {rank}{message}"));
        // Each rank keeps a connection to the store open until the job ends.
        open_files::raise_open_file_limit(*world_size)
            .map_err(|message| failed(format!(": {message}")))?;
        let addresses = listening::listening_addresses(address, options)
            .map_err(|error| failed(format!(" could not listen: {error}; see MASTER_ADDR")))?;
        // An address that strangers reach needs a secret. This is checked before the port is open.
        addresses
            .iter()
            .try_for_each(|address| options.check_address(address.ip()))
            .map_err(|message| failed(format!(": {message}")))?;
        let server = server::start(&addresses, options).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse => {
                    "; is another job using this port? choose another MASTER_PORT"
                }
                ErrorKind::AddrNotAvailable => {
                    "; MASTER_ADDR must be an address of the host of rank 0"
                }
                _ => "",
            };
            failed(format!(" could not listen: {error}{hint}"))
        })?;
        // Port 0 stands for any, so the name of the store has the port that the system has chosen.
        let listening_address = server.address();
        let mut name = listening_address.to_string();
        let mut store_addresses = vec![listening_address];
        if listening::listens_everywhere(address, options) {
            let port = listening_address.port();
            name = format!("{}:{port}", listening::host_of(address));
            store_addresses = listening::loopback_addresses(port).to_vec();
        }
        Self::open(&name, &store_addresses[..], options, Some(server))
    }

    /// Connects to the store at `address` (`host:port`), and retries until the store opens or the
    /// deadline is over.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if no store answers within the deadline, if it is the store of
    /// another job, or if another process has joined it as this rank and is still there at the
    /// deadline.
    pub fn connect(address: &str, options: &StoreOptions) -> Result<TcpStore, CommError> {
        Self::open(address, listening::Name(address), options, None)
    }

    /// Connects to a store and joins it. `address` is its name for messages and other ranks, and
    /// `store_addresses` are the addresses that this rank tries. `server` is the port of the store,
    /// if this rank hosts it; the result keeps it.
    fn open(
        address: &str,
        store_addresses: impl ToSocketAddrs,
        options: &StoreOptions,
        server: Option<Port>,
    ) -> Result<TcpStore, CommError> {
        let deadline = deadline_after(options.deadline);
        let pause = retry_pause(options);
        let mut last_reason = None;
        loop {
            let joined = connect_until(&store_addresses, deadline, pause)
                .map_err(NotJoined::Lost)
                .and_then(|stream| Self::join(stream, address, options, deadline))
                .map_err(|reason| reason.unless_cut_off(last_reason.take()));
            match joined {
                Ok(store) => {
                    return Ok(TcpStore {
                        _server: server,
                        ..store
                    });
                }
                // The store drops connections if too many arrive at once. Or it is that of an
                // earlier attempt of this job, in which rank 0 has not noticed yet that others have
                // ended. So try again until the deadline.
                Err(reason @ (NotJoined::Lost(_) | NotJoined::NotNow(_)))
                    if Instant::now() + pause < deadline =>
                {
                    tracing::debug!(address, ?reason, "not joined yet; trying again");
                    last_reason = Some(reason);
                    thread::sleep(pause);
                }
                Err(reason) => return Err(not_joined_error(address, &reason, options)),
            }
        }
    }

    /// Joins the store at the other end of a connection: completes the handshake, and waits for the
    /// store's answer until the deadline.
    pub(super) fn join(
        mut stream: TcpStream,
        address: &str,
        options: &StoreOptions,
        deadline: Instant,
    ) -> Result<TcpStore, NotJoined> {
        options
            .check_address(stream.peer_addr()?.ip())
            .map_err(NotJoined::Refused)?;
        // Step 1: both sides show that they belong to the same job.
        let hello = Hello {
            rank: options.rank,
            world_size: options.world_size,
        };
        let key = options.key();
        handshake_as_client(&stream, &key, hello, deadline)?;
        // Step 2: the store of this job accepts this rank or refuses it, for example because the
        // rank has already joined.
        match read_blocking(&mut stream, deadline)? {
            Reply::Welcome => {}
            Reply::NotNow(reason) => return Err(NotJoined::NotNow(reason)),
            Reply::Refused(reason) => return Err(NotJoined::Refused(reason)),
            _ => {
                return Err(NotJoined::Refused(
                    "the program at this address is not a store".to_owned(),
                ));
            }
        }
        Ok(TcpStore {
            address: address.to_owned(),
            key,
            local: stream.local_addr()?,
            peer: stream.peer_addr()?,
            listens_everywhere: listening::listens_everywhere(address, options),
            connection: Mutex::new(Some(stream)),
            timeout: options.deadline,
            _server: None,
        })
    }

    /// Returns the address of the store.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sets a key.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone, or full, or key and value are too long.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), CommError> {
        let request = Request::Set {
            key: key.to_owned(),
            value: value.to_vec(),
        };
        self.ask("set", request, self.timeout, |_| Ok(()))
    }

    /// Returns the value of a key, if it has been set.
    ///
    /// # Errors
    /// [`CommError::Store`]: the store is gone.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>, CommError> {
        let request = Request::Get {
            key: key.to_owned(),
        };
        self.ask("get", request, self.timeout, |reply| match reply {
            Reply::Value(value) => Ok(value),
            reply => Err(reply),
        })
    }

    /// Waits until each rank has set its key, which is `prefix` and its number. If a rank has ended
    /// its connection to the store and keys are missing, the wait ends early if it `needs_all`;
    /// else it passes over that rank.
    pub(crate) fn wait_for_ranks(
        &self,
        prefix: &str,
        timeout: Duration,
        needs_all: bool,
    ) -> Result<RankValues, CommError> {
        let request = Request::WaitForRanks {
            prefix: prefix.to_owned(),
            milliseconds: timeout.min(MAX_TIMEOUT).as_millis() as u64,
            needs_all,
        };
        self.ask("wait", request, timeout, |reply| match reply {
            Reply::Values(values) => Ok(RankValues::Complete(values)),
            Reply::Missing(ranks) => Ok(RankValues::Missing(ranks)),
            Reply::Departed(ranks) if !ranks.is_empty() => Ok(RankValues::Departed(ranks[0])),
            reply => Err(reply),
        })
    }

    /// Returns the ranks that have ended their connections to the store, in this order.
    pub(crate) fn departed_ranks(&self, timeout: Duration) -> Result<Vec<usize>, CommError> {
        self.ask(
            "departed",
            Request::Departed,
            timeout,
            |reply| match reply {
                Reply::Departed(ranks) => Ok(ranks),
                reply => Err(reply),
            },
        )
    }

    /// Sets a key unless it has been set, in so much time at most. Returns its value after that.
    pub(crate) fn set_if_absent(
        &self,
        key: &str,
        value: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>, CommError> {
        let request = Request::SetIfAbsent {
            key: key.to_owned(),
            value: value.to_vec(),
        };
        self.ask("set_if_absent", request, timeout, |reply| match reply {
            Reply::Value(Some(value)) => Ok(value),
            reply => Err(reply),
        })
    }

    /// Ends the connection, so that later requests fail. The store, if this rank hosts it, goes on.
    pub(crate) fn leave(&self) {
        lock(&self.connection).take();
    }

    /// Sends a request, and returns what `read` finds in the reply, or the error of a reply that
    /// `read` gives back; `name` is the operation, for errors. A connection that broke in the
    /// middle of a request is not used again: the next reply could be that of the one before.
    fn ask<R>(
        &self,
        name: &str,
        request: Request,
        timeout: Duration,
        read: impl FnOnce(Reply) -> Result<R, Reply>,
    ) -> Result<R, CommError> {
        // A request that is too long must not cost the connection, so it is encoded first.
        let request =
            to_bytes(&request).map_err(|error| self.request_error(name, error.to_string()))?;
        let mut connection = lock(&self.connection);
        let Some(mut stream) = connection.take() else {
            return Err(self.request_error(name, "the connection was lost in an earlier request"));
        };
        // The store itself answers at the deadline, and its answer may take a moment.
        let deadline = deadline_after(timeout.saturating_add(GRACE_PERIOD));
        let reply = write_all(&stream, &request, deadline)
            .and_then(|()| read_blocking(&mut stream, deadline))
            .map_err(|error| self.request_error(name, error.to_string()))?;
        *connection = Some(stream);
        match reply {
            Reply::Refused(reason) => Err(self.request_error(name, reason)),
            reply => read(reply)
                .map_err(|reply| self.request_error(name, format!("unexpected reply {reply:?}"))),
        }
    }

    /// Returns the error of a request that the store did not carry out.
    fn request_error(&self, request: &str, message: impl Into<String>) -> CommError {
        CommError::Store {
            address: self.address.clone(),
            request: request.to_owned(),
            message: message.into(),
        }
    }
}

/// Returns the error of a rank that could not join. One that reaches no store misses rank 0.
fn not_joined_error(address: &str, reason: &NotJoined, options: &StoreOptions) -> CommError {
    let message = reason.message(address, options);
    match reason {
        NotJoined::Lost(_) if options.rank != 0 => CommError::rendezvous(
            address,
            &[0],
            format!("{message}; is rank 0 running, and is the port open?"),
        ),
        _ => CommError::rendezvous(address, &[], message),
    }
}

/// The reason that a rank could not join a store.
#[derive(Debug)]
pub(super) enum NotJoined {
    /// The store is of another job.
    OtherJob,
    /// The store of this job refused this rank, or its address is not allowed without a secret.
    Refused(String),
    /// The store of this job cannot take this rank now. It may be that of an earlier attempt, which
    /// is about to end.
    NotNow(String),
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
    /// Returns the reason of the attempt before, if the deadline has cut this attempt off: that one
    /// may have had an answer.
    pub(super) fn unless_cut_off(self, last_reason: Option<NotJoined>) -> NotJoined {
        match self {
            NotJoined::Lost(error) if error.kind() == ErrorKind::TimedOut => {
                last_reason.unwrap_or(NotJoined::Lost(error))
            }
            reason => reason,
        }
    }

    /// Returns the message for a rank that could not join the store at this address.
    pub(super) fn message(&self, address: &str, options: &StoreOptions) -> String {
        let StoreOptions {
            rank,
            deadline: timeout,
            ..
        } = options;
        match self {
            NotJoined::OtherJob => format!(
                "rank {rank}: another job, or one with another secret, listens at {address}: choose another MASTER_PORT, or \
                 check that FSDP_JOB_ID, FSDP_SECRET and the version of fsdp ({VERSION}) are the same on all ranks"
            ),
            NotJoined::Refused(reason) => format!("rank {rank}: {reason}"),
            NotJoined::NotNow(reason) => {
                format!(
                    "rank {rank} could not join the job at {address} within {timeout:?}: {reason}"
                )
            }
            NotJoined::Lost(error) => {
                format!(
                    "rank {rank} could not reach rank 0 at {address} within {timeout:?}: {error}"
                )
            }
        }
    }
}

/// Connects to an address, and retries after each `pause` until `deadline`.
pub(super) fn connect_until(
    address: &impl ToSocketAddrs,
    deadline: Instant,
    pause: Duration,
) -> io::Result<TcpStream> {
    loop {
        match connect_once(address, deadline) {
            Err(error) if Instant::now() + pause >= deadline => return Err(error),
            Err(_) => thread::sleep(pause),
            connected => return connected,
        }
    }
}

/// Tries all addresses of a name once.
pub(super) fn connect_once(
    address: impl ToSocketAddrs,
    deadline: Instant,
) -> io::Result<TcpStream> {
    let mut error = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        let remaining = time_left(deadline).clamp(Duration::from_millis(1), GRACE_PERIOD);
        match TcpStream::connect_timeout(&address, remaining) {
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(20);

    fn options(rank: usize, timeout: Duration) -> StoreOptions {
        StoreOptions {
            job: "job".to_owned(),
            rank,
            world_size: 3,
            deadline: timeout,
            ..StoreOptions::default()
        }
    }

    #[test]
    fn a_rank_that_ends_while_it_waits_ends_the_waits_of_the_others_and_no_rank_joins_after_that() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        let other = TcpStore::connect(host.address(), &options(1, DEADLINE)).unwrap();
        host.set("place/0", b"").unwrap();
        other.set("place/1", b"").unwrap();
        assert_eq!(host.departed_ranks(DEADLINE).unwrap(), []);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| host.wait_for_ranks("place/", DEADLINE, true).unwrap());
            // It asks the same, and ends before there is a reply.
            let stream = other.connection.lock().unwrap().take().unwrap();
            let request = Request::WaitForRanks {
                prefix: "place/".to_owned(),
                milliseconds: 1 << 20,
                needs_all: true,
            };
            write_all(
                &stream,
                &to_bytes(&request).unwrap(),
                deadline_after(DEADLINE),
            )
            .unwrap();
            drop(stream);
            let outcome = waiting.join().unwrap();
            assert!(matches!(outcome, RankValues::Departed(1)), "{outcome:?}");
        });
        assert_eq!(host.departed_ranks(DEADLINE).unwrap(), [1]);
        let late =
            TcpStore::connect(host.address(), &options(2, Duration::from_secs(2))).unwrap_err();
        assert!(
            late.to_string().contains("the rendezvous there has failed"),
            "{late}"
        );
        // Others than those who need all ranks go on.
        host.set("place/2", b"2").unwrap();
        host.set("name/0", b"0").unwrap();
        host.set("name/2", b"2").unwrap();
        let outcome = host.wait_for_ranks("name/", DEADLINE, false).unwrap();
        assert!(
            matches!(&outcome, RankValues::Complete(values) if *values == [b"0", b"2"]),
            "{outcome:?}"
        );
    }

    #[test]
    fn no_rank_joins_after_the_others_have_waited_for_it_in_vain() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        host.set("place/0", b"").unwrap();
        let outcome = host
            .wait_for_ranks("place/", Duration::from_millis(50), true)
            .unwrap();
        assert!(
            matches!(&outcome, RankValues::Missing(ranks) if ranks[..] == [1, 2]),
            "{outcome:?}"
        );
        assert_eq!(host.get("place/0").unwrap().unwrap(), b"");
        let late =
            TcpStore::connect(host.address(), &options(1, Duration::from_secs(2))).unwrap_err();
        assert!(
            late.to_string().contains("the rendezvous there has failed"),
            "{late}"
        );
    }

    #[test]
    fn what_a_store_has_answered_is_told_also_if_the_deadline_ends_the_next_attempt() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        let _other = TcpStore::connect(host.address(), &options(1, DEADLINE)).unwrap();
        // The first connection reaches the store, and nobody answers the later ones.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (client, _) = listener.accept().unwrap();
                let store = TcpStream::connect(host.address()).unwrap();
                let (answers, questions) =
                    (store.try_clone().unwrap(), client.try_clone().unwrap());
                for (mut from, mut to) in [(questions, store), (answers, client)] {
                    scope.spawn(move || io::copy(&mut from, &mut to));
                }
            });
            let error =
                TcpStore::connect(&address, &options(1, Duration::from_secs(2))).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("another process has already joined as rank 1"),
                "{error}"
            );
        });
    }

    #[test]
    fn values_of_all_ranks_are_there_even_if_one_has_ended_since() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        for rank in [1, 2] {
            let other = TcpStore::connect(host.address(), &options(rank, DEADLINE)).unwrap();
            other.set(&format!("place/{rank}"), &[rank as u8]).unwrap();
        }
        host.set("place/0", &[0]).unwrap();
        let outcome = host.wait_for_ranks("place/", DEADLINE, true).unwrap();
        assert!(
            matches!(&outcome, RankValues::Complete(values) if *values == [[0], [1], [2]]),
            "{outcome:?}"
        );
    }

    #[test]
    fn waiting_ends_when_the_last_key_is_set() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        thread::scope(|scope| {
            let waiters = [(1, true), (2, false)].map(|(rank, needs_all)| {
                let store = TcpStore::connect(host.address(), &options(rank, DEADLINE)).unwrap();
                scope.spawn(move || store.wait_for_ranks("key/", DEADLINE, needs_all).unwrap())
            });
            for rank in [2, 0, 1] {
                thread::sleep(Duration::from_millis(10));
                host.set(&format!("key/{rank}"), &[rank]).unwrap();
            }
            for waiter in waiters {
                let outcome = waiter.join().unwrap();
                assert!(
                    matches!(&outcome, RankValues::Complete(values) if *values == [[0], [1], [2]]),
                    "{outcome:?}"
                );
            }
        });
    }

    #[test]
    fn the_longest_deadline_is_one() {
        let longest = |rank| StoreOptions {
            world_size: 2,
            ..options(rank, Duration::MAX)
        };
        let host = TcpStore::host("127.0.0.1:0", &longest(0)).unwrap();
        let other = TcpStore::connect(host.address(), &longest(1)).unwrap();
        host.set("key/0", b"").unwrap();
        host.set("key/1", b"").unwrap();
        let outcome = other.wait_for_ranks("key/", Duration::MAX, true).unwrap();
        assert!(matches!(outcome, RankValues::Complete(_)), "{outcome:?}");
        // So many milliseconds do not fit in 64 bits. The lowest 64 are 384 of them.
        let long = Duration::from_secs(18_446_744_073_709_552);
        host.set("late/0", b"").unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| other.wait_for_ranks("late/", long, true).unwrap());
            thread::sleep(Duration::from_millis(600));
            host.set("late/1", b"").unwrap();
            let outcome = waiting.join().unwrap();
            assert!(matches!(outcome, RankValues::Complete(_)), "{outcome:?}");
        });
    }

    #[test]
    fn exactly_one_sets_what_was_not_set() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        let values: Vec<Vec<u8>> = thread::scope(|scope| {
            let setters = [1, 2].map(|rank| {
                let store = TcpStore::connect(host.address(), &options(rank, DEADLINE)).unwrap();
                let set = move || store.set_if_absent("nonce", &[rank as u8], DEADLINE);
                scope.spawn(move || set().unwrap())
            });
            setters.map(|setter| setter.join().unwrap()).into()
        });
        assert!(values[0] == values[1] && values[0].len() == 1, "{values:?}");
        assert_eq!(
            host.set_if_absent("nonce", b"other", DEADLINE).unwrap(),
            values[0]
        );
        assert_eq!(host.get("nonce").unwrap().unwrap(), values[0]);
    }

    #[test]
    fn a_reply_that_is_too_long_is_an_error_and_no_lost_connection() {
        let host = TcpStore::host("127.0.0.1:0", &options(0, DEADLINE)).unwrap();
        // The store may hold a little more than fits in one message.
        for (rank, bytes) in [(0, (32 << 20) + 1024), (1, 32 << 20), (2, 0)] {
            host.set(&format!("key/{rank}"), &vec![7; bytes]).unwrap();
        }
        let refused = host.wait_for_ranks("key/", DEADLINE, true);
        assert!(
            matches!(&refused, Err(CommError::Store { message, .. }) if message.contains("long")),
            "{refused:?}"
        );
        assert_eq!(host.get("key/2").unwrap().unwrap(), b"");
    }

    /// Connects more ranks than the usual limit of 1,024 open files allows in one process.
    #[test]
    fn many_ranks_learn_of_each_other_within_the_deadline() {
        const RANKS: usize = 600;
        let place = |rank| StoreOptions {
            world_size: RANKS,
            ..options(rank, DEADLINE)
        };
        // The clients are in this process too.
        open_files::raise_open_file_limit(2 * RANKS).unwrap();
        let host = TcpStore::host("127.0.0.1:0", &place(0)).unwrap();
        let meet = |store: &TcpStore, rank: usize| {
            store
                .set(&format!("place/{rank}"), &rank.to_le_bytes())
                .unwrap();
            let outcome = store.wait_for_ranks("place/", DEADLINE, true).unwrap();
            assert!(matches!(outcome, RankValues::Complete(values) if values.len() == RANKS));
        };
        thread::scope(|scope| {
            for rank in 1..RANKS {
                let (address, place) = (host.address(), place(rank));
                scope.spawn(move || meet(&TcpStore::connect(address, &place).unwrap(), rank));
            }
            meet(&host, 0);
        });
    }

    #[test]
    fn all_ranks_together_make_about_a_thousand_attempts_in_a_second_at_most() {
        for world_size in [1, 2, 50, 1000, 1 << 16] {
            let pause = retry_pause(&StoreOptions {
                world_size,
                ..options(0, DEADLINE)
            });
            assert!(
                pause >= Duration::from_millis(20) && pause <= Duration::from_secs(1),
                "{world_size}: {pause:?}"
            );
            let each_second = world_size.min(1000) as f64 / pause.as_secs_f64();
            assert!(each_second <= 1001.0, "{world_size}: {each_second}");
        }
    }
}
