//! The frames that this process has received, and what it knows about the other ranks. Nothing here
//! sends, waits or looks at the clock.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::mem;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::frame::{Frame, Kind, Notice};
use super::poll::{Message, Poll};
use super::schedule::Schedule;
use crate::access::wrong_protocol_error;
use crate::backend::Round;
use crate::blocking::is_end;
use crate::error::CommError;
use crate::wire;

/// The time without any frame after which a rank counts as stopped or unreachable, and not merely
/// slow.
pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(1750);

/// The time that a process which was stopped has for reading what the others sent meanwhile.
const CATCH_UP_TIMEOUT: Duration = Duration::from_millis(500);

/// The time that the news of a failure has to come through other ranks, once this rank has noticed
/// that one has left. That one may have left because of the failure.
pub(crate) const NEWS_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason that is given for a rank that has ended without a goodbye.
const EXITED: &str = "exited without leaving the group (its connection was closed)";

/// The number that the job itself has among the groups if not every two ranks are connected. Only
/// the news that a rank has died travels in it.
pub(super) const JOB: u64 = u64::MAX;

/// The received frames of all sockets, and what follows from them.
#[derive(Debug)]
pub(super) struct InboxState {
    /// This rank.
    pub(super) rank: usize,
    /// By global rank.
    pub(super) peers: Vec<PeerState>,
    /// The time of silence after which a rank counts as lost, even during an operation that may
    /// take longer: the deadline of the job.
    pub(super) max_silence: Duration,
    /// The last time at which the thread that sends heartbeats was seen to run.
    pub(super) last_beat: Instant,
    /// The time at which this process went on after it had been stopped.
    resumed: Option<Instant>,
    /// By the number of the group.
    pub(super) groups: HashMap<u64, GroupState>,
    /// The frames to send that no operation of this rank waits for.
    pub(super) notices: Vec<Notice>,
    /// `true` if there may be notices to send.
    pub(super) has_news: bool,
    /// The number of notices that the thread which sends them has taken, but not sent yet.
    pub(super) unsent_notices: usize,
    /// The ranks that have ended without a goodbye, or of which another rank says so, in the order
    /// in which this rank heard of it.
    lost: Vec<usize>,
    /// Groups that this process has dropped. Frames for them may still arrive, and are ignored.
    closed_groups: HashSet<u64>,
    /// `true` once this rank leaves the job.
    pub(super) leaving: bool,
}

/// The knowledge of this rank about another one.
#[derive(Debug, Default)]
pub(super) struct PeerState {
    /// The way in which it has left; `None` while it has not.
    pub(super) departure: Option<Departure>,
    pub(super) said_goodbye: bool,
    /// The time of its last frame, or the time since which this rank expects frames from it. `None`
    /// while there is no reason to expect any: there is no connection, and none has been asked for.
    pub(super) last_frame_received: Option<Instant>,
    /// The number of connections to it. There may be two if both ranks have made one at the same
    /// time.
    connections: usize,
}

/// The way in which a rank has left.
#[derive(Debug)]
pub(super) struct Departure {
    /// The words for messages.
    reason: String,
    /// The time at which this rank noticed it.
    noticed: Instant,
}

/// The knowledge of this rank about a group.
#[derive(Debug, Default)]
pub(super) struct GroupState {
    /// The global ranks of the group, in the group's order. Empty while only frames of others tell
    /// that the group exists.
    pub(super) ranks: Vec<usize>,
    /// The place of this rank among them.
    pub(super) schedule: Schedule,
    /// The round in which the group failed, and the error.
    pub(super) failure: Option<(u64, CommError)>,
    /// The received chunks of tensors, by global rank and round.
    chunks: HashMap<(usize, u64), VecDeque<Vec<u8>>>,
    /// The votes by round. That of the last round that is over is kept, because others that are
    /// still in it may need its ballots.
    pub(super) polls: BTreeMap<u64, Poll>,
    /// For each rank that sends ballots to this one, by global rank, the highest round of which it
    /// has sent some.
    last_rounds: HashMap<usize, u64>,
    /// The global ranks that have died, each with the first round that it has not finished.
    pub(super) absent_from: BTreeMap<usize, u64>,
}

impl GroupState {
    /// Returns the ranks of the group to which this one sends ballots, or from which it receives
    /// them.
    pub(super) fn neighbours(&self) -> Vec<usize> {
        self.schedule
            .neighbours()
            .into_iter()
            .map(|rank| self.ranks[rank])
            .collect()
    }

    /// Records that a round is over on this rank. Drops the votes of rounds before the last one:
    /// others may still need its ballots, and if they have entered it without this rank, this rank
    /// may enter it later.
    pub(super) fn finish(&mut self, round: u64) {
        if let Some(poll) = self.polls.get_mut(&round) {
            poll.is_in_progress = false;
        }
        self.polls.retain(|&other_round, poll| {
            other_round >= round
                || poll.is_in_progress
                || !mem::replace(&mut poll.is_outdated, true)
        });
    }
}

impl PeerState {
    /// Records that it has left, unless that is known already.
    fn depart(&mut self, reason: impl Into<String>, now: Instant) {
        self.departure.get_or_insert_with(|| Departure {
            reason: reason.into(),
            noticed: now,
        });
    }

    /// Returns the time since its last frame, or since this rank began to need it.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        self.last_frame_received
            .map_or(Duration::ZERO, |last_frame| {
                now.saturating_duration_since(last_frame)
            })
    }

    /// Returns `true` if it has not left, but seems to be stopped.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        self.departure.is_none() && self.silence(now) > HEARTBEAT_TIMEOUT
    }
}

impl InboxState {
    /// Creates the state of a rank that is not connected to any other.
    pub(super) fn new(rank: usize, ranks: usize, timeout: Duration, now: Instant) -> Self {
        InboxState {
            rank,
            peers: (0..ranks).map(|_| PeerState::default()).collect(),
            max_silence: timeout.max(HEARTBEAT_TIMEOUT),
            last_beat: now,
            resumed: None,
            groups: HashMap::new(),
            notices: Vec::new(),
            has_news: false,
            unsent_notices: 0,
            lost: Vec::new(),
            closed_groups: HashSet::new(),
            leaving: false,
        }
    }

    /// Records that this process runs. If that was last recorded long ago, the process was stopped,
    /// and then the others are not to blame for their silence: what they sent has not been read
    /// yet.
    pub(super) fn record_heartbeat_thread_ran(&mut self, now: Instant) {
        if now.saturating_duration_since(self.last_beat) > HEARTBEAT_TIMEOUT {
            self.resumed = Some(now);
            for peer in &mut self.peers {
                peer.last_frame_received = peer.last_frame_received.map(|_| now);
            }
        }
        self.last_beat = now;
    }

    /// Returns `true` if this process was stopped until a moment ago, so that it may not have read
    /// yet what the others sent meanwhile. They may have sent that this rank itself is to blame.
    pub(super) fn catches_up(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_beat) > HEARTBEAT_TIMEOUT
            || self
                .resumed
                .is_some_and(|resumed| now.saturating_duration_since(resumed) < CATCH_UP_TIMEOUT)
    }

    /// Takes a frame of another rank.
    ///
    /// # Errors
    /// A frame that no rank sends.
    pub(super) fn receive(&mut self, sender: usize, frame: Frame, now: Instant) -> io::Result<()> {
        self.peers[sender].last_frame_received = Some(now);
        let Frame {
            kind,
            group,
            round,
            body,
        } = frame;
        match kind {
            Kind::Heartbeat => {}
            Kind::Goodbye => {
                self.peers[sender].said_goodbye = true;
                // If this rank failed to write to it before it read the goodbye, it took that rank
                // for lost.
                self.lost.retain(|&lost| lost != sender);
                self.peers[sender].depart(String::from_utf8_lossy(&body), now);
            }
            Kind::Absent => {
                let absent = self.decode_rank(&body)?;
                self.receive_news_of_end(absent);
                if !self.closed_groups.contains(&group) {
                    self.receive_absence(group, round, absent);
                }
            }
            // All kinds below are about a group.
            _ if self.closed_groups.contains(&group) => {}
            Kind::Abort => {
                let failure = wire::decode(&body).unwrap_or_else(|message| CommError::Aborted {
                    rank: sender,
                    message,
                });
                let state = self.groups.entry(group).or_default();
                // The first round that failed counts. The news of a later one may arrive before,
                // from a rank that is further than this one.
                match &state.failure {
                    Some((failed, _)) if *failed <= round => {}
                    _ => {
                        state.failure = Some((round, failure));
                        self.forward_failure(group);
                    }
                }
            }
            Kind::Chunk => self.chunks(group, sender, round).push_back(body),
            Kind::Ballot => {
                let message = Message::decode(body).ok_or_else(wrong_protocol_error)?;
                if !message.names_ranks_below(self.peers.len()) {
                    return Err(wrong_protocol_error());
                }
                let state = self.groups.entry(group).or_default();
                if !message.is_spread {
                    let last_round = state.last_rounds.entry(sender).or_default();
                    *last_round = round.max(*last_round);
                }
                let poll = state.polls.entry(round).or_default();
                poll.receive(message);
                self.has_news |= poll.spread.is_some();
            }
        }
        self.has_news |= !self.notices.is_empty();
        Ok(())
    }

    /// Reads the body of a frame that consists of a rank; an error if there is no such rank.
    fn decode_rank(&self, body: &[u8]) -> io::Result<usize> {
        let bytes = body.try_into().map_err(|_| wrong_protocol_error())?;
        match usize::try_from(u64::from_le_bytes(bytes)) {
            Ok(rank) if rank < self.peers.len() => Ok(rank),
            _ => Err(wrong_protocol_error()),
        }
    }

    /// Records a new connection to a rank.
    pub(super) fn connect(&mut self, other_rank: usize, now: Instant) {
        self.peers[other_rank].connections += 1;
        self.peers[other_rank].last_frame_received = Some(now);
        // If there was news that it had ended, that was wrong.
        self.lost.retain(|&lost| lost != other_rank);
    }

    /// Records that this rank needs `rank`. From now on its silence counts, although there
    /// may be no connection yet.
    pub(super) fn expect_frames_from(&mut self, rank: usize, now: Instant) {
        self.peers[rank].last_frame_received.get_or_insert(now);
    }

    /// Records that a connection to the rank `other_rank` ended with `error`. The rank is lost with
    /// its last connection: its frames come on only one of them, and this rank does not know on
    /// which.
    pub(super) fn disconnect(&mut self, other_rank: usize, error: &io::Error, now: Instant) {
        // A rank that leaves registers no connections any more, but may still read from one.
        let connections = &mut self.peers[other_rank].connections;
        *connections = connections.saturating_sub(1);
        if *connections > 0 {
            return;
        }
        self.record_loss(other_rank, error, now);
        // All of its frames have been read, and there was no goodbye, so its process has ended:
        // tell others. If it was lost for another reason, perhaps only these two ranks do not
        // reach each other.
        let departure = self.peers[other_rank].departure.as_ref();
        if !self.peers[other_rank].said_goodbye
            && departure.is_some_and(|departure| departure.reason == EXITED)
        {
            self.announce_absence(other_rank);
        }
    }

    /// Tells the ranks of all groups in which a rank that has died sends ballots to this one from
    /// which round on it is absent. All frames of that rank have been read.
    fn announce_absence(&mut self, died: usize) {
        if self.leaving {
            return;
        }
        let mut absences = Vec::new();
        for (&group, state) in &self.groups {
            let mut senders = state.schedule.steps().map(|step| state.ranks[step.sender]);
            if state.failure.is_none() && senders.any(|sender| sender == died) {
                let first_round = state.last_rounds.get(&died).map_or(0, |last| last + 1);
                absences.push((group, first_round));
            }
        }
        for (group, first_round) in absences {
            self.receive_absence(group, first_round, died);
        }
    }

    /// Takes the news that a rank has died before it had finished a round of a group. Forwards it
    /// unless the rank was known to be absent from there on.
    fn receive_absence(&mut self, group: u64, first_round: u64, absent: usize) {
        if absent == self.rank || self.peers[absent].said_goodbye {
            return;
        }
        let state = self.groups.entry(group).or_default();
        let known_round = state.absent_from.entry(absent).or_insert(u64::MAX);
        if first_round < *known_round {
            *known_round = first_round;
            self.tell_neighbours(Kind::Absent, group, first_round, encode_rank(absent));
        }
    }

    /// Tells the neighbours in a group some news.
    fn tell_neighbours(&mut self, kind: Kind, group: u64, round: u64, body: Bytes) {
        self.has_news = true;
        let neighbours = self.groups[&group].neighbours().into_iter();
        self.notices.extend(neighbours.map(|receiver| Notice {
            receiver,
            kind,
            group,
            round,
            body: body.clone(),
        }));
    }

    /// Records that there can be no connection to the rank `other_rank` any more, because of
    /// `error`.
    pub(super) fn record_loss(&mut self, other_rank: usize, error: &io::Error, now: Instant) {
        let reason = if is_end(error) {
            EXITED.to_owned()
        } else {
            format!("was lost: {error}")
        };
        if !self.leaving {
            tracing::debug!(rank = other_rank, reason, "a rank left");
        }
        if self.peers[other_rank].departure.is_none() {
            self.peers[other_rank].depart(reason, now);
            self.lost.push(other_rank);
        }
    }

    /// Records that a rank has refused a connection. So it has left or ended. If there is another
    /// connection to it, its frames may still be on their way there, and the end of that connection
    /// will tell that it has left.
    pub(super) fn record_refusal(&mut self, refusing: usize, now: Instant) {
        let reason = if self.lost.contains(&refusing) {
            EXITED
        } else {
            "has ended (it takes no connections any more)"
        };
        let peer = &mut self.peers[refusing];
        if peer.connections == 0 {
            peer.depart(reason, now);
        }
    }

    /// Takes the news that the rank `ended` has ended without a goodbye. The news must not overtake
    /// that rank's own frames. So it counts only if there is no connection to that rank: then no
    /// frames are on their way, because a rank sends frames on a connection only once the other
    /// side has registered it.
    ///
    /// The news may be wrong: a rank that was stopped for long may find connections closed whose
    /// other ends are well. So this rank tries to connect in order to send a heartbeat, and
    /// believes the news only when the connection is refused.
    fn receive_news_of_end(&mut self, ended: usize) {
        let peer = &self.peers[ended];
        if ended == self.rank
            || peer.connections > 0
            || peer.said_goodbye
            || self.lost.contains(&ended)
        {
            return;
        }
        self.lost.push(ended);
        if !self.leaving {
            let heartbeat = Notice::new(ended, Kind::Heartbeat, Bytes::new());
            self.notices.push(heartbeat);
        }
    }

    /// Tells the neighbours in a group that it has failed, if it has. The thread of this rank that
    /// uses the group may be busy with other things for long, and some neighbours may hear the news
    /// from this rank only.
    fn forward_failure(&mut self, group: u64) {
        if let Some((round, error)) = &self.groups[&group].failure {
            let (round, body) = (*round, wire::encode_plain(error).into());
            self.tell_neighbours(Kind::Abort, group, round, body);
        }
    }

    /// Records the ranks of a new group. Frames for it may have arrived already.
    pub(super) fn open(&mut self, group: u64, ranks: &[usize]) {
        let place = ranks
            .iter()
            .position(|&rank| rank == self.rank)
            .expect("a process opens only groups that it is in");
        let state = self.groups.entry(group).or_default();
        state.schedule = Schedule::new(ranks.len(), place);
        state.ranks = ranks.to_vec();
        for (absent, first_round) in mem::take(&mut state.absent_from) {
            self.receive_absence(group, first_round, absent);
        }
        self.forward_failure(group);
        // Others may have begun to spread ballots.
        self.has_news = true;
    }

    /// Drops a group. Frames for it that arrive later are ignored.
    pub(super) fn close(&mut self, group: u64) {
        self.groups.remove(&group);
        self.closed_groups.insert(group);
    }

    /// Lets a group fail on this rank, and tells its neighbours, unless it has failed already.
    pub(super) fn fail(&mut self, group: u64, round: u64, error: &CommError) {
        let state = self.groups.entry(group).or_default();
        if state.failure.is_none() {
            state.failure = Some((round, error.clone()));
            self.forward_failure(group);
        }
    }

    /// Returns the chunks of a tensor that a rank has sent in a round, and that are not taken yet.
    pub(super) fn chunks(&mut self, group: u64, rank: usize, round: u64) -> &mut VecDeque<Vec<u8>> {
        let state = self.groups.entry(group).or_default();
        state.chunks.entry((rank, round)).or_default()
    }

    /// Returns the largest number of chunks of one rank that wait to be taken.
    #[cfg(test)]
    pub(super) fn max_waiting_chunks(&self) -> usize {
        let incoming = self.groups.values().flat_map(|group| group.chunks.values());
        incoming.map(VecDeque::len).max().unwrap_or(0)
    }

    /// Drops the chunks of a round.
    pub(super) fn discard_chunks(&mut self, group: u64, round: u64) {
        if let Some(state) = self.groups.get_mut(&group) {
            state
                .chunks
                .retain(|&(_, frame_round), _| frame_round != round);
        }
    }
}

/// The reasons for which a round cannot end.
impl InboxState {
    /// Returns the error for which a round of a group must end while the data of the `missing`
    /// ranks has not arrived; `None` if it can go on waiting. In this order: the group has failed,
    /// a missing rank has left, one of them has been silent for too long, or the deadline is over.
    /// While this process catches up, nobody is blamed yet. A missing rank that has left without
    /// being lost is not blamed at once, if the deadline leaves time: it may have left because of a
    /// failure of which it told only its neighbours, and the news is still on its way.
    pub(super) fn failure(
        &self,
        group: u64,
        round: &Round<'_>,
        missing: &[usize],
        now: Instant,
    ) -> Option<CommError> {
        let ended = self.group_error(group, round);
        if ended.is_some() || self.catches_up(now) {
            return ended;
        }
        let is_news_due = now < round.deadline && self.awaits_news_of(group, missing, now);
        let departed = if is_news_due {
            None
        } else {
            self.departed_error(group, round, missing)
        };
        departed
            .or_else(|| self.unresponsive_rank_error(round, missing, now))
            .or_else(|| timeout_error(round, missing, now))
    }

    /// Returns `true` if one of the `missing` ranks has left a short time ago, and no rank of the
    /// group is lost. A neighbour that has said goodbye had told this rank all of its news before.
    fn awaits_news_of(&self, group: u64, missing: &[usize], now: Instant) -> bool {
        let Some(rank) = self.first_lost(group, missing) else {
            return false;
        };
        let peer = &self.peers[rank];
        let is_neighbour = |state: &GroupState| state.neighbours().contains(&rank);
        let has_told = peer.said_goodbye && self.groups.get(&group).is_some_and(is_neighbour);
        let departure = peer.departure.as_ref();
        !has_told
            && !self.lost.contains(&rank)
            && departure.is_some_and(|departure| now < departure.noticed + NEWS_TIMEOUT)
    }

    /// Returns the error that has ended the group, for a round which cannot end because of it.
    pub(super) fn group_error(&self, group: u64, round: &Round<'_>) -> Option<CommError> {
        let (failed, failure) = self.groups.get(&group)?.failure.as_ref()?;
        // If the group failed in a later round, all ranks have sent their frames of this round, so
        // it can still succeed.
        (*failed <= round.number).then(|| failure.clone())
    }

    /// Returns the error of a round that misses a rank that has left.
    pub(super) fn departed_error(
        &self,
        group: u64,
        round: &Round<'_>,
        missing: &[usize],
    ) -> Option<CommError> {
        let rank = self.first_lost(group, missing)?;
        let departure = self.peers[rank].departure.as_ref();
        let reason = departure.map_or(EXITED, |departure| &departure.reason);
        Some(round.rank_left_error(rank, reason))
    }

    /// Returns the error of a round that misses a rank which has been silent for too long.
    ///
    /// After the deadline, a rank without recent heartbeats is blamed before one that is only slow.
    /// Before the deadline, a rank is lost once it has been silent for `max_silence`.
    pub(super) fn unresponsive_rank_error(
        &self,
        round: &Round<'_>,
        missing: &[usize],
        now: Instant,
    ) -> Option<CommError> {
        let limit = if now >= round.deadline {
            HEARTBEAT_TIMEOUT
        } else {
            self.max_silence
        };
        let (rank, silence) = missing
            .iter()
            .map(|&rank| (rank, self.peers[rank].silence(now)))
            .find(|(_, silence)| *silence > limit)?;
        let seconds = silence.as_secs_f64();
        let reason =
            format!("has sent no heartbeat for {seconds:.1} s: it is stopped or cannot be reached");
        Some(round.rank_left_error(rank, reason))
    }

    /// Returns the rank to blame if one of the `missing` ranks has left: the one that left first.
    /// Returns `None` if none of them has left.
    fn first_lost(&self, group: u64, missing: &[usize]) -> Option<usize> {
        let departed = missing.iter().filter_map(|&rank| {
            let departure = self.peers[rank].departure.as_ref()?;
            Some((departure.noticed, rank))
        });
        let (_, missing_departed) = departed.min()?;
        // The rank of the group that was lost first is probably the reason why the missing one has
        // left, even if that first rank is not missing itself.
        let first_departed = self.groups.get(&group).and_then(|group| {
            let mut lost = self.lost.iter();
            lost.find(|rank| group.ranks.contains(rank)).copied()
        });
        Some(first_departed.unwrap_or(missing_departed))
    }
}

/// Returns the error of a round whose deadline is over while ranks are missing.
pub(super) fn timeout_error(
    round: &Round<'_>,
    missing: &[usize],
    now: Instant,
) -> Option<CommError> {
    (now >= round.deadline && !missing.is_empty()).then(|| round.timeout_error(missing.to_vec()))
}

/// Returns the body of a frame that consists of a rank, a little-endian `u64`.
pub(super) fn encode_rank(rank: usize) -> Bytes {
    Bytes::copy_from_slice(&(rank as u64).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ballot::MESSAGE_BYTES;

    /// Returns a frame of round 5 of a group.
    fn frame(kind: Kind, group: u64, body: Vec<u8>) -> Frame {
        Frame {
            kind,
            group,
            round: 5,
            body,
        }
    }

    /// Delivers the frame with which `rank` leaves as it should.
    fn say_goodbye(state: &mut InboxState, rank: usize, now: Instant) {
        let goodbye = frame(Kind::Goodbye, 0, Vec::new());
        state.receive(rank, goodbye, now).unwrap();
    }

    #[test]
    fn the_first_rank_of_a_group_that_died_is_named_and_not_one_that_left_after_it() {
        let now = Instant::now();
        let mut state = InboxState::new(0, 4, HEARTBEAT_TIMEOUT, now);
        state.open(7, &[0, 1, 2]);
        let died = || io::Error::from(io::ErrorKind::UnexpectedEof);
        // A rank of another group has nothing to do with it.
        state.record_loss(3, &died(), now);
        assert_eq!(state.first_lost(7, &[1, 2]), None);
        say_goodbye(&mut state, 1, now);
        assert_eq!(state.first_lost(7, &[1, 2]), Some(1));
        assert_eq!(state.first_lost(7, &[2]), None);
        state.record_loss(2, &died(), now);
        // It said goodbye, and then its connection ended too.
        state.record_loss(1, &died(), now);
        assert_eq!(state.first_lost(7, &[1]), Some(2));
        assert_eq!(state.first_lost(7, &[0]), None);
    }

    /// Returns a round that may take twice as long as a rank may be silent.
    fn round(number: u64, now: Instant) -> Round<'static> {
        Round {
            number,
            sequence: number,
            operation: "barrier",
            timeout: 2 * HEARTBEAT_TIMEOUT,
            deadline: now + 2 * HEARTBEAT_TIMEOUT,
            votes_by_message: false,
        }
    }

    /// Returns the rank that `failure` names as the one that left.
    fn blamed(failure: Option<CommError>) -> Option<usize> {
        failure.map(|failure| match failure {
            CommError::RankLeft { rank, .. } => rank,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_rank_that_left_is_blamed_only_once_the_news_of_a_failure_has_had_time_to_come() {
        let start = Instant::now();
        let moment = Duration::from_millis(1);
        for takes_no_connections in [true, false] {
            let mut state = large(start);
            // Nobody has told this rank of a failure. Rank 5 is no neighbour, and would not.
            if takes_no_connections {
                state.record_refusal(5, start);
            } else {
                say_goodbye(&mut state, 5, start);
            }
            let round = round(5, start);
            let early = state.failure(7, &round, &[3, 5], start + NEWS_TIMEOUT - moment);
            assert_eq!(blamed(early), None);
            let late = state.failure(7, &round, &[3, 5], start + NEWS_TIMEOUT);
            assert_eq!(blamed(late), Some(5));
            // The deadline does not leave time for news.
            let short = Round {
                deadline: start + moment,
                ..round
            };
            let over = state.failure(7, &short, &[3, 5], start + moment);
            assert_eq!(blamed(over), Some(5));
            // It was not the first, and the first has not said a word.
            let mut other = large(start);
            other.record_loss(20, &io::ErrorKind::UnexpectedEof.into(), start);
            other.record_refusal(5, start);
            assert_eq!(
                blamed(other.failure(7, &round, &[5], start + moment)),
                Some(20)
            );
            // The news comes in time.
            let error = CommError::Aborted {
                rank: 30,
                message: String::new(),
            };
            let news = frame(Kind::Abort, 7, wire::encode(&error).unwrap());
            state.receive(1, news, start + moment).unwrap();
            assert_eq!(state.failure(7, &round, &[5], start + moment), Some(error));
        }
    }

    #[test]
    fn a_neighbour_that_said_goodbye_is_blamed_at_once() {
        let start = Instant::now();
        let mut state = large(start);
        let round = round(5, start);
        assert_eq!(state.failure(7, &round, &[1, 3], start), None);
        say_goodbye(&mut state, 1, start);
        assert_eq!(blamed(state.failure(7, &round, &[1, 3], start)), Some(1));
    }

    #[test]
    fn the_first_round_that_failed_counts_whoever_tells_first() {
        let now = Instant::now();
        let mut state = InboxState::new(0, 3, HEARTBEAT_TIMEOUT, now);
        state.open(7, &[0, 1, 2]);
        for (from, failed) in [(1, 5), (2, 4), (1, 6)] {
            let error = CommError::Aborted {
                rank: from,
                message: failed.to_string(),
            };
            let body = wire::encode(&error).unwrap();
            state
                .receive(
                    from,
                    Frame {
                        kind: Kind::Abort,
                        group: 7,
                        round: failed,
                        body,
                    },
                    now,
                )
                .unwrap();
        }
        assert_eq!(state.group_error(7, &round(3, now)), None);
        assert!(matches!(
            state.group_error(7, &round(4, now)),
            Some(CommError::Aborted { rank: 2, .. })
        ));
        assert_eq!(
            state.group_error(7, &round(4, now)),
            state.group_error(7, &round(6, now))
        );
    }

    /// Returns the state of rank 0 of a job of 40 that is connected to its neighbours.
    fn large(now: Instant) -> InboxState {
        let mut state = InboxState::new(0, 40, HEARTBEAT_TIMEOUT, now);
        state.open(7, &(0..40).collect::<Vec<_>>());
        state.open(JOB, &(0..40).collect::<Vec<_>>());
        state.groups[&7]
            .neighbours()
            .into_iter()
            .for_each(|rank| state.connect(rank, now));
        state
    }

    /// Returns the ranks to which there is a notice of this kind about a group. Besides, only
    /// heartbeats may be sent.
    fn told(state: &mut InboxState, kind: Kind, group: u64) -> Vec<usize> {
        let notices = state.notices();
        let others = [kind, Kind::Heartbeat, Kind::Absent];
        assert!(
            notices.iter().all(|notice| others.contains(&notice.kind)),
            "{notices:?}"
        );
        notices
            .into_iter()
            .filter(|notice| notice.kind == kind && notice.group == group)
            .map(|notice| notice.receiver)
            .collect()
    }

    #[test]
    fn the_news_of_a_failure_is_passed_on_once_also_by_a_rank_that_does_not_know_the_group_yet() {
        let now = Instant::now();
        for knows_it_first in [true, false] {
            let mut state = large(now);
            let neighbours = state.groups[&7].neighbours();
            if !knows_it_first {
                state.groups.clear();
            }
            let error = CommError::Aborted {
                rank: 5,
                message: String::new(),
            };
            for from in [1, 2, 4] {
                let body = wire::encode(&error).unwrap();
                state
                    .receive(from, frame(Kind::Abort, 7, body), now)
                    .unwrap();
            }
            if !knows_it_first {
                assert_eq!(told(&mut state, Kind::Abort, 7), []);
                state.open(7, &(0..40).collect::<Vec<_>>());
            }
            assert_eq!(told(&mut state, Kind::Abort, 7), neighbours);
        }
    }

    #[test]
    fn the_news_of_an_end_is_passed_on_once_and_does_not_overtake_the_frames_of_that_rank() {
        let now = Instant::now();
        let mut state = large(now);
        let neighbours = state.groups[&7].neighbours();
        let news = |state: &mut InboxState, of: usize| {
            let body = encode_rank(of).to_vec();
            let news = Frame {
                round: 0,
                ..frame(Kind::Absent, JOB, body)
            };
            state.receive(4, news, now).unwrap();
        };
        // There is no connection to rank 5, and none can be made.
        news(&mut state, 5);
        news(&mut state, 5);
        assert_eq!(told(&mut state, Kind::Absent, JOB), neighbours);
        assert!(state.peers[5].departure.is_none());
        state.record_refusal(5, now);
        assert_eq!(state.peers[5].departure.as_ref().unwrap().reason, EXITED);
        // Rank 6 is well.
        news(&mut state, 6);
        let to_sixth = state
            .notices()
            .into_iter()
            .filter(|notice| notice.receiver == 6)
            .map(|notice| notice.kind);
        assert!(to_sixth.eq([Kind::Heartbeat]));
        state.connect(6, now);
        assert_eq!(state.first_lost(7, &[6]), None);
        // There is one to rank 2, which ends after its last frame.
        news(&mut state, 2);
        assert!(state.peers[2].departure.is_none());
        assert_eq!(told(&mut state, Kind::Absent, JOB), neighbours);
        state.disconnect(2, &io::ErrorKind::UnexpectedEof.into(), now);
        let notices = state.notices();
        let told_again = notices.iter().filter(|notice| notice.group == JOB);
        assert_eq!(told_again.count(), 0);
        // It sends ballots to this rank in the group, and has sent none.
        let told_in_group = notices.iter().filter(|notice| notice.group == 7);
        assert!(told_in_group.clone().all(|notice| notice.round == 0));
        assert!(told_in_group.map(|notice| notice.receiver).eq(neighbours));
        // Rank 1 leaves as it should.
        say_goodbye(&mut state, 1, now);
        state.disconnect(1, &io::ErrorKind::UnexpectedEof.into(), now);
        news(&mut state, 1);
        // That is not so of this rank.
        news(&mut state, 0);
        assert_eq!(told(&mut state, Kind::Absent, JOB), []);
        assert_eq!(state.lost, [5, 2]);
    }

    #[test]
    fn a_rank_has_left_when_its_last_connection_has_ended() {
        let now = Instant::now();
        let mut state = large(now);
        state.connect(5, now);
        state.connect(5, now);
        // An attempt that came too late does not mean anything.
        state.record_refusal(5, now);
        state.disconnect(5, &io::ErrorKind::UnexpectedEof.into(), now);
        assert!(state.peers[5].departure.is_none());
        state.disconnect(5, &io::ErrorKind::UnexpectedEof.into(), now);
        assert_eq!(state.peers[5].departure.as_ref().unwrap().reason, EXITED);
        // There has been no connection to rank 6. It may have left as it should, and is not blamed
        // before others.
        state.record_refusal(6, now);
        assert_eq!(state.first_lost(7, &[6]), Some(5));
        assert!(state.peers[6].departure.is_some() && !state.lost.contains(&6));
    }

    #[test]
    fn only_a_rank_that_this_one_needs_can_be_silent() {
        let now = Instant::now();
        let mut state = large(now);
        let later = now + 2 * HEARTBEAT_TIMEOUT;
        assert_eq!(state.peers[2].silence(later), 2 * HEARTBEAT_TIMEOUT);
        assert_eq!(state.peers[5].silence(later), Duration::ZERO);
        state.expect_frames_from(5, later);
        assert_eq!(
            state.peers[5].silence(later + HEARTBEAT_TIMEOUT),
            HEARTBEAT_TIMEOUT
        );
    }

    #[test]
    fn frames_that_no_rank_sends_are_refused() {
        let now = Instant::now();
        let mut state = InboxState::new(0, 2, HEARTBEAT_TIMEOUT, now);
        // There is no rank 2.
        let of_nobody = [&[2][..], &[0; 7]].concat();
        let refused = [
            (Kind::Ballot, vec![0; MESSAGE_BYTES - 1]),
            (Kind::Ballot, vec![0; MESSAGE_BYTES + 7]),
            (Kind::Ballot, [&[0; MESSAGE_BYTES][..], &of_nobody].concat()),
            (Kind::Absent, of_nobody.clone()),
            (Kind::Absent, vec![0; 9]),
        ];
        for (kind, body) in refused {
            assert!(
                state.receive(1, frame(kind, 0, body), now).is_err(),
                "{kind:?}"
            );
        }
        let taken = [
            (Kind::Ballot, vec![0; MESSAGE_BYTES]),
            (Kind::Ballot, vec![0; MESSAGE_BYTES + 8]),
            (Kind::Absent, vec![0; 8]),
        ];
        for (kind, body) in taken {
            assert!(
                state.receive(1, frame(kind, 3, body), now).is_ok(),
                "{kind:?}"
            );
        }
    }
}
