//! Rounds through shared memory, for groups whose ranks are all on one host.
//!
//! Each rank owns a segment that all ranks map. The segment holds the rank's record. The bytes that
//! the rank sends go through two windows of the segment, chunk by chunk: the rank writes chunk `k`
//! into window `k % 2` once all readers have consumed chunk `k - 2`. Bytes that several ranks read
//! (an all-gather) are written once. If ranks read different bytes (a reduce-scatter), their chunks
//! share the window.
//!
//! A round has these steps:
//! 1. Each rank writes its record, and says that it has arrived.
//! 2. Each rank waits until all have arrived. All agree on a verdict: the round is complete, or it
//!    has failed.
//! 3. Each rank plans from all records what it sends and reads, and tells its readers where their
//!    chunks will lie.
//! 4. Each rank publishes its chunks, and in between consumes those of the others.

use std::fs;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::chunks::{Incoming, Outgoing, Published};
use super::inbox::SILENCE;
use super::segment::{Notification, RECORD_BYTES, Segment, Word};
use super::sockets::{Member, SETUP_ROUNDS, exchange};
use super::watch::wait;
use crate::backend::{Destination, Filler, Plan, Planner, Round, reduce_blocks};
use crate::error::CommError;
use crate::wire;

/// The bit of a verdict that is set once the group has failed.
///
/// The verdict is a word in the segment of rank 0, by which all ranks agree on the outcome of each
/// round. Without this bit, it is the number of complete rounds. With this bit, its other bits are
/// the number of complete rounds, which is also the number of the round that failed, and the rank
/// that gave up.
const FAILED: u64 = 1 << 63;
/// The position of the rank in a verdict. The bits below it are the round.
const RANK_SHIFT: u32 = 40;

/// The shared memory of a group.
#[derive(Debug)]
pub(super) struct SharedMemory {
    /// The segment of each rank.
    segments: Vec<Segment>,
    /// The chunks that this rank has sent so far.
    published: Mutex<Published>,
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
            segment
                .word(Word::Verdict)
                .store(SETUP_ROUNDS, Ordering::Release);
            segment.word(Word::Token).store(token, Ordering::Release);
            Invitation {
                process: std::process::id(),
                file: Segment::number(file),
                token,
            }
        });
        // Step 2: send all ranks what they need to map it, over the sockets.
        let invitations = exchange(
            member,
            &Round {
                number: 0,
                ..*round
            },
            &encode(&invitation),
        )?;
        // Step 3: map the segments of all others. The file stays open until all have mapped it,
        // after the next exchange.
        let (own, _file) = created.ok().unzip();
        let segments = own.and_then(|own| map_all(rank, own, &invitations));
        // Step 4: use shared memory only if it works for all ranks.
        let verdicts = exchange(
            member,
            &Round {
                number: 1,
                ..*round
            },
            &encode(&segments.is_some()),
        )?;
        (0..2).for_each(|number| node.inbox().lock().forget(group, number));
        if !verdicts
            .iter()
            .all(|verdict| wire::decode(verdict) == Ok(true))
        {
            return Ok(None);
        }
        Ok(segments.map(|segments| SharedMemory {
            segments,
            published: Mutex::default(),
        }))
    }

    /// Carries out a round.
    pub(super) fn round(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        record: &[u8],
        send: &[u8],
        plan: Planner<'_, '_>,
    ) -> Result<(), CommError> {
        let rank = member.rank;
        if record.len() > RECORD_BYTES {
            return Err(CommError::InvalidArgument {
                operation: round.operation.to_owned(),
                message: format!(
                    "its {} bytes of arguments are more than {RECORD_BYTES}",
                    record.len()
                ),
            });
        }
        let parity = (round.number % 2) as usize;
        let own = &self.segments[rank];
        // Step 1: publish this rank's record, and wake the others. It overwrites the record of the
        // round before last, which nobody reads any more, because all ranks have arrived at the
        // last round since then.
        own.write_record(parity, record);
        own.word(Word::Arrived)
            .store(round.number + 1, Ordering::Release);
        own.notify(Notification::ToReaders);
        // Step 2: wait for all ranks, and agree on whether all have come.
        self.conclude(member, round, self.all_arrived(member, round))?;
        // Steps 3 and 4.
        let records: Vec<&[u8]> = self
            .segments
            .iter()
            .map(|segment| segment.record(parity))
            .collect();
        match plan(&records)? {
            Some(plan) => self.transfer(member, round, send, plan),
            None => Ok(()),
        }
    }

    /// Waits for all ranks to arrive at a round.
    fn all_arrived(&self, member: Member<'_>, round: &Round<'_>) -> Result<(), CommError> {
        for segment in &self.segments {
            let missing = || self.missing(member, round);
            wait(
                member,
                round,
                segment,
                Notification::ToReaders,
                || has_arrived(segment, round),
                missing,
            )?;
        }
        Ok(())
    }

    /// Returns the ranks that have not arrived at a round, as global ranks, for the error when a
    /// deadline is over.
    fn missing(&self, member: Member<'_>, round: &Round<'_>) -> Vec<usize> {
        let ranks = self.segments.iter().zip(member.ranks);
        ranks
            .filter(|(segment, _)| !has_arrived(segment, round))
            .map(|(_, &rank)| rank)
            .collect()
    }

    /// Makes all ranks agree on the outcome of a round: all have arrived, or it has failed. The
    /// first rank that knows decides, by setting the verdict atomically.
    ///
    /// Without this, a rank could arrive just after another has given up waiting for it, and
    /// continue as if nothing had happened.
    fn conclude(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        all: Result<(), CommError>,
    ) -> Result<(), CommError> {
        let verdict = self.segments[0].word(Word::Verdict);
        let complete = round.number + 1;
        let failed = FAILED | (member.rank as u64) << RANK_SHIFT | round.number;
        let own = if all.is_ok() { complete } else { failed };
        // The verdict of the round before can be replaced only once, so the first rank decides. If
        // that is this rank, its own outcome counts.
        let Err(decided) =
            verdict.compare_exchange(round.number, own, Ordering::AcqRel, Ordering::Acquire)
        else {
            return all;
        };
        let rounds = decided & ((1 << RANK_SHIFT) - 1);
        if rounds >= complete {
            // The round was complete; a later failure does not change that.
            return Ok(());
        }
        // Another rank has given up, and sends its error over the socket. Wait for that, so that
        // all ranks return the same error, also if the deadline of this rank is over meanwhile.
        let patient = Round {
            until: round.until.max(Instant::now() + SILENCE),
            ..*round
        };
        let by = ((decided & !FAILED) >> RANK_SHIFT) as usize;
        let by = member.ranks.get(by).copied().unwrap_or(member.ranks[0]);
        all.and_then(|()| member.node.wait(member.group, &patient, |_| Err(vec![by])))
    }

    /// Transfers the payloads of a round: publishes this rank's bytes chunk by chunk, and consumes
    /// those of the others.
    fn transfer(
        &self,
        member: Member<'_>,
        round: &Round<'_>,
        send: &[u8],
        plan: Plan<'_>,
    ) -> Result<(), CommError> {
        let rank = member.rank;
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut outgoing = Outgoing::new(
            member,
            round,
            &self.segments[rank],
            &plan.to,
            send,
            &mut published,
        );
        let own = send.get(plan.from[rank].clone()).unwrap_or_default();
        // Each rank begins with the bytes of a different rank, so that not all wait for the same
        // one.
        let others = (1..self.segments.len()).map(|k| (rank + k) % self.segments.len());
        let incoming = |from: usize| {
            Incoming::new(
                member,
                round,
                &self.segments[from],
                from,
                plan.from[from].len(),
            )
        };
        match plan.destination {
            Destination::Copy(destinations) => {
                let mut fillers: Vec<Filler<'_>> =
                    destinations.into_iter().map(Filler::new).collect();
                let mut incoming: Vec<Incoming<'_>> = others.map(incoming).collect();
                // In each turn, publish the next chunk and consume one chunk of each other rank.
                // The own bytes are copied in the first turn, while the others publish their
                // chunks.
                let mut first = true;
                while first || !outgoing.is_over() || !incoming.iter().all(Incoming::is_over) {
                    outgoing.publish()?;
                    if std::mem::take(&mut first) {
                        fillers[rank].fill(own);
                    }
                    for incoming in incoming.iter_mut().filter(|incoming| !incoming.is_over()) {
                        fillers[incoming.from].fill(incoming.chunk()?);
                        incoming.consumed();
                    }
                }
            }
            Destination::Reduce(mut reduce) => {
                let mut incoming: Vec<Incoming<'_>> = others.map(incoming).collect();
                // In each turn, publish the next chunk, and reduce one chunk of every rank at once.
                let mut offset = 0;
                while !outgoing.is_over() || offset < own.len() {
                    outgoing.publish()?;
                    if offset == own.len() {
                        continue;
                    }
                    let mut pieces = vec![&[][..]; self.segments.len()];
                    // The chunks of all ranks have the same size, as all ranks send to the same
                    // places.
                    let mut len = own.len() - offset;
                    for incoming in &mut incoming {
                        pieces[incoming.from] = incoming.chunk()?;
                        len = len.min(pieces[incoming.from].len());
                    }
                    pieces[rank] = &own[offset..offset + len];
                    reduce_blocks(&mut reduce, offset, &pieces);
                    offset += len;
                    incoming.iter_mut().for_each(Incoming::consumed);
                }
            }
        }
        Ok(())
    }
}

/// Returns `true` if the owner of a segment has arrived at a round.
fn has_arrived(segment: &Segment, round: &Round<'_>) -> bool {
    segment.word(Word::Arrived).load(Ordering::Acquire) > round.number
}

/// Encodes a message for the other ranks of the host.
fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // If encoding fails, the other ranks cannot decode the empty bytes either, and then no rank
    // uses shared memory.
    wire::encode(value).unwrap_or_default()
}

/// Maps the segments of all ranks. Returns `None` if one cannot be mapped or does not hold its
/// rank's token.
fn map_all(rank: usize, own: Segment, invitations: &[Bytes]) -> Option<Vec<Segment>> {
    let mut own = Some(own);
    let mut segments = Vec::with_capacity(invitations.len());
    for (from, invitation) in invitations.iter().enumerate() {
        segments.push(if from == rank {
            own.take()?
        } else {
            map(from, invitation, invitations.len())?
        });
    }
    Some(segments)
}

/// Maps the segment of another rank.
fn map(from: usize, invitation: &Bytes, ranks: usize) -> Option<Segment> {
    let Invitation {
        process,
        file,
        token,
    } = wire::decode::<Option<Invitation>>(invitation).ok()??;
    let segment = Segment::open(process, file, ranks)
        .inspect_err(|error| tracing::warn!(rank = from, %error, "memory cannot be shared: it goes over sockets"));
    segment
        .ok()
        .filter(|segment| segment.word(Word::Token).load(Ordering::Acquire) == token)
}
