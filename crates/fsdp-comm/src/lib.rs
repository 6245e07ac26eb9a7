//! Process groups: collectives between ranks, with deadlines, and with the same error on every
//! rank.
//!
//! A [`ProcessGroup`] is one rank's handle on a group of ranks that call the same operations in the
//! same order: torch's `ProcessGroup`, on slices of host memory. The backend determines what a rank
//! is and how bytes move between ranks:
//!
//! | backend | ranks are | they are started by | bytes move |
//! |---|---|---|---|
//! | `local` | threads of one process | [`run_local`] | directly from one rank's slice to another's |
//! | `tcp` | processes | a launcher; [`init_process_group`] in each | through shared memory on one host, else over sockets |
//! | `mpi` (feature `mpi`) | processes | `mpirun` or `srun`; [`init_process_group`] in each | through MPI's collectives |
//! | `nccl` (feature `nccl`) | processes with GPUs | as for `tcp` | GPU memory through NCCL ([`ProcessGroup::device`](crate::ProcessGroup)), all else as in `tcp` |
//!
//! ```
//! use fsdp_comm::{ReduceOp, run_local};
//! let sums = run_local(4, |group| {
//!     let mut buffer = [group.rank() as f32, 1.0];
//!     group.all_reduce(&mut buffer, ReduceOp::Sum).map(|()| buffer)
//! })?;
//! assert!(sums.iter().all(|sum| *sum == Ok([6.0, 4.0])));
//! # Ok::<(), fsdp_comm::CommError>(())
//! ```
//!
//! On every backend:
//! - **No hangs.** Every operation has a deadline. If a rank leaves, fails or does not call the
//!   operation, all others get an error that names it, and from then on every operation of that
//!   group fails at once with the same cause.
//! - **No mixed calls.** Every operation has a fingerprint (operation, sequence number, dtype,
//!   sizes, reduction, root) that all ranks compare before bytes move. [`CommError::Mismatch`] says
//!   which ranks called what.
//! - **The same bits.** Reductions add in rank order `0..N` (`f16` and `bf16` in `f32`, rounded
//!   once at the end). So a result depends on the number of ranks, but not on the backend, the
//!   timing or the way that the work is split. (NCCL, which chooses its own order, is the
//!   exception.)
//!
//! Safety limits, checked before anything is allocated: [`MAX_OBJECT_BYTES`],
//! [`MAX_MESSAGE_BYTES`], [`MAX_WORLD_SIZE`], [`MAX_STORE_BYTES`].

mod access;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod asking;
mod backend;
mod backend_kind;
mod ballot;
mod blame;
mod blocking;
mod buffer;
#[cfg(feature = "nccl")]
mod call_order;
mod collectives;
mod deadline;
#[cfg(feature = "nccl")]
pub mod device;
mod element;
mod environment;
mod error;
mod exchange;
mod group;
mod init;
mod link;
mod local;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
mod objects;
mod open_files;
mod record;
mod reduce;
mod store;
mod subgroup;
mod sync;
mod tcp;
mod traffic;
mod wire;

pub use access::Secret;
pub use backend_kind::BackendKind;
pub use blame::BLAME_DIR;
pub use deadline::DEFAULT_DEADLINE;
pub use element::Element;
pub use environment::{DEFAULT_MASTER_PORT, Environment, Launcher, MAX_WORLD_SIZE};
pub use error::{CommError, MAX_MESSAGE_BYTES, RankCall, RankFailure};
pub use exchange::MAX_OBJECT_BYTES;
pub use group::ProcessGroup;
pub use init::{init_process_group, init_process_group_within};
pub use link::SimulatedLink;
pub use local::{LocalRanks, Turns, run_local};
pub use record::Operation;
pub use reduce::ReduceOp;
pub use store::{MAX_STORE_BYTES, StoreOptions, TcpStore};
pub use tcp::TcpOptions;
pub use traffic::Traffic;
