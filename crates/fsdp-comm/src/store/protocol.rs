//! The messages between clients and the store, each after its length.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::buffer::zeroed;
use crate::wire;

/// The longest key of the store, in bytes.
pub const MAX_KEY_BYTES: usize = 4096;
/// The longest value of the store, in bytes.
pub const MAX_VALUE_BYTES: usize = 16 << 20;
/// The longest message: a request to wait for one key of each of very many ranks, or the values of these keys.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The first bytes of a client, which no other protocol begins with.
const MAGIC: [u8; 8] = *b"fsdp\0kv\x01";

/// The description of a rank, with which it connects to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// The name that tells this job from others on the same port.
    pub job: String,
    /// This rank.
    pub rank: usize,
    /// The number of ranks of the job.
    pub world_size: usize,
    /// The time that connecting, and each request, may take.
    pub deadline: Duration,
}

/// The first message of a client.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    magic: [u8; 8],
    pub(super) job: String,
    pub(super) rank: usize,
    pub(super) world_size: usize,
}

impl Hello {
    pub(super) fn new(options: &StoreOptions) -> Self {
        Hello { magic: MAGIC, job: options.job.clone(), rank: options.rank, world_size: options.world_size }
    }

    pub(super) fn is_genuine(&self) -> bool {
        self.magic == MAGIC
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Set { key: String, value: Vec<u8> },
    Get { key: String },
    Wait { keys: Vec<String>, milliseconds: u64 },
    Add { key: String, amount: i64 },
    CompareAndSet { key: String, expected: Option<Vec<u8>>, value: Vec<u8> },
}

impl Request {
    pub(super) fn check(&self) -> Result<(), String> {
        match self {
            Request::Set { key, value } | Request::CompareAndSet { key, value, .. } => {
                check_key(key).and_then(|()| check_value(value))
            }
            Request::Get { key } | Request::Add { key, .. } => check_key(key),
            Request::Wait { keys, .. } => keys.iter().try_for_each(|key| check_key(key)),
        }
    }
}

fn check_key(key: &str) -> Result<(), String> {
    if key.len() > MAX_KEY_BYTES {
        return Err(format!("a key of {} bytes is longer than {MAX_KEY_BYTES}", key.len()));
    }
    Ok(())
}

fn check_value(value: &[u8]) -> Result<(), String> {
    if value.len() > MAX_VALUE_BYTES {
        return Err(format!("a value of {} bytes is longer than {MAX_VALUE_BYTES}", value.len()));
    }
    Ok(())
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome,
    Refused(String),
    Value(Option<Vec<u8>>),
    Values(Vec<Vec<u8>>),
    Missing(Vec<String>),
    Number(i64),
}

pub(super) fn invalid(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

pub(super) fn out_of_memory(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, message)
}

/// Encodes a message, with its length in front.
pub(super) fn to_bytes<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let body = wire::encode(message).map_err(invalid)?;
    let len = u32::try_from(body.len()).ok().filter(|&len| len as usize <= MAX_MESSAGE_BYTES);
    let len = len.ok_or_else(|| invalid(format!("a message of {} bytes is too long", body.len())))?;
    Ok([&len.to_le_bytes(), &body[..]].concat())
}

/// Returns the length of the message after this prefix.
pub(super) fn message_len(prefix: [u8; 4]) -> io::Result<usize> {
    let len = u32::from_le_bytes(prefix) as usize;
    if len > MAX_MESSAGE_BYTES {
        return Err(invalid(format!("a message of {len} bytes is too long")));
    }
    Ok(len)
}

pub(super) fn write_blocking<T: Serialize>(stream: &mut TcpStream, message: &T, until: Instant) -> io::Result<()> {
    write_all(stream, &to_bytes(message)?, until)
}

pub(super) fn write_all(stream: &mut TcpStream, bytes: &[u8], until: Instant) -> io::Result<()> {
    stream.set_write_timeout(Some(left(until)))?;
    stream.write_all(bytes)
}

pub(super) fn read_blocking<T: DeserializeOwned>(stream: &mut TcpStream, until: Instant) -> io::Result<T> {
    let mut prefix = [0; 4];
    read_exact(stream, &mut prefix, until)?;
    let mut body = zeroed(message_len(prefix)?, "a message of the store").map_err(out_of_memory)?;
    read_exact(stream, &mut body, until)?;
    wire::decode(&body).map_err(invalid)
}

pub(super) fn read_exact(stream: &mut TcpStream, mut buffer: &mut [u8], until: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(Some(left(until)))?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => buffer = &mut buffer[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) if Instant::now() >= until => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns the time left, and at least a little, because zero would mean no timeout.
fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
