//! The listening port of a rank during the rendezvous: a thread accepts the connections of other ranks.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tokio::sync::oneshot;

use crate::access::{Hello, Key, let_in};

/// An open port. It is closed when this is dropped.
pub(super) struct Door {
    admitted: Receiver<(TcpStream, Hello)>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    /// Lets connections in that show that they have the key.
    pub(super) fn open(listener: TcpListener, key: Key) -> io::Result<Door> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        listener.set_nonblocking(true)?;
        let guard = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)?;
        drop(guard);
        let (admit, admitted) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let keep = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = let_in(&listener, &key, |stream, hello| hand_over(&admit, stream, hello)) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = thread::Builder::new().name("fsdp-door".to_owned()).spawn(keep)?;
        Ok(Door { admitted, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns the next connection that was let in; `None` if there is none in time.
    pub(super) fn next(&mut self, until: Instant) -> Option<(TcpStream, Hello)> {
        self.admitted.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }
}

/// Makes a connection an ordinary one again. It is lost if that fails, and then its rank counts as one that did not come.
fn hand_over(admit: &mpsc::Sender<(TcpStream, Hello)>, stream: tokio::net::TcpStream, hello: Hello) {
    let ordinary = stream.into_std().and_then(|stream| stream.set_nonblocking(false).map(|()| stream));
    match ordinary {
        // Sending fails only when nobody waits for connections any more.
        Ok(stream) => drop(admit.send((stream, hello))),
        Err(error) => tracing::warn!(%error, rank = hello.rank, "a connection was lost"),
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}
