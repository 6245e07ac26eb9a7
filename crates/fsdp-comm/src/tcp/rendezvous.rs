//! The rendezvous: the processes of a job publish their addresses in the store, and then every two connect.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::door::Door;
use super::node::Node;
use super::shared::host_token;
use crate::access::{Hello, Key, Refusal, knock, nonce};
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

/// The value in place of the address of a rank that has not come in time.
const GIVEN_UP: &[u8] = &[];

/// The time for which rank 0 keeps the store after a failed rendezvous, so that the others can read the outcome.
const LINGER: Duration = Duration::from_millis(200);

/// The time between two attempts to connect to a rank.
const RETRY: Duration = Duration::from_millis(20);

/// A process that takes part in a rendezvous.
#[derive(Debug)]
pub(crate) struct Participant {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The address of the store, for messages.
    pub(crate) address: String,
    /// The key of the job.
    pub(crate) key: Key,
    pub(crate) deadline: Duration,
    pub(crate) until: Instant,
}

/// Opens the store of a job. Rank 0 hosts it at the job's address or, if torchrun's agent listens there, at a free port.
pub(super) fn open(environment: &Environment, deadline: Duration) -> Result<TcpStore, CommError> {
    let &Environment { rank, world_size, .. } = environment;
    let options = StoreOptions {
        job: environment.job.clone(),
        secret: environment.secret.clone(),
        insecure: environment.insecure,
        rank,
        world_size,
        deadline,
    };
    let master = environment.master();
    environment.check_identity()?;
    let one_host = environment.is_on_one_host();
    match &environment.agent_store {
        Some(key) => TcpStore::through_agent(&master, key, one_host, &options),
        None if rank == 0 => TcpStore::host(&master, &options),
        None => TcpStore::connect(&master, &options),
    }
}

/// Finds all other ranks through the store, and connects to each of them.
pub(super) fn meet(participant: &Participant, store: TcpStore, shared_memory: bool) -> Result<Arc<Node>, CommError> {
    let rank = participant.rank;
    // Step 1: listen, so that others can connect as soon as they know the address.
    let listener = TcpListener::bind((store.local_ip(), 0)).map_err(|error| participant.io("listen", &error))?;
    let port = listener.local_addr().map_err(|error| participant.io("listen", &error))?.port();
    let host = shared_memory.then(host_token).flatten();
    let address = Address { ip: store.local_ip(), port, host };
    // Step 2: agree on a nonce, which the first rank to come chooses. The key of the connections between ranks is made
    // of it, so only a process that the store has let in can complete their handshake.
    let nonce = nonce().map_err(|error| participant.io("get a random number", &error))?;
    let nonce = store.compare_and_set("tcp/nonce", None, &nonce).map_err(|error| participant.lost(&error))?;
    let key = participant.key.derive("ranks", &nonce);
    // Step 3: let others in from now on, in the background. So no rank waits for another one to reach this point.
    let mut door = Door::open(listener, key.clone()).map_err(|error| participant.io("open its port", &error))?;
    // Step 4: exchange addresses through the store.
    let addresses = exchange_addresses(participant, &store, &address)?;
    // Step 5: connect to all lower ranks, then take the connections of all higher ones.
    let mut streams: Vec<Option<TcpStream>> = (0..participant.world_size).map(|_| None).collect();
    for (other, address) in addresses.iter().enumerate().take(rank) {
        let connected = connect(participant, &key, address);
        let what = format!("connect to rank {other} at {}:{}", address.ip, address.port);
        streams[other] = Some(connected.map_err(|error| participant.io(&what, &error))?);
    }
    accept_all(participant, &mut door, &mut streams)?;
    drop(door);
    let hosts = addresses.into_iter().map(|address| address.host).collect();
    Node::start(rank, hosts, streams, store, participant.deadline)
        .map_err(|error| participant.io("start its threads", &error))
}

impl Participant {
    /// Returns the error of a rendezvous to which only the ranks of which `joined` is true are known to have come.
    fn failed(&self, joined: impl Fn(usize) -> bool, message: String) -> CommError {
        let (joined, missing) = (0..self.world_size).partition(|&rank| joined(rank));
        CommError::Rendezvous { address: self.address.clone(), joined, missing, message }
    }

    /// Returns the error of a rank that failed by itself.
    fn io(&self, what: &str, error: &io::Error) -> CommError {
        self.failed(|other| other == self.rank, format!("rank {} could not {what}: {error}", self.rank))
    }

    /// Returns the error of a rank that has lost the store, and with it rank 0.
    fn lost(&self, error: &CommError) -> CommError {
        self.failed(|other| other != 0 && other == self.rank, format!("rank 0 is gone: {error}"))
    }
}

/// Returns the key of a rank's address in the store.
fn address_key(rank: usize) -> String {
    format!("tcp/address/{rank}")
}

/// Publishes this rank's address in the store, and waits for the addresses of all ranks.
fn exchange_addresses(participant: &Participant, store: &TcpStore, own: &Address) -> Result<Vec<Address>, CommError> {
    let &Participant { rank, world_size, deadline, until, .. } = participant;
    let encoded = wire::encode(own).map_err(|message| participant.failed(|other| other == rank, message))?;
    // The others may have given this rank up already, and then its key has a value.
    let published =
        store.compare_and_set(&address_key(rank), None, &encoded).map_err(|error| participant.lost(&error))?;
    if published != encoded {
        let message = format!("rank {rank} came after the others had given it up");
        return Err(participant.failed(|other| other != rank, message));
    }
    let keys: Vec<String> = (0..world_size).map(address_key).collect();
    let left = until.saturating_duration_since(Instant::now());
    let addresses = match store.wait(&keys, left).map_err(|error| participant.lost(&error))? {
        Ok(addresses) => addresses,
        Err(missing) => {
            // The first rank to give up gives up for all: it marks the missing ranks, which ends the waits of the others.
            for key in missing {
                store.compare_and_set(&key, None, GIVEN_UP).map_err(|error| participant.lost(&error))?;
            }
            store.wait(&keys, deadline).map_err(|error| participant.lost(&error))?.unwrap_or_default()
        }
    };
    if addresses.len() != world_size || addresses.iter().any(|address| address == GIVEN_UP) {
        if rank == 0 {
            // The store ends with this rank, and the others have yet to read the marks.
            thread::sleep(LINGER);
        }
        let message = format!("not all ranks came within {deadline:?}");
        return Err(participant.failed(|rank| addresses.get(rank).is_some_and(|address| address != GIVEN_UP), message));
    }
    let decoded: Result<Vec<Address>, String> = addresses.iter().map(|bytes| wire::decode(bytes)).collect();
    decoded.map_err(|message| participant.failed(|_| true, message))
}

/// Takes the connections of all higher ranks.
fn accept_all(participant: &Participant, door: &mut Door, streams: &mut [Option<TcpStream>]) -> Result<(), CommError> {
    let &Participant { rank, world_size, deadline, until, .. } = participant;
    while streams[rank + 1..].iter().any(Option::is_none) {
        let Some((stream, hello)) = door.next(until) else {
            let message = format!("rank {rank} had not all connections within {deadline:?}");
            return Err(participant.failed(|other| other <= rank || streams[other].is_some(), message));
        };
        let other = (rank + 1..world_size).find(|&other| hello == Hello::new(other, world_size));
        match other {
            // A rank connects again only if it has lost the connection before.
            Some(other) => streams[other] = Some(stream),
            None => tracing::warn!(rank = hello.rank, "a connection that no rank of this job should make was refused"),
        }
    }
    Ok(())
}

/// Connects to a rank. That rank drops connections when too many come at once, so this tries again.
fn connect(participant: &Participant, key: &Key, address: &Address) -> io::Result<TcpStream> {
    let hello = Hello::new(participant.rank, participant.world_size);
    loop {
        let left = participant.until.saturating_duration_since(Instant::now()).max(RETRY);
        let connected = TcpStream::connect_timeout(&SocketAddr::new(address.ip, address.port), left);
        let greeted = connected.map_err(Refusal::Io).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            knock(&mut stream, key, hello, participant.until)?;
            Ok(stream)
        });
        match greeted {
            // It listened before it told its address, so it is gone.
            Err(Refusal::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => return Err(error),
            Err(Refusal::Io(error)) if Instant::now() + RETRY < participant.until => {
                tracing::debug!(%error, ip = %address.ip, port = address.port, "not connected; trying again");
                thread::sleep(RETRY);
            }
            Err(Refusal::Io(error)) => return Err(error),
            Err(Refusal::OtherJob) => {
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a process of another job is there"));
            }
            Ok(stream) => return Ok(stream),
        }
    }
}
