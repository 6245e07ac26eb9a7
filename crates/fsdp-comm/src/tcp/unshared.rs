//! The replacement of `shared.rs` on systems where shared memory is not supported. Ranks always use
//! sockets there.

use super::sockets::Member;
use crate::backend::{Plan, Round, Tally, Vote};
use crate::error::CommError;

/// The shared memory of a group, which never exists here.
#[derive(Debug)]
pub(super) enum SharedMemory {}

impl SharedMemory {
    pub(super) fn new(_member: Member<'_>, _round: &Round<'_>) -> Result<Option<Self>, CommError> {
        Ok(None)
    }

    /// Returns never: there is no value of this type to call it on.
    pub(super) fn vote(
        &self,
        _member: Member<'_>,
        _round: &Round<'_>,
        _vote: &Vote<'_>,
    ) -> Result<Tally, CommError> {
        match *self {}
    }

    /// Returns never: there is no value of this type to call it on.
    pub(super) fn transfer(
        &self,
        _member: Member<'_>,
        _round: &Round<'_>,
        _send: &[u8],
        _plan: Plan<'_>,
    ) -> Result<(), CommError> {
        match *self {}
    }
}

/// Returns `None`: processes on this system cannot share memory. (On Linux, processes whose tokens
/// are equal can.)
pub(super) fn host_token() -> Option<String> {
    None
}
