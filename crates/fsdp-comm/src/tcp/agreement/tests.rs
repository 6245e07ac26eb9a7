//! Tests of whole groups in one thread: the states of all ranks, a network that delays and reorders
//! frames, and a clock that jumps from one event to the next. A seed decides everything that is
//! random.
//!
//! Each rank is connected to its neighbours at the start, and to others once it sends something to
//! them or they to it.

mod properties;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::frame::{Frame, Kind, Notice};
use super::super::inbox::{InboxState, JOB, encode_rank};
use super::super::schedule::Schedule;
use super::Next;
use crate::backend::{Round, Tally, Vote};
use crate::ballot::{Ballot, MESSAGE_BYTES};
use crate::error::CommError;

const GROUP: u64 = 7;

/// The time that a round may take.
const TIMEOUT: Duration = Duration::from_secs(6);

/// The time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// The longest time for which a frame is on its way.
const LATENCY: Duration = Duration::from_millis(3);

/// The most time between the end of a round on a rank and its next round.
const SKEW: Duration = Duration::from_millis(800);

/// The time within which ranks must notice that a rank has ended, once all who are not at fault are
/// in the round.
const AT_ONCE: Duration = Duration::from_millis(100);

/// A generator of random numbers, which are the same for the same seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        // Spread the seeds, so that those of neighbouring numbers do not begin alike.
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn below(&mut self, limit: usize) -> usize {
        // The constants are those of a common generator of this kind.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }

    fn within(&mut self, limit: Duration) -> Duration {
        Duration::from_micros(self.below(limit.as_micros() as usize + 1) as u64)
    }
}

/// Returns what a rank attaches to its ballot in a round. Some attach nothing.
fn attachment_of(rank: usize, round: u64, attaches: bool) -> Bytes {
    let number = rank ^ round as usize;
    if attaches && !number.is_multiple_of(3) {
        encode_rank(number)
    } else {
        Bytes::new()
    }
}

/// Returns the ballot of a rank in a round. Some have failed, each in other rounds.
fn ballot_of(rank: usize, round: u64) -> Ballot {
    failing_or(Ballot::new(&round), rank, round)
}

/// Returns the ballots of all ranks in a round.
fn ballots_of(ranks: usize, round: u64) -> impl Iterator<Item = Ballot> {
    // The hash of the call is the same for all ranks, so it is computed once.
    let ballot = Ballot::new(&round);
    (0..ranks).map(move |rank| failing_or(ballot, rank, round))
}

/// Returns the ballot, or one that has failed, for the ranks that fail in a round.
fn failing_or(ballot: Ballot, rank: usize, round: u64) -> Ballot {
    match rank ^ round as usize {
        number if number % 7 == 2 => Ballot {
            failed_rank: rank as u32,
            ..ballot
        },
        _ => ballot,
    }
}

/// A fault of a rank.
#[derive(Debug, Clone, Copy)]
enum RankFault {
    /// It enters this round so much later.
    Late(u64, Duration),
    /// It ends without a goodbye after this time.
    Dies(Duration),
    /// It ends without a goodbye before it enters this round.
    DiesBefore(u64),
    /// It stops after this time.
    Stops(Duration),
    /// It stops after this time, and goes on after another.
    Pauses(Duration, Duration),
    /// It leaves with a goodbye after this many rounds.
    Leaves(u64),
}

#[derive(Debug)]
enum Event {
    Enter(usize),
    Wake(usize),
    Frame {
        from: usize,
        to: usize,
        frame: Frame,
    },
    /// A rank asks for a connection.
    Connect {
        from: usize,
        to: usize,
    },
    /// A rank has registered a connection that another one has asked for.
    Connected {
        from: usize,
        to: usize,
    },
    /// A rank takes no connections any more.
    Refused {
        from: usize,
        to: usize,
    },
    /// The connection from a rank ends.
    End {
        from: usize,
        to: usize,
    },
    Fault(usize, RankFault),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Condition {
    Running,
    /// Stopped since the first moment, until the second one if there is one.
    Stopped(Instant, Option<Instant>),
    Gone,
}

struct Rank {
    state: InboxState,
    condition: Condition,
    fault: Option<RankFault>,
    /// The end of the round that it is in.
    deadline: Option<Instant>,
    /// The number of rounds that it has completed.
    completed: u64,
    wake: Option<Instant>,
    /// The time at which it last took the heartbeats of all others.
    heard: Instant,
    entered: Instant,
    error: Option<(Instant, CommError)>,
    /// The frames of each kind that it has sent.
    ballots: usize,
    aborts: usize,
    ends: usize,
    /// The bytes of the ballots.
    ballot_bytes: usize,
    /// The connections that it has asked for, beside those that it has at the start.
    connects: usize,
}

impl Rank {
    /// Returns the number of frames that it has sent, without heartbeats and goodbyes.
    fn sent(&self) -> usize {
        self.ballots + self.aborts + self.ends
    }
}

struct World {
    start: Instant,
    now: Instant,
    rounds: u64,
    ranks: Vec<Rank>,
    events: BTreeMap<(Instant, u64), Event>,
    number_of_events: u64,
    /// The time at which the last frame from one rank to another arrives.
    last: HashMap<(usize, usize), Instant>,
    /// The frames that wait until their sender, the first rank, is connected to their receiver.
    waiting: HashMap<(usize, usize), Vec<Frame>>,
    /// The pairs of ranks of which the first sends to the second.
    linked: HashSet<(usize, usize)>,
    /// For each pair of ranks, the number of connections whose end the second one sees when the
    /// first one ends.
    ends: BTreeMap<(usize, usize), usize>,
    random: Random,
    /// The time at which the last rank at fault ended.
    last_end: Instant,
    /// `true` if ranks that have failed end.
    ends_after_failure: bool,
    /// `true` if most ranks attach something to their ballots.
    attaches: bool,
}

impl World {
    /// Creates a group of ranks that enter so many rounds, one after the other.
    fn new(ranks: usize, rounds: u64, seed: u64, faults: &[(usize, RankFault)]) -> Self {
        let start = Instant::now();
        let mut random = Random::new(seed);
        let rank = |number: usize| {
            let mut state = InboxState::new(number, ranks, TIMEOUT, start);
            state.open(GROUP, &(0..ranks).collect::<Vec<_>>());
            state.open(JOB, &(0..ranks).collect::<Vec<_>>());
            let fault = faults
                .iter()
                .find(|(at_fault, _)| *at_fault == number)
                .map(|(_, fault)| *fault);
            Rank {
                state,
                condition: Condition::Running,
                fault,
                deadline: None,
                completed: 0,
                wake: None,
                heard: start,
                entered: start,
                error: None,
                ballots: 0,
                aborts: 0,
                ends: 0,
                ballot_bytes: 0,
                connects: 0,
            }
        };
        let ranks: Vec<Rank> = (0..ranks).map(rank).collect();
        let ends_after_failure = ranks.len() < 100 && random.below(2) == 0;
        let (events, last) = (BTreeMap::new(), HashMap::new());
        let mut world = World {
            start,
            now: start,
            rounds,
            ranks,
            events,
            number_of_events: 0,
            last,
            waiting: HashMap::new(),
            linked: HashSet::new(),
            ends: BTreeMap::new(),
            random,
            last_end: start,
            ends_after_failure,
            attaches: true,
        };
        for &(rank, fault) in faults {
            if let RankFault::Dies(at) | RankFault::Stops(at) | RankFault::Pauses(at, _) = fault {
                world.plan(start + at, Event::Fault(rank, fault));
            }
        }
        for rank in 0..world.ranks.len() {
            for other in Schedule::new(world.ranks.len(), rank).neighbours() {
                world.ranks[rank].state.connect(other, start);
                world.linked.insert((rank, other));
                world.ends.insert((rank, other), 1);
            }
        }
        (0..world.ranks.len()).for_each(|rank| world.plan_round(rank));
        world
    }

    fn plan(&mut self, at: Instant, event: Event) {
        self.events
            .insert((at.max(self.now), self.number_of_events), event);
        self.number_of_events += 1;
    }

    /// Plans the next round of a rank, or its end.
    fn plan_round(&mut self, rank: usize) {
        let Rank {
            completed, fault, ..
        } = self.ranks[rank];
        let mut at = self.now + self.random.within(SKEW);
        match fault {
            Some(RankFault::Late(round, by)) if round == completed => at += by,
            Some(fault @ RankFault::DiesBefore(round)) if round == completed => {
                return self.plan(at, Event::Fault(rank, fault));
            }
            Some(RankFault::Leaves(rounds)) if rounds == completed => return self.leave(rank),
            _ if completed == self.rounds => return,
            _ => {}
        }
        self.plan(at, Event::Enter(rank));
    }

    /// Returns the time at which a frame arrives that a rank sends now. It is not before the
    /// arrival of earlier frames.
    fn arrival(&mut self, from: usize, to: usize) -> Instant {
        let latency = self.random.within(LATENCY);
        let last = self.last.entry((from, to)).or_insert(self.now);
        *last = (self.now + latency).max(*last);
        *last
    }

    /// Sends a frame from one rank to another, and counts it. If the sender is not connected, it
    /// asks for that first.
    fn send(&mut self, from: usize, notice: &Notice) {
        let &Notice {
            receiver: to,
            kind,
            group,
            round,
            ref body,
        } = notice;
        let sender = &mut self.ranks[from];
        match kind {
            Kind::Ballot => {
                sender.ballots += 1;
                sender.ballot_bytes += body.len();
            }
            Kind::Abort => sender.aborts += 1,
            Kind::Absent => sender.ends += 1,
            _ => {}
        }
        let frame = Frame {
            kind,
            group,
            round,
            body: body.to_vec(),
        };
        if self.linked.contains(&(from, to)) {
            let at = self.arrival(from, to);
            return self.plan(at, Event::Frame { from, to, frame });
        }
        if sender.state.peers[to].departure.is_some() {
            return;
        }
        sender.state.expect_frames_from(to, self.now);
        let waiting = self.waiting.entry((from, to)).or_default();
        waiting.push(frame);
        if waiting.len() == 1 {
            sender.connects += 1;
            let at = self.now + self.random.within(LATENCY);
            self.plan(at, Event::Connect { from, to });
        }
    }

    /// Lets the rank `to` register a connection that `from` has asked for. `from` learns that a
    /// little later.
    fn accept(&mut self, from: usize, to: usize) {
        if self.ranks[from].condition == Condition::Gone {
            return;
        }
        self.ranks[to].state.connect(from, self.now);
        for pair in [(from, to), (to, from)] {
            *self.ends.entry(pair).or_default() += 1;
        }
        let at = self.arrival(to, from);
        self.plan(at, Event::Connected { from: to, to: from });
        self.link(to, from);
    }

    /// Lets a rank send to another one from now on, beginning with the frames that have waited for
    /// the connection.
    fn link(&mut self, from: usize, to: usize) {
        self.linked.insert((from, to));
        for frame in self.waiting.remove(&(from, to)).unwrap_or_default() {
            let at = self.arrival(from, to);
            self.plan(at, Event::Frame { from, to, frame });
        }
    }

    /// Ends a rank and its connections.
    fn end(&mut self, rank: usize) {
        self.ranks[rank].condition = Condition::Gone;
        if self.ranks[rank].fault.is_some() {
            self.last_end = self.now;
        }
        let ends: Vec<(usize, usize)> = self
            .ends
            .range((rank, 0)..(rank + 1, 0))
            .map(|(&(_, to), &count)| (to, count))
            .collect();
        for (to, count) in ends {
            for _ in 0..count {
                let at = self.arrival(rank, to);
                self.plan(at, Event::End { from: rank, to });
            }
        }
    }

    fn leave(&mut self, rank: usize) {
        self.ranks[rank].state.leaving = true;
        self.send_notices(rank);
        for to in 0..self.ranks.len() {
            if self.linked.contains(&(rank, to)) {
                let goodbye = Notice::new(to, Kind::Goodbye, &b"has left the group"[..]);
                self.send(rank, &goodbye);
            }
        }
        self.end(rank);
    }

    /// Handles all events in the order of their times, until none is left, and returns the
    /// simulation as it is then.
    fn run(mut self) -> Self {
        while let Some(((at, _), event)) = self.events.pop_first() {
            self.now = at;
            assert!(at < self.start + 20 * TIMEOUT, "the ranks do not end");
            let (Event::Enter(rank)
            | Event::Wake(rank)
            | Event::Frame { to: rank, .. }
            | Event::Connect { to: rank, .. }
            | Event::Connected { to: rank, .. }
            | Event::Refused { to: rank, .. }
            | Event::End { to: rank, .. }
            | Event::Fault(rank, _)) = event;
            match self.ranks[rank].condition {
                Condition::Gone => {
                    if let Event::Connect { from, to } = event {
                        let at = self.arrival(to, from);
                        self.plan(at, Event::Refused { from: to, to: from });
                    }
                    continue;
                }
                Condition::Stopped(_, None) => continue,
                Condition::Stopped(_, Some(deadline)) if at < deadline => {
                    self.plan(deadline, event);
                    continue;
                }
                Condition::Stopped(..) => {
                    self.ranks[rank].condition = Condition::Running;
                    self.ranks[rank].state.record_heartbeat_thread_ran(at);
                }
                Condition::Running => {}
            }
            self.hear(rank);
            match event {
                Event::Enter(_) => self.enter(rank),
                // Another time to wake up has been set since.
                Event::Wake(_) if self.ranks[rank].wake.is_some_and(|wake| wake > at) => continue,
                Event::Wake(_) => self.ranks[rank].wake = None,
                Event::Frame { from, frame, .. } => {
                    self.ranks[rank].state.receive(from, frame, at).unwrap()
                }
                Event::Connect { from, .. } => self.accept(from, rank),
                Event::Connected { from, .. } => {
                    self.ranks[rank].state.connect(from, at);
                    self.link(rank, from);
                }
                Event::Refused { from, .. } => {
                    self.ranks[rank].state.record_refusal(from, at);
                    self.waiting.remove(&(rank, from));
                }
                Event::End { from, .. } => {
                    self.ranks[rank].state.disconnect(
                        from,
                        &io::ErrorKind::UnexpectedEof.into(),
                        at,
                    );
                }
                Event::Fault(_, RankFault::Dies(_) | RankFault::DiesBefore(_)) => self.end(rank),
                Event::Fault(_, RankFault::Stops(_)) => {
                    self.ranks[rank].condition = Condition::Stopped(at, None)
                }
                Event::Fault(_, RankFault::Pauses(_, pause)) => {
                    self.ranks[rank].condition = Condition::Stopped(at, Some(at + pause));
                }
                Event::Fault(_, RankFault::Late(..) | RankFault::Leaves(_)) => {}
            }
            if self.ranks[rank].condition == Condition::Running {
                self.go_on(rank);
            }
        }
        self
    }

    /// Gives a rank the heartbeats of all that are connected to it, which are no events of their
    /// own.
    fn hear(&mut self, rank: usize) {
        let now = self.now;
        if now < self.ranks[rank].heard + HEARTBEAT_INTERVAL {
            return;
        }
        self.ranks[rank].heard = now;
        let conditions: Vec<Condition> = self.ranks.iter().map(|rank| rank.condition).collect();
        let state = &mut self.ranks[rank].state;
        state.last_beat = now;
        for (other, condition) in conditions.into_iter().enumerate() {
            if !self.linked.contains(&(other, rank)) {
                continue;
            }
            let heard = match condition {
                Condition::Running | Condition::Gone => now,
                Condition::Stopped(since, _) => since,
            };
            let last = &mut state.peers[other].last_frame_received;
            *last = (*last).max(Some(heard));
        }
    }

    fn enter(&mut self, rank: usize) {
        let now = self.now;
        let (round, attaches) = (self.ranks[rank].completed, self.attaches);
        let attachment = attachment_of(rank, round, attaches);
        let vote = Vote {
            ballot: ballot_of(rank, round),
            attachment: &attachment,
        };
        let rank = &mut self.ranks[rank];
        rank.deadline = Some(now + TIMEOUT);
        rank.entered = now;
        rank.state.enter(GROUP, round, &vote, now);
    }

    /// Lets a rank do what it can do now.
    fn go_on(&mut self, rank: usize) {
        loop {
            self.go_on_with_the_round(rank);
            if self.ranks[rank].condition != Condition::Running || !self.send_notices(rank) {
                return;
            }
        }
    }

    /// Lets the thread of a rank that is in a round do what it can do now.
    fn go_on_with_the_round(&mut self, rank: usize) {
        while let Some(deadline) = self.ranks[rank].deadline {
            let number = self.ranks[rank].completed;
            let round = Round {
                number,
                sequence: number,
                operation: "barrier",
                timeout: TIMEOUT,
                deadline,
                votes_by_message: false,
            };
            match self.ranks[rank].state.next(GROUP, &round, self.now) {
                Ok(Next::Send {
                    receiver: to,
                    messages,
                }) => {
                    for body in messages {
                        let ballots = Notice {
                            receiver: to,
                            kind: Kind::Ballot,
                            group: GROUP,
                            round: number,
                            body,
                        };
                        self.send(rank, &ballots);
                    }
                }
                Ok(Next::Wait(deadline)) => {
                    assert!(deadline > self.now, "a wait that ends at once");
                    self.ranks[rank].wake = Some(deadline);
                    self.plan(deadline, Event::Wake(rank));
                    break;
                }
                Ok(Next::Done(tally)) => {
                    let ranks = 0..self.ranks.len();
                    let attaches = self.attaches;
                    let expected = ranks.map(|of| attachment_of(of, number, attaches));
                    assert!(tally.attachments.into_iter().eq(expected));
                    let ballots = ballots_of(self.ranks.len(), number);
                    assert_eq!(Some(tally.ballot), ballots.reduce(Ballot::merge));
                    self.ranks[rank].deadline = None;
                    self.ranks[rank].completed += 1;
                    self.plan_round(rank);
                }
                Err(error) => self.fail(rank, error),
            }
        }
    }

    /// Sends the notices of a rank. Returns `true` if there were any.
    fn send_notices(&mut self, rank: usize) -> bool {
        let notices = self.ranks[rank].state.notices();
        for notice in &notices {
            self.send(rank, notice);
        }
        !notices.is_empty()
    }

    fn fail(&mut self, rank: usize, error: CommError) {
        self.ranks[rank].deadline = None;
        self.ranks[rank].error = Some((self.now, error.clone()));
        let round = self.ranks[rank].completed;
        self.ranks[rank].state.fail(GROUP, round, &error);
        if self.ends_after_failure {
            self.leave(rank);
        }
    }

    /// Returns the ranks that are not at fault.
    fn sound(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|rank| rank.fault.is_none())
    }

    /// Checks that all ranks have completed all rounds.
    fn assert_success(&self) {
        for rank in &self.ranks {
            assert_eq!(rank.error, None, "rank {}", rank.state.rank);
            assert_eq!(rank.completed, self.rounds, "rank {}", rank.state.rank);
        }
    }

    /// Checks that all ranks that are not at fault have errors, and that these name ranks at fault
    /// only.
    fn assert_blame(&self) {
        self.assert_blame_of(self.sound());
    }

    /// Checks the same of these ranks.
    fn assert_blame_of<'w>(&'w self, ranks: impl Iterator<Item = &'w Rank>) {
        for rank in ranks {
            let Some((_, error)) = &rank.error else {
                panic!(
                    "rank {} has no error after {} rounds",
                    rank.state.rank, rank.completed
                );
            };
            let named = match error {
                CommError::RankLeft { rank, .. } => vec![*rank],
                CommError::Timeout { missing, .. } => missing.clone(),
                error => panic!("{error}"),
            };
            let is_at_fault = |&rank: &usize| self.ranks[rank].fault.is_some();
            assert!(
                !named.is_empty() && named.iter().all(is_at_fault),
                "rank {}: {error}",
                rank.state.rank
            );
        }
    }

    /// Checks that all ranks that are not at fault have failed at once.
    fn assert_failed_at_once(&self) {
        self.assert_failed_within(AT_ONCE);
    }

    /// Checks that all ranks that are not at fault have failed within this time.
    fn assert_failed_within(&self, limit: Duration) {
        let ripe = self
            .sound()
            .map(|rank| rank.entered)
            .max()
            .unwrap()
            .max(self.last_end);
        for rank in self.sound() {
            let failed = rank.error.as_ref().unwrap().0;
            assert!(
                failed <= ripe + limit,
                "rank {}: {:?} late",
                rank.state.rank,
                failed - ripe
            );
        }
    }
}
