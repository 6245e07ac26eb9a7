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
    pub(super) send: Vec<u8>,
    /// The bytes that it receives, in rank order. The bytes of a broadcast are here on the root
    /// too.
    pub(super) receive: Vec<u8>,
    /// The counts and displacements of the call.
    pub(super) numbers: [Vec<c_int>; 4],
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
    rank: usize,
    ranks: usize,
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
            .map(|&rank| int(rank))
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
                int(ranks.len())?,
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

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Notes that a call on it will never be over, so that it is never freed.
    pub(super) fn give_up(&mut self) {
        self.is_ours = false;
    }

    /// Begins to gather `counts[r]` bytes of each rank `r`'s `send` in the `receive` of all ranks.
    pub(super) fn all_gather(&self, mut buffers: Buffers, counts: &[usize]) -> Result<Pending> {
        self.prepare(
            &mut buffers,
            &[(self.rank, counts[self.rank])],
            Some(counts),
        )?;
        self.begin(
            buffers,
            |communicator,
             Buffers {
                 send,
                 receive,
                 numbers: [_, _, counts, starts],
             },
             request| {
                // SAFETY: `prepare` made the buffers fit the numbers; both live until the call is
                // over.
                unsafe {
                    ffi::MPI_Iallgatherv(
                        send.as_ptr().cast(),
                        send.len() as c_int,
                        ffi::RSMPI_UINT8_T,
                        receive.as_mut_ptr().cast(),
                        counts.as_ptr(),
                        starts.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        communicator,
                        request,
                    )
                }
            },
        )
    }

    /// Begins to copy the root's `receive` to the `receive` of all ranks.
    pub(super) fn broadcast(
        &self,
        mut buffers: Buffers,
        len: usize,
        root: usize,
    ) -> Result<Pending> {
        let count = int(len)?;
        let root = int(root)?;
        buffers.receive.resize(len, 0);
        self.begin(buffers, |communicator, Buffers { receive, .. }, request| {
            // SAFETY: `receive` has `count` bytes, and lives until the call is over.
            unsafe {
                let bytes = receive.as_mut_ptr().cast();
                ffi::MPI_Ibcast(
                    bytes,
                    count,
                    ffi::RSMPI_UINT8_T,
                    root,
                    communicator,
                    request,
                )
            }
        })
    }

    /// Begins to gather `counts[r]` bytes of each rank `r`'s `send` in the root's `receive`.
    pub(super) fn gather(
        &self,
        mut buffers: Buffers,
        counts: &[usize],
        root: usize,
    ) -> Result<Pending> {
        let receives = self.rank == root;
        self.prepare(
            &mut buffers,
            &[(self.rank, counts[self.rank])],
            receives.then_some(counts),
        )?;
        let root = int(root)?;
        self.begin(
            buffers,
            |communicator,
             Buffers {
                 send,
                 receive,
                 numbers: [_, _, counts, starts],
             },
             request| {
                // SAFETY: as in `all_gather`; MPI reads the arguments of the receiving side on the
                // root only.
                unsafe {
                    ffi::MPI_Igatherv(
                        send.as_ptr().cast(),
                        send.len() as c_int,
                        ffi::RSMPI_UINT8_T,
                        receive.as_mut_ptr().cast(),
                        counts.as_ptr(),
                        starts.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        root,
                        communicator,
                        request,
                    )
                }
            },
        )
    }

    /// Copies `counts[r]` bytes of the root's `send` to the `receive` of each rank `r`.
    pub(super) fn scatter(
        &self,
        mut buffers: Buffers,
        counts: &[usize],
        root: usize,
    ) -> Result<Pending> {
        // Only the root sends.
        let mut sent: Vec<(usize, usize)> = counts.iter().copied().enumerate().collect();
        if self.rank != root {
            sent.clear();
        }
        let mut received = vec![0; self.ranks];
        received[root] = counts[self.rank];
        self.prepare(&mut buffers, &sent, Some(&received))?;
        let root = int(root)?;
        self.begin(
            buffers,
            |communicator,
             Buffers {
                 send,
                 receive,
                 numbers: [counts, starts, ..],
             },
             request| {
                // SAFETY: as in `all_gather`; what is sent is looked at on the root only.
                unsafe {
                    ffi::MPI_Iscatterv(
                        send.as_ptr().cast(),
                        counts.as_ptr(),
                        starts.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        receive.as_mut_ptr().cast(),
                        receive.len() as c_int,
                        ffi::RSMPI_UINT8_T,
                        root,
                        communicator,
                        request,
                    )
                }
            },
        )
    }

    /// Begins to send `sent[r]` bytes of `send` to each rank `r`, and to receive `received[r]`
    /// bytes from it.
    pub(super) fn all_to_all(
        &self,
        mut buffers: Buffers,
        sent: &[usize],
        received: &[usize],
    ) -> Result<Pending> {
        let sent: Vec<(usize, usize)> = sent.iter().copied().enumerate().collect();
        self.prepare(&mut buffers, &sent, Some(received))?;
        self.begin(
            buffers,
            |communicator,
             Buffers {
                 send,
                 receive,
                 numbers: [sent, from, received, to],
             },
             request| {
                // SAFETY: as in `all_gather`.
                unsafe {
                    ffi::MPI_Ialltoallv(
                        send.as_ptr().cast(),
                        sent.as_ptr(),
                        from.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        receive.as_mut_ptr().cast(),
                        received.as_ptr(),
                        to.as_ptr(),
                        ffi::RSMPI_UINT8_T,
                        communicator,
                        request,
                    )
                }
            },
        )
    }

    /// Writes the counts of a call, checks the length of `send`, and resizes `receive`.
    fn prepare(
        &self,
        buffers: &mut Buffers,
        sent: &[(usize, usize)],
        received: Option<&[usize]>,
    ) -> Result<()> {
        let Buffers {
            send,
            receive,
            numbers,
        } = buffers;
        let [send_counts, send_starts, receive_counts, receive_starts] = numbers;
        let mut counts = vec![0; self.ranks];
        sent.iter().for_each(|&(rank, count)| counts[rank] = count);
        let total = lay_out(&counts, send_counts, send_starts)?;
        if total != send.len() {
            return Err(format!(
                "{} bytes are to be sent where there should be {total}",
                send.len()
            ));
        }
        match received {
            Some(received) if received.len() != self.ranks => {
                Err("there is not one count for each rank".to_owned())
            }
            Some(received) => {
                receive.resize(lay_out(received, receive_counts, receive_starts)?, 0);
                Ok(())
            }
            None => {
                receive.clear();
                Ok(())
            }
        }
    }

    /// Begins a non-blocking call of MPI. The buffers stay where they are until the call is over.
    fn begin(
        &self,
        mut buffers: Buffers,
        call: impl FnOnce(ffi::MPI_Comm, &mut Buffers, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<Pending> {
        // A vector without memory has an address that may have a special meaning for MPI.
        for bytes in [&mut buffers.send, &mut buffers.receive] {
            if bytes.capacity() == 0 {
                bytes.reserve(1);
            }
        }
        // SAFETY: a constant.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let code = call(self.raw, &mut buffers, &mut request);
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
fn lay_out(lens: &[usize], counts: &mut Vec<c_int>, starts: &mut Vec<c_int>) -> Result<usize> {
    counts.clear();
    starts.clear();
    let mut start = 0usize;
    for &len in lens {
        counts.push(int(len)?);
        starts.push(int(start)?);
        start = start.saturating_add(len);
    }
    int(start).map(|_| start)
}

fn int(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| format!("{number} is more than MPI can count in one call"))
}

/// Returns MPI's own text for a code that is not success.
fn check(code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: `text` has as much room as MPI ever needs.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let written = text.get(..len as usize).unwrap_or(&text);
    let message = String::from_utf8_lossy(written);
    Err(format!("{message} (code {code})"))
}
