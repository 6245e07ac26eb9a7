//! How the processes of a job find each other: through the store, each tells where it listens; then every two connect.

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
use crate::store::{Store, StoreOptions};
use crate::wire;

/// Where a rank listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Address {
    ip: IpAddr,
    port: u16,
    /// Equal tokens can share memory.
    host: Option<String>,
}

/// The first bytes of a rank on a new socket: the job's nonce and its rank.
type Greeting = [u8; 16];

/// In place of the address of a rank that has not come in time.
const GIVEN_UP: &[u8] = &[];

/// How long the store outlives a failed rendezvous.
const LINGER: Duration = Duration::from_millis(200);

const POLL: Duration = Duration::from_millis(2);

/// Who meets where.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The store's, for messages.
    pub(crate) address: String,
    pub(crate) deadline: Duration,
    pub(crate) until: Instant,
}

/// The store of a job, which rank 0 hosts: at the job's address, or, if torchrun's agent listens there, elsewhere.
pub(super) fn open(environment: &Environment, deadline: Duration) -> Result<Store, CommError> {
    let &Environment { rank, world_size, .. } = environment;
    let options = StoreOptions { job: environment.job.clone(), rank, world_size, deadline };
    let master = environment.master();
    match &environment.agent_store {
        Some(key) => Store::through_agent(&master, key, &options),
        None if rank == 0 => Store::host(&master, &options),
        None => Store::connect(&master, &options),
    }
}

/// Meets all other ranks.
pub(super) fn meet(place: &Place, store: Store, shared_memory: bool) -> Result<Arc<Node>, CommError> {
    let &Place { rank, world_size, deadline, until, address: ref master } = place;
    let failed = |joined: &dyn Fn(usize) -> bool, message: String| CommError::Rendezvous {
        address: master.clone(),
        joined: (0..world_size).filter(|&rank| joined(rank)).collect(),
        missing: (0..world_size).filter(|&rank| !joined(rank)).collect(),
        message,
    };
    let io =
        |what: &str, error: io::Error| failed(&|other| other == rank, format!("rank {rank} could not {what}: {error}"));

    let listener = TcpListener::bind((store.local_ip(), 0)).map_err(|error| io("listen", error))?;
    let port = listener.local_addr().map_err(|error| io("listen", error))?.port();
    let host = shared_memory.then(host_token).flatten();
    let address = Address { ip: store.local_ip(), port, host };
    let encoded = wire::encode(&address).map_err(|message| failed(&|other| other == rank, message))?;
    let key = |rank: usize| format!("tcp/address/{rank}");
    let lost = |error: CommError| failed(&|other| other != 0 && other == rank, format!("rank 0 is gone: {error}"));
    // Whatever a process of another job may have got hold of, it has not got this.
    let nonce = RandomState::new().hash_one(rank).to_le_bytes();
    let nonce = store.compare_and_set("tcp/nonce", None, &nonce).map_err(lost)?;
    if store.compare_and_set(&key(rank), None, &encoded).map_err(lost)? != encoded {
        return Err(failed(&|other| other != rank, format!("rank {rank} came after the others had given it up")));
    }
    let keys: Vec<String> = (0..world_size).map(key).collect();
    let addresses = match store.wait(&keys, until.saturating_duration_since(Instant::now())).map_err(lost)? {
        Ok(addresses) => addresses,
        Err(missing) => {
            // Given up by one, given up by all: so all know the same, and now.
            for key in missing {
                store.compare_and_set(&key, None, GIVEN_UP).map_err(lost)?;
            }
            store.wait(&keys, deadline).map_err(lost)?.unwrap_or_default()
        }
    };
    if addresses.len() != world_size || addresses.iter().any(|address| address == GIVEN_UP) {
        if rank == 0 {
            // The store goes with this rank; the others are still being told.
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
    // Listeners accept without their process, so all ranks can connect first and accept then.
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

/// The next connection, and what was said on it.
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
