//! The store itself: a map, which the thread of its port serves.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::protocol::{
    MAX_STORE_BYTES, MAX_STORE_BYTES_PER_RANK, Reply, Request, StoreOptions, invalid_data_error,
    message_len, to_bytes,
};
use crate::access::{Hello, Port};
use crate::sync::lock;
use crate::wire;

/// The time that the bytes of one message may take, once it has begun.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// A store, as all of its connections share it.
#[derive(Debug)]
struct Store {
    world_size: usize,
    state: Mutex<StoreState>,
    changed: Notify,
}

/// The values of a store, and the ranks that have joined it.
#[derive(Debug, Default)]
struct StoreState {
    joined: HashSet<usize>,
    values: HashMap<String, Vec<u8>>,
    /// The bytes of all keys and values.
    total_bytes: usize,
    /// The ranks whose connections have ended, in this order.
    departed: Vec<usize>,
    /// `true` once a wait for all ranks has failed, because one had ended or did not come in time.
    has_failed: bool,
}

/// Opens a store at the first of `addresses` that is one of this host. It ends when the port is
/// dropped.
pub(super) fn start(addresses: &[SocketAddr], options: &StoreOptions) -> io::Result<Port> {
    let store = Arc::new(Store {
        world_size: options.world_size,
        state: Mutex::default(),
        changed: Notify::new(),
    });
    Port::open(
        addresses,
        options.key(),
        "fsdp-store",
        move |stream, hello| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                if let Err(error) = serve(stream, hello, &store).await {
                    tracing::debug!(rank = hello.rank, %error, "a store connection ended");
                }
            });
        },
    )
}

/// Serves one connection, which has completed the handshake and so belongs to the job, from the
/// registration of its rank until it ends.
async fn serve(mut stream: TcpStream, hello: Hello, store: &Store) -> io::Result<()> {
    let reply = store.register_rank(hello);
    let outcome = write(&mut stream, &reply).await;
    if !matches!(reply, Reply::Welcome) {
        return outcome;
    }
    if outcome.is_err() {
        // The reply could not be sent, so the rank does not know of its seat, and will connect
        // again.
        store.lock().joined.remove(&hello.rank);
        return outcome;
    }
    let outcome = answer_requests(&mut stream, store).await;
    // Wake the requests that need all ranks: they learn that this one has left.
    store.lock().departed.push(hello.rank);
    store.changed.notify_waiters();
    outcome
}

/// Answers the requests of a rank until it ends the connection.
async fn answer_requests(stream: &mut TcpStream, store: &Store) -> io::Result<()> {
    loop {
        let request: Request = match read(stream).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            request => request?,
        };
        // A rank may end while it waits for others. Its request is carried out first, as it may
        // have ended after that.
        let reply = tokio::select! {
            biased;
            reply = store.answer(request) => reply,
            () = wait_for_end(stream) => return Ok(()),
        };
        write(stream, &reply.unwrap_or_else(Reply::Refused)).await?;
    }
}

/// Waits until the other side ends the connection. If the other side sends something meanwhile,
/// this waits for ever; but no client sends anything before it has its reply.
async fn wait_for_end(stream: &TcpStream) {
    if let Ok(1..) = stream.peek(&mut [0]).await {
        std::future::pending().await
    }
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, StoreState> {
        lock(&self.state)
    }

    /// Assigns a rank its seat. A rank can have only one connection, so there are no more
    /// connections than ranks.
    fn register_rank(&self, Hello { rank, world_size }: Hello) -> Reply {
        let store_world_size = self.world_size;
        if world_size != store_world_size {
            return Reply::Refused(format!(
                "the world size is {world_size} here, but {store_world_size} on the rank that hosts the store"
            ));
        }
        if rank >= store_world_size {
            return Reply::Refused(format!(
                "there is no rank {rank} in a job of {store_world_size} ranks"
            ));
        }
        let mut state = self.lock();
        // In both cases below, this store may belong to the last attempt of the job, which is just
        // ending, and the rank to the next attempt. So the rank is told to try again: the store of
        // its own attempt opens when this one has ended.
        if state.has_failed {
            return Reply::NotNow(
                "the rendezvous there has failed, and has not ended yet".to_owned(),
            );
        }
        if !state.joined.insert(rank) {
            return Reply::NotNow(format!("another process has already joined as rank {rank}"));
        }
        Reply::Welcome
    }

    /// Carries out a request, and returns the reply; or the reason that it is refused.
    async fn answer(&self, request: Request) -> Result<Reply, String> {
        Ok(match request {
            Request::Set { key, value } => {
                self.set_key(&mut self.lock(), key, value)?;
                Reply::Value(None)
            }
            Request::Get { key } => Reply::Value(self.lock().values.get(&key).cloned()),
            Request::SetIfAbsent { key, value } => {
                let mut state = self.lock();
                if !state.values.contains_key(&key) {
                    self.set_key(&mut state, key.clone(), value)?;
                }
                Reply::Value(state.values.get(&key).cloned())
            }
            Request::WaitForRanks {
                prefix,
                milliseconds,
                needs_all,
            } => self.wait_for_ranks(&prefix, milliseconds, needs_all).await,
            Request::Departed => Reply::Departed(self.lock().departed.clone()),
        })
    }

    /// Sets a key, and wakes all that wait for keys; an error if the store would then hold more
    /// than its share of memory.
    fn set_key(&self, state: &mut StoreState, key: String, value: Vec<u8>) -> Result<(), String> {
        let replaced_bytes = state
            .values
            .get(&key)
            .map_or(0, |replaced_bytes| key.len() + replaced_bytes.len());
        let total_bytes = state.total_bytes - replaced_bytes + key.len() + value.len();
        let limit = MAX_STORE_BYTES
            .saturating_add(self.world_size.saturating_mul(MAX_STORE_BYTES_PER_RANK));
        if total_bytes > limit {
            return Err(format!(
                "the store is full: its keys and values may have {limit} bytes together"
            ));
        }
        state.total_bytes = total_bytes;
        state.values.insert(key, value);
        self.changed.notify_waiters();
        Ok(())
    }

    /// Waits until each rank has set its key, which is `prefix` and its number, but no longer than
    /// this, and returns the values. If a rank has ended its connection, the wait fails if it
    /// `needs_all`; else that rank is passed over.
    async fn wait_for_ranks(&self, prefix: &str, milliseconds: u64, needs_all: bool) -> Reply {
        // A list of the keys of many ranks for each of many waiting ranks would take much memory.
        let key = |rank: usize| format!("{prefix}{rank}");
        let ranks = 0..self.world_size;
        let waiting = async {
            // Keys are never removed, so those that have been found need not be looked up again.
            // Many ranks wait for the keys of many ranks, and each new key wakes them all.
            let mut first_missing = 0;
            loop {
                // Any change after this line ends the wait, so none is missed.
                let changed = self.changed.notified();
                {
                    let mut state = self.lock();
                    while ranks.contains(&first_missing)
                        && (state.values.contains_key(&key(first_missing))
                            || !needs_all && state.departed.contains(&first_missing))
                    {
                        first_missing += 1;
                    }
                    if !ranks.contains(&first_missing) {
                        let values = ranks
                            .clone()
                            .filter_map(|rank| state.values.get(&key(rank)));
                        return Reply::Values(values.cloned().collect());
                    }
                    if needs_all && !state.departed.is_empty() {
                        state.has_failed = true;
                        return Reply::Departed(state.departed.clone());
                    }
                }
                changed.await;
            }
        };
        if let Ok(reply) = timeout(Duration::from_millis(milliseconds), waiting).await {
            return reply;
        }
        let mut state = self.lock();
        state.has_failed |= needs_all;
        let missing = ranks.filter(|&rank| !state.values.contains_key(&key(rank)));
        Reply::Missing(missing.collect())
    }
}

/// Reads one message: four bytes for its length, then its body. A client may keep silent between
/// messages for as long as it likes, but not within one.
async fn read<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).await?;
    let len = message_len(prefix)?;
    // The buffer grows with the bytes that arrive, so a wrong length takes no memory.
    let mut body = Vec::new();
    timeout(
        MESSAGE_TIMEOUT,
        stream.take(len as u64).read_to_end(&mut body),
    )
    .await??;
    wire::decode(&body).map_err(invalid_data_error)
}

/// Writes a reply. The values of all ranks can be longer than a message, which is an error of that
/// request only. A client that does not read is dropped, as its replies would pile up.
async fn write(stream: &mut TcpStream, reply: &Reply) -> io::Result<()> {
    let bytes = to_bytes(reply).or_else(|error| to_bytes(&Reply::Refused(error.to_string())))?;
    timeout(MESSAGE_TIMEOUT, stream.write_all(&bytes)).await?
}
