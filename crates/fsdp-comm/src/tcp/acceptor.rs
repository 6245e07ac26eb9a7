//! The listening port of a rank: a thread accepts the connections of other ranks.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::access::{Hello, Key, accept_authenticated};

/// A connection that was let in, with what the process at the other end says about itself.
pub(super) type Comer = (TcpStream, Hello);

/// An open port, and the connections that were let in there.
#[derive(Debug)]
pub(super) struct Acceptor {
    port: Port,
    authenticated: Receiver<Comer>,
}

/// An open port. It is closed when this is dropped.
#[derive(Debug)]
pub(super) struct Port {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Starts a thread that lets in every connection which proves in the handshake that it has the key.
    ///
    /// # Errors
    /// The system refuses a thread, or what the runtime needs.
    pub(super) fn open(listener: TcpListener, key: Key) -> io::Result<Acceptor> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        listener.set_nonblocking(true)?;
        // The listener registers with the runtime that is entered.
        let guard = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        drop(guard);
        let (send_on, authenticated) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let keep = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = accept_authenticated(&listener, &key, |stream, hello| hand_over(&send_on, stream, hello)) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = thread::Builder::new().name("fsdp-acceptor".to_owned()).spawn(keep)?;
        Ok(Acceptor { port: Port { stop: Some(stop), thread: Some(thread) }, authenticated })
    }

    /// Returns the next connection that was let in; `None` if there is none in time.
    pub(super) fn next(&mut self, until: Instant) -> Option<Comer> {
        let left = until.saturating_duration_since(Instant::now());
        match self.authenticated.recv_timeout(left) {
            Ok(connection) => Some(connection),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // The thread has ended, so nobody comes any more. Callers ask again at once, so let the time pass here.
                thread::sleep(left);
                None
            }
        }
    }

    /// Returns the port, and all connections that are let in until it is closed.
    pub(super) fn split(self) -> (Port, Receiver<Comer>) {
        (self.port, self.authenticated)
    }
}

/// Makes a connection of the runtime an ordinary blocking socket, and sends it on. If that fails, the connection is
/// lost, and its rank counts as one that did not come.
fn hand_over(send_on: &mpsc::Sender<Comer>, stream: tokio::net::TcpStream, hello: Hello) {
    let ordinary = stream.into_std().and_then(|stream| stream.set_nonblocking(false).map(|()| stream));
    match ordinary {
        // Sending fails only when nobody waits for connections any more.
        Ok(stream) => drop(send_on.send((stream, hello))),
        Err(error) => tracing::warn!(%error, rank = hello.rank, "a connection was lost"),
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
