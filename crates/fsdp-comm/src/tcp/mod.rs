//! The `tcp` backend: ranks are processes, which connect to rank 0 at MASTER_ADDR first, and then to each other.
//!
//! Every two processes are connected by a socket, which carries heartbeats, errors, and between hosts everything else.
//! Groups whose ranks are all on one host carry out their rounds through shared memory instead.

mod acceptor;
mod backend;
#[cfg(target_os = "linux")]
mod chunks;
mod frame;
mod node;
mod rendezvous;
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
#[cfg(feature = "mpi")]
pub(crate) use self::rendezvous::Participant;
