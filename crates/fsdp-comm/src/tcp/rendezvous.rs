//! The rendezvous: the processes of a job publish their addresses in the store, and then connect to
//! each other.
//!
//! In a small job every two ranks connect. In a large one each rank connects to its neighbours in
//! the [schedule](super::schedule) of the group of all ranks, about `2 log2(ranks)`, and later to
//! others when it needs to. So during the rendezvous a rank may not notice that another one, to
//! which it is not connected, has ended. Therefore all ranks meet in the store a second time: no
//! rank goes on before all are connected to their neighbours.
//!
//! The first rank that gives up writes its error to the store, and then ends its connection to it.
//! The others notice that it has ended, and return the error that is in the store, so that all
//! ranks have the same.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::acceptor::{Admitted, listen};
use super::links::Directory;
use super::node::{Connections, Node};
use super::schedule::Schedule;
use super::shared::host_token;
use crate::access::{Hello, Key, Refusal, handshake_as_client, nonce};
use crate::deadline::time_left;
use crate::environment::Environment;
use crate::error::CommError;
use crate::open_files;
use crate::store::{RankValues, StoreOptions, TcpStore, address_in_zone, every_address};
use crate::wire;

/// The address at which a rank listens, and what else the other ranks must know of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RankAddress {
    /// The address of its host. It is unspecified (0.0.0.0) if the rank is on the host of the
    /// store: then other ranks use the address at which they have reached the store.
    ip: IpAddr,
    port: u16,
    /// A token of the host. Ranks with equal tokens can share memory.
    host: Option<String>,
    /// The size of the largest job in which every two ranks connect at the start. That of rank 0
    /// counts.
    connect_all_up_to: usize,
}

impl RankAddress {
    /// Returns the address at which this rank, which has this connection to the store, reaches the
    /// other one.
    fn reachable_address(&self, store: &TcpStore) -> SocketAddr {
        let ip = if self.ip.is_unspecified() {
            store.peer.ip()
        } else {
            self.ip
        };
        address_in_zone(store.local, ip, self.port)
    }
}

/// The prefix of the keys of the ranks' addresses in the store.
const ADDRESS: &str = "tcp/address/";

/// The prefix of the keys of the ranks that are connected to their neighbours.
const CONNECTED: &str = "tcp/connected/";

/// The prefix of the keys of the ranks that know that all ranks are connected to their neighbours.
const KNOWS: &str = "tcp/knows/";

/// The key of the error of the first rank that has given up.
const FAILURE: &str = "tcp/failure";

/// The time for which rank 0 keeps the store after a failed rendezvous, so that the others can read
/// the outcome. It is longer than the others need for two checks of the store.
const LINGER_INTERVAL: Duration = Duration::from_millis(500);

/// The time between two checks whether a rank has ended, while this one waits for connections.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The time between two attempts to connect to a rank.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A process that takes part in a rendezvous.
#[derive(Debug)]
pub(crate) struct Participant {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The address of the store, for messages.
    pub(crate) address: String,
    pub(crate) timeout: Duration,
    pub(crate) deadline: Instant,
    /// The size of the largest job in which every two ranks connect at the start. That of rank 0
    /// counts.
    pub(crate) connect_all_up_to: usize,
}

/// Opens the store of a job, and waits for it until the deadline. Rank 0 hosts it at the job's
/// address or, if torchrun's agent listens there, at a free port.
pub(super) fn open(environment: &Environment, timeout: Duration) -> Result<TcpStore, CommError> {
    environment.check_identity()?;
    let options = StoreOptions {
        job: environment.job.clone(),
        secret: environment.secret.clone(),
        insecure: environment.insecure,
        rank: environment.rank,
        world_size: environment.world_size,
        deadline: timeout,
    };
    let master = environment.master();
    match &environment.agent_store {
        Some(key) => {
            let one_host = environment.is_on_one_host();
            TcpStore::through_agent(&master, key, one_host, &options)
        }
        None if environment.rank == 0 => TcpStore::host(&master, &options),
        None => TcpStore::connect(&master, &options),
    }
}

/// Finds all other ranks through the store, connects to its neighbours, which are all ranks in a
/// small job, and starts the threads of this rank.
pub(super) fn meet(
    participant: &Participant,
    store: TcpStore,
    shared_memory: bool,
) -> Result<Arc<Node>, CommError> {
    let connections = connect_to_neighbours(participant, &store, shared_memory)
        .map_err(|error| participant.give_up(&store, error))?;
    Node::start(connections, store)
        .map_err(|error| participant.io_error("start its threads", &error))
}

/// Publishes this rank's address, and connects it to its neighbours, which in a small job are all
/// other ranks. Raises the limit on open files first, because each connection takes one.
fn connect_to_neighbours(
    participant: &Participant,
    store: &TcpStore,
    shared_memory: bool,
) -> Result<Connections, CommError> {
    let &Participant {
        rank, world_size, ..
    } = participant;
    // Rank 0 has those to its store, too.
    let connections = if rank == 0 {
        2 * world_size
    } else {
        world_size
    };
    open_files::raise_open_file_limit(connections)
        .map_err(|message| participant.own_error(format!("rank {rank}: {message}")))?;
    // Step 1: agree on a nonce, which the first rank to come chooses. The key of the connections
    // between ranks is derived from it. So only a process that the store has let in can complete
    // the handshake of these connections.
    let proposed = nonce().map_err(|error| participant.io_error("get a random number", &error))?;
    let chosen = store
        .set_if_absent("tcp/nonce", &proposed, participant.timeout)
        .map_err(|error| participant.store_lost_error(&error))?;
    let key = store.key.derive("ranks", &chosen);
    // Step 2: listen, and let others in from now on, in the background. So they can connect as soon
    // as they know the address of this rank, and no rank waits for another one to reach this point.
    let (listen_at, ip) = own_addresses(store);
    let (port, admitted) = listen(&listen_at, key.clone(), rank, world_size)
        .map_err(|error| participant.io_error("listen", &error))?;
    // Step 3: exchange addresses through the store.
    let own_address = RankAddress {
        ip,
        port: port.address().port(),
        host: shared_memory.then(host_token).flatten(),
        connect_all_up_to: participant.connect_all_up_to,
    };
    let encoded = wire::encode_plain(&own_address);
    let ranks: Vec<RankAddress> = exchange_values(participant, store, ADDRESS, &encoded, "came")?
        .iter()
        .map(|bytes| wire::decode(bytes))
        .collect::<Result<_, _>>()
        .map_err(|message| participant.own_error(message))?;
    let connects_all = world_size <= ranks[0].connect_all_up_to;
    let directory = Directory {
        addresses: ranks
            .iter()
            .map(|rank| rank.reachable_address(store))
            .collect(),
        key,
    };
    // Step 4: connect to the lower ranks among the neighbours, then wait for the connections of the
    // higher ones. So of every two ranks exactly one connects.
    let neighbours = if connects_all {
        (0..world_size).collect()
    } else {
        Schedule::new(world_size, rank).neighbours()
    };
    let others = neighbours.into_iter().filter(|&other| other != rank);
    let (lower, higher): (Vec<usize>, Vec<usize>) = others.partition(|&other| other < rank);
    let mut streams = HashMap::new();
    for other_rank in lower {
        let address = directory.addresses[other_rank];
        let stream = connect(participant, &directory.key, address)
            .map_err(|error| participant.unreachable_error(store, other_rank, address, &error))?;
        streams.insert(other_rank, stream);
    }
    accept_all(participant, store, &admitted, &mut streams, &higher)?;
    // Step 5: in a large job, wait until all ranks are connected to their neighbours.
    let on_demand = if connects_all {
        None
    } else {
        wait_until_all_connected(participant, store)?;
        Some((directory, (port, admitted)))
    };
    Ok(Connections {
        rank,
        timeout: participant.timeout,
        hosts: ranks.into_iter().map(|rank| rank.host).collect(),
        streams,
        on_demand,
    })
}

/// Returns the addresses at which this rank may listen, and the address of this host to publish.
fn own_addresses(store: &TcpStore) -> (Vec<SocketAddr>, IpAddr) {
    let ip = store.local.ip();
    if ip.is_loopback() && store.listens_everywhere {
        // This is the host of the store, and the store listens at all addresses of it. This rank
        // has reached the store at a loopback address, which is of no use to other hosts. So listen
        // at all addresses too.
        return (every_address(0).to_vec(), Ipv4Addr::UNSPECIFIED.into());
    }
    (vec![address_in_zone(store.local, ip, 0)], ip)
}

impl Participant {
    /// Returns the error of a rendezvous that lacks the `missing` ranks.
    fn missing_error(&self, missing: &[usize], message: String) -> CommError {
        CommError::rendezvous(&self.address, missing, message)
    }

    /// Returns the error of a rendezvous in which each rank came or is missing.
    fn incomplete_error(&self, is_missing: impl Fn(usize) -> bool, message: String) -> CommError {
        let (missing, joined) = (0..self.world_size).partition(|&rank| is_missing(rank));
        CommError::Rendezvous {
            address: self.address.clone(),
            joined,
            missing,
            message,
        }
    }

    /// Returns the error of a rank that failed by itself.
    fn own_error(&self, message: String) -> CommError {
        self.missing_error(&[self.rank], message)
    }

    /// Returns the error of a rank that failed by itself because the system refused `action`.
    fn io_error(&self, action: &str, error: &io::Error) -> CommError {
        self.own_error(format!("rank {} could not {action}: {error}", self.rank))
    }

    /// Returns the error of a rank that has lost the store, and with it rank 0.
    fn store_lost_error(&self, error: &CommError) -> CommError {
        self.missing_error(&[0], format!("rank 0 is gone: {error}"))
    }

    /// Returns the error because of `first_departed`, the first rank that has ended its connection
    /// to the store. It is probably the reason why others have.
    fn departed_error(&self, first_departed: usize) -> CommError {
        self.missing_error(
            &[first_departed],
            format!("rank {first_departed} ended before all ranks were connected"),
        )
    }

    /// Asks the store which ranks have ended. Returns the error if one of them `is_awaited` or has
    /// given up, or if rank 0 has ended and the store with it.
    fn ended_error(
        &self,
        store: &TcpStore,
        is_awaited: impl Fn(usize) -> bool,
    ) -> Option<CommError> {
        let departed = match store.departed_ranks(time_left(self.deadline)) {
            Ok(departed) => departed,
            Err(error) => return Some(self.store_lost_error(&error)),
        };
        let first_departed = *departed.first()?;
        if departed.iter().any(|&rank| is_awaited(rank)) {
            return Some(self.departed_error(first_departed));
        }
        wire::decode(&store.get(FAILURE).ok()??).ok()
    }

    /// Ends the part of this rank in a rendezvous that has failed. Returns the error of the first
    /// rank that gave up, which is `own_error` if that is this rank, or if the store does not
    /// answer any more.
    fn give_up(&self, store: &TcpStore, own_error: CommError) -> CommError {
        let encoded = wire::encode_plain(&own_error);
        let first_error = store.set_if_absent(FAILURE, &encoded, CHECK_INTERVAL);
        store.leave();
        if self.rank == 0 {
            // The store ends with this rank, and the others have yet to read the error there.
            thread::sleep(LINGER_INTERVAL);
        }
        first_error
            .ok()
            .and_then(|first_error| wire::decode(&first_error).ok())
            .unwrap_or(own_error)
    }

    /// Returns the error of a rank that could not connect to another one.
    fn unreachable_error(
        &self,
        store: &TcpStore,
        other_rank: usize,
        address: SocketAddr,
        error: &io::Error,
    ) -> CommError {
        // The other rank may have ended because a third one had ended before: then blame the first
        // that ended.
        if let Ok(departed) = store.departed_ranks(CHECK_INTERVAL)
            && let Some(&first_departed) = departed.first()
        {
            return self.departed_error(first_departed);
        }
        let message = format!(
            "rank {} could not connect to rank {other_rank} at {address}: {error}",
            self.rank
        );
        self.missing_error(&[other_rank], message)
    }
}

/// Sets the key of this rank, which is `prefix` and its number, and waits for the values of all
/// ranks. `action` says in messages what a rank has done that has set its key.
fn exchange_values(
    participant: &Participant,
    store: &TcpStore,
    prefix: &str,
    own_value: &[u8],
    action: &str,
) -> Result<Vec<Vec<u8>>, CommError> {
    store
        .set(&format!("{prefix}{}", participant.rank), own_value)
        .map_err(|error| participant.store_lost_error(&error))?;
    match store
        .wait_for_ranks(prefix, time_left(participant.deadline), true)
        .map_err(|error| participant.store_lost_error(&error))?
    {
        RankValues::Complete(values) if values.len() == participant.world_size => Ok(values),
        RankValues::Complete(values) => {
            let message = format!(
                "the store has {} values of {} ranks",
                values.len(),
                participant.world_size
            );
            Err(participant.own_error(message))
        }
        RankValues::Departed(first_departed) => Err(participant.departed_error(first_departed)),
        RankValues::Missing(ranks) => {
            let message = format!("not all ranks {action} within {:?}", participant.timeout);
            Err(participant.incomplete_error(|rank| ranks.contains(&rank), message))
        }
    }
}

/// Takes the connections of the `higher` ranks that this one is to be connected to, until it has
/// all of them.
///
/// # Errors
/// The deadline is over, or one of them has ended.
fn accept_all(
    participant: &Participant,
    store: &TcpStore,
    admitted: &Admitted,
    streams: &mut HashMap<usize, TcpStream>,
    higher: &[usize],
) -> Result<(), CommError> {
    let &Participant {
        rank,
        timeout,
        deadline,
        ..
    } = participant;
    let mut is_suspected = false;
    loop {
        let awaited: HashSet<usize> = higher
            .iter()
            .copied()
            .filter(|other_rank| !streams.contains_key(other_rank))
            .collect();
        if awaited.is_empty() {
            return Ok(());
        }
        match admitted.recv_timeout(time_left(deadline).min(CHECK_INTERVAL)) {
            Ok((stream, other_rank)) => {
                // A rank connects a second time only if it has lost the first connection, so the
                // new one takes its place.
                if higher.contains(&other_rank) {
                    streams.insert(other_rank, stream);
                }
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            // The thread of the port has ended, so nobody comes any more.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(CHECK_INTERVAL),
        }
        if Instant::now() >= deadline {
            let message = format!("not all ranks connected to rank {rank} within {timeout:?}");
            return Err(
                participant.incomplete_error(|other_rank| awaited.contains(&other_rank), message)
            );
        }
        // A rank that has ended will not connect. But it may have connected just before, and the
        // connection may still be on its way to this thread. So fail only if the next check finds
        // the same.
        match participant.ended_error(store, |other_rank| awaited.contains(&other_rank)) {
            Some(error) if is_suspected => return Err(error),
            suspicion => is_suspected = suspicion.is_some(),
        }
    }
}

/// Waits until all ranks have connected to their neighbours, and on rank 0 until all others know
/// that, but no longer than the deadline.
fn wait_until_all_connected(participant: &Participant, store: &TcpStore) -> Result<(), CommError> {
    // Step 1: say that this rank is connected, and wait until all ranks have said so.
    exchange_values(
        participant,
        store,
        CONNECTED,
        &[],
        "connected to each other",
    )?;
    // Step 2: say that this rank knows. The store ends with rank 0, so rank 0 goes on only when all
    // others know.
    store
        .set(&format!("{KNOWS}{}", participant.rank), &[])
        .map_err(|error| participant.store_lost_error(&error))?;
    if participant.rank == 0 {
        // Nobody needs to wait for a rank that has ended.
        store
            .wait_for_ranks(KNOWS, time_left(participant.deadline), false)
            .map_err(|error| participant.store_lost_error(&error))?;
    }
    Ok(())
}

/// Connects to a rank, and tries again until the deadline, because a rank drops connections when
/// too many come at once.
fn connect(participant: &Participant, key: &Key, address: SocketAddr) -> io::Result<TcpStream> {
    let hello = Hello {
        rank: participant.rank,
        world_size: participant.world_size,
    };
    loop {
        // A connect with a timeout of zero is refused, so the last attempt gets a little time.
        let remaining = time_left(participant.deadline).max(RETRY_INTERVAL);
        let connected = TcpStream::connect_timeout(&address, remaining)
            .map_err(Refusal::Io)
            .and_then(|stream| {
                stream.set_nodelay(true)?;
                handshake_as_client(&stream, key, hello, participant.deadline)?;
                Ok(stream)
            });
        match connected {
            Ok(stream) => return Ok(stream),
            Err(Refusal::OtherJob) => {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "a process of another job is there",
                ));
            }
            // The other rank listened before it published its address, so if it refuses, it is
            // gone.
            Err(Refusal::Io(error))
                if error.kind() == io::ErrorKind::ConnectionRefused
                    || Instant::now() + RETRY_INTERVAL >= participant.deadline =>
            {
                return Err(error);
            }
            Err(Refusal::Io(error)) => {
                tracing::debug!(%error, %address, "not connected; trying again");
                thread::sleep(RETRY_INTERVAL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::deadline_after;

    /// Returns the options of a rank of a job for its store.
    fn options(rank: usize, world_size: usize) -> StoreOptions {
        StoreOptions {
            job: "job".to_owned(),
            rank,
            world_size,
            deadline: Duration::from_secs(20),
            ..StoreOptions::default()
        }
    }

    /// Meets the other ranks of a job in vain, and returns the error.
    fn meet(
        options: &StoreOptions,
        store: TcpStore,
        timeout: Duration,
        connect_all_up_to: usize,
    ) -> CommError {
        let &StoreOptions {
            rank, world_size, ..
        } = options;
        let participant = Participant {
            rank,
            world_size,
            address: "here".to_owned(),
            timeout,
            deadline: deadline_after(timeout),
            connect_all_up_to,
        };
        super::meet(&participant, store, false).unwrap_err()
    }

    #[test]
    fn all_ranks_give_up_with_the_error_of_the_first_that_does() {
        for connect_all_up_to in [3, 1] {
            let [first, second, third] = [0, 1, 2].map(|rank| options(rank, 3));
            let host = TcpStore::host("127.0.0.1:0", &first).unwrap();
            let [other, silent] = [&second, &third]
                .map(|options| TcpStore::connect(host.address(), options).unwrap());
            // Rank 2 publishes an address, and then connects to nobody.
            let address = RankAddress {
                ip: Ipv4Addr::LOCALHOST.into(),
                port: 1,
                host: None,
                connect_all_up_to,
            };
            silent
                .set(&format!("{ADDRESS}2"), &wire::encode(&address).unwrap())
                .unwrap();
            thread::scope(|scope| {
                let other = scope
                    .spawn(|| meet(&second, other, Duration::from_secs(20), connect_all_up_to));
                let first = meet(&first, host, Duration::from_millis(700), connect_all_up_to);
                let is_named =
                    matches!(&first, CommError::Rendezvous { missing, .. } if missing[..] == [2]);
                assert!(is_named, "{first}");
                assert_eq!(other.join().unwrap(), first);
            });
        }
    }
}
