//! The messages between clients and the store, each after its length.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::access::{Key, Secret};
use crate::blocking::read_exact;
use crate::buffer::zeroed;
use crate::deadline::DEFAULT_DEADLINE;
use crate::wire;

/// The longest message. The values of all ranks are one.
pub(super) const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// The most bytes of all keys and values together, beside 1 KiB for each rank.
pub const MAX_STORE_BYTES: usize = 64 << 20;
/// The bytes of keys and values that each rank adds to [`MAX_STORE_BYTES`]: more than its address
/// takes.
pub(super) const MAX_STORE_BYTES_PER_RANK: usize = 1 << 10;

/// The description of a rank, with which it connects to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// The name that tells this job from others on the same port.
    pub job: String,
    /// The secret of the job. Without one, the store lets in everybody who knows the job's name.
    pub secret: Option<Secret>,
    /// `true` if the ranks may meet at an address that other hosts reach, although there is no
    /// secret.
    pub insecure: bool,
    /// This rank; 0 by default.
    pub rank: usize,
    /// The number of ranks of the job; 1 by default.
    pub world_size: usize,
    /// The time that connecting, and each request, may take; [`DEFAULT_DEADLINE`] by default.
    pub deadline: Duration,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions {
            job: String::new(),
            secret: None,
            insecure: false,
            rank: 0,
            world_size: 1,
            deadline: DEFAULT_DEADLINE,
        }
    }
}

impl StoreOptions {
    /// Checks that a rank may listen at this address, or trust it.
    pub(super) fn check_address(&self, ip: IpAddr) -> Result<(), String> {
        if self.secret.is_some() || self.insecure || ip.is_loopback() {
            return Ok(());
        }
        Err(format!(
            "{ip} can be reached from other hosts, so the ranks need a secret: set FSDP_SECRET to the same random text on \
             all ranks, or FSDP_INSECURE to `true` to trust everybody in the network"
        ))
    }

    /// Returns the key that all ranks of the job have.
    pub(super) fn key(&self) -> Key {
        Key::for_job(self.secret.as_ref(), &self.job)
    }
}

/// A message from a client to the store.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    Set {
        key: String,
        value: Vec<u8>,
    },
    Get {
        key: String,
    },
    /// Sets a key unless it has been set.
    SetIfAbsent {
        key: String,
        value: Vec<u8>,
    },
    /// Waits for one key of each rank, which is this prefix and the rank's number. If a rank has
    /// ended its connection, the wait ends if it `needs_all`; else that rank is passed over.
    WaitForRanks {
        prefix: String,
        milliseconds: u64,
        needs_all: bool,
    },
    /// Asks which ranks have ended their connections.
    Departed,
}

/// The answer to a request, or to the attempt to join.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome,
    /// The rank cannot join now, but may be able to later; with the reason.
    NotNow(String),
    /// The rank can never join, or the request is wrong.
    Refused(String),
    Value(Option<Vec<u8>>),
    /// The values of ranks, in rank order.
    Values(Vec<Vec<u8>>),
    /// The ranks whose keys have not been set.
    Missing(Vec<usize>),
    /// The ranks that have ended their connections, in this order.
    Departed(Vec<usize>),
}

/// Returns the error of a message that makes no sense.
pub(super) fn invalid_data_error(message: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message.into())
}

/// Encodes a message, with its length in front.
pub(super) fn to_bytes<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let body = wire::encode(message).map_err(invalid_data_error)?;
    check_message_len(body.len())?;
    let prefix = (body.len() as u32).to_le_bytes();
    Ok([&prefix, &body[..]].concat())
}

/// Returns the length of the message after `prefix`.
pub(super) fn message_len(prefix: [u8; 4]) -> io::Result<usize> {
    let len = u32::from_le_bytes(prefix) as usize;
    check_message_len(len).map(|()| len)
}

/// Checks the length of a message's body.
fn check_message_len(len: usize) -> io::Result<()> {
    if len > MAX_MESSAGE_BYTES {
        return Err(invalid_data_error(format!(
            "a message of {len} bytes is too long"
        )));
    }
    Ok(())
}

/// Reads one message before the deadline. Its length is checked before memory is reserved.
pub(super) fn read_blocking<T: DeserializeOwned>(
    stream: &mut TcpStream,
    deadline: Instant,
) -> io::Result<T> {
    // The length comes first, and is checked before there is memory for the rest.
    let mut prefix = [0; 4];
    read_exact(stream, &mut prefix, deadline)?;
    let mut body = zeroed(message_len(prefix)?, "a message of the store")
        .map_err(|message| io::Error::new(io::ErrorKind::OutOfMemory, message))?;
    read_exact(stream, &mut body, deadline)?;
    wire::decode(&body).map_err(invalid_data_error)
}
