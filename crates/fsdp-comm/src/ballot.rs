//! The ballot of each rank in a round: all that ranks compare before an operation, in a few bytes.
//!
//! Ballots can be merged in any order, and any of them more than once. So ranks may pass merged
//! ballots on to each other in whatever way is fast, and all end with the same one.

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::wire;

/// The outcome that one rank, or several together, propose for a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ballot {
    /// The hash of what must be the same on all ranks; the smallest one if hashes differ.
    pub(crate) hash: u128,
    /// `true` if two ranks have different hashes.
    pub(crate) differs: bool,
    /// The lowest rank of the group that has an error; [`NO_RANK`] if none has.
    pub(crate) failed_rank: u32,
    /// `true` if some rank has not attached everything that it sends.
    pub(crate) is_partial: bool,
    /// `true` if some rank has attached something. Only votes through shared memory set it.
    pub(crate) has_attachments: bool,
}

/// The number that stands for no rank.
pub(crate) const NO_RANK: u32 = u32::MAX;

/// The number of bytes of a ballot.
pub(crate) const BALLOT_BYTES: usize = 21;

/// The number of bytes of a message that carries a ballot and nothing else.
pub(crate) const MESSAGE_BYTES: usize = 32;

impl Ballot {
    /// Creates the ballot of one rank. `call` must be the same on all ranks.
    pub(crate) fn new(call: &impl Serialize) -> Ballot {
        let digest = Sha256::digest(wire::encode_plain(call));
        Ballot {
            hash: u128::from_le_bytes(std::array::from_fn(|at| digest[at])),
            ..Ballot::blank()
        }
    }

    /// Returns a ballot for a round in which nothing is compared.
    pub(crate) const fn blank() -> Ballot {
        Ballot {
            hash: 0,
            differs: false,
            failed_rank: NO_RANK,
            is_partial: false,
            has_attachments: false,
        }
    }

    /// Returns the ballot of all ranks whose ballots are in either of the two.
    pub(crate) fn merge(self, other: Ballot) -> Ballot {
        Ballot {
            hash: self.hash.min(other.hash),
            differs: self.differs || other.differs || self.hash != other.hash,
            failed_rank: self.failed_rank.min(other.failed_rank),
            is_partial: self.is_partial || other.is_partial,
            has_attachments: self.has_attachments || other.has_attachments,
        }
    }

    /// Returns `true` if all ranks make the same call, and none has an error.
    pub(crate) fn is_unanimous(self) -> bool {
        !self.differs && self.failed_rank == NO_RANK
    }

    /// Returns the ballot as other ranks read it.
    pub(crate) fn to_bytes(self) -> [u8; BALLOT_BYTES] {
        let mut bytes = [0; BALLOT_BYTES];
        bytes[..16].copy_from_slice(&self.hash.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.failed_rank.to_le_bytes());
        bytes[20] = u8::from(self.differs)
            | u8::from(self.is_partial) << 1
            | u8::from(self.has_attachments) << 2;
        bytes
    }

    /// Returns the ballot that another rank has written. Any bytes are one.
    pub(crate) fn from_bytes(bytes: [u8; BALLOT_BYTES]) -> Ballot {
        Ballot {
            hash: u128::from_le_bytes(std::array::from_fn(|at| bytes[at])),
            failed_rank: u32::from_le_bytes(std::array::from_fn(|at| bytes[16 + at])),
            differs: bytes[20] & 1 != 0,
            is_partial: bytes[20] & 2 != 0,
            has_attachments: bytes[20] & 4 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ballots of few different hashes and ranks, so that many are alike.
    fn ballots() -> impl Strategy<Value = Ballot> {
        let failed_rank = prop_oneof![Just(NO_RANK), 0..3u32];
        let flags = any::<[bool; 3]>();
        (0..3u128, failed_rank, flags).prop_map(|(hash, failed_rank, flags)| {
            let [differs, is_partial, has_attachments] = flags;
            Ballot {
                hash,
                differs,
                failed_rank,
                is_partial,
                has_attachments,
            }
        })
    }

    proptest! {
        #[test]
        fn it_does_not_matter_in_which_order_and_how_often_ballots_are_merged(
            [first, second, third] in [ballots(), ballots(), ballots()],
        ) {
            prop_assert_eq!(first.merge(second), second.merge(first));
            prop_assert_eq!(first.merge(second).merge(third), first.merge(second.merge(third)));
            prop_assert_eq!(first.merge(first), first);
            prop_assert_eq!(first.merge(second).merge(first), first.merge(second));
        }

        #[test]
        fn ballots_come_back_from_bytes(ballot in ballots()) {
            prop_assert_eq!(Ballot::from_bytes(ballot.to_bytes()), ballot);
        }
    }

    #[test]
    fn ranks_are_unanimous_if_all_calls_are_the_same_and_none_has_failed() {
        let [call, same, other] = ["a", "a", "b"].map(|call| Ballot::new(&call));
        assert!(call.merge(same).is_unanimous());
        assert!(!call.merge(other).is_unanimous());
        // A third rank that makes the first call again does not hide the difference.
        assert!(!other.merge(call).merge(same).is_unanimous());
        let failed = [(7, call), (5, same)].map(|(failed_rank, ballot)| Ballot {
            failed_rank,
            ..ballot
        });
        let merged = failed[0].merge(failed[1]);
        assert_eq!((merged.is_unanimous(), merged.failed_rank), (false, 5));
        let partial = Ballot {
            is_partial: true,
            ..same
        };
        assert!(call.merge(partial).is_partial && !call.merge(same).is_partial);
    }
}
