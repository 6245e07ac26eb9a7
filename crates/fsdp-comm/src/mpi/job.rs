//! This process in MPI: joining, which the thread does that leaves, too; and leaving together or not at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::library::{self, Buffers, Communicator, Pending};
use crate::backend_kind::BackendKind;
use crate::error::CommError;
use crate::store::{Store, StoreOptions};
use crate::tcp::{Place, TcpBackend};
use crate::wire;

/// Variables of which a launcher that starts MPI processes sets one.
const LAUNCHED: [&str; 5] = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MPI_LOCALRANKID", "SLURM_STEP_ID"];

/// Room for the address of the store.
const ADDRESS_BYTES: usize = 1024;
/// Room for the name of a host: MPI's own limit.
const NAME_BYTES: usize = 256;

/// How long a rank whose group has failed waits for the others to leave, too.
const PATIENCE: Duration = Duration::from_millis(1000);
/// How long leaving MPI may take once all are about to.
const LEAVING: Duration = Duration::from_secs(5);

/// How long a wait goes on without sleeping, and how long it sleeps then.
const EAGER: Duration = Duration::from_millis(2);
const NAP: Duration = Duration::from_micros(50);

/// How often MPI is given a chance to go on while nothing waits for it.
const BEAT: Duration = Duration::from_millis(1);

/// All groups of a process hold it.
#[derive(Debug)]
pub(super) struct Job {
    owner: Owner,
    pub(super) control: Arc<TcpBackend>,
    /// A group has failed: others may never come.
    failed: AtomicBool,
    /// A call is not over and never will be.
    stuck: AtomicBool,
}

/// The thread that MPI belongs to.
#[derive(Debug)]
struct Owner {
    leave: Mutex<Option<Sender<()>>>,
    left: Mutex<Receiver<()>>,
}

impl Owner {
    /// Starts MPI.
    fn start(until: Instant) -> Result<Owner, CommError> {
        let (leave, leaves) = mpsc::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let (leaving, left) = mpsc::channel();
        let own = move || {
            match library::start() {
                Ok(universe) => {
                    ready.send(Ok(())).ok();
                    match keep_going(&leaves) {
                        Ok(()) => drop(universe),
                        // Others would wait in vain for all to leave.
                        Err(_) => std::mem::forget(universe),
                    }
                }
                Err(message) => drop(ready.send(Err(message))),
            }
            leaving.send(()).ok();
        };
        let thread = thread::Builder::new().name("mpi".to_owned()).spawn(own);
        thread.map_err(|error| unavailable(format!("its thread could not be started: {error}")))?;
        match is_ready.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Ok(())) => Ok(Owner { leave: Mutex::new(Some(leave)), left: Mutex::new(left) }),
            Ok(Err(message)) => Err(unavailable(message)),
            Err(_) => Err(rendezvous("MPI did not start all processes in time".to_owned())),
        }
    }
}

/// Until this process is to leave, or is left behind. Calls that are over here may still have to be carried on for
/// others, which MPI does only while it is called, and this process may compute for long.
fn keep_going(leaves: &Receiver<()>) -> Result<(), RecvTimeoutError> {
    loop {
        match leaves.recv_timeout(BEAT) {
            Err(RecvTimeoutError::Timeout) => {
                if let Err(error) = library::go_on() {
                    tracing::debug!(%error, "MPI does not go on");
                }
            }
            leave => return leave,
        }
    }
}

impl Job {
    /// Joins all other processes.
    pub(super) fn join(deadline: Duration) -> Result<Arc<Job>, CommError> {
        static JOINED: OnceLock<()> = OnceLock::new();
        if LAUNCHED.iter().all(|name| std::env::var_os(name).is_none()) {
            let message =
                "no MPI launcher has started this process: start the ranks with `mpirun -n N` or `srun --mpi`";
            return Err(unavailable(message.to_owned()));
        }
        if JOINED.set(()).is_err() {
            return Err(unavailable("this process has already joined MPI, which it can do only once".to_owned()));
        }
        let until = Instant::now() + deadline;
        let owner = Owner::start(until)?;
        let world = Communicator::world().map_err(|error| failed("MPI_Comm_size", error))?;
        let (rank, world_size) = (world.rank(), world.ranks());
        let store = open_store(&world, deadline, until)?;
        let place = Place { rank, world_size, address: store.address().to_owned(), deadline, until };
        let control = Arc::new(TcpBackend::meet(&place, store, true)?);
        Ok(Arc::new(Job { owner, control, failed: AtomicBool::new(false), stuck: AtomicBool::new(false) }))
    }

    /// A group has failed.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// A call of MPI's will never be over.
    pub(super) fn give_up(&self) {
        self.stuck.store(true, Ordering::Release);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let limit = self.failed.load(Ordering::Acquire).then_some(PATIENCE);
        // MPI ends when all have left it, so a rank leaves only if all do. What its launcher does with processes that
        // end without is its launcher's business.
        let all_leave = self.control.say_goodbye(limit) && !self.stuck.load(Ordering::Acquire);
        let leave = self.owner.leave.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(leave) = leave.filter(|_| all_leave) {
            leave.send(()).ok();
            let left = self.owner.left.lock().unwrap_or_else(PoisonError::into_inner);
            if left.recv_timeout(LEAVING) == Err(RecvTimeoutError::Timeout) {
                tracing::warn!("MPI did not end within {LEAVING:?}");
            }
        }
    }
}

/// Rank 0 opens the store, and tells the others through MPI where it is.
fn open_store(world: &Communicator, deadline: Duration, until: Instant) -> Result<Store, CommError> {
    let (rank, world_size) = (world.rank(), world.ranks());
    let name = ::mpi::environment::processor_name().unwrap_or_default();
    let mut own = name.clone().into_bytes();
    own.resize(NAME_BYTES, 0);
    let buffers = Buffers { send: own.clone(), ..Buffers::default() };
    let gathered = world.all_gather(buffers, &vec![NAME_BYTES; world_size]);
    let names = wait(gathered.map_err(|error| failed("MPI_Iallgatherv", error))?, until)?.receive;
    let options = StoreOptions { job: "mpi".to_owned(), rank, world_size, deadline };
    let mut hosted = None;
    let mut told = Buffers::default();
    if rank == 0 {
        let one_host = names.chunks(NAME_BYTES).all(|name| *name == own[..]);
        let master = std::env::var("MASTER_ADDR").ok().filter(|address| !address.is_empty());
        let host = master.unwrap_or(if one_host { "127.0.0.1".to_owned() } else { name });
        let store = Store::host(&format!("{host}:0"), &options);
        let address = store.as_ref().map(|store| store.address().to_owned()).map_err(ToString::to_string);
        told.receive = wire::encode(&address).unwrap_or_default();
        hosted = Some(store);
    }
    let telling = world.broadcast(told, ADDRESS_BYTES, 0).map_err(|error| failed("MPI_Ibcast", error))?;
    let told = wait(telling, until)?.receive;
    match (hosted, wire::decode_prefix::<Result<String, String>>(&told)) {
        (Some(store), _) => store,
        (None, Ok((Ok(address), _))) => Store::connect(&address, &options),
        (None, Ok((Err(message), _)) | Err(message)) => Err(rendezvous(message)),
    }
}

/// Waits for a call before there is anybody to ask about the others.
fn wait(mut pending: Pending, until: Instant) -> Result<Buffers, CommError> {
    let mut pause = Pause::new();
    while !pending.test().map_err(|error| failed("MPI_Test", error))? {
        if Instant::now() >= until {
            return Err(rendezvous("not all processes that MPI started came in time".to_owned()));
        }
        pause.take();
    }
    Ok(pending.finish().unwrap_or_default())
}

/// What a rank does while it waits: MPI goes on only while it is called, but other ranks may need the processor.
#[derive(Debug)]
pub(super) struct Pause {
    eager_until: Instant,
}

impl Pause {
    pub(super) fn new() -> Self {
        Pause { eager_until: Instant::now() + EAGER }
    }

    pub(super) fn take(&mut self) {
        if Instant::now() < self.eager_until { thread::yield_now() } else { thread::sleep(NAP) }
    }
}

pub(super) fn failed(call: &str, message: String) -> CommError {
    CommError::Library { library: "MPI".to_owned(), call: call.to_owned(), message }
}

fn unavailable(message: String) -> CommError {
    BackendKind::Mpi.unavailable(message)
}

fn rendezvous(message: String) -> CommError {
    CommError::Rendezvous { address: "MPI".to_owned(), joined: Vec::new(), missing: Vec::new(), message }
}
