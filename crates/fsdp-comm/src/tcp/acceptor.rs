//! The listening port of a rank, and the connections of other ranks that were let in there.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self, Receiver};

use crate::access::{Hello, Key, Port};

/// The connections of other ranks, each with its rank.
pub(super) type Admitted = Receiver<(TcpStream, usize)>;

/// Listens at the first of `addresses` that is one of this host, and lets in every connection which
/// proves in the handshake that it has the key, and that comes from another rank than `own_rank`.
/// Returns the port, and all connections that are let in until it is closed.
///
/// # Errors
/// The same as of [`Port::open`].
pub(super) fn listen(
    addresses: &[SocketAddr],
    key: Key,
    own_rank: usize,
    ranks: usize,
) -> io::Result<(Port, Admitted)> {
    // The port has a thread of its own, so connections that come early wait in this channel.
    let (sender, admitted) = mpsc::channel();
    let port = Port::open(addresses, key, "fsdp-acceptor", move |stream, hello| {
        let Hello { rank, world_size } = hello;
        if world_size != ranks || rank >= ranks || rank == own_rank {
            tracing::warn!("refused a connection from a process that claims to be rank {rank}");
            return;
        }
        // Make it an ordinary blocking socket. If that fails, the rank counts as one that did not
        // come.
        let blocking = stream
            .into_std()
            .and_then(|stream| stream.set_nonblocking(false).map(|()| stream));
        match blocking {
            // Sending fails only when nobody waits for connections any more.
            Ok(stream) => drop(sender.send((stream, rank))),
            Err(error) => tracing::warn!(%error, rank, "a connection was lost"),
        }
    })?;
    Ok((port, admitted))
}
