//! The store itself: a map, served by a listener on a thread of its own.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, oneshot};

use super::protocol::{Hello, Reply, Request, StoreOptions, invalid, message_len, to_bytes};
use crate::wire;

/// The time that a new connection has for its greeting.
const HELLO_DEADLINE: Duration = Duration::from_secs(10);

/// A running store. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    job: String,
    world_size: usize,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    joined: HashSet<usize>,
    values: HashMap<String, Vec<u8>>,
}

impl Server {
    pub(super) fn start(address: &str, options: &StoreOptions) -> io::Result<Server> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let addresses: Vec<SocketAddr> = address.to_socket_addrs()?.collect();
        let listener = runtime.block_on(TcpListener::bind(&addresses[..]))?;
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        let (job, world_size) = (options.job.clone(), options.world_size);
        let shared = Arc::new(Shared { job, world_size, state: Mutex::default(), changed: Notify::new() });
        let serve = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept(&listener, shared) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = thread::Builder::new().name("fsdp-store".to_owned()).spawn(serve)?;
        Ok(Server { address, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

async fn accept(listener: &TcpListener, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move {
                    if let Err(error) = serve(stream, &shared).await {
                        tracing::debug!(%peer, %error, "a store connection ended");
                    }
                });
            }
            // There may be no file descriptor left until another connection closes.
            Err(error) => {
                tracing::warn!(%error, "the store could not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let hello = tokio::time::timeout(HELLO_DEADLINE, read::<Hello>(&mut stream)).await??;
    let reply = shared.greet(&hello);
    write(&mut stream, &reply).await?;
    if !matches!(reply, Reply::Welcome) {
        return Ok(());
    }
    loop {
        let request: Request = match read(&mut stream).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            request => request?,
        };
        let reply = match request.check() {
            Ok(()) => shared.answer(request).await,
            Err(message) => Reply::Refused(message),
        };
        write(&mut stream, &reply).await?;
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn greet(&self, hello: &Hello) -> Reply {
        if !hello.is_genuine() {
            return Reply::Refused("this is the store of an `fsdp` job, of another version".to_owned());
        }
        if hello.job != self.job {
            return Reply::Refused(format!("this port is job `{}`'s, not job `{}`'s", self.job, hello.job));
        }
        if hello.world_size != self.world_size {
            let (here, there) = (self.world_size, hello.world_size);
            return Reply::Refused(format!(
                "the world size is {there} here, but {here} on the rank that hosts the store"
            ));
        }
        if !self.lock().joined.insert(hello.rank) {
            return Reply::Refused(format!("a rank {} has already joined this job", hello.rank));
        }
        Reply::Welcome
    }

    async fn answer(&self, request: Request) -> Reply {
        match request {
            Request::Set { key, value } => {
                self.lock().values.insert(key, value);
                self.changed.notify_waiters();
                Reply::Value(None)
            }
            Request::Get { key } => Reply::Value(self.lock().values.get(&key).cloned()),
            Request::Wait { keys, milliseconds } => {
                let wait = self.wait(&keys);
                match tokio::time::timeout(Duration::from_millis(milliseconds), wait).await {
                    Ok(values) => Reply::Values(values),
                    Err(_) => {
                        let state = self.lock();
                        Reply::Missing(keys.into_iter().filter(|key| !state.values.contains_key(key)).collect())
                    }
                }
            }
            Request::Add { key, amount } => {
                let mut state = self.lock();
                let before = match state.values.get(&key).map(|value| <[u8; 8]>::try_from(&value[..])) {
                    None => 0,
                    Some(Ok(bytes)) => i64::from_le_bytes(bytes),
                    Some(Err(_)) => return Reply::Refused(format!("the value of `{key}` is no number")),
                };
                let sum = before.wrapping_add(amount);
                state.values.insert(key, sum.to_le_bytes().to_vec());
                self.changed.notify_waiters();
                Reply::Number(sum)
            }
            Request::CompareAndSet { key, expected, value } => {
                let mut state = self.lock();
                if state.values.get(&key) == expected.as_ref() {
                    state.values.insert(key, value.clone());
                    self.changed.notify_waiters();
                    return Reply::Value(Some(value));
                }
                Reply::Value(state.values.get(&key).cloned())
            }
        }
    }

    async fn wait(&self, keys: &[String]) -> Vec<Vec<u8>> {
        loop {
            // Any change after this line ends the wait, so none is missed.
            let changed = self.changed.notified();
            {
                let state = self.lock();
                let values: Vec<Vec<u8>> = keys.iter().filter_map(|key| state.values.get(key).cloned()).collect();
                if values.len() == keys.len() {
                    return values;
                }
            }
            changed.await;
        }
    }
}

/// Reads one message: four bytes for its length, then its body.
async fn read<T: DeserializeOwned>(stream: &mut TcpStream) -> io::Result<T> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).await?;
    let len = message_len(prefix)?;
    // The buffer grows with the bytes that arrive, so a wrong length takes no memory.
    let mut body = Vec::new();
    stream.take(len as u64).read_to_end(&mut body).await?;
    wire::decode(&body).map_err(invalid)
}

async fn write<T: Serialize>(stream: &mut TcpStream, message: &T) -> io::Result<()> {
    stream.write_all(&to_bytes(message)?).await
}
