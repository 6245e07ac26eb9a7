//! Rounds through shared memory, for groups whose ranks are all on one host.
//!
//! Each rank owns a segment that all map. Its record lies there, and its bytes go through two windows, chunk by chunk:
//! it writes chunk `k` into window `k % 2` once all readers have consumed chunk `k - 2`. What several ranks want alike
//! (an all-gather) is written once; what they want of different places (a reduce-scatter) shares the window.

use std::fs;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::SETUP_ROUNDS;
use super::chunks::{Incoming, Outgoing, Published};
use super::segment::{Bell, RECORD_BYTES, Segment, Word};
use super::sockets::{Member, exchange};
use super::watch::wait;
use crate::backend::{Destination, Filler, Plan, Planner, Round, reduce_blocks};
use crate::error::CommError;
use crate::wire;

/// The verdict on a group is the number of complete rounds, and once it has failed, this and in which round (so many
/// rounds were complete) and by the word of which rank.
const FAILED: u64 = 1 << 63;
/// Where in a verdict the rank is; the round is below it.
const RANK_SHIFT: u32 = 40;

/// A group's memory.
#[derive(Debug)]
pub(super) struct SharedMemory {
    /// Of each rank.
    segments: Vec<Segment>,
    /// What this rank has sent so far.
    published: Mutex<Published>,
}

/// How others map a rank's segment.
#[derive(Debug, Serialize, Deserialize)]
struct Invitation {
    process: u32,
    file: i32,
    token: u64,
}

/// What is equal for processes that can share memory: the same running kernel, and the same numbering of processes.
pub(super) fn host_token() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let processes = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), processes.display()))
}

impl SharedMemory {
    /// Maps each other's memory, if all ranks of the group can.
    pub(super) fn new(member: Member<'_>, round: &Round<'_>) -> Result<Option<Self>, CommError> {
        let Member { node, ranks, rank, group } = member;
        let host = &node.hosts[ranks[0]];
        if host.is_none() || ranks.iter().any(|&rank| node.hosts[rank] != *host) {
            return Ok(None);
        }
        let created = Segment::create(ranks.len()).inspect_err(|error| {
            tracing::warn!(%error, "no shared memory for a group: its tensors go over sockets");
        });
        let token = group ^ (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let invitation = created.as_ref().ok().map(|(segment, file)| {
            segment.word(Word::Verdict).store(SETUP_ROUNDS, Ordering::Release);
            segment.word(Word::Token).store(token, Ordering::Release);
            Invitation { process: std::process::id(), file: Segment::number(file), token }
        });
        let invitations = exchange(member, &Round { number: 0, ..*round }, &encode(&invitation))?;
        // The file stays open until all have mapped it.
        let (own, _file) = created.ok().unzip();
        let segments = own.and_then(|own| map_all(rank, own, &invitations));
        let verdicts = exchange(member, &Round { number: 1, ..*round }, &encode(&segments.is_some()))?;
        (0..2).for_each(|number| node.inbox().lock().forget(group, number));
        if !verdicts.iter().all(|verdict| wire::decode(verdict) == Ok(true)) {
            return Ok(None);
        }
        Ok(segments.map(|segments| SharedMemory { segments, published: Mutex::default() }))
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
                message: format!("its {} bytes of arguments are more than {RECORD_BYTES}", record.len()),
            });
        }
        let parity = (round.number % 2) as usize;
        let own = &self.segments[rank];
        own.write_record(parity, record);
        own.word(Word::Arrived).store(round.number + 1, Ordering::Release);
        own.ring(Bell::ForReaders);
        self.conclude(member, round, self.all_arrived(member, round))?;
        let records: Vec<&[u8]> = self.segments.iter().map(|segment| segment.record(parity)).collect();
        match plan(&records)? {
            Some(plan) => self.transfer(member, round, send, plan),
            None => Ok(()),
        }
    }

    /// Waits for all ranks to come to a round.
    fn all_arrived(&self, member: Member<'_>, round: &Round<'_>) -> Result<(), CommError> {
        let arrived = |segment: &Segment| segment.word(Word::Arrived).load(Ordering::Acquire) > round.number;
        let missing = || {
            let ranks = self.segments.iter().zip(member.ranks);
            ranks.filter(|(segment, _)| !arrived(segment)).map(|(_, &rank)| rank).collect()
        };
        let mut segments = self.segments.iter();
        segments.try_for_each(|segment| wait(member, round, segment, Bell::ForReaders, || arrived(segment), missing))
    }

    /// Makes all ranks think the same of whether all have come: what the first of them to know says.
    ///
    /// Else a rank could come just when another has given it up, and go on as if nothing had happened.
    fn conclude(&self, member: Member<'_>, round: &Round<'_>, all: Result<(), CommError>) -> Result<(), CommError> {
        let verdict = self.segments[0].word(Word::Verdict);
        let complete = round.number + 1;
        let failed = FAILED | (member.rank as u64) << RANK_SHIFT | round.number;
        let own = if all.is_ok() { complete } else { failed };
        let Err(said) = verdict.compare_exchange(round.number, own, Ordering::AcqRel, Ordering::Acquire) else {
            return all;
        };
        let rounds = said & ((1 << RANK_SHIFT) - 1);
        if rounds >= complete {
            // It is complete, whatever came after it.
            return Ok(());
        }
        // The rank that gave up says why.
        let by = ((said & !FAILED) >> RANK_SHIFT) as usize;
        let by = member.ranks.get(by).copied().unwrap_or(member.ranks[0]);
        all.and_then(|()| member.node.wait(member.group, round, |_| Err(vec![by])))
    }

    fn transfer(&self, member: Member<'_>, round: &Round<'_>, send: &[u8], plan: Plan<'_>) -> Result<(), CommError> {
        let rank = member.rank;
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        let mut outgoing = Outgoing::new(member, round, &self.segments[rank], &plan.to, send, &mut published);
        let own = send.get(plan.from[rank].clone()).unwrap_or_default();
        // Each begins with the bytes of another.
        let others = (1..self.segments.len()).map(|k| (rank + k) % self.segments.len());
        let incoming = |from: usize| Incoming::new(member, round, &self.segments[from], from, plan.from[from].len());
        match plan.destination {
            Destination::Copy(destinations) => {
                let mut fillers: Vec<Filler<'_>> = destinations.into_iter().map(Filler::new).collect();
                let mut incoming: Vec<Incoming<'_>> = others.map(incoming).collect();
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
                let mut offset = 0;
                while !outgoing.is_over() || offset < own.len() {
                    outgoing.publish()?;
                    if offset == own.len() {
                        continue;
                    }
                    let mut pieces = vec![&[][..]; self.segments.len()];
                    // All ranks cut what they send alike, as all send to the same places.
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

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    // What cannot be encoded cannot be decoded either, and then there is no shared memory.
    wire::encode(value).unwrap_or_default()
}

/// The segments of all ranks, if each can be mapped and is the one that its rank meant.
fn map_all(rank: usize, own: Segment, invitations: &[Vec<u8>]) -> Option<Vec<Segment>> {
    let ranks = invitations.len();
    let mut own = Some(own);
    let open = |(from, bytes): (usize, &Vec<u8>)| {
        if from == rank {
            return own.take();
        }
        let Invitation { process, file, token } = wire::decode::<Option<Invitation>>(bytes).ok()??;
        let segment = Segment::open(process, file, ranks)
            .inspect_err(|error| tracing::warn!(rank = from, %error, "memory cannot be shared: it goes over sockets"));
        segment.ok().filter(|segment| segment.word(Word::Token).load(Ordering::Acquire) == token)
    };
    invitations.iter().enumerate().map(open).collect()
}
