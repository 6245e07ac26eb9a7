//! The frames that this process has received, and what it knows about the other ranks. Nothing here
//! sends, waits or looks at the clock.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use super::frame::{Frame, Kind, Notice};
use super::relayed_round::{RelayedRound, unbundle};
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

/// The reason that is given for a rank that has ended without a goodbye.
const EXITED: &str = "exited without leaving the group (its connection was closed)";

/// The received frames of all sockets, and what follows from them.
#[derive(Debug)]
pub(super) struct InboxState {
    /// This rank.
    pub(super) rank: usize,
    /// The most ranks of a group that send their records to each other directly.
    max_direct_group_size: usize,
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
    /// The questions of other ranks that are not answered yet.
    pub(super) questions: BTreeSet<Question>,
    /// The frames to send that no operation of this rank waits for.
    pub(super) notices: Vec<Notice>,
    /// The ranks to which this one forwards the news that a rank has ended. Empty if every two
    /// ranks are connected.
    pub(super) neighbours: Vec<usize>,
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
    /// The way in which it has left, for messages; `None` while it has not.
    pub(super) departure: Option<String>,
    pub(super) said_goodbye: bool,
    /// The time of its last frame, or the time since which this rank expects frames from it. `None`
    /// while there is no reason to expect any: there is no connection, and none has been asked for.
    pub(super) last_frame_received: Option<Instant>,
    /// The number of connections to it. There may be two if both ranks have made one at the same
    /// time.
    connections: usize,
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
    /// The received frames, by global rank and round.
    rounds: HashMap<(usize, u64), ReceivedFrames>,
    /// The records that travel through other ranks, by round. Those of the last round that is over
    /// are kept, because others that are still in it may ask for them.
    pub(super) relayed_rounds: BTreeMap<u64, RelayedRound>,
    /// The last round that is over on this rank, among those whose records travel through other
    /// ranks.
    pub(super) last_finished_round: Option<u64>,
}

/// The frames of one rank in one round.
#[derive(Debug, Default)]
pub(super) struct ReceivedFrames {
    pub(super) record: Option<Vec<u8>>,
    pub(super) chunks: VecDeque<Vec<u8>>,
}

/// A question of a rank for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Question {
    pub(super) group: u64,
    pub(super) round: u64,
    /// The rank that asks.
    pub(super) asker: usize,
    /// The rank of the group whose record it asks for.
    pub(super) wanted_rank: usize,
}

impl GroupState {
    /// Returns the ranks of the group that this one sends to or receives from if records travel
    /// through other ranks.
    pub(super) fn neighbours(&self) -> Vec<usize> {
        self.schedule
            .neighbours()
            .into_iter()
            .map(|rank| self.ranks[rank])
            .collect()
    }
}

impl PeerState {
    /// Returns the time since its last frame, or since this rank began to need it.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        self.last_frame_received
            .map_or(Duration::ZERO, |last_frame| {
                now.saturating_duration_since(last_frame)
            })
    }

    /// Returns `true` if it is worth while to ask it something.
    pub(super) fn can_answer(&self, now: Instant) -> bool {
        self.departure.is_none() && self.silence(now) <= HEARTBEAT_TIMEOUT
    }

    /// Returns `true` if there is a connection to it.
    pub(super) fn is_connected(&self) -> bool {
        self.connections > 0
    }
}

impl InboxState {
    /// Creates the state of a rank that is not connected to any other.
    pub(super) fn new(
        rank: usize,
        ranks: usize,
        max_direct_group_size: usize,
        timeout: Duration,
        now: Instant,
    ) -> Self {
        InboxState {
            rank,
            max_direct_group_size,
            peers: (0..ranks).map(|_| PeerState::default()).collect(),
            max_silence: timeout.max(HEARTBEAT_TIMEOUT),
            last_beat: now,
            resumed: None,
            groups: HashMap::new(),
            questions: BTreeSet::new(),
            notices: Vec::new(),
            neighbours: Vec::new(),
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
                self.peers[sender]
                    .departure
                    .get_or_insert_with(|| String::from_utf8_lossy(&body).into_owned());
            }
            Kind::Ended => {
                let ended = self.decode_rank(&body)?;
                self.receive_news_of_end(ended);
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
            Kind::Record => self.received_frames(group, sender, round).record = Some(body),
            Kind::Chunk => self
                .received_frames(group, sender, round)
                .chunks
                .push_back(body),
            Kind::Bundle => {
                let records = unbundle(body).ok_or_else(wrong_protocol_error)?;
                if records.iter().any(|&(rank, _)| rank >= self.peers.len()) {
                    return Err(wrong_protocol_error());
                }
                if let Some(relayed) = self.relayed_round(group, round) {
                    for (rank, record) in records {
                        relayed.add(rank, record);
                    }
                }
            }
            Kind::Question => {
                let wanted_ranks = self.decode_ranks(&body)?;
                // If this rank does not have the records either, it asks its own neighbours for
                // them.
                if let Some(state) = self.groups.get_mut(&group)
                    && let Some(relayed) = state.relayed_rounds.get_mut(&round)
                {
                    relayed.others_ask |= wanted_ranks
                        .iter()
                        .any(|&wanted_rank| relayed.record(wanted_rank).is_none());
                }
                self.questions
                    .extend(wanted_ranks.into_iter().map(|wanted_rank| Question {
                        group,
                        round,
                        asker: sender,
                        wanted_rank,
                    }));
            }
            Kind::Absent => {
                let absent = self.decode_rank(&body)?;
                if let Some(relayed) = self.relayed_round(group, round) {
                    relayed.peer(absent).is_absent = true;
                }
            }
        }
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

    /// Reads the body of a frame that consists of ranks, at least one; an error if one of them does
    /// not exist.
    fn decode_ranks(&self, body: &[u8]) -> io::Result<Vec<usize>> {
        if body.is_empty() {
            return Err(wrong_protocol_error());
        }
        body.chunks(size_of::<u64>())
            .map(|bytes| self.decode_rank(bytes))
            .collect()
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
    pub(super) fn disconnect(&mut self, other_rank: usize, error: &io::Error) {
        // A rank that leaves registers no connections any more, but may still read from one.
        let connections = &mut self.peers[other_rank].connections;
        *connections = connections.saturating_sub(1);
        if *connections > 0 {
            return;
        }
        self.record_loss(other_rank, error);
        // All of its frames have been read, and there was no goodbye, so its process has ended:
        // tell others. If it was lost for another reason, perhaps only these two ranks do not
        // reach each other.
        if !self.peers[other_rank].said_goodbye
            && self.peers[other_rank].departure.as_deref() == Some(EXITED)
        {
            self.forward_end(other_rank);
        }
    }

    /// Records that there can be no connection to the rank `other_rank` any more, because of
    /// `error`.
    pub(super) fn record_loss(&mut self, other_rank: usize, error: &io::Error) {
        let reason = if is_end(error) {
            EXITED.to_owned()
        } else {
            format!("was lost: {error}")
        };
        if !self.leaving {
            tracing::debug!(rank = other_rank, reason, "a rank left");
        }
        if self.peers[other_rank].departure.is_none() {
            self.peers[other_rank].departure = Some(reason);
            self.lost.push(other_rank);
        }
    }

    /// Records that a rank has refused a connection. So it has left or ended. If there is another
    /// connection to it, its frames may still be on their way there, and the end of that connection
    /// will tell that it has left.
    pub(super) fn record_refusal(&mut self, refusing: usize) {
        let reason = if self.lost.contains(&refusing) {
            EXITED
        } else {
            "has ended (it takes no connections any more)"
        };
        let peer = &mut self.peers[refusing];
        if peer.connections == 0 {
            peer.departure.get_or_insert_with(|| reason.to_owned());
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
        self.forward_end(ended);
        if !self.leaving {
            self.notices
                .push(Notice::new(ended, Kind::Heartbeat, Vec::new()));
        }
    }

    /// Tells the neighbours that a rank has ended. Each rank forwards this news once.
    fn forward_end(&mut self, ended: usize) {
        if self.leaving {
            return;
        }
        for &neighbour in self
            .neighbours
            .iter()
            .filter(|&&neighbour| neighbour != ended)
        {
            self.notices
                .push(Notice::new(neighbour, Kind::Ended, encode_ranks(&[ended])));
        }
    }

    /// Tells the neighbours in a large group that the group has failed. The thread of this rank
    /// that uses the group may be busy with other things for long, and some neighbours may hear the
    /// news from this rank only.
    fn forward_failure(&mut self, group: u64) {
        let state = &self.groups[&group];
        if state.ranks.len() <= self.max_direct_group_size {
            return;
        }
        let Some((round, error)) = &state.failure else {
            return;
        };
        let body = encode_failure(error);
        for neighbour in state.neighbours() {
            self.notices.push(Notice {
                receiver: neighbour,
                kind: Kind::Abort,
                group,
                round: *round,
                body: body.clone().into(),
            });
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
        self.forward_failure(group);
    }

    /// Drops a group. Frames for it that arrive later are ignored.
    pub(super) fn close(&mut self, group: u64) {
        self.groups.remove(&group);
        self.questions.retain(|question| question.group != group);
        self.closed_groups.insert(group);
    }

    /// Lets a group fail on this rank, unless it has failed already. Returns the ranks that this
    /// one has to tell.
    ///
    /// In a small group, a rank that has found the failure itself tells all others, and one that
    /// was told tells nobody. In a large group each rank tells its neighbours, which forward the
    /// news. A rank does so even if it was told itself and has forwarded the news already: its
    /// neighbours must hear of the failure before they see this rank leave.
    pub(super) fn fail(&mut self, group: u64, round: u64, error: &CommError) -> Vec<usize> {
        let state = self.groups.entry(group).or_default();
        let is_large = state.ranks.len() > self.max_direct_group_size;
        match &state.failure {
            Some((_, known_error)) if known_error == error && is_large => state.neighbours(),
            Some(_) => Vec::new(),
            None => {
                state.failure = Some((round, error.clone()));
                if is_large {
                    return state.neighbours();
                }
                let others = state.ranks.iter().copied();
                others.filter(|&rank| rank != self.rank).collect()
            }
        }
    }

    /// Returns the frames that a rank has sent in a round so far.
    pub(super) fn received_frames(
        &mut self,
        group: u64,
        rank: usize,
        round: u64,
    ) -> &mut ReceivedFrames {
        self.groups
            .entry(group)
            .or_default()
            .rounds
            .entry((rank, round))
            .or_default()
    }

    /// Returns the state of a round whose records travel through other ranks; `None` if an even
    /// later round is over here, so that nobody can need these records.
    fn relayed_round(&mut self, group: u64, round: u64) -> Option<&mut RelayedRound> {
        let state = self.groups.entry(group).or_default();
        (state.last_finished_round <= Some(round))
            .then(|| state.relayed_rounds.entry(round).or_default())
    }

    /// Returns the largest number of chunks of one rank that wait to be taken.
    #[cfg(test)]
    pub(super) fn max_waiting_chunks(&self) -> usize {
        let incoming = self.groups.values().flat_map(|group| group.rounds.values());
        incoming
            .map(|incoming| incoming.chunks.len())
            .max()
            .unwrap_or(0)
    }

    /// Drops the frames of a round.
    pub(super) fn discard_round(&mut self, group: u64, round: u64) {
        if let Some(state) = self.groups.get_mut(&group) {
            state
                .rounds
                .retain(|&(_, frame_round), _| frame_round != round);
        }
    }
}

/// The reasons for which a round cannot end.
impl InboxState {
    /// Returns the error for which a round of a group must end while the data of the `missing`
    /// ranks has not arrived; `None` if it can go on waiting. In this order: the group has failed,
    /// a missing rank has left, one of them has been silent for too long, or the deadline is over.
    /// While this process catches up, nobody is blamed yet.
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
        self.departed_error(group, round, missing)
            .or_else(|| self.unresponsive_rank_error(round, missing, now))
            .or_else(|| timeout_error(round, missing, now))
    }

    /// Returns the error that has ended the group.
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
        let reason = self.peers[rank].departure.as_deref().unwrap_or(EXITED);
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
        let missing_departed = missing
            .iter()
            .find(|&&rank| self.peers[rank].departure.is_some())?;
        // The rank of the group that was lost first is probably the reason why the missing one has
        // left, even if that first rank is not missing itself.
        let first_departed = self.groups.get(&group).and_then(|group| {
            let mut lost = self.lost.iter();
            lost.find(|rank| group.ranks.contains(rank))
        });
        Some(*first_departed.unwrap_or(missing_departed))
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

/// Returns the body of a frame that tells of an error.
pub(super) fn encode_failure(error: &CommError) -> Vec<u8> {
    wire::encode(error).expect("texts and numbers can be encoded")
}

/// Returns the body of a frame that consists of ranks, each a little-endian `u64`.
pub(super) fn encode_ranks(ranks: &[usize]) -> Vec<u8> {
    ranks
        .iter()
        .flat_map(|&rank| (rank as u64).to_le_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut state = InboxState::new(0, 4, 32, HEARTBEAT_TIMEOUT, now);
        state.open(7, &[0, 1, 2]);
        let died = || io::Error::from(io::ErrorKind::UnexpectedEof);
        // A rank of another group has nothing to do with it.
        state.record_loss(3, &died());
        assert_eq!(state.first_lost(7, &[1, 2]), None);
        say_goodbye(&mut state, 1, now);
        assert_eq!(state.first_lost(7, &[1, 2]), Some(1));
        assert_eq!(state.first_lost(7, &[2]), None);
        state.record_loss(2, &died());
        // It said goodbye, and then its connection ended too.
        state.record_loss(1, &died());
        assert_eq!(state.first_lost(7, &[1]), Some(2));
        assert_eq!(state.first_lost(7, &[0]), None);
    }

    #[test]
    fn the_first_round_that_failed_counts_whoever_tells_first() {
        let now = Instant::now();
        let mut state = InboxState::new(0, 3, 32, HEARTBEAT_TIMEOUT, now);
        state.open(7, &[0, 1, 2]);
        let deadline = now + HEARTBEAT_TIMEOUT;
        let round = |number| Round {
            number,
            sequence: number,
            operation: "barrier",
            timeout: HEARTBEAT_TIMEOUT,
            deadline,
        };
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
        assert_eq!(state.group_error(7, &round(3)), None);
        assert!(matches!(
            state.group_error(7, &round(4)),
            Some(CommError::Aborted { rank: 2, .. })
        ));
        assert_eq!(
            state.group_error(7, &round(4)),
            state.group_error(7, &round(6))
        );
    }

    /// Returns the state of rank 0 of a job of 40 that is connected to its neighbours.
    fn large(now: Instant) -> InboxState {
        let mut state = InboxState::new(0, 40, 32, HEARTBEAT_TIMEOUT, now);
        state.open(7, &(0..40).collect::<Vec<_>>());
        state.neighbours = state.groups[&7].neighbours();
        state
            .neighbours
            .clone()
            .into_iter()
            .for_each(|rank| state.connect(rank, now));
        state
    }

    /// Returns the ranks to which there is a notice of this kind. Besides, only heartbeats may be
    /// sent.
    fn told(state: &mut InboxState, kind: Kind) -> Vec<usize> {
        let notices = state.notices();
        assert!(
            notices
                .iter()
                .all(|notice| [kind, Kind::Heartbeat].contains(&notice.kind)),
            "{notices:?}"
        );
        notices
            .into_iter()
            .filter(|notice| notice.kind == kind)
            .map(|notice| notice.receiver)
            .collect()
    }

    #[test]
    fn the_news_of_a_failure_is_passed_on_once_also_by_a_rank_that_does_not_know_the_group_yet() {
        let now = Instant::now();
        for knows_it_first in [true, false] {
            let mut state = large(now);
            let neighbours = state.neighbours.clone();
            if !knows_it_first {
                state.groups.clear();
            }
            let body = wire::encode(&CommError::Aborted {
                rank: 5,
                message: String::new(),
            })
            .unwrap();
            for from in [1, 2, 4] {
                let body = body.clone();
                state
                    .receive(from, frame(Kind::Abort, 7, body), now)
                    .unwrap();
            }
            if !knows_it_first {
                assert_eq!(told(&mut state, Kind::Abort), []);
                state.open(7, &(0..40).collect::<Vec<_>>());
            }
            assert_eq!(told(&mut state, Kind::Abort), neighbours);
            // A small group needs no help.
            state.open(8, &(0..32).collect::<Vec<_>>());
            state.receive(1, frame(Kind::Abort, 8, body), now).unwrap();
            assert_eq!(told(&mut state, Kind::Abort), []);
        }
    }

    #[test]
    fn the_news_of_an_end_is_passed_on_once_and_does_not_overtake_the_frames_of_that_rank() {
        let now = Instant::now();
        let mut state = large(now);
        let neighbours = state.neighbours.clone();
        let news = |state: &mut InboxState, of: usize| {
            state
                .receive(4, frame(Kind::Ended, 0, encode_ranks(&[of])), now)
                .unwrap();
        };
        // There is no connection to rank 5, and none can be made.
        news(&mut state, 5);
        news(&mut state, 5);
        assert_eq!(told(&mut state, Kind::Ended), neighbours);
        assert_eq!(state.peers[5].departure, None);
        state.record_refusal(5);
        assert_eq!(state.peers[5].departure.as_deref(), Some(EXITED));
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
        assert_eq!(state.peers[2].departure, None);
        assert_eq!(told(&mut state, Kind::Ended), []);
        state.disconnect(2, &io::ErrorKind::UnexpectedEof.into());
        let others: Vec<usize> = neighbours
            .iter()
            .copied()
            .filter(|&rank| rank != 2)
            .collect();
        assert_eq!(told(&mut state, Kind::Ended), others);
        // Rank 1 leaves as it should.
        say_goodbye(&mut state, 1, now);
        state.disconnect(1, &io::ErrorKind::UnexpectedEof.into());
        news(&mut state, 1);
        // That is not so of this rank.
        news(&mut state, 0);
        assert_eq!(told(&mut state, Kind::Ended), []);
        assert_eq!(state.lost, [5, 2]);
    }

    #[test]
    fn a_rank_has_left_when_its_last_connection_has_ended() {
        let now = Instant::now();
        let mut state = large(now);
        state.connect(5, now);
        state.connect(5, now);
        // An attempt that came too late does not mean anything.
        state.record_refusal(5);
        state.disconnect(5, &io::ErrorKind::UnexpectedEof.into());
        assert_eq!(state.peers[5].departure, None);
        state.disconnect(5, &io::ErrorKind::UnexpectedEof.into());
        assert_eq!(state.peers[5].departure.as_deref(), Some(EXITED));
        // There has been no connection to rank 6. It may have left as it should, and is not blamed
        // before others.
        state.record_refusal(6);
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
        let mut state = InboxState::new(0, 2, 32, HEARTBEAT_TIMEOUT, now);
        // There is no rank 2.
        let of_nobody = [&[2][..], &[0; 7]].concat();
        let refused = [
            (Kind::Bundle, vec![1]),
            (Kind::Bundle, of_nobody.clone()),
            (Kind::Question, of_nobody.clone()),
            (Kind::Question, vec![0; 7]),
            (Kind::Question, vec![0; 12]),
            (Kind::Question, Vec::new()),
            (Kind::Absent, of_nobody.clone()),
            (Kind::Absent, vec![0; 9]),
            (Kind::Ended, of_nobody),
            (Kind::Ended, vec![0; 7]),
        ];
        for (kind, body) in refused {
            assert!(
                state.receive(1, frame(kind, 0, body), now).is_err(),
                "{kind:?}"
            );
        }
        for kind in [Kind::Bundle, Kind::Question, Kind::Absent, Kind::Ended] {
            assert!(
                state.receive(1, frame(kind, 0, vec![0; 8]), now).is_ok(),
                "{kind:?}"
            );
        }
    }
}
