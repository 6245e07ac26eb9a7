//! This process in MPI: one thread joins and leaves, and processes leave together or not at all.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::library::{self, Buffers, Communicator, Pending};
use crate::access::Secret;
use crate::asking::wait_until;
use crate::backend::Direction;
use crate::backend_kind::BackendKind;
use crate::blame;
use crate::deadline::{deadline_after, time_left};
use crate::error::CommError;
use crate::store::{StoreOptions, TcpStore};
use crate::sync::lock;
use crate::tcp::{Participant, TcpBackend};
use crate::wire;

/// The variables of launchers that start MPI processes. Each launcher sets at least one.
const LAUNCHER_VARIABLES: [&str; 5] = [
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "MPI_LOCALRANKID",
    "SLURM_STEP_ID",
];

/// The room for the address of the store.
const ADDRESS_BYTES: usize = 1024;
/// The room for the name of a host: MPI's own limit.
const NAME_BYTES: usize = 256;

/// The time that a rank whose group has failed waits for the others to leave too.
const FAILED_GOODBYE_TIMEOUT: Duration = Duration::from_millis(1000);
/// The time that leaving MPI may take once all ranks are leaving.
const FINALIZE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time between two calls that let MPI make progress while nothing waits for it.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(1);

/// This process's part in the MPI job. All groups of the process hold it.
#[derive(Debug)]
pub(super) struct Job {
    owner: Mutex<Owner>,
    pub(super) control: Arc<TcpBackend>,
    /// The number of ranks on this host.
    pub(super) ranks_on_host: usize,
    /// `true` if a group has failed, so that other ranks may never leave properly.
    failed: AtomicBool,
    /// `true` if an MPI call was abandoned before it was complete.
    stuck: AtomicBool,
}

/// The handle of the thread that joins and leaves MPI.
#[derive(Debug)]
struct Owner {
    leave_sender: Sender<()>,
    departure_receiver: Receiver<()>,
}

impl Owner {
    /// Starts MPI on a new thread.
    fn start(deadline: Instant) -> Result<Owner, CommError> {
        // The first channel asks the thread to leave, the second tells that MPI has started, the
        // third that it has been left.
        let (leave_sender, leave_receiver) = mpsc::channel();
        let (start_sender, start_receiver) = mpsc::channel();
        let (departure_sender, departure_receiver) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("mpi".to_owned())
            .spawn(move || be_in_mpi(&leave_receiver, &start_sender, &departure_sender));
        thread.map_err(|error| {
            unavailable_error(format!("its thread could not be started: {error}"))
        })?;
        match start_receiver.recv_timeout(time_left(deadline)) {
            Ok(Ok(())) => Ok(Owner {
                leave_sender,
                departure_receiver,
            }),
            Ok(Err(message)) => Err(unavailable_error(message)),
            Err(_) => Err(rendezvous_error(
                "MPI did not start all processes in time".to_owned(),
            )),
        }
    }
}

/// Joins MPI, stays until it is asked to leave, and leaves: all in one thread, as MPI wants it.
fn be_in_mpi(
    leave_receiver: &Receiver<()>,
    start_sender: &Sender<Result<(), String>>,
    departure_sender: &Sender<()>,
) {
    match library::start() {
        Ok(universe) => {
            start_sender.send(Ok(())).ok();
            match make_progress_until_leave(leave_receiver) {
                Ok(()) => drop(universe),
                // Leaving waits for all ranks, which may never leave.
                Err(_) => std::mem::forget(universe),
            }
        }
        Err(message) => drop(start_sender.send(Err(message))),
    }
    departure_sender.send(()).ok();
}

/// Calls MPI regularly until this process leaves the job, and returns `Ok` then. Returns an error
/// if the group is dropped without leaving.
///
/// A call that has ended on this rank may still need this process before it ends on other ranks.
/// MPI makes progress only while it is called, and this process may compute for a long time.
fn make_progress_until_leave(leave_receiver: &Receiver<()>) -> Result<(), RecvTimeoutError> {
    loop {
        match leave_receiver.recv_timeout(PROGRESS_INTERVAL) {
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
    /// Joins MPI, and meets all other processes.
    pub(super) fn join(timeout: Duration) -> Result<Arc<Job>, CommError> {
        static JOINED: OnceLock<()> = OnceLock::new();
        if LAUNCHER_VARIABLES
            .iter()
            .all(|name| std::env::var_os(name).is_none())
        {
            let message = "no MPI launcher has started this process: start the ranks with `mpirun -n N` or `srun --mpi`";
            return Err(unavailable_error(message.to_owned()));
        }
        if JOINED.set(()).is_err() {
            return Err(unavailable_error(
                "this process has already joined MPI, which it can do only once".to_owned(),
            ));
        }
        let deadline = deadline_after(timeout);
        let owner = Owner::start(deadline)?;
        let world = Communicator::world().map_err(|error| library_error("MPI_Comm_size", error))?;
        let (control, ranks_on_host) = blame::record(world.rank, meet(&world, timeout, deadline))?;
        Ok(Arc::new(Job {
            owner: Mutex::new(owner),
            control: Arc::new(control),
            ranks_on_host,
            failed: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
        }))
    }

    /// Records that a group has failed.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    /// Records that a call was abandoned, and will never be complete.
    pub(super) fn give_up(&self) {
        self.stuck.store(true, Ordering::Release);
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let goodbye_timeout = self
            .failed
            .load(Ordering::Acquire)
            .then_some(FAILED_GOODBYE_TIMEOUT);
        // Leaving MPI waits for all ranks, so a rank leaves only if all do. A process that ends
        // without leaving is left to its launcher.
        let all_leave =
            self.control.say_goodbye(goodbye_timeout) && !self.stuck.load(Ordering::Acquire);
        if all_leave {
            let owner = lock(&self.owner);
            owner.leave_sender.send(()).ok();
            if owner.departure_receiver.recv_timeout(FINALIZE_TIMEOUT)
                == Err(RecvTimeoutError::Timeout)
            {
                tracing::warn!("MPI did not end within {FINALIZE_TIMEOUT:?}");
            }
        }
    }
}

/// Connects this process to all others. Returns the connection, and the number of ranks on this
/// host.
fn meet(
    world: &Communicator,
    timeout: Duration,
    deadline: Instant,
) -> Result<(TcpBackend, usize), CommError> {
    let (store, ranks_on_host) = open_store(world, timeout, deadline)?;
    let participant = Participant {
        rank: world.rank,
        world_size: world.ranks,
        address: store.address().to_owned(),
        timeout,
        deadline,
        // Before it leaves MPI, each rank waits for the goodbyes of all.
        connect_all_up_to: usize::MAX,
    };
    Ok((TcpBackend::meet(&participant, store, true)?, ranks_on_host))
}

/// Opens the store on rank 0, and tells its address to the others through MPI. Returns the store,
/// and the number of ranks on this host.
fn open_store(
    world: &Communicator,
    timeout: Duration,
    deadline: Instant,
) -> Result<(TcpStore, usize), CommError> {
    // Step 1: gather the names of all hosts, so that rank 0 knows whether all ranks are on one
    // host.
    let rank = world.rank;
    let world_size = world.ranks;
    let name = ::mpi::environment::processor_name()
        .map_err(|error| library_error("MPI_Get_processor_name", error.to_string()))?;
    let mut padded_name = name.clone().into_bytes();
    padded_name.resize(NAME_BYTES, 0);
    let mut pieces = vec![&[][..]; world_size];
    pieces[rank] = &padded_name;
    let lens = vec![NAME_BYTES; world_size];
    let gathered = world.begin(Direction::AllGather, Buffers::default(), &pieces, &lens);
    let names = wait("MPI_Iallgatherv", gathered, || late_error(deadline))?.receive;
    let ranks_on_host = names
        .chunks(NAME_BYTES)
        .filter(|name| **name == padded_name[..])
        .count();
    // Step 2: rank 0 opens the store, at an address that the others can reach.
    let options = StoreOptions {
        job: "mpi".to_owned(),
        rank,
        world_size,
        deadline: timeout,
        ..StoreOptions::default()
    };
    let mut hosted = None;
    let mut encoded_place = Vec::new();
    if rank == 0 {
        let host = match std::env::var("MASTER_ADDR") {
            Ok(address) if !address.is_empty() => address,
            _ if ranks_on_host == world_size => "127.0.0.1".to_owned(),
            _ => name,
        };
        // MPI has connected the processes already, so the secret can be sent through it.
        let store = host_store(&format!("{host}:0"), &options);
        let place = store
            .as_ref()
            .map(|(store, secret)| (store.address().to_owned(), secret.text().to_owned()));
        encoded_place = wire::encode_plain(&place.map_err(ToString::to_string));
        encoded_place.resize(ADDRESS_BYTES, 0);
        hosted = Some(store.map(|(store, _)| store));
    }
    // Step 3: rank 0 tells the others the address and the secret, or its error.
    let mut lens = vec![0; world_size];
    if rank > 0 {
        lens[0] = ADDRESS_BYTES;
    }
    pieces[rank] = &encoded_place;
    let telling = world.begin(
        Direction::Broadcast { root: 0 },
        Buffers::default(),
        &pieces,
        &lens,
    );
    let received = wait("MPI_Ibcast", telling, || late_error(deadline))?.receive;
    let store = match (
        hosted,
        wire::decode_prefix::<Result<(String, String), String>>(&received),
    ) {
        (Some(store), _) => store,
        (None, Ok((Ok((address, secret)), _))) => {
            let secret = Some(Secret::new(secret).map_err(rendezvous_error)?);
            TcpStore::connect(&address, &StoreOptions { secret, ..options })
        }
        (None, Ok((Err(message), _)) | Err(message)) => Err(rendezvous_error(message)),
    };
    Ok((store?, ranks_on_host))
}

/// Opens a store with a secret of its own.
fn host_store(address: &str, options: &StoreOptions) -> Result<(TcpStore, Secret), CommError> {
    let secret = Secret::random()
        .map_err(|error| rendezvous_error(format!("there is no random number: {error}")))?;
    let options = StoreOptions {
        secret: Some(secret.clone()),
        ..options.clone()
    };
    TcpStore::host(address, &options).map(|store| (store, secret))
}

/// Returns the error of ranks that are not connected yet, so that only the deadline can end their
/// waits, if it is over.
fn late_error(deadline: Instant) -> Option<CommError> {
    let message = "not all processes that MPI started came in time";
    (Instant::now() >= deadline).then(|| rendezvous_error(message.to_owned()))
}

/// Waits until a call of MPI is over, and returns its buffers. `name` is that of the call, and
/// `failure` returns the reason that it may never be over, if there is one.
pub(super) fn wait(
    name: &str,
    call: library::Result<Pending>,
    failure: impl Fn() -> Option<CommError>,
) -> Result<Buffers, CommError> {
    let mut pending = call.map_err(|error| library_error(name, error))?;
    wait_until(
        || pending.test().map_err(|error| library_error(name, error)),
        failure,
    )?;
    Ok(pending.finish().expect("the call is over"))
}

pub(super) fn library_error(call: &str, message: String) -> CommError {
    CommError::library("MPI", call, message)
}

fn unavailable_error(message: String) -> CommError {
    BackendKind::Mpi.unavailable(message)
}

/// Returns the error of a rendezvous through MPI, of which it is not known who came.
fn rendezvous_error(message: String) -> CommError {
    CommError::rendezvous("MPI", &[], message)
}
