//! The handshake at the start of every connection. All of its messages have a fixed size.
//!
//! ```text
//! client                                                       server
//!        ── magic, client nonce ─────────────────────────────▶
//!        ◀─ server nonce, proof of (nonces) ──────────────────
//!        ── hello, proof of (nonces, hello) ──────────────────▶
//!        ◀─ welcome ──────────────────────────────────────────
//! ```

use std::io;
use std::net::TcpStream;
use std::time::Instant;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::key::{KEY_BYTES, Key};
use super::nonce::{Nonce, nonce};
use crate::blocking::{read_exact, write_all};

/// The first bytes of a connection, which no other protocol begins with. The last one is the
/// version.
const MAGIC: [u8; 8] = *b"fsdp\0kv\x03";

/// The answer to a client that has proved that it has the key.
const WELCOME: u8 = 1;

/// The purposes of proofs. They differ, so that no side can send a proof back to the side that made
/// it.
const SERVER: &str = "server";
const CLIENT: &str = "client";

/// A rank's description of itself, sent when it connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
}

const HELLO_BYTES: usize = 16;

impl Hello {
    /// Returns the hello as it is sent: both numbers, little-endian.
    fn to_bytes(self) -> [u8; HELLO_BYTES] {
        bytemuck::cast([self.rank, self.world_size].map(|number| (number as u64).to_le_bytes()))
    }

    /// Reads a hello from the bytes that [`to_bytes`](Self::to_bytes) writes.
    fn from_bytes(bytes: [u8; HELLO_BYTES]) -> Hello {
        let numbers: [[u8; 8]; 2] = bytemuck::cast(bytes);
        let [rank, world_size] = numbers.map(|number| u64::from_le_bytes(number) as usize);
        Hello { rank, world_size }
    }
}

/// The reason why a client was refused.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The other side has another key: it belongs to another job.
    OtherJob,
    /// The connection was interrupted, or nothing came in time.
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Io(error)
    }
}

/// Returns the error for bytes that no rank sends.
pub(crate) fn wrong_protocol_error() -> io::Error {
    let message =
        "received bytes that are not of this protocol; is another program using this port?";
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Carries out the client's side of the handshake: proves that this process has the key, and checks
/// that the server has it.
pub(crate) fn handshake_as_client(
    stream: &TcpStream,
    key: &Key,
    hello: Hello,
    deadline: Instant,
) -> Result<(), Refusal> {
    // Step 1: challenge the server. Each side sends a fresh nonce, so that a recording of an
    // earlier handshake proves nothing.
    let client_nonce = nonce()?;
    write_all(stream, &[&MAGIC[..], &client_nonce].concat(), deadline)?;
    // Step 2: check the server's proof first, so that this process sends nothing about itself to a
    // stranger.
    let mut server_nonce = Nonce::default();
    read_exact(stream, &mut server_nonce, deadline)?;
    let mut proof = [0; KEY_BYTES];
    read_exact(stream, &mut proof, deadline)?;
    if !key.accepts(SERVER, &[&client_nonce, &server_nonce], &proof) {
        return Err(Refusal::OtherJob);
    }
    // Step 3: say who this is. The proof covers the hello, so that nobody in between can change it.
    let hello = hello.to_bytes();
    let own_proof = key.prove(CLIENT, &[&client_nonce, &server_nonce, &hello]);
    write_all(stream, &[&hello[..], &own_proof].concat(), deadline)?;
    // Step 4: wait for the server's welcome, because it may drop a connection if too many arrive at
    // once.
    let mut answer = [0];
    read_exact(stream, &mut answer, deadline)?;
    if answer != [WELCOME] {
        return Err(wrong_protocol_error().into());
    }
    Ok(())
}

/// Carries out the server's side of the handshake: returns the client's hello once the client has
/// proved that it has the key.
///
/// A client without the key learns only that a job listens here.
pub(super) async fn handshake_as_server(
    stream: &mut tokio::net::TcpStream,
    key: &Key,
) -> io::Result<Hello> {
    // Step 1: drop clients of other protocols before computing anything for them.
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic).await?;
    if magic != MAGIC {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is no rank, or one of another version",
        ));
    }
    let mut client_nonce = Nonce::default();
    stream.read_exact(&mut client_nonce).await?;
    // Step 2: answer the client's challenge, with one for the client.
    let server_nonce = nonce()?;
    let own_proof = key.prove(SERVER, &[&client_nonce, &server_nonce]);
    stream
        .write_all(&[&server_nonce[..], &own_proof].concat())
        .await?;
    // Step 3: check the client's proof before its hello is used.
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).await?;
    let mut proof = [0; KEY_BYTES];
    stream.read_exact(&mut proof).await?;
    if !key.accepts(CLIENT, &[&client_nonce, &server_nonce, &hello], &proof) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it does not have the job's key",
        ));
    }
    // Step 4: tell the client that it was accepted.
    stream.write_all(&[WELCOME]).await?;
    Ok(Hello::from_bytes(hello))
}
