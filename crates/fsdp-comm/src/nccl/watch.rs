//! The conditions under which a wait for NCCL ends: the loss of another rank, and the deadline.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use crate::asking::{GRACE_PERIOD, PEER_CHECK_INTERVAL, wait_until};
use crate::backend::{Backend as _, Round};
use crate::error::CommError;
use crate::tcp::{NEWS_TIMEOUT, TcpBackend};

/// The round of an operation, with its name.
#[derive(Debug, Clone)]
pub(super) struct OwnedRound {
    operation: String,
    /// The round, without the operation.
    round: Round<'static>,
}

impl OwnedRound {
    pub(super) fn new(round: &Round<'_>) -> OwnedRound {
        OwnedRound {
            operation: round.operation.to_owned(),
            round: Round {
                operation: "",
                ..*round
            },
        }
    }

    pub(super) fn get(&self) -> Round<'_> {
        Round {
            operation: &self.operation,
            ..self.round
        }
    }
}

/// An operation, and the sockets between the ranks of its communicator, over which a lost rank is
/// noticed.
pub(super) struct Watch<'w> {
    pub(super) control: &'w Arc<TcpBackend>,
    pub(super) round: Round<'w>,
}

impl Watch<'_> {
    /// Tells the other ranks that the operation has failed.
    pub(super) fn abort(&self, error: &CommError) {
        self.control.abort(self.round.number, error);
    }

    /// Returns the error of a call of NCCL's that has failed: the one that names another rank, if
    /// one is to blame. NCCL may have noticed first that a rank has left, so this waits until that
    /// rank can be blamed.
    pub(super) fn blame(&self, call: &str, message: String) -> CommError {
        let deadline = Instant::now() + GRACE_PERIOD + NEWS_TIMEOUT;
        loop {
            if let Some(failure) = self.group_failure() {
                return failure;
            }
            if Instant::now() >= deadline {
                return library_error(call, message);
            }
            thread::sleep(PEER_CHECK_INTERVAL);
        }
    }

    /// Returns the reason that the operation cannot end, if there is one. An operation that others
    /// have done may still get the error of a later call, if this rank's GPU has not done it.
    pub(super) fn failure(&self) -> Option<CommError> {
        // A group of one rank can miss no other, but has a deadline too.
        self.group_failure().or_else(|| {
            (Instant::now() >= self.round.deadline).then(|| self.round.timeout_error(Vec::new()))
        })
    }

    /// Returns the error that has ended the group, or that of a rank which has left or is lost.
    fn group_failure(&self) -> Option<CommError> {
        // An operation may wait in the stream while a later round fails. The other ranks then abort
        // their communicators, and with them this operation.
        self.control.failure(&Round {
            number: u64::MAX,
            ..self.round
        })
    }

    /// Waits until `is_done` returns `true`.
    ///
    /// # Errors
    /// The error of `is_done`, or that of the rank that has caused it. The loss of another rank, or
    /// the deadline, if the call is not done within [`GRACE_PERIOD`] after that.
    pub(super) fn wait(
        &self,
        call: &str,
        mut is_done: impl FnMut() -> Result<bool, String>,
    ) -> Result<(), CommError> {
        wait_until(
            || is_done().map_err(|message| self.blame(call, message)),
            || self.failure(),
        )
    }
}

pub(super) fn library_error(call: &str, message: String) -> CommError {
    CommError::library("NCCL", call, message)
}

pub(super) fn driver_error(call: &str, error: cudarc::driver::DriverError) -> CommError {
    CommError::library("CUDA", call, error.to_string())
}
