//! The `tcp` backend: ranks are processes, which connect to rank 0 at MASTER_ADDR first, and then
//! to each other.
//!
//! A socket between two processes carries heartbeats, errors and, between hosts, everything else.
//! In a small job every two processes are connected. In a large one two processes connect when one
//! of them first needs to send to the other ([`links`]). Groups whose ranks are all on one host
//! carry out their rounds through shared memory ([`shared`]) instead.
//!
//! In a [round](crate::backend) the ballots of all ranks are merged on their way through other
//! ranks ([`agreement`]), in the order of [`schedule`].

mod acceptor;
mod agreement;
mod backend;
#[cfg(target_os = "linux")]
mod chunks;
mod frame;
mod inbox;
mod inbox_lock;
mod links;
mod node;
mod poll;
mod rendezvous;
mod schedule;
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "memory that several processes map")]
mod segment;
#[cfg(target_os = "linux")]
mod shared;
#[cfg(not(target_os = "linux"))]
#[path = "unshared.rs"]
mod shared;
mod sockets;
#[cfg(target_os = "linux")]
mod watch;

#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use self::backend::TcpBackend;
pub use self::backend::TcpOptions;
#[cfg(feature = "nccl")]
pub(crate) use self::inbox::NEWS_TIMEOUT;
#[cfg(feature = "mpi")]
pub(crate) use self::rendezvous::Participant;
