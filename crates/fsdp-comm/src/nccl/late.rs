//! Agreements that ranks leave out while all of them make the calls that all expect, and make up
//! for when one of them does not, or when a call takes long.
//!
//! A rank that leaves the order of calls, or has an error, votes before it sends anything. The
//! watchers of the others see its ballot, and vote on the call that their ranks have made instead.
//! So all ranks get the error that an agreement in time would have given. Calls on the host's
//! memory may come anywhere in the order: their votes travel as messages, which watchers answer
//! too.

use std::collections::BTreeMap;

use super::watch::OwnedRound;
use crate::backend::{Backend as _, Round, Vote};
use crate::ballot::Ballot;
use crate::error::CommError;
use crate::group::{difference_error, encode_record, own_ballot};
use crate::record::{Call, Fault};
use crate::tcp::TcpBackend;

/// The calls whose agreements this rank has left out since all ranks last agreed, by the numbers of
/// their rounds.
pub(super) type LeftOut = BTreeMap<u64, (OwnedRound, Call)>;

/// Agrees on a call with all ranks, each of which may do so in any thread.
///
/// # Errors
/// A rank with another call or a fault; one that is missing at the deadline of the round, or lost.
pub(super) fn agree(
    control: &TcpBackend,
    round: &Round<'_>,
    call: &Call,
    fault: Option<&Fault>,
) -> Result<(), CommError> {
    let members = control.members();
    let vote = Vote {
        ballot: own_ballot(call, fault, members.rank),
        attachment: &[],
    };
    if control.vote_late(round, &vote)?.ballot.is_unanimous() {
        return Ok(());
    }
    let encoded = encode_record(call, fault.cloned());
    let vote = Vote {
        ballot: Ballot::blank(),
        attachment: &encoded,
    };
    // Of each round, the odd number is that of the vote in which ranks show their records.
    let records_round = Round {
        number: round.number + 1,
        ..*round
    };
    let tally = control.vote_late(&records_round, &vote)?;
    Err(difference_error(&tally, call.name(), &members.global_ranks))
}
