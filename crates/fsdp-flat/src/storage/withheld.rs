//! Tensors whose readers are made to wait. This detects when code that knows nothing of sharding
//! starts to use a tensor.
//!
//! candle has no hook for the use of a tensor. But each operation, on each device, takes the read
//! lock of the tensor's storage first. A [`Withheld`] holds the write locks of released tensors. An
//! operation that reads one of them blocks, [`Withheld::is_awaited`] then returns `true`, and
//! [`Withheld::give`] fills the tensors and lets the operation continue.
//!
//! candle gives access to a storage, and so to its lock, only inside a callback. So a separate
//! thread stays inside such callbacks, nested one in the other, as long as the locks are held. The
//! locks are parking_lot's, whose queue of waiters can be inspected. [`Withheld::new`] tests that
//! once, because it depends on the kind of lock that candle uses.

#![expect(
    unsafe_code,
    reason = "the locks of storages: this only inspects their queues, and whether they are held"
)]

use std::collections::HashSet;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Layout, Tensor};
use parking_lot::RawRwLock;
use parking_lot::lock_api::{RawRwLock as _, RwLockReadGuard};
use parking_lot_core::{DEFAULT_UNPARK_TOKEN, FilterOp, unpark_filter};

use super::contents::Contents;
use super::lend::{StorageMut, with_storage_mut};
use super::{release_storage, storage_id};
use crate::FlatError;

/// The offset from a lock's address to the key of the queue in which a writer waits for the last
/// readers. (The key of the queue of readers that wait for a writer is the address itself.)
const QUEUE_OF_WRITERS: usize = 1;

/// The fixed part of the size of the thread's stack.
const STACK_BYTES: usize = 256 << 10;
/// The part of the stack for each tensor, because the call that holds its lock is nested in those
/// of the others.
const STACK_BYTES_PER_TENSOR: usize = 4 << 10;

/// The interval at which [`Withheld::settle`] checks whether the thread waits for a lock.
const LOOK: Duration = Duration::from_millis(1);

/// The time for which [`Withheld::new`] waits until a test thread blocks on a lock, even on a busy
/// machine.
const TRY_OUT: Duration = Duration::from_secs(10);

/// Tensors that can be released in such a way that their readers wait until they are filled again.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp_flat::storage::{Contents, Withheld};
/// let tensor = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// let withheld = Withheld::new(vec![tensor.clone()])?;
/// withheld.withhold();
/// withheld.wait()?;
/// let reader = std::thread::spawn(move || tensor.to_vec1::<f32>());
/// while !withheld.is_awaited() {
///     std::thread::yield_now();
/// }
/// withheld.give(vec![Contents::new(vec![3f32, 4.])])?;
/// assert_eq!(reader.join().unwrap()?, [3., 4.]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Withheld {
    /// The tensors, which own the locks.
    tensors: Vec<Tensor>,
    /// The addresses of the locks, by which parking_lot knows their queues.
    locks: Vec<usize>,
    shared: Arc<Shared>,
    /// The channel to the thread. Each call of [`Self::withhold`] sends a request: the receiver of
    /// the contents that end it. `None` once this is dropped.
    requests: Option<Sender<Receiver<Give>>>,
    /// The sender of the contents that end the current request; `None` if the tensors are not
    /// withheld.
    gives: Mutex<Option<Sender<Give>>>,
    thread: Option<JoinHandle<()>>,
}

/// Contents for the tensors, and the channel for the result of filling them.
struct Give {
    contents: Vec<Contents>,
    result: Sender<Result<(), FlatError>>,
}

/// The state that a [`Withheld`] and its thread share.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum State {
    /// The tensors are not withheld, and are read as any other.
    #[default]
    Free,
    /// The thread is taking the locks.
    Asked,
    /// The thread holds all locks, and readers wait.
    Held,
    /// The locks could not be taken, for this reason. The reason is `None` if there is no thread,
    /// or if it has been returned to a caller already.
    Failed(Option<FlatError>),
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes the threads that wait for a change.
    fn set(&self, state: State) {
        *self.state() = state;
        self.changed.notify_all();
    }

    /// Waits for as long as the state is one of these.
    fn wait_while(&self, is_waiting: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self
            .changed
            .wait_while(self.state(), |state| is_waiting(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A guard that the thread holds while it serves a request. When it is dropped, also by a panic,
/// the tensors are free, unless the request has failed.
struct Ends<'a>(&'a Shared);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if !matches!(*state, State::Failed(_)) {
            *state = State::Free;
        }
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Withheld {
    /// Starts the thread that will hold the locks of these tensors. Each tensor must have a storage
    /// of its own.
    ///
    /// # Errors
    /// [`FlatError::SharedStorage`]; [`FlatError::UnseenUse`] if this version of candle uses other
    /// locks; the errors of starting a thread.
    pub fn new(tensors: Vec<Tensor>) -> Result<Self, FlatError> {
        static IS_SUPPORTED: OnceLock<bool> = OnceLock::new();
        // The thread would deadlock on the lock of a storage that it already holds.
        let storages: HashSet<usize> = tensors.iter().map(storage_id).collect();
        if storages.len() != tensors.len() {
            return Err(FlatError::SharedStorage);
        }
        if *IS_SUPPORTED.get_or_init(|| try_out().unwrap_or(false)) {
            Self::start(tensors)
        } else {
            Err(FlatError::UnseenUse)
        }
    }

    /// Starts the thread that holds the locks while there is a request to do so.
    fn start(tensors: Vec<Tensor>) -> Result<Self, FlatError> {
        let locks = tensors.iter().map(lock_of).collect();
        // Keep the tensors without their graphs, which would keep more memory alive than the
        // storages.
        let tensors: Vec<Tensor> = tensors.iter().map(Tensor::detach).collect();
        let withheld = tensors.clone();
        let shared = Arc::new(Shared::default());
        let (requests, received) = mpsc::channel::<Receiver<Give>>();
        let of_thread = Arc::clone(&shared);
        let stack = STACK_BYTES + STACK_BYTES_PER_TENSOR * tensors.len();
        let run = move || {
            received
                .into_iter()
                .for_each(|gives| hold(&withheld, &gives, &of_thread))
        };
        let builder = thread::Builder::new()
            .name("fsdp-withheld".to_owned())
            .stack_size(stack);
        let thread = builder.spawn(run).map_err(candle_core::Error::Io)?;
        Ok(Withheld {
            tensors,
            locks,
            shared,
            requests: Some(requests),
            gives: Mutex::default(),
            thread: Some(thread),
        })
    }

    fn gives(&self) -> MutexGuard<'_, Option<Sender<Give>>> {
        self.gives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to withhold the tensors. As soon as the operations that read them now have finished,
    /// all locks are taken, the memory is released, and new readers wait. Has no effect if the
    /// tensors are already withheld.
    pub fn withhold(&self) {
        let mut gives = self.gives();
        if gives.is_some() {
            return;
        }
        // Ask the thread to take the locks. It holds them until it gets contents through this
        // channel, or the sender is dropped.
        let (sender, receiver) = mpsc::channel();
        self.shared.set(State::Asked);
        if self
            .requests
            .as_ref()
            .is_none_or(|requests| requests.send(receiver).is_err())
        {
            self.shared.set(State::Failed(None));
        }
        *gives = Some(sender);
    }

    /// Waits until the thread holds all locks after [`Self::withhold`]. From then on, readers wait.
    /// Returns at once if the tensors are not withheld.
    ///
    /// # Errors
    /// A tensor on a device that this build does not support, and the errors of a GPU's driver.
    /// Then readers do not wait.
    pub fn wait(&self) -> Result<(), FlatError> {
        let mut state = self
            .shared
            .wait_while(|state| matches!(state, State::Asked));
        match &mut *state {
            State::Failed(error) => Err(error.take().unwrap_or(FlatError::NotWithheld)),
            _ => Ok(()),
        }
    }

    /// Waits like [`Self::wait`], but returns early if an operation still reads one of the tensors:
    /// that operation may in turn wait for other tensors.
    ///
    /// # Errors
    /// The same as [`Self::wait`].
    pub fn settle(&self) -> Result<(), FlatError> {
        let is_asked = |state: &mut State| matches!(state, State::Asked);
        loop {
            let state = self
                .shared
                .changed
                .wait_timeout_while(self.shared.state(), LOOK, is_asked);
            drop(state.unwrap_or_else(PoisonError::into_inner));
            // If an operation reads one of the tensors, the thread waits in the queue of writers.
            let is_read = || {
                self.locks
                    .iter()
                    .any(|&lock| has_waiting(lock + QUEUE_OF_WRITERS))
            };
            if !matches!(*self.shared.state(), State::Asked) || is_read() {
                break;
            }
        }
        match &mut *self.shared.state() {
            State::Failed(error) => Err(error.take().unwrap_or(FlatError::NotWithheld)),
            _ => Ok(()),
        }
    }

    /// Returns `true` if a reader waits for one of the tensors.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        // Before all locks are taken, the thread itself may be the one that waits.
        matches!(*self.shared.state(), State::Held)
            && self.locks.iter().any(|&lock| has_waiting(lock))
    }

    /// Returns `true` if the lock of one of the tensors is held: an operation reads it, or the
    /// tensors are withheld.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.tensors
            .iter()
            .zip(&self.locks)
            .any(|(tensor, &lock)| is_locked(tensor, lock))
    }

    /// Fills the tensors with `contents`, which are in the order of the tensors in [`Self::new`],
    /// and lets their readers continue.
    ///
    /// # Errors
    /// [`FlatError::WrongContents`]; contents of another shape or dtype; the errors of
    /// [`Self::wait`]. The readers then get the error of a released tensor.
    pub fn give(&self, contents: Vec<Contents>) -> Result<(), FlatError> {
        let given = contents.len();
        let Some(gives) = self.gives().take() else {
            return Err(FlatError::WrongContents { given, withheld: 0 });
        };
        let (result, given) = mpsc::channel();
        // If sending fails, the message is dropped with its result sender, so `recv` below returns
        // at once.
        let _ = gives.send(Give { contents, result });
        drop(gives);
        let given = given.recv();
        let mut state = self
            .shared
            .wait_while(|state| matches!(state, State::Asked | State::Held));
        match (&mut *state, given) {
            (State::Failed(error), _) => Err(error.take().unwrap_or(FlatError::NotWithheld)),
            (_, Ok(result)) => result,
            (_, Err(_)) => Err(FlatError::NotWithheld),
        }
    }

    /// Lets readers continue without filling the tensors, if they are withheld. They get the error
    /// of a released tensor.
    pub fn let_go(&self) {
        if self.gives().take().is_some() {
            drop(
                self.shared
                    .wait_while(|state| matches!(state, State::Asked | State::Held)),
            );
        }
    }
}

impl Drop for Withheld {
    fn drop(&mut self) {
        self.let_go();
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, its readers have continued, and there is nobody to report it
            // to.
            let _ = thread.join();
        }
    }
}

/// Holds the locks of all tensors until contents arrive, or until the sender is dropped.
fn hold(tensors: &[Tensor], gives: &Receiver<Give>, shared: &Shared) {
    let _ends = Ends(shared);
    let mut given = None;
    let held = lend_all(tensors, Vec::new(), &mut |lent| {
        given = hold_lent(lent, gives, shared)?;
        Ok(())
    });
    match (held, given) {
        (Err(error), _) => shared.set(State::Failed(Some(error))),
        // The result is sent only now, when the locks are free again.
        (Ok(()), Some((sender, result))) => drop(sender.send(result)),
        (Ok(()), None) => {}
    }
}

/// The channel for the result of filling the tensors, and the result.
type Given = (Sender<Result<(), FlatError>>, Result<(), FlatError>);

/// Waits for contents while all storages are lent, and fills them.
fn hold_lent(
    mut lent: Vec<Lent<'_>>,
    gives: &Receiver<Give>,
    shared: &Shared,
) -> Result<Option<Given>, FlatError> {
    // The memory is released only when all locks are held, because until then an operation may read
    // it.
    for lent in &mut lent {
        release_storage(lent.storage.reborrow())?;
    }
    shared.set(State::Held);
    let Ok(Give { contents, result }) = gives.recv() else {
        return Ok(None);
    };
    let (given, withheld) = (contents.len(), lent.len());
    if given != withheld {
        return Ok(Some((
            result,
            Err(FlatError::WrongContents { given, withheld }),
        )));
    }
    let mut filled = contents.into_iter().zip(lent);
    let filled = filled
        .try_for_each(|(contents, lent)| contents.put_into(lent.tensor, lent.storage, lent.layout));
    Ok(Some((result, filled)))
}

/// A tensor whose storage is lent.
struct Lent<'a> {
    tensor: &'a Tensor,
    layout: &'a Layout,
    storage: StorageMut<'a>,
}

/// Runs `f` while the write locks of all tensors are held. `lent` has the first of them, which are
/// locked already.
fn lend_all(
    tensors: &[Tensor],
    lent: Vec<Lent<'_>>,
    f: &mut dyn FnMut(Vec<Lent<'_>>) -> Result<(), FlatError>,
) -> Result<(), FlatError> {
    let Some(tensor) = tensors.get(lent.len()) else {
        return f(lent);
    };
    with_storage_mut(tensor, |storage, layout| {
        let mut lent: Vec<Lent<'_>> = lent;
        lent.push(Lent {
            tensor,
            layout,
            storage,
        });
        lend_all(tensors, lent, f)
    })
}

/// Returns the address of the lock of a tensor's storage.
fn lock_of(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    // SAFETY: only the address of the lock is taken.
    std::ptr::from_ref(unsafe { RwLockReadGuard::rwlock(&storage).raw() }).expose_provenance()
}

/// Returns `true` if the lock of a tensor's storage is held. `lock` is the address that [`lock_of`]
/// returned for this tensor.
fn is_locked(_owner: &Tensor, lock: usize) -> bool {
    let lock = std::ptr::with_exposed_provenance::<RawRwLock>(lock);
    // SAFETY: `lock_of` exposed the address of this lock, and `_owner` keeps the lock alive. Locks
    // may be inspected from any thread.
    unsafe { &*lock }.is_locked()
}

/// Returns `true` if a thread waits for the lock at this address.
fn has_waiting(lock: usize) -> bool {
    let mut is_waiting = false;
    let look = |_| {
        is_waiting = true;
        FilterOp::Stop
    };
    // SAFETY: the closures neither panic nor call parking_lot, and wake nobody.
    unsafe { unpark_filter(lock, look, |_| DEFAULT_UNPARK_TOKEN) };
    is_waiting
}

/// Tests the mechanism: returns `true` if a reader of a withheld tensor waits, and is detected.
fn try_out() -> Result<bool, FlatError> {
    let tensor = Tensor::zeros(1, DType::F32, &Device::Cpu)?;
    let withheld = Withheld::start(vec![tensor.clone()])?;
    withheld.withhold();
    withheld.wait()?;
    let reader = thread::Builder::new().spawn(move || tensor.to_vec1::<f32>().is_ok());
    let reader = reader.map_err(candle_core::Error::Io)?;
    let begun = Instant::now();
    while !withheld.is_awaited() && !reader.is_finished() && begun.elapsed() < TRY_OUT {
        thread::sleep(Duration::from_micros(100));
    }
    let is_seen = withheld.is_awaited();
    withheld.give(vec![Contents::new(vec![1f32])])?;
    Ok(reader.join().unwrap_or(false) && is_seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::is_released;

    fn tensor(value: f32) -> Tensor {
        Tensor::full(value, (2, 2), &Device::Cpu).unwrap()
    }

    fn contents(value: f32) -> Contents {
        Contents::new(vec![value; 4])
    }

    fn sum(tensor: &Tensor) -> f32 {
        tensor.sum_all().unwrap().to_scalar().unwrap()
    }

    /// Reads in another thread, and waits until that is seen.
    fn read(withheld: &Withheld, tensor: &Tensor) -> JoinHandle<candle_core::Result<f32>> {
        let tensor = tensor.clone();
        let reader = thread::spawn(move || tensor.sum_all()?.to_scalar::<f32>());
        while !withheld.is_awaited() {
            assert!(!reader.is_finished(), "a reader does not wait");
            thread::yield_now();
        }
        reader
    }

    #[test]
    fn readers_wait_until_the_tensors_are_filled() {
        let tensors = vec![tensor(1.), tensor(2.), tensor(3.)];
        let withheld = Withheld::new(tensors.clone()).unwrap();
        for round in 0..50u8 {
            assert!(!withheld.is_awaited());
            withheld.withhold();
            withheld.wait().unwrap();
            assert!(!withheld.is_awaited(), "nobody reads");
            let reader = read(&withheld, &tensors[usize::from(round) % 3].t().unwrap());
            withheld
                .give((0..3).map(|_| contents(f32::from(round))).collect())
                .unwrap();
            assert_eq!(reader.join().unwrap().unwrap(), 4. * f32::from(round));
            assert_eq!(
                sum(&tensors[0]),
                4. * f32::from(round),
                "it is a tensor as any other"
            );
        }
    }

    #[test]
    fn readers_that_are_let_go_get_the_error_of_a_released_tensor() {
        let tensor = tensor(1.);
        let withheld = Withheld::new(vec![tensor.clone()]).unwrap();
        withheld.let_go();
        assert_eq!(sum(&tensor), 4.);
        withheld.withhold();
        withheld.wait().unwrap();
        let reader = read(&withheld, &tensor);
        withheld.let_go();
        assert!(reader.join().unwrap().is_err());
        assert!(is_released(&tensor));
        withheld.withhold();
        drop(withheld);
        assert!(sum_is_error(&tensor), "dropping lets readers go too");
    }

    fn sum_is_error(tensor: &Tensor) -> bool {
        tensor.sum_all().is_err()
    }

    #[test]
    fn tensors_that_cannot_be_withheld_are_an_error_and_nobody_waits() {
        // candle lends no storage through a tensor whose elements repeat.
        let repeated = Tensor::zeros(1, DType::F32, &Device::Cpu)
            .unwrap()
            .broadcast_as(4)
            .unwrap();
        let withheld = Withheld::new(vec![repeated]).unwrap();
        withheld.withhold();
        assert!(
            !matches!(withheld.wait().unwrap_err(), FlatError::NotWithheld),
            "the reason itself"
        );
        assert!(
            matches!(withheld.settle(), Err(FlatError::NotWithheld)),
            "it is not said a second time"
        );
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(withheld.give(vec![contents(1.)]).is_err()));
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(true));
    }

    #[test]
    fn views_of_one_storage_are_refused() {
        let tensor = tensor(1.);
        let view = tensor.t().unwrap();
        assert!(matches!(
            Withheld::new(vec![tensor, view]),
            Err(FlatError::SharedStorage)
        ));
    }

    #[test]
    fn contents_that_do_not_fit_are_an_error_and_readers_go_on() {
        let tensor = tensor(1.);
        let withheld = Withheld::new(vec![tensor.clone()]).unwrap();
        for wrong in [
            vec![],
            vec![Contents::new(vec![1f32; 3])],
            vec![Contents::new(vec![1f64; 4])],
        ] {
            withheld.withhold();
            let given = withheld.give(wrong);
            assert!(given.is_err());
            assert!(sum_is_error(&tensor));
        }
        assert!(
            withheld.give(vec![contents(1.)]).is_err(),
            "nothing is withheld"
        );
    }

    #[test]
    fn the_locks_are_taken_when_present_readers_have_finished() {
        let (a, b) = (tensor(1.), tensor(2.));
        let withheld = Withheld::new(vec![a.clone(), b.clone()]).unwrap();
        let (storage, _) = b.storage_and_layout();
        withheld.withhold();
        withheld.settle().unwrap();
        assert!(!withheld.is_awaited() && !matches!(*withheld.shared.state(), State::Held));
        assert!(
            matches!(&*storage, candle_core::Storage::Cpu(candle_core::CpuStorage::F32(data)) if data[..] == [2.; 4])
        );
        drop(storage);
        withheld.wait().unwrap();
        withheld.give(vec![contents(5.), contents(6.)]).unwrap();
        assert_eq!([sum(&a), sum(&b)], [20., 24.]);
    }

    #[test]
    fn tensors_are_in_use_while_an_operation_reads_one_of_them_or_waits_for_it() {
        let (a, b) = (tensor(1.), tensor(2.));
        let withheld = Withheld::new(vec![a, b.clone()]).unwrap();
        assert!(!withheld.is_in_use());
        let (storage, _) = b.storage_and_layout();
        assert!(withheld.is_in_use());
        drop(storage);
        assert!(!withheld.is_in_use());
        withheld.withhold();
        withheld.wait().unwrap();
        assert!(withheld.is_in_use());
        withheld.give(vec![contents(5.), contents(6.)]).unwrap();
        assert!(!withheld.is_in_use());
    }

    #[test]
    fn hundreds_of_tensors_are_withheld_at_once() {
        let tensors: Vec<Tensor> = (0..700).map(|_| tensor(1.)).collect();
        let withheld = Withheld::new(tensors.clone()).unwrap();
        withheld.withhold();
        withheld.wait().unwrap();
        let reader = read(&withheld, &tensors[699]);
        withheld
            .give((0..700).map(|_| contents(2.)).collect())
            .unwrap();
        assert_eq!(reader.join().unwrap().unwrap(), 8.);
    }
}
