//! A key-value store over TCP, through which the ranks of a job find each other: torch's
//! `TCPStore`.
//!
//! Rank 0 [hosts](TcpStore::host) it, all others [connect](TcpStore::connect). A connection begins
//! with the handshake of [`access`](crate::access), so that processes of two jobs that use one port
//! never meet. Where torchrun's agent has the job's port, its store tells where rank 0's is.

mod agent;
mod client;
mod listening;
mod protocol;
mod server;

pub(crate) use self::client::RankValues;
pub use self::client::TcpStore;
pub(crate) use self::listening::{address_in_zone, every_address, without_brackets, without_zone};
pub use self::protocol::{MAX_STORE_BYTES, StoreOptions};
