//! Rounds through shared memory, for groups whose ranks are all on one host.
//!
//! Each rank owns a segment that all ranks map. The segment holds the rank's ballot. The bytes that
//! the rank sends go through two windows of the segment, chunk by chunk: the rank writes chunk `k`
//! into window `k % 2` once all readers have consumed chunk `k - 2`. Bytes that several ranks read
//! (an all-gather) are written once. If ranks read different bytes (a reduce-scatter), their chunks
//! share the window.
//!
//! A round has these steps:
//! 1. Each rank writes its ballot and its attachment, and counts itself. The last one wakes the
//!    others.
//! 2. All agree on a verdict: the vote is complete, or it has failed.
//! 3. Each rank merges all ballots, plans from the outcome what it sends and reads, and tells its
//!    readers where their chunks will lie.
//! 4. Each rank publishes its chunks, and in between consumes those of the others.

use std::fs;
use std::os::fd::AsRawFd as _;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::chunks::{IncomingChunks, OutgoingChunks, PublishedChunks};
use super::inbox::HEARTBEAT_TIMEOUT;
use super::segment::{ATTACHMENT_BYTES, Notification, Segment, Word};
use super::sockets::Member;
use super::watch::SharedRound;
use crate::backend::{Destination, Plan, Round, Tally, Vote, reduce_blocks};
use crate::ballot::Ballot;
use crate::error::CommError;
use crate::sync::lock;
use crate::wire;

/// The bit of a verdict that is set once the group has failed.
///
/// The verdict is a word in the segment of rank 0, by which all ranks agree on the end of each
/// vote. Without this bit, it is the number of complete votes. With this bit, its other bits are
/// the number of complete votes, which is also the number of the vote that failed, and the rank
/// that gave up.
const FAILED: u64 = 1 << 63;
/// The position of the rank in a verdict. The bits below it are the number of votes.
const RANK_SHIFT: u32 = 40;

/// The shared memory of a group.
#[derive(Debug)]
pub(super) struct SharedMemory {
    /// The segment of each rank.
    segments: Vec<Segment>,
    /// The number of votes that are complete. Locked during a vote.
    complete_votes: Mutex<u64>,
    /// The chunks that this rank has sent so far.
    published: Mutex<PublishedChunks>,
}

/// The data with which other ranks map a rank's segment.
#[derive(Debug, Serialize, Deserialize)]
struct Invitation {
    process: u32,
    file: i32,
    token: u64,
}

/// Returns a token that is equal for processes that can share memory: those of one running kernel
/// and one namespace of process ids.
pub(super) fn host_token() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let processes = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), processes.display()))
}

impl SharedMemory {
    /// Creates a segment on each rank of the group, and maps the segments of all others. Returns
    /// `None` on all ranks if one of them cannot. The ranks then use sockets.
    pub(super) fn new(member: Member<'_>, round: &Round<'_>) -> Result<Option<Self>, CommError> {
        let Member {
            node,
            ranks,
            rank,
            group,
        } = member;
        let host = &node.hosts[ranks[0]];
        if host.is_none() || ranks.iter().any(|&rank| node.hosts[rank] != *host) {
            return Ok(None);
        }
        // Step 1: create this rank's segment.
        let created = Segment::create(ranks.len()).inspect_err(|error| {
            tracing::warn!(%error, "no shared memory for a group: its tensors go over sockets");
        });
        let token = group ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let invitation = created.as_ref().ok().map(|(segment, file)| {
            segment.word(Word::Token).store(token, Ordering::Release);
            Invitation {
                process: std::process::id(),
                file: file.as_raw_fd(),
                token,
            }
        });
        // Step 2: send all ranks what they need to map it, over the sockets.
        let invitations = member.exchange(round, 0, &wire::encode_plain(&invitation))?;
        // Step 3: map the segments of all others. The file stays open until all have mapped it,
        // after the next exchange.
        let (own_segment, _file) = created.ok().unzip();
        let segments = own_segment.and_then(|own_segment| map_all(rank, own_segment, &invitations));
        // Step 4: use shared memory only if it works for all ranks.
        let verdicts = member.exchange(round, 1, &wire::encode_plain(&segments.is_some()))?;
        let works_for_all = verdicts
            .iter()
            .all(|verdict| wire::decode(verdict) == Ok(true));
        let memory = segments.map(|segments| SharedMemory {
            segments,
            complete_votes: Mutex::default(),
            published: Mutex::default(),
        });
        Ok(memory.filter(|_| works_for_all))
    }

    /// Votes in a round with all other ranks.
    pub(super) fn vote(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        vote: &Vote<'_>,
    ) -> Result<Tally, CommError> {
        let &Vote { ballot, attachment } = vote;
        if attachment.len() > ATTACHMENT_BYTES {
            let message = format!(
                "its {} bytes of arguments are more than {ATTACHMENT_BYTES}",
                attachment.len()
            );
            return Err(CommError::invalid_argument(round.operation, message));
        }
        let mut complete_votes = lock(&self.complete_votes);
        let parity = (*complete_votes % 2) as usize;
        // Step 1: cast this rank's ballot. The ballot and the attachment overwrite those of the
        // vote before last, which nobody reads any more, because all ranks have voted since then.
        let own_segment = &self.segments[member.rank];
        own_segment.write_attachment(parity, attachment);
        own_segment.write_ballot(
            parity,
            Ballot {
                has_attachments: !attachment.is_empty(),
                ..ballot
            },
        );
        own_segment
            .word(Word::Voted)
            .store(*complete_votes + 1, Ordering::Release);
        let group = &self.segments[0];
        group.word(Word::AllBallots).fetch_add(1, Ordering::AcqRel);
        // Step 2: wait until all have voted, and agree on whether all have.
        let voting = self.wait_until_all_have_voted(member, round, *complete_votes);
        self.conclude(member, round, *complete_votes, voting)?;
        *complete_votes += 1;
        // Step 3: merge all ballots. Nobody overwrites them before this rank has voted once more.
        let ballots = self.segments.iter().map(|segment| segment.ballot(parity));
        let ballot = ballots
            .reduce(Ballot::merge)
            .expect("a group has at least one rank");
        Ok(Tally {
            ballot,
            attachments: self.copy_attachments(parity, ballot),
            sent_ballots: usize::from(self.segments.len() > 1),
        })
    }

    /// Returns the attachments of all ranks in a complete vote, in one allocation.
    fn copy_attachments(&self, parity: usize, ballot: Ballot) -> Vec<Bytes> {
        if !ballot.has_attachments {
            return vec![Bytes::new(); self.segments.len()];
        }
        let mut all = Vec::new();
        let mut ends = Vec::with_capacity(self.segments.len());
        for segment in &self.segments {
            all.extend_from_slice(segment.attachment(parity));
            ends.push(all.len());
        }
        let all = Bytes::from(all);
        let starts = std::iter::once(0).chain(ends.iter().copied());
        starts
            .zip(&ends)
            .map(|(start, &end)| all.slice(start..end))
            .collect()
    }

    /// Returns a round of this group through its shared memory.
    fn shared_round<'a>(&'a self, member: Member<'a>, round: &'a Round<'a>) -> SharedRound<'a> {
        SharedRound {
            member,
            round,
            segments: &self.segments,
        }
    }

    /// Waits until all ranks have voted, or there is a verdict. All sleep at the same place, and
    /// the last rank to vote wakes them once.
    ///
    /// # Errors
    /// A rank that does not vote before the deadline, or is lost.
    fn wait_until_all_have_voted(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        complete_votes: u64,
    ) -> Result<(), CommError> {
        let group = &self.segments[0];
        let all_ballots = (complete_votes + 1) * self.segments.len() as u64;
        // The last rank may die before it has written the verdict. Then another one does.
        let is_over = || {
            group.word(Word::Verdict).load(Ordering::Acquire) != complete_votes
                || group.word(Word::AllBallots).load(Ordering::Acquire) >= all_ballots
        };
        // The ranks that have not voted, as global ranks, for the error when a deadline is over.
        let missing = || {
            let segments_and_ranks = self.segments.iter().zip(member.ranks);
            segments_and_ranks
                .filter(|(segment, _)| {
                    segment.word(Word::Voted).load(Ordering::Acquire) <= complete_votes
                })
                .map(|(_, &rank)| rank)
                .collect()
        };
        self.shared_round(member, round)
            .wait(group, Notification::Group, is_over, missing)
    }

    /// Makes all ranks agree on the end of a vote: all have voted, or it has failed. The first rank
    /// that knows decides, by setting the verdict atomically.
    ///
    /// Without this, a rank could vote just after another has given up waiting for it, and continue
    /// as if nothing had happened.
    pub(super) fn conclude(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        complete_votes: u64,
        voting: Result<(), CommError>,
    ) -> Result<(), CommError> {
        let group = &self.segments[0];
        let verdict = group.word(Word::Verdict);
        let mut decided = verdict.load(Ordering::Acquire);
        if decided == complete_votes {
            let own_verdict = if voting.is_ok() {
                complete_votes + 1
            } else {
                FAILED | (member.rank as u64) << RANK_SHIFT | complete_votes
            };
            // The verdict of the vote before can be replaced only once, so the first rank decides.
            // If that is this rank, its own outcome counts.
            match verdict.compare_exchange(
                complete_votes,
                own_verdict,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    group.notify(Notification::Group);
                    return voting;
                }
                Err(other_verdict) => decided = other_verdict,
            }
        }
        if decided & ((1 << RANK_SHIFT) - 1) > complete_votes {
            // The vote was complete; a later failure does not change that.
            return Ok(());
        }
        // Another rank has given up, and sends its error over the socket. Wait for that, so that
        // all ranks return the same error, also if this rank has found another one meanwhile.
        let failed_rank = ((decided & !FAILED) >> RANK_SHIFT) as usize;
        let Some(&failed_rank) = member.ranks.get(failed_rank) else {
            // All ranks of the group can write the verdict, and one has written nonsense.
            return Err(CommError::Aborted {
                rank: member.ranks[member.rank],
                message: format!(
                    "rank {failed_rank} of the group, which has no such rank, has given up"
                ),
            });
        };
        let soon = Instant::now() + HEARTBEAT_TIMEOUT;
        let patient = Round {
            deadline: voting.as_ref().map_or(soon, |()| round.deadline.max(soon)),
            ..*round
        };
        let told = member.node.wait(member.group, &patient, |state| {
            let error = state.group_error(member.group, round);
            error.ok_or_else(|| vec![failed_rank])
        });
        match told {
            Ok(error) => Err(error),
            Err(silence) => voting.and(Err(silence)),
        }
    }

    /// Transfers the payloads of a round: publishes this rank's bytes chunk by chunk, and consumes
    /// those of the others.
    pub(super) fn transfer(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        send: &[u8],
        plan: Plan<'_>,
    ) -> Result<(), CommError> {
        let rank = member.rank;
        let shared = self.shared_round(member, round);
        let mut published = lock(&self.published);
        let mut outgoing = OutgoingChunks::new(shared, &plan.sent_ranges, send, &mut published);
        let own_bytes = &send[plan.received_ranges[rank].clone()];
        // Each rank begins with the bytes of a different rank, so that not all wait for the same
        // one.
        let ranks = self.segments.len();
        let mut incoming: Vec<IncomingChunks<'_>> = (1..ranks)
            .map(|distance| (rank + distance) % ranks)
            .map(|sender| IncomingChunks::new(shared, sender, plan.received_ranges[sender].len()))
            .collect();
        match plan.destination {
            Destination::Copy(mut fillers) => {
                // In each turn, publish the next chunk and consume one chunk of each other rank.
                // The own bytes are copied in the first turn, while the others publish their
                // chunks.
                outgoing.publish()?;
                fillers[rank].fill(own_bytes);
                while !outgoing.is_over() || !incoming.iter().all(IncomingChunks::is_over) {
                    for incoming in incoming.iter_mut().filter(|incoming| !incoming.is_over()) {
                        fillers[incoming.sender].fill(incoming.wait_for_chunk()?);
                        incoming.release_chunk();
                    }
                    outgoing.publish()?;
                }
            }
            Destination::Reduce(mut reduce) => {
                // In each turn, publish the next chunk, and reduce one chunk of every rank at once.
                let mut offset = 0;
                while !outgoing.is_over() || offset < own_bytes.len() {
                    outgoing.publish()?;
                    if offset == own_bytes.len() {
                        continue;
                    }
                    let mut pieces = vec![&[][..]; ranks];
                    // The chunks of all ranks have the same size, as all ranks send to the same
                    // places.
                    let mut piece_len = own_bytes.len() - offset;
                    for incoming in &mut incoming {
                        pieces[incoming.sender] = incoming.wait_for_chunk()?;
                        piece_len = piece_len.min(pieces[incoming.sender].len());
                    }
                    pieces[rank] = &own_bytes[offset..offset + piece_len];
                    reduce_blocks(&mut reduce, offset, &pieces);
                    offset += piece_len;
                    incoming.iter_mut().for_each(IncomingChunks::release_chunk);
                }
            }
        }
        Ok(())
    }
}

/// Maps the segments of all ranks. Returns `None` if one cannot be mapped or does not hold its
/// rank's token.
fn map_all(rank: usize, own_segment: Segment, invitations: &[Bytes]) -> Option<Vec<Segment>> {
    let mut own_segment = Some(own_segment);
    let segments = invitations
        .iter()
        .enumerate()
        .map(|(other_rank, invitation)| {
            if other_rank == rank {
                own_segment.take()
            } else {
                map(other_rank, invitation, invitations.len())
            }
        });
    segments.collect()
}

/// Maps the segment of another rank. Returns `None` if that is not possible, or if the segment
/// does not hold the rank's token.
fn map(other_rank: usize, invitation: &Bytes, ranks: usize) -> Option<Segment> {
    let Invitation {
        process,
        file,
        token,
    } = wire::decode::<Option<Invitation>>(invitation).ok()??;
    match Segment::open(process, file, ranks) {
        Ok(segment) => {
            (segment.word(Word::Token).load(Ordering::Acquire) == token).then_some(segment)
        }
        Err(error) => {
            tracing::warn!(rank = other_rank, %error, "memory cannot be shared: it goes over sockets");
            None
        }
    }
}
