//! The `tcp` backend: ranks are processes, which meet at MASTER_ADDR.
//!
//! Every two processes have a socket: for signs of life, errors, and everything else between hosts. Groups whose ranks
//! are all on one host do their rounds through shared memory instead.

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

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::node::Node;
use self::shared::SharedMemory;
use self::sockets::Member;
use crate::backend::{Backend, Planner, Round};
use crate::environment::Environment;
use crate::error::CommError;
use crate::group::{DEFAULT_DEADLINE, ProcessGroup};

/// How the ranks of a job reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendKind {
    /// Threads of one process: see [`run_local`](crate::run_local).
    Local,
    /// Processes, over sockets and shared memory.
    Tcp,
    /// Processes, over MPI.
    Mpi,
    /// Processes with a GPU each, over NCCL.
    Nccl,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BackendKind::Local => "local",
            BackendKind::Tcp => "tcp",
            BackendKind::Mpi => "mpi",
            BackendKind::Nccl => "nccl",
        })
    }
}

impl FromStr for BackendKind {
    type Err = CommError;

    fn from_str(name: &str) -> Result<Self, CommError> {
        let all = [BackendKind::Local, BackendKind::Tcp, BackendKind::Mpi, BackendKind::Nccl];
        all.into_iter().find(|kind| kind.to_string() == name).ok_or_else(|| CommError::BackendUnavailable {
            backend: name.to_owned(),
            message: "there are local, tcp, mpi and nccl".to_owned(),
        })
    }
}

/// The group of all ranks of the job that a launcher started this process in. torch's `init_process_group`.
///
/// # Errors
/// [`CommError::Environment`] where no launcher says who this process is, [`CommError::Rendezvous`] where the ranks do
/// not find each other within [`DEFAULT_DEADLINE`], [`CommError::BackendUnavailable`].
pub fn init_process_group(backend: BackendKind) -> Result<ProcessGroup, CommError> {
    let message = match backend {
        BackendKind::Tcp => return TcpOptions::new(Environment::from_env()?).connect(),
        BackendKind::Local => "its ranks are threads of one process, which `run_local` starts",
        _ => "it is not compiled in",
    };
    Err(CommError::BackendUnavailable { backend: backend.to_string(), message: message.to_owned() })
}

/// How a process joins the others of its job through the `tcp` backend.
#[derive(Debug, Clone)]
#[must_use]
pub struct TcpOptions {
    environment: Environment,
    deadline: Duration,
    shared_memory: bool,
}

impl TcpOptions {
    /// The place of a process in its job, with [`DEFAULT_DEADLINE`] and shared memory.
    pub fn new(environment: Environment) -> Self {
        TcpOptions { environment, deadline: DEFAULT_DEADLINE, shared_memory: true }
    }

    /// How long the rendezvous may take, and the deadline of the group.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Whether this rank shares memory with others on its host. If any rank of a group does not, none does.
    pub fn shared_memory(mut self, shared_memory: bool) -> Self {
        self.shared_memory = shared_memory;
        self
    }

    /// Meets all other ranks.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] tells which ranks came.
    pub fn connect(&self) -> Result<ProcessGroup, CommError> {
        let until = Instant::now() + self.deadline;
        let node = rendezvous::meet(&self.environment, until, self.deadline, self.shared_memory)?;
        let round = Round { number: 0, sequence: 0, operation: "rendezvous", deadline: self.deadline, until };
        let ranks = (0..self.environment.world_size).collect();
        let backend = TcpBackend::new(node, 0, ranks, self.environment.rank, &round)?;
        Ok(ProcessGroup::new(Arc::new(backend)).with_deadline(self.deadline))
    }
}

/// A group's first rounds are its own making; those of its operations come after.
const SETUP_ROUNDS: u64 = 2;

/// One rank of one group.
#[derive(Debug)]
struct TcpBackend {
    node: Arc<Node>,
    id: u64,
    global_ranks: Vec<usize>,
    rank: usize,
    memory: Option<SharedMemory>,
}

impl TcpBackend {
    fn new(
        node: Arc<Node>,
        id: u64,
        global_ranks: Vec<usize>,
        rank: usize,
        round: &Round<'_>,
    ) -> Result<Self, CommError> {
        let member = Member { node: &node, group: id, ranks: &global_ranks, rank };
        let memory = SharedMemory::new(member, round).inspect_err(|_| node.close(id))?;
        Ok(TcpBackend { node, id, global_ranks, rank, memory })
    }
}

impl Backend for TcpBackend {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn global_ranks(&self) -> &[usize] {
        &self.global_ranks
    }

    fn round<'p>(&self, round: &Round<'_>, record: &[u8], send: &[u8], plan: Planner<'p, '_>) -> Result<(), CommError> {
        let round = &Round { number: round.number + SETUP_ROUNDS, ..*round };
        if let Some(failure) = self.node.trouble(self.id, round, &[]) {
            return Err(failure);
        }
        let member = Member { node: &self.node, group: self.id, ranks: &self.global_ranks, rank: self.rank };
        match &self.memory {
            Some(memory) => memory.round(member, round, record, send, plan),
            None => sockets::round(member, round, record, send, plan),
        }
    }

    fn subgroup(&self, round: &Round<'_>, id: u64, ranks: &[usize]) -> Result<Arc<dyn Backend>, CommError> {
        let global_ranks: Vec<usize> = ranks.iter().filter_map(|&rank| self.global_ranks.get(rank).copied()).collect();
        let rank = ranks.iter().position(|&rank| rank == self.rank).unwrap_or_default();
        Ok(Arc::new(TcpBackend::new(Arc::clone(&self.node), id, global_ranks, rank, round)?))
    }

    fn abort(&self, round: u64, error: &CommError) {
        self.node.abort(self.id, round + SETUP_ROUNDS, &self.global_ranks, error);
    }
}

impl Drop for TcpBackend {
    fn drop(&mut self) {
        self.node.close(self.id);
    }
}
