//! A listener that accepts only connections which complete the handshake. Other connections can use
//! only a bounded amount of memory and file descriptors.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::handshake::{Hello, handshake_as_server};
use super::key::Key;

/// The largest number of connections in the middle of the handshake. More wait in the system's
/// queue, where they take no file descriptors.
const MAX_PENDING_HANDSHAKES: usize = 64;

/// The time that the handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time that a handshake may take while other connections wait for its place.
const HANDSHAKE_TIMEOUT_WHEN_FULL: Duration = Duration::from_millis(250);

/// The pause after the system could not accept a connection. There may be no file descriptor left
/// until another connection closes.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Accepts connections forever, and calls `on_authenticated` with each that has completed the
/// handshake.
pub(super) async fn accept_authenticated(
    listener: &TcpListener,
    key: &Key,
    mut on_authenticated: impl FnMut(TcpStream, Hello),
) {
    let mut handshakes = JoinSet::new();
    // Each handshake with the time at which it began.
    let mut oldest_first: VecDeque<(Instant, AbortHandle)> = VecDeque::new();
    loop {
        // A stranger may keep silent. So when all places are taken, the oldest handshake gives way.
        let is_full = handshakes.len() >= MAX_PENDING_HANDSHAKES;
        let oldest_is_slow = wait_until_slow(oldest_first.front().map(|&(started, _)| started));
        tokio::select! {
            Some(finished) = handshakes.join_next() => {
                oldest_first.retain(|(_, handshake)| !handshake.is_finished());
                match finished {
                    Ok(Ok((stream, hello))) => on_authenticated(stream, hello),
                    Ok(Err(error)) => tracing::debug!(%error, "a connection was not let in"),
                    // The handshake was dropped to make room.
                    Err(_) => {}
                }
            }
            accepted = listener.accept(), if !is_full => match accepted {
                Ok((stream, _)) => {
                    let handshake = handshakes.spawn(authenticate(stream, key.clone()));
                    oldest_first.push_back((Instant::now(), handshake));
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            },
            () = oldest_is_slow, if is_full => {
                // Give up the handshake that has run for longest.
                if let Some((_, handshake)) = oldest_first.pop_front() {
                    handshake.abort();
                }
            }
        }
    }
}

/// Waits until a handshake that began then has taken so long that it may be dropped for another.
async fn wait_until_slow(started: Option<Instant>) {
    match started {
        Some(started) => sleep_until(started + HANDSHAKE_TIMEOUT_WHEN_FULL).await,
        None => std::future::pending().await,
    }
}

/// Completes the handshake of a connection, and returns the connection and who is at its other end.
async fn authenticate(mut stream: TcpStream, key: Key) -> io::Result<(TcpStream, Hello)> {
    stream.set_nodelay(true)?;
    let hello = timeout(HANDSHAKE_TIMEOUT, handshake_as_server(&mut stream, &key)).await??;
    Ok((stream, hello))
}
