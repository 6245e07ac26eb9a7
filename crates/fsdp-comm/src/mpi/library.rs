//! Calls of MPI, and the memory that they use while they run.
//!
//! All calls are non-blocking, except the one that makes communicators. The memory that a call
//! reads and writes belongs to the [`Pending`] call. MPI cannot undo a call, so if a call is
//! dropped before it is over, its memory is never freed.

use std::ffi::c_int;
use std::mem::ManuallyDrop;

use ::mpi::Threading;
use ::mpi::environment::{Universe, initialize_with_threading, is_finalized, threading_support};
use ::mpi::ffi;

use crate::backend::Direction;

/// A result with MPI's own message as the error.
pub(super) type Result<T> = std::result::Result<T, String>;

/// Starts MPI for use from all threads. Returns `None` if other code of this process has started it
/// and will end it.
pub(super) fn start() -> Result<Option<Universe>> {
    if is_finalized() {
        return Err("this process has already left MPI, which can be joined only once".to_owned());
    }
    let (universe, threads) = match initialize_with_threading(Threading::Multiple) {
        Some((universe, threads)) => (Some(universe), threads),
        None => (None, threading_support()),
    };
    if threads != Threading::Multiple {
        return Err(format!(
            "it allows only {threads:?} use of threads: it must be started with MPI_THREAD_MULTIPLE"
        ));
    }
    Ok(universe)
}

/// Lets MPI make progress with the calls that it has begun.
pub(super) fn go_on() -> Result<()> {
    let mut flag = 0;
    // SAFETY: MPI is initialised; `MPI_Iprobe` writes only `flag`, and no status is asked for. No
    // message is ever sent on this communicator, so none is found.
    check(unsafe {
        ffi::MPI_Iprobe(
            ffi::RSMPI_ANY_SOURCE,
            0,
            ffi::RSMPI_COMM_WORLD,
            &mut flag,
            ffi::RSMPI_STATUS_IGNORE,
        )
    })
}

/// The memory of a call.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// The bytes that this rank sends.
    send: Vec<u8>,
    /// The bytes that it receives, in rank order. The bytes of a broadcast are here on the root
    /// too.
    pub(super) receive: Vec<u8>,
    /// The counts and displacements of what it sends, and then those of what it receives.
    counts_and_starts: [Vec<c_int>; 4],
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Pending {
    request: ffi::MPI_Request,
    buffers: ManuallyDrop<Buffers>,
    is_complete: bool,
}

// SAFETY: a request may be tested from any thread (MPI_THREAD_MULTIPLE); `&mut self` keeps it to
// one at a time.
unsafe impl Send for Pending {}

impl Pending {
    /// Lets MPI make progress, and returns `true` if the call is over.
    pub(super) fn test(&mut self) -> Result<bool> {
        if !self.is_complete {
            let mut flag = 0;
            // SAFETY: the request is that of the call under way, or null; no status is asked for.
            check(unsafe {
                ffi::MPI_Test(&mut self.request, &mut flag, ffi::RSMPI_STATUS_IGNORE)
            })?;
            self.is_complete = flag != 0;
        }
        Ok(self.is_complete)
    }

    /// Returns the memory of a call that is over. A call that is not over keeps its memory for
    /// good.
    pub(super) fn finish(mut self) -> Option<Buffers> {
        let is_complete = std::mem::replace(&mut self.is_complete, false);
        // SAFETY: taken once, as nothing is taken on drop once `is_complete` is false.
        is_complete.then(|| unsafe { ManuallyDrop::take(&mut self.buffers) })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.is_complete {
            // SAFETY: MPI is done with the memory, and `finish` has not taken it.
            unsafe { ManuallyDrop::drop(&mut self.buffers) }
        }
    }
}

/// A communicator of some ranks.
#[derive(Debug)]
pub(super) struct Communicator {
    raw: ffi::MPI_Comm,
    /// This rank.
    pub(super) rank: usize,
    /// The number of ranks.
    pub(super) ranks: usize,
    is_ours: bool,
}

// SAFETY: communicators may be used from all threads (MPI_THREAD_MULTIPLE).
unsafe impl Send for Communicator {}
// SAFETY: as above. The calls of one communicator are made one after the other, by its group.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Returns the communicator of all ranks.
    pub(super) fn world() -> Result<Communicator> {
        // SAFETY: a constant.
        unsafe { Self::new(ffi::RSMPI_COMM_WORLD, false) }
    }

    /// Creates the communicator of some ranks. All of them call this, and wait for each other
    /// without a deadline.
    pub(super) fn create(ranks: &[usize], tag: u64) -> Result<Communicator> {
        let ranks = ranks
            .iter()
            .map(|&rank| to_c_int(rank))
            .collect::<Result<Vec<c_int>>>()?;
        // MPI guarantees tags of 15 bits. Those of groups that are made at the same time should
        // differ, so each bit of the number counts.
        let tag = (tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 49) as c_int;
        // SAFETY: handles are made, used and freed in order; the ranks are as many as is said.
        unsafe {
            let mut world = ffi::RSMPI_GROUP_NULL;
            let mut group = ffi::RSMPI_GROUP_NULL;
            let mut raw = ffi::RSMPI_COMM_NULL;
            check(ffi::MPI_Comm_group(ffi::RSMPI_COMM_WORLD, &mut world))?;
            check(ffi::MPI_Group_incl(
                world,
                to_c_int(ranks.len())?,
                ranks.as_ptr(),
                &mut group,
            ))?;
            check(ffi::MPI_Comm_create_group(
                ffi::RSMPI_COMM_WORLD,
                group,
                tag,
                &mut raw,
            ))?;
            check(ffi::MPI_Group_free(&mut group))?;
            check(ffi::MPI_Group_free(&mut world))?;
            Self::new(raw, true)
        }
    }

    /// Wraps a communicator, whose errors from now on come back as codes. It is freed on drop if it
    /// `is_ours`.
    ///
    /// # Safety
    /// `raw` is a communicator that this process is in.
    unsafe fn new(raw: ffi::MPI_Comm, is_ours: bool) -> Result<Communicator> {
        let mut rank = 0;
        let mut ranks = 0;
        // SAFETY: the caller's word. Errors must come back, and not end the process.
        unsafe {
            check(ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN))?;
            check(ffi::MPI_Comm_rank(raw, &mut rank))?;
            check(ffi::MPI_Comm_size(raw, &mut ranks))?;
        }
        Ok(Communicator {
            raw,
            rank: rank as usize,
            ranks: ranks as usize,
            is_ours,
        })
    }

    /// Notes that a call on it will never be over, so that it is never freed.
    pub(super) fn give_up(&mut self) {
        self.is_ours = false;
    }

    /// Begins a collective: this rank sends `pieces`, one for each rank, and receives
    /// `received_lens[r]` bytes from each rank `r`. Bytes that go to all ranks are one of the
    /// pieces, and the others are empty. After a broadcast the root has its own bytes in `receive`
    /// too.
    pub(super) fn begin(
        &self,
        direction: Direction,
        mut buffers: Buffers,
        pieces: &[&[u8]],
        received_lens: &[usize],
    ) -> Result<Pending> {
        if pieces.len() != self.ranks || received_lens.len() != self.ranks {
            return Err("there is not one count for each rank".to_owned());
        }
        let Buffers {
            send,
            receive,
            counts_and_starts: [sent_counts, sent_starts, counts, starts],
        } = &mut buffers;
        send.clear();
        pieces
            .iter()
            .for_each(|piece| send.extend_from_slice(piece));
        lay_out(
            pieces.iter().map(|piece| piece.len()),
            sent_counts,
            sent_starts,
        )?;
        let expected = lay_out(received_lens.iter().copied(), counts, starts)?;
        receive.resize(expected, 0);
        // A broadcast has one buffer, for the bytes that the root sends and the others receive.
        if let Direction::Broadcast { root } = direction
            && root == self.rank
        {
            std::mem::swap(send, receive);
        }
        // A vector without memory has an address that may have a special meaning for MPI.
        for bytes in [&mut *send, &mut *receive] {
            if bytes.capacity() == 0 {
                bytes.reserve(1);
            }
        }
        let sent_count = to_c_int(send.len())?;
        let received_count = to_c_int(receive.len())?;
        let send_address = send.as_ptr().cast();
        let receive_address = receive.as_mut_ptr().cast();
        let communicator = self.raw;
        // SAFETY: constants.
        let (byte, mut request) = unsafe { (ffi::RSMPI_UINT8_T, ffi::RSMPI_REQUEST_NULL) };
        let request_place = &mut request;
        // SAFETY: the numbers are those of the buffers, which stay where they are until the call
        // is over. On ranks that are not the root MPI does not look at what only the root needs.
        let code = unsafe {
            match direction {
                Direction::AllGather => ffi::MPI_Iallgatherv(
                    send_address,
                    sent_count,
                    byte,
                    receive_address,
                    counts.as_ptr(),
                    starts.as_ptr(),
                    byte,
                    communicator,
                    request_place,
                ),
                Direction::Broadcast { root } => ffi::MPI_Ibcast(
                    receive_address,
                    received_count,
                    byte,
                    to_c_int(root)?,
                    communicator,
                    request_place,
                ),
                Direction::Gather { root } => ffi::MPI_Igatherv(
                    send_address,
                    sent_count,
                    byte,
                    receive_address,
                    counts.as_ptr(),
                    starts.as_ptr(),
                    byte,
                    to_c_int(root)?,
                    communicator,
                    request_place,
                ),
                Direction::Scatter { root } => ffi::MPI_Iscatterv(
                    send_address,
                    sent_counts.as_ptr(),
                    sent_starts.as_ptr(),
                    byte,
                    receive_address,
                    received_count,
                    byte,
                    to_c_int(root)?,
                    communicator,
                    request_place,
                ),
                Direction::AllToAll => ffi::MPI_Ialltoallv(
                    send_address,
                    sent_counts.as_ptr(),
                    sent_starts.as_ptr(),
                    byte,
                    receive_address,
                    counts.as_ptr(),
                    starts.as_ptr(),
                    byte,
                    communicator,
                    request_place,
                ),
            }
        };
        let pending = Pending {
            request,
            buffers: ManuallyDrop::new(buffers),
            is_complete: false,
        };
        // A call that failed may have begun all the same, so its memory is kept.
        check(code).map(|()| pending)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.is_ours && !is_finalized() {
            // SAFETY: made by `create`, and no call on it is under way. Local, as MPI's standard
            // expects it to be.
            check(unsafe { ffi::MPI_Comm_free(&mut self.raw) }).unwrap_or_else(
                |error| tracing::warn!(%error, "a communicator could not be freed"),
            );
        }
    }
}

/// Writes the counts and displacements of pieces that lie one after the other, and returns their
/// sum.
fn lay_out(
    lens: impl Iterator<Item = usize>,
    counts: &mut Vec<c_int>,
    starts: &mut Vec<c_int>,
) -> Result<usize> {
    counts.clear();
    starts.clear();
    let mut start = 0usize;
    for len in lens {
        counts.push(to_c_int(len)?);
        starts.push(to_c_int(start)?);
        start = start.saturating_add(len);
    }
    to_c_int(start).map(|_| start)
}

/// Returns a number as MPI's type for counts, or a message that it is too large.
fn to_c_int(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| format!("{number} is more than MPI can count in one call"))
}

/// Turns the code of a call into a result. The error is MPI's own text.
fn check(code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: `text` has as much room as MPI ever needs.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let message_bytes = text.get(..len as usize).unwrap_or(&text);
    let message = String::from_utf8_lossy(message_bytes);
    Err(format!("{message} (code {code})"))
}
