//! The listening port of a rank, and the connections of other ranks that were let in there.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Instant;

use crate::access::{Hello, Key, Port};

/// A connection that was let in, with what the process at the other end says about itself.
pub(super) type AdmittedConnection = (TcpStream, Hello);

/// An open port, and the connections that were let in there.
#[derive(Debug)]
pub(super) struct Acceptor {
    port: Port,
    admitted_connections: Receiver<AdmittedConnection>,
}

impl Acceptor {
    /// Listens at the first of `addresses` that is one of this host, and lets in every
    /// connection which proves in the handshake that it has the key.
    ///
    /// # Errors
    /// The same as of [`Port::open`].
    pub(super) fn open(addresses: &[SocketAddr], key: Key) -> io::Result<Acceptor> {
        // The port has a thread of its own, so connections that come early wait in this channel.
        let (admitted_sender, admitted_connections) = mpsc::channel();
        let port = Port::open(addresses, key, "fsdp-acceptor", move |stream, hello| {
            hand_over(&admitted_sender, stream, hello)
        })?;
        Ok(Acceptor {
            port,
            admitted_connections,
        })
    }

    /// Returns the number of the port.
    pub(super) fn port(&self) -> u16 {
        self.port.address().port()
    }

    /// Returns the next connection that was let in; `None` if there is none in time.
    pub(super) fn next(&mut self, deadline: Instant) -> Option<AdmittedConnection> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        match self.admitted_connections.recv_timeout(remaining) {
            Ok(connection) => Some(connection),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // The thread has ended, so nobody comes any more. Callers ask again at once, so let
                // the time pass here.
                thread::sleep(remaining);
                None
            }
        }
    }

    /// Returns the port, and all connections that are let in until it is closed.
    pub(super) fn split(self) -> (Port, Receiver<AdmittedConnection>) {
        (self.port, self.admitted_connections)
    }
}

/// Makes a connection of the runtime an ordinary blocking socket, and sends it on. If that fails,
/// the connection is lost, and its rank counts as one that did not come.
fn hand_over(
    admitted_sender: &mpsc::Sender<AdmittedConnection>,
    stream: tokio::net::TcpStream,
    hello: Hello,
) {
    let blocking = stream
        .into_std()
        .and_then(|stream| stream.set_nonblocking(false).map(|()| stream));
    match blocking {
        // Sending fails only when nobody waits for connections any more.
        Ok(stream) => drop(admitted_sender.send((stream, hello))),
        Err(error) => tracing::warn!(%error, rank = hello.rank, "a connection was lost"),
    }
}
