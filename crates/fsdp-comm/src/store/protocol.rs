//! What clients and the store say to each other: length-prefixed messages.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::StoreOptions;
use crate::wire;

/// Longest key, in bytes.
pub const MAX_KEY_BYTES: usize = 4096;
/// Longest value, in bytes.
pub const MAX_VALUE_BYTES: usize = 16 << 20;
/// Longest message: a request to wait for a key of each of very many ranks, or their values.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Nobody else begins like this.
const MAGIC: [u8; 8] = *b"fsdp\0kv\x01";

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
        let key = |key: &String| match key.len() {
            0..=MAX_KEY_BYTES => Ok(()),
            len => Err(format!("a key of {len} bytes is longer than {MAX_KEY_BYTES}")),
        };
        let value = |value: &Vec<u8>| match value.len() {
            0..=MAX_VALUE_BYTES => Ok(()),
            len => Err(format!("a value of {len} bytes is longer than {MAX_VALUE_BYTES}")),
        };
        match self {
            Request::Set { key: k, value: v } | Request::CompareAndSet { key: k, value: v, .. } => key(k).and(value(v)),
            Request::Get { key: k } | Request::Add { key: k, .. } => key(k),
            Request::Wait { keys, .. } => keys.iter().try_for_each(key),
        }
    }
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

/// A message as it is sent.
pub(super) fn to_bytes<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let body = wire::encode(message).map_err(invalid)?;
    let len = u32::try_from(body.len()).ok().filter(|&len| len as usize <= MAX_MESSAGE_BYTES);
    let len = len.ok_or_else(|| invalid(format!("a message of {} bytes is too long", body.len())))?;
    Ok([&len.to_le_bytes(), &body[..]].concat())
}

/// How long the message is that begins with this.
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
    let mut body = vec![0; message_len(prefix)?];
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

/// The time left, and a little if there is none: zero would mean without end.
fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}
