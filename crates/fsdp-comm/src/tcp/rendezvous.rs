//! The rendezvous: the processes of a job publish their addresses in the store, and then every two connect.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::node::Node;
use super::shared::host_token;
use crate::environment::Environment;
use crate::error::CommError;
use crate::store::{StoreOptions, TcpStore};
use crate::wire;

/// The address at which a rank listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Address {
    ip: IpAddr,
    port: u16,
    /// A token of the host. Ranks with equal tokens can share memory.
    host: Option<String>,
}

/// The first bytes of a rank on a new socket: the job's nonce and its rank.
type Greeting = [u8; 16];

/// The value in place of the address of a rank that has not come in time.
const GIVEN_UP: &[u8] = &[];

/// The time for which rank 0 keeps the store after a failed rendezvous, so that the others can read the outcome.
const LINGER: Duration = Duration::from_millis(200);

/// The time between two attempts to accept a connection.
const POLL: Duration = Duration::from_millis(2);

/// A process's place in a rendezvous.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The address of the store, for messages.
    pub(crate) address: String,
    pub(crate) deadline: Duration,
    pub(crate) until: Instant,
}

/// Opens the store of a job. Rank 0 hosts it at the job's address or, if torchrun's agent listens there, at a free port.
pub(super) fn open(environment: &Environment, deadline: Duration) -> Result<TcpStore, CommError> {
    let &Environment { rank, world_size, .. } = environment;
    let options = StoreOptions { job: environment.job.clone(), rank, world_size, deadline };
    let master = environment.master();
    match &environment.agent_store {
        Some(key) => TcpStore::through_agent(&master, key, &options),
        None if rank == 0 => TcpStore::host(&master, &options),
        None => TcpStore::connect(&master, &options),
    }
}

/// Finds all other ranks through the store, and connects to each of them.
pub(super) fn meet(place: &Place, store: TcpStore, shared_memory: bool) -> Result<Arc<Node>, CommError> {
    let &Place { rank, world_size, deadline, until, address: ref master } = place;
    let failed = |joined: &dyn Fn(usize) -> bool, message: String| CommError::Rendezvous {
        address: master.clone(),
        joined: (0..world_size).filter(|&rank| joined(rank)).collect(),
        missing: (0..world_size).filter(|&rank| !joined(rank)).collect(),
        message,
    };
    let io =
        |what: &str, error: io::Error| failed(&|other| other == rank, format!("rank {rank} could not {what}: {error}"));

    // Step 1: listen, so that others can connect as soon as they know the address.
    let listener = TcpListener::bind((store.local_ip(), 0)).map_err(|error| io("listen", error))?;
    let port = listener.local_addr().map_err(|error| io("listen", error))?.port();
    let host = shared_memory.then(host_token).flatten();
    let address = Address { ip: store.local_ip(), port, host };
    let encoded = wire::encode(&address).map_err(|message| failed(&|other| other == rank, message))?;
    let key = |rank: usize| format!("tcp/address/{rank}");
    let lost = |error: CommError| failed(&|other| other != 0 && other == rank, format!("rank 0 is gone: {error}"));
    // Step 2: agree on a nonce, which the first rank to come chooses. A connection must begin with it, so processes of
    // other jobs are refused.
    let nonce = RandomState::new().hash_one(rank).to_le_bytes();
    let nonce = store.compare_and_set("tcp/nonce", None, &nonce).map_err(lost)?;
    // Step 3: publish the address, unless the others have already given this rank up.
    if store.compare_and_set(&key(rank), None, &encoded).map_err(lost)? != encoded {
        return Err(failed(&|other| other != rank, format!("rank {rank} came after the others had given it up")));
    }
    // Step 4: wait for the addresses of all ranks.
    let keys: Vec<String> = (0..world_size).map(key).collect();
    let addresses = match store.wait(&keys, until.saturating_duration_since(Instant::now())).map_err(lost)? {
        Ok(addresses) => addresses,
        Err(missing) => {
            // The first rank to give up gives up for all: it marks the missing ranks, which ends the waits of the others.
            for key in missing {
                store.compare_and_set(&key, None, GIVEN_UP).map_err(lost)?;
            }
            store.wait(&keys, deadline).map_err(lost)?.unwrap_or_default()
        }
    };
    if addresses.len() != world_size || addresses.iter().any(|address| address == GIVEN_UP) {
        if rank == 0 {
            // The store ends with this rank, and the others have yet to read the marks.
            thread::sleep(LINGER);
        }
        let came = |rank: usize| addresses.get(rank).is_some_and(|address| address != GIVEN_UP);
        return Err(failed(&came, format!("not all ranks came within {deadline:?}")));
    }
    let addresses = addresses
        .iter()
        .map(|bytes| wire::decode(bytes))
        .collect::<Result<Vec<Address>, String>>()
        .map_err(|message| failed(&|_| true, message))?;

    let mut streams: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
    // Step 5: connect to all lower ranks, then accept the connections of all higher ones. The system completes connections
    // before they are accepted, so no rank waits for another one to reach that point.
    for (other, address) in addresses.iter().enumerate().take(rank) {
        let connected = connect(address, until).and_then(|mut stream| {
            stream.write_all(&greeting(&nonce, rank))?;
            Ok(stream)
        });
        let what = format!("connect to rank {other} at {}:{}", address.ip, address.port);
        streams[other] = Some(connected.map_err(|error| io(&what, error))?);
    }
    while streams[rank + 1..].iter().any(Option::is_none) {
        match accept(&listener, until) {
            Ok((stream, said)) => {
                let other = (rank + 1..world_size).find(|&other| said == greeting(&nonce, other));
                match other.map(|other| &mut streams[other]) {
                    Some(empty @ None) => *empty = Some(stream),
                    _ => tracing::warn!("a connection that was not greeted by a rank of this job was refused"),
                }
            }
            Err(error) if Instant::now() >= until => {
                let joined = |other: usize| other <= rank || streams[other].is_some();
                let message = format!("rank {rank} had not all connections within {deadline:?}: {error}");
                return Err(failed(&joined, message));
            }
            Err(error) => tracing::debug!(%error, "a connection broke off"),
        }
    }
    let hosts = addresses.into_iter().map(|address| address.host).collect();
    Node::start(rank, hosts, streams, store, deadline).map_err(|error| io("start its threads", error))
}

fn greeting(nonce: &[u8], rank: usize) -> Greeting {
    let mut greeting = [0; 16];
    greeting[..8].iter_mut().zip(nonce).for_each(|(to, from)| *to = *from);
    greeting[8..].copy_from_slice(&(rank as u64).to_le_bytes());
    greeting
}

fn connect(address: &Address, until: Instant) -> io::Result<TcpStream> {
    let left = until.saturating_duration_since(Instant::now()).max(POLL);
    TcpStream::connect_timeout(&SocketAddr::new(address.ip, address.port), left)
}

/// Accepts the next connection, and reads its greeting.
fn accept(listener: &TcpListener, until: Instant) -> io::Result<(TcpStream, Greeting)> {
    listener.set_nonblocking(true)?;
    let mut stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            Err(_) if Instant::now() >= until => return Err(io::ErrorKind::TimedOut.into()),
            Err(_) => thread::sleep(POLL),
        }
    };
    stream.set_nonblocking(false)?;
    let left = until.saturating_duration_since(Instant::now());
    stream.set_read_timeout(Some(left.clamp(POLL, Duration::from_secs(5))))?;
    let mut greeting = [0; 16];
    stream.read_exact(&mut greeting)?;
    Ok((stream, greeting))
}
