//! The vote of one round as one rank sees it: the ballots and attachments that have reached this
//! rank, and its part in sending them on.
//!
//! A message brings the ballots of consecutive ranks, merged into one, and their attachments. Empty
//! ones are left out, so that a vote without attachments takes [`MESSAGE_BYTES`] in each step of
//! the [schedule](super::schedule). If some ranks have waited for long, all *spread* the ballots
//! that they have, beside these steps.

use std::mem;
use std::time::Instant;

use bytes::{Buf, BufMut, Bytes};

use super::frame::CHUNK_BYTES;
use super::schedule::{Schedule, Step};
use crate::backend::{Tally, Vote};
use crate::ballot::{BALLOT_BYTES, Ballot, MESSAGE_BYTES};

/// The state of a vote on one rank. Ballots may come before this rank enters the round.
#[derive(Debug, Default)]
pub(super) struct Poll {
    /// The merged ballot of at least the ranks whose attachments are here.
    ballot: Option<Ballot>,
    /// The attachments by rank of the group. It may be shorter than the group.
    attachments: Vec<Option<Bytes>>,
    /// The number of ranks whose attachments are here.
    known_ranks: usize,
    /// The messages that have come since the last call of [`settle`](Self::settle).
    unsettled: Vec<Message>,
    /// The time at which this rank entered the round.
    pub(super) entered: Option<Instant>,
    /// The number of steps in which this rank has sent.
    sent_steps: usize,
    /// `true` while this rank is in the round.
    pub(super) is_in_progress: bool,
    /// `true` if a later round is over on this rank.
    pub(super) is_outdated: bool,
    /// By rank of the group, `true` if this one has spread its ballot. `None` while nobody has
    /// waited for long. It may be shorter than the group.
    pub(super) spread: Option<Vec<bool>>,
    /// The time at which this rank, if it has waited for long, connects to the ranks whose ballots
    /// are missing.
    pub(super) connects_at: Option<Instant>,
    /// `true` once it has connected to them.
    pub(super) has_connected: bool,
}

/// A message of a vote: a merged ballot, and attachments.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message {
    ballot: Ballot,
    /// `true` if the message belongs to no step, but spreads the ballots that a rank has.
    pub(super) is_spread: bool,
    /// The first rank whose ballot the message brings.
    first_rank: usize,
    /// The number of consecutive ranks, from the first one on, whose ballots the message brings; 0
    /// if it spreads ballots, whose ranks need not be consecutive.
    rank_count: usize,
    /// Attachments, each with its rank: those of consecutive ranks that are not empty, or those of
    /// all ranks whose ballots are spread.
    attachments: Vec<(usize, Bytes)>,
}

impl Message {
    /// Reads a message; `None` if it is none.
    pub(super) fn decode(body: Vec<u8>) -> Option<Message> {
        let mut remaining = Bytes::from(body);
        let mut ballot = [0; BALLOT_BYTES];
        remaining.try_copy_to_slice(&mut ballot).ok()?;
        let mut message = Message {
            ballot: Ballot::from_bytes(ballot),
            is_spread: remaining.try_get_u8().ok()? != 0,
            first_rank: remaining.try_get_u32_le().ok()? as usize,
            rank_count: remaining.try_get_u32_le().ok()? as usize,
            attachments: Vec::new(),
        };
        remaining.try_get_u16_le().ok()?;
        while !remaining.is_empty() {
            let rank = remaining.try_get_u32_le().ok()?;
            let len = remaining.try_get_u32_le().ok()? as usize;
            if len > remaining.len() {
                return None;
            }
            let attachment = remaining.split_to(len);
            message.attachments.push((rank as usize, attachment));
        }
        Some(message)
    }

    /// Returns `true` if the message can be one of a group of so many ranks.
    pub(super) fn names_ranks_below(&self, ranks: usize) -> bool {
        let attached_ranks = self.attachments.iter().map(|&(rank, _)| rank);
        let mut named_ranks = attached_ranks.chain([self.first_rank]);
        named_ranks.all(|rank| rank < ranks) && self.rank_count <= ranks
    }
}

impl Poll {
    /// Takes a message of another rank.
    pub(super) fn receive(&mut self, message: Message) {
        if message.is_spread {
            self.spread.get_or_insert_default();
        }
        self.unsettled.push(message);
    }

    /// Takes over what the messages so far have brought. Before, the ranks of the group need not be
    /// known.
    pub(super) fn settle(&mut self, schedule: Schedule) {
        for message in mem::take(&mut self.unsettled) {
            if !message.names_ranks_below(schedule.ranks) {
                continue;
            }
            self.merge(message.ballot);
            for (rank, attachment) in message.attachments {
                self.add(rank, attachment);
            }
            // The other attachments are empty.
            let ranks = schedule.consecutive_ranks(message.first_rank, message.rank_count);
            ranks.for_each(|rank| self.add(rank, Bytes::new()));
        }
    }

    /// Returns messages with the ballots of ranks, which are all here. There is one message, unless
    /// that would be much longer than a chunk. Unless they spread ballots, the ranks are
    /// consecutive.
    fn messages(&self, ranks: impl Iterator<Item = usize>, is_spread: bool) -> Vec<Bytes> {
        let ballot = self.ballot.unwrap_or(Ballot::blank()).to_bytes();
        let mut ranks = ranks.peekable();
        let mut messages = Vec::new();
        while let Some(&first_rank) = ranks.peek() {
            let mut rank_count = 0;
            let mut message = vec![0; MESSAGE_BYTES];
            while let Some(rank) = ranks.next_if(|&rank| {
                let attachment_bytes = self.attachment(rank).map_or(0, Bytes::len);
                message.len() == MESSAGE_BYTES || message.len() + attachment_bytes <= CHUNK_BYTES
            }) {
                rank_count += u32::from(!is_spread);
                let attachment = self.attachment(rank).cloned().unwrap_or_default();
                if is_spread || !attachment.is_empty() {
                    message.put_u32_le(rank as u32);
                    message.put_u32_le(attachment.len() as u32);
                    message.put_slice(&attachment);
                }
            }
            let mut header = &mut message[..];
            header.put_slice(&ballot);
            header.put_u8(is_spread.into());
            header.put_u32_le(first_rank as u32);
            header.put_u32_le(rank_count);
            messages.push(message.into());
        }
        messages
    }

    fn merge(&mut self, ballot: Ballot) {
        self.ballot = Some(self.ballot.map_or(ballot, |known| known.merge(ballot)));
    }

    /// Adds an attachment, unless it is here already. The rank must be one of the group.
    fn add(&mut self, rank: usize, attachment: Bytes) {
        if rank >= self.attachments.len() {
            self.attachments.resize_with(rank + 1, || None);
        }
        let known = &mut self.attachments[rank];
        self.known_ranks += usize::from(known.is_none());
        known.get_or_insert(attachment);
    }

    /// Returns the attachment of a rank; `None` if neither it nor the rank's ballot is here yet.
    pub(super) fn attachment(&self, rank: usize) -> Option<&Bytes> {
        self.attachments.get(rank)?.as_ref()
    }

    /// Returns `true` if other ranks have entered the round, but this rank has not.
    #[cfg(any(test, feature = "nccl"))]
    pub(super) fn awaits_this_rank(&self) -> bool {
        self.entered.is_none() && (self.ballot.is_some() || !self.unsettled.is_empty())
    }

    /// Lets this rank enter the round, with its own vote.
    pub(super) fn enter(&mut self, schedule: Schedule, vote: &Vote<'_>, now: Instant) {
        self.merge(vote.ballot);
        // No attachment of this rank can be here already.
        self.add(schedule.rank, Bytes::copy_from_slice(vote.attachment));
        self.entered = Some(now);
        self.is_in_progress = true;
    }

    /// Returns the next step in which this rank can send, and its messages, and counts it as done;
    /// `None` if it lacks ballots for it, or has sent in all steps.
    pub(super) fn next_step(&mut self, schedule: Schedule) -> Option<(Step, Vec<Bytes>)> {
        let step = schedule.steps().nth(self.sent_steps)?;
        self.entered?;
        let ranks = schedule.consecutive_ranks(schedule.rank, step.count);
        if ranks.clone().any(|rank| self.attachment(rank).is_none()) {
            return None;
        }
        self.sent_steps += 1;
        Some((step, self.messages(ranks, false)))
    }

    /// Returns the messages with the ballots that this rank has not spread yet, and counts them as
    /// spread.
    pub(super) fn ballots_to_spread(&mut self, schedule: Schedule) -> Vec<Bytes> {
        self.settle(schedule);
        let Some(is_spread) = &mut self.spread else {
            return Vec::new();
        };
        is_spread.resize(self.attachments.len(), false);
        let mut news = Vec::new();
        for (rank, is_spread) in is_spread.iter_mut().enumerate() {
            if self.attachments[rank].is_some() && !mem::replace(is_spread, true) {
                news.push(rank);
            }
        }
        self.messages(news.into_iter(), true)
    }

    /// Returns the result once this rank has the ballots of all, and has sent on those that others
    /// wait for; `None` before.
    pub(super) fn tally(&self, schedule: Schedule) -> Option<Tally> {
        let has_sent_all = self.sent_steps == schedule.steps().count();
        if self.entered.is_none() || !has_sent_all || self.known_ranks < schedule.ranks {
            return None;
        }
        Some(Tally {
            ballot: self.ballot?,
            attachments: self.attachments[..schedule.ranks]
                .iter()
                .flatten()
                .cloned()
                .collect(),
            sent_ballots: self.sent_steps,
        })
    }

    /// Returns the ranks whose ballots are not here.
    pub(super) fn missing(&self, schedule: Schedule) -> impl Iterator<Item = usize> {
        (0..schedule.ranks).filter(|&rank| self.attachment(rank).is_none())
    }

    /// Returns the ranks from which this one still needs ballots in some step of the schedule.
    pub(super) fn awaited_senders(&self, schedule: Schedule) -> impl Iterator<Item = usize> {
        let awaited_steps = schedule.steps().filter(move |step| {
            schedule
                .consecutive_ranks(step.sender, step.count)
                .any(|rank| self.attachment(rank).is_none())
        });
        awaited_steps.map(|step| step.sender)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attachment(of: usize) -> Bytes {
        Bytes::from(vec![of as u8; of])
    }

    fn ballot(of: usize) -> Ballot {
        Ballot {
            failed_rank: of as u32,
            ..Ballot::blank()
        }
    }

    /// Lets a rank enter a round.
    fn enter(poll: &mut Poll, schedule: Schedule) {
        let vote = Vote {
            ballot: ballot(schedule.rank),
            attachment: &attachment(schedule.rank),
        };
        poll.enter(schedule, &vote, Instant::now());
    }

    /// Delivers messages of another rank.
    fn deliver(poll: &mut Poll, messages: &[Bytes]) {
        for message in messages {
            poll.receive(Message::decode(message.to_vec()).unwrap());
        }
    }

    /// Returns the messages with consecutive ballots of a group, of which each rank attaches
    /// `attachment_of` its number.
    fn messages_of(
        schedule: Schedule,
        first_rank: usize,
        rank_count: usize,
        attachment_of: impl Fn(usize) -> Bytes,
    ) -> Vec<Bytes> {
        let mut poll = Poll::default();
        for rank in schedule.consecutive_ranks(first_rank, rank_count) {
            poll.merge(ballot(rank));
            poll.add(rank, attachment_of(rank));
        }
        poll.messages(schedule.consecutive_ranks(first_rank, rank_count), false)
    }

    #[test]
    fn attachments_come_back_from_messages_without_those_that_are_empty() {
        let messages = messages_of(Schedule::new(7, 0), 5, 4, attachment);
        assert_eq!(messages.len(), 1);
        let expected = Message {
            ballot: ballot(0),
            is_spread: false,
            first_rank: 5,
            rank_count: 4,
            attachments: [5, 6, 1].map(|of| (of, attachment(of))).into(),
        };
        let message = Message::decode(messages[0].to_vec()).unwrap();
        assert!(message.names_ranks_below(7) && !message.names_ranks_below(6));
        assert_eq!(message, expected);
        let empty = messages_of(Schedule::new(7, 0), 5, 4, |_| Bytes::new());
        assert_eq!((empty.len(), empty[0].len()), (1, MESSAGE_BYTES));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let message = messages_of(Schedule::new(9, 0), 7, 1, attachment).remove(0);
        for len in (0..message.len()).filter(|&len| len != MESSAGE_BYTES) {
            assert_eq!(Message::decode(message[..len].to_vec()), None, "{len}");
        }
        assert_eq!(Message::decode([&message[..], &[0]].concat()), None);
    }

    #[test]
    fn many_long_attachments_are_cut_into_messages_of_the_size_of_a_chunk_and_may_come_in_any_order()
     {
        let schedule = Schedule::new(9, 0);
        let long = |rank: usize| match rank {
            4 => Bytes::from(vec![1; CHUNK_BYTES + 1]),
            _ => Bytes::from(vec![2; 300 << 10]),
        };
        let mut messages = messages_of(schedule, 4, 5, long);
        let counts = messages
            .iter()
            .map(|message| Message::decode(message.to_vec()).unwrap().rank_count);
        assert_eq!(counts.collect::<Vec<_>>(), [1, 3, 1]);
        messages.reverse();
        let mut poll = Poll::default();
        deliver(&mut poll, &messages[..2]);
        poll.settle(schedule);
        assert!(poll.missing(schedule).eq([0, 1, 2, 3, 4]));
        deliver(&mut poll, &messages[2..]);
        poll.settle(schedule);
        assert!(poll.missing(schedule).eq([0, 1, 2, 3]));
        assert!((4..9).all(|rank| poll.attachment(rank) == Some(&long(rank))));
    }

    #[test]
    fn a_rank_sends_on_what_it_has_and_is_done_when_it_has_all() {
        let schedule = Schedule::new(6, 4);
        let mut poll = Poll::default();
        // Rank 0 has sent the ballots of 0 and 1, of which the first attaches nothing.
        deliver(&mut poll, &messages_of(schedule, 0, 2, attachment));
        assert!(poll.awaits_this_rank());
        poll.settle(schedule);
        assert!(
            poll.next_step(schedule).is_none(),
            "it has not entered the round"
        );
        enter(&mut poll, schedule);
        assert!(!poll.awaits_this_rank());
        let (step, _) = poll.next_step(schedule).unwrap();
        assert_eq!((step.receiver, step.count), (3, 1));
        assert!(
            poll.next_step(schedule).is_none(),
            "it has no ballot of rank 5"
        );
        assert_eq!(poll.awaited_senders(schedule).collect::<Vec<_>>(), [5, 2]);
        deliver(&mut poll, &messages_of(schedule, 5, 1, attachment));
        poll.settle(schedule);
        let (step, messages) = poll.next_step(schedule).unwrap();
        assert_eq!((step.receiver, step.count), (2, 2));
        let sent = Message::decode(messages[0].to_vec()).unwrap();
        assert_eq!(sent.attachments, [4, 5].map(|of| (of, attachment(of))));
        // The last step needs no more than what it has.
        let (step, _) = poll.next_step(schedule).unwrap();
        assert_eq!((step.receiver, step.count), (0, 2));
        assert!(poll.missing(schedule).eq([2, 3]));
        assert_eq!(poll.awaited_senders(schedule).collect::<Vec<_>>(), [2]);
        assert_eq!(poll.tally(schedule), None);
        deliver(&mut poll, &messages_of(schedule, 2, 2, attachment));
        poll.settle(schedule);
        let tally = Tally {
            ballot: ballot(0),
            attachments: (0..6).map(attachment).collect(),
            sent_ballots: 3,
        };
        assert_eq!(poll.tally(schedule), Some(tally));
    }

    #[test]
    fn every_ballot_is_spread_once() {
        let schedule = Schedule::new(6, 4);
        let mut poll = Poll::default();
        deliver(&mut poll, &messages_of(schedule, 5, 2, attachment));
        assert!(poll.ballots_to_spread(schedule).is_empty());
        poll.spread = Some(Vec::new());
        let spread = |poll: &mut Poll| -> Vec<(usize, Bytes)> {
            let messages = poll.ballots_to_spread(schedule).into_iter();
            messages
                .map(|message| Message::decode(message.to_vec()).unwrap())
                .flat_map(|message| message.attachments)
                .collect()
        };
        assert_eq!(spread(&mut poll), [0, 5].map(|of| (of, attachment(of))));
        deliver(&mut poll, &messages_of(schedule, 1, 2, attachment));
        assert_eq!(spread(&mut poll), [1, 2].map(|of| (of, attachment(of))));
        assert_eq!(spread(&mut poll), []);
    }
}
