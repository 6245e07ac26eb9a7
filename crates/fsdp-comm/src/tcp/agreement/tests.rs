//! Tests of whole groups in one thread: the states of all ranks, a network that delays and reorders
//! frames, and a clock that jumps from one event to the next. A seed decides everything that is
//! random.
//!
//! Each rank is connected to its neighbours at the start, and to others once it sends something to
//! them or they to it.

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
    let ballot = Ballot::new(&round).unwrap();
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
                    self.ranks[rank].state.record_refusal(from);
                    self.waiting.remove(&(rank, from));
                }
                Event::End { from, .. } => {
                    self.ranks[rank]
                        .state
                        .disconnect(from, &io::ErrorKind::UnexpectedEof.into());
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
                    let ballots = (0..self.ranks.len()).map(|of| ballot_of(of, number));
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

/// Runs a check in groups of many sizes, the last of them the largest one, with many seeds.
fn with_many_seeds(largest: usize, check: impl Fn(usize, u64, &mut Random)) {
    let seeds = std::env::var("FSDP_TEST_SEEDS").map_or(300, |seeds| seeds.parse().unwrap());
    for seed in 0..seeds {
        let mut random = Random::new(seed);
        let ranks = 2 + random.below(if seed % 10 == 0 { 90 } else { 20 });
        check(ranks, seed, &mut random);
    }
    check(largest, 1000, &mut Random::new(1000));
}

#[test]
fn an_agreement_takes_32_bytes_a_message_and_ten_messages_of_each_of_1024_ranks() {
    for ranks in (1..20).chain([31_usize, 32, 33, 64, 100, 257, 1023, 1024]) {
        let digits = ranks.next_power_of_two().ilog2() as usize;
        let mut world = World::new(ranks, 3, 1, &[]);
        world.attaches = false;
        let world = world.run();
        world.assert_success();
        for rank in &world.ranks {
            assert_eq!(
                (rank.sent(), rank.ballot_bytes),
                (3 * digits, 3 * digits * MESSAGE_BYTES),
                "rank {} of {ranks}",
                rank.state.rank
            );
        }
    }
    assert_eq!(MESSAGE_BYTES, 32);
}

/// The messages of a rank in the handshake of a connection: a greeting and a proof, or an answer
/// and a welcome.
const HANDSHAKE: usize = 2;

#[test]
fn the_rendezvous_and_a_barrier_of_1024_ranks_take_few_connections_and_messages_of_each() {
    // The store of rank 0 hears from all ranks in any case, as they know no other address. It is
    // not part of this.
    for (ranks, digits) in [(33, 6), (600, 10), (1023, 10), (1024, 10)] {
        let world = World::new(ranks, 1, 1, &[]).run();
        world.assert_success();
        for rank in 0..ranks {
            let connections: usize = world
                .ends
                .range((rank, 0)..(rank + 1, 0))
                .map(|(_, count)| count)
                .sum();
            assert!(
                connections <= 2 * digits,
                "rank {rank} of {ranks}: {connections} connections"
            );
            let messages = HANDSHAKE * connections + world.ranks[rank].sent();
            assert!(
                messages <= 5 * digits,
                "rank {rank} of {ranks}: {messages} messages"
            );
        }
    }
}

#[test]
fn the_news_of_an_end_takes_few_messages_of_each_rank() {
    for (ranks, digits) in [(33, 6), (600, 10), (1023, 10), (1024, 10)] {
        let world = World::new(ranks, 2, 1, &[(ranks / 3, RankFault::DiesBefore(1))]).run();
        world.assert_blame();
        world.assert_failed_at_once();
        for rank in world.sound() {
            // At most one connection: the rank looks for itself whether the other one has ended.
            assert!(rank.connects <= 1, "rank {} of {ranks}", rank.state.rank);
            // Beside its ballots, the rank tells its neighbours once each that the other one has
            // ended, since which round it is absent, and that the group has failed.
            assert!(
                rank.sent() <= 8 * digits,
                "rank {} of {ranks}: {} ballots, {} aborts, {} ends",
                rank.state.rank,
                rank.ballots,
                rank.aborts,
                rank.ends
            );
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_by_a_rank_that_waits_alone_and_is_not_connected_to_it() {
    for ranks in [33, 50, 1024] {
        // All but rank 12 come much later.
        let others = (0..ranks).filter(|rank| ![1, 12].contains(rank));
        let mut faults: Vec<_> = others
            .map(|rank| (rank, RankFault::Late(1, TIMEOUT / 2)))
            .collect();
        faults.push((1, RankFault::DiesBefore(1)));
        let world = World::new(ranks, 3, 5, &faults).run();
        world.assert_failed_at_once();
        assert!(matches!(
            world.ranks[12].error,
            Some((_, CommError::RankLeft { rank: 1, .. }))
        ));
    }
}

#[test]
fn all_ranks_get_the_ballots_and_attachments_of_all_in_whatever_order_frames_come() {
    with_many_seeds(1024, |ranks, seed, _| {
        World::new(ranks, 4, seed, &[]).run().assert_success()
    });
}

#[test]
fn exactly_the_ranks_that_are_late_are_named_by_all() {
    with_many_seeds(200, |ranks, seed, random| {
        let late = [random.below(ranks), random.below(ranks)];
        let faults = late.map(|rank| (rank, RankFault::Late(1, 2 * TIMEOUT)));
        let world = World::new(ranks, 3, seed, &faults).run();
        let mut expected = late.to_vec();
        expected.sort_unstable();
        expected.dedup();
        if expected.len() == ranks {
            return;
        }
        let first = world.ranks[0].error.as_ref().unwrap().1.clone();
        let CommError::Timeout {
            missing,
            sequence: 1,
            ..
        } = &first
        else {
            panic!("{first}")
        };
        assert_eq!(*missing, expected, "seed {seed}");
        for rank in &world.ranks {
            assert_eq!(
                rank.error.as_ref().map(|(_, error)| error),
                Some(&first),
                "seed {seed}"
            );
            assert_eq!(rank.completed, 1, "seed {seed}");
        }
    });
}

#[test]
fn a_rank_that_is_late_until_the_deadline_costs_few_connections() {
    let mut random = Random::new(7);
    for (ranks, digits) in [(33, 6), (100, 7), (600, 10), (1024, 10)] {
        let late = random.below(ranks);
        let world = World::new(ranks, 2, 7, &[(late, RankFault::Late(1, 2 * TIMEOUT))]).run();
        world.assert_blame();
        // All connect to the late rank itself. The others help each other.
        let connects: usize = world.ranks.iter().map(|rank| rank.connects).sum();
        assert!(
            connects <= ranks * digits,
            "{ranks} ranks: {connects} connections"
        );
    }
}

#[test]
fn ranks_that_die_before_a_round_are_named_at_once() {
    with_many_seeds(1024, |ranks, seed, random| {
        // Neighbours, too: they are often on one host.
        let first = random.below(ranks);
        let victims = (first..first + 1 + random.below(2)).map(|rank| rank % ranks);
        let faults: Vec<_> = victims
            .map(|rank| (rank, RankFault::DiesBefore(1)))
            .collect();
        let world = World::new(ranks, 3, seed, &faults).run();
        if faults.len() < ranks {
            world.assert_blame();
            world.assert_failed_at_once();
            assert!(world.sound().all(|rank| rank.completed == 1), "seed {seed}");
        }
    });
}

#[test]
fn a_rank_that_dies_is_named_by_a_rank_that_waits_alone() {
    for ranks in [3, 8, 33, 50, 1024] {
        // All but rank 2 come much later.
        let others = (0..ranks).filter(|rank| ![1, 2].contains(rank));
        let mut faults: Vec<_> = others
            .map(|rank| (rank, RankFault::Late(1, TIMEOUT / 2)))
            .collect();
        faults.push((1, RankFault::DiesBefore(1)));
        let world = World::new(ranks, 3, 5, &faults).run();
        world.assert_failed_at_once();
        assert!(matches!(
            world.ranks[2].error,
            Some((_, CommError::RankLeft { rank: 1, .. }))
        ));
    }
}

#[test]
fn a_rank_that_leaves_between_rounds_spoils_only_the_next() {
    with_many_seeds(1024, |ranks, seed, random| {
        let world = World::new(
            ranks,
            3,
            seed,
            &[(random.below(ranks), RankFault::Leaves(2))],
        )
        .run();
        world.assert_blame();
        world.assert_failed_at_once();
        assert!(world.sound().all(|rank| rank.completed == 2), "seed {seed}");
    });
}

#[test]
fn ranks_may_leave_after_the_last_round() {
    with_many_seeds(200, |ranks, seed, _| {
        let faults: Vec<_> = (0..ranks)
            .map(|rank| (rank, RankFault::Leaves(2)))
            .collect();
        World::new(ranks, 2, seed, &faults).run().assert_success();
    });
}

#[test]
fn a_rank_that_dies_at_any_time_is_named() {
    with_many_seeds(1024, |ranks, seed, random| {
        let victim = random.below(ranks);
        let world = World::new(
            ranks,
            6,
            seed,
            &[(victim, RankFault::Dies(random.within(3 * SKEW)))],
        )
        .run();
        world.assert_blame();
        world.assert_failed_at_once();
    });
}

#[test]
fn a_rank_that_stops_at_any_time_is_named() {
    with_many_seeds(400, |ranks, seed, random| {
        let victim = random.below(ranks);
        let world = World::new(
            ranks,
            6,
            seed,
            &[(victim, RankFault::Stops(random.within(3 * SKEW)))],
        )
        .run();
        world.assert_blame();
    });
}

#[test]
fn a_rank_that_pauses_spoils_nothing() {
    with_many_seeds(200, |ranks, seed, random| {
        let fault = RankFault::Pauses(random.within(3 * SKEW), random.within(TIMEOUT / 2));
        World::new(ranks, 6, seed, &[(random.below(ranks), fault)])
            .run()
            .assert_success();
    });
}

#[test]
fn a_rank_that_was_stopped_until_the_others_gave_up_blames_nobody_else() {
    with_many_seeds(200, |ranks, seed, random| {
        let victim = random.below(ranks);
        let fault = RankFault::Pauses(random.within(3 * SKEW), 2 * TIMEOUT);
        let world = World::new(ranks, 6, seed, &[(victim, fault)]).run();
        world.assert_blame_of(world.ranks.iter());
    });
}

#[test]
fn a_rank_that_stops_after_it_has_entered_keeps_no_ballot_from_the_others() {
    with_many_seeds(200, |ranks, seed, random| {
        // It stops while all wait for the last rank.
        let victim = random.below(ranks - 1);
        let faults = [
            (victim, RankFault::Stops(2 * SKEW)),
            (ranks - 1, RankFault::Late(0, 3 * SKEW)),
        ];
        let world = World::new(ranks, 2, seed, &faults).run();
        let all_but_victim = world.ranks.iter().filter(|rank| rank.state.rank != victim);
        for rank in all_but_victim {
            assert_eq!(
                rank.completed, 1,
                "rank {}, seed {seed}: {:?}",
                rank.state.rank, rank.error
            );
            let named = &rank.error.as_ref().unwrap().1;
            assert!(
                matches!(named, CommError::RankLeft { rank, .. } if *rank == victim),
                "{named}"
            );
        }
    });
}

/// A group of ranks that are in several rounds at once, and whose frames arrive at once.
struct LateVotes {
    states: Vec<InboxState>,
    /// The rounds that each rank is in, with the outcomes of those that are over.
    rounds: Vec<BTreeMap<u64, Option<Tally>>>,
    now: Instant,
}

impl LateVotes {
    fn new(ranks: usize) -> Self {
        let now = Instant::now();
        let all: Vec<usize> = (0..ranks).collect();
        let state = |rank| {
            let mut state = InboxState::new(rank, ranks, TIMEOUT, now);
            state.open(GROUP, &all);
            state
        };
        LateVotes {
            states: all.iter().map(|&rank| state(rank)).collect(),
            rounds: vec![BTreeMap::new(); ranks],
            now,
        }
    }

    fn enter(&mut self, rank: usize, round: u64) {
        let attachment = attachment_of(rank, round, true);
        let vote = Vote {
            ballot: ballot_of(rank, round),
            attachment: &attachment,
        };
        self.states[rank].enter(GROUP, round, &vote, self.now);
        self.rounds[rank].insert(round, None);
        while (0..self.states.len()).any(|rank| self.go_on(rank)) {}
    }

    /// Lets a rank send what it can in all its rounds. Returns `false` if it can do nothing.
    fn go_on(&mut self, rank: usize) -> bool {
        for number in self.rounds[rank].keys().copied().collect::<Vec<_>>() {
            if self.rounds[rank][&number].is_some() {
                continue;
            }
            let round = Round {
                number,
                sequence: number,
                operation: "barrier",
                timeout: TIMEOUT,
                deadline: self.now + TIMEOUT,
            };
            match self.states[rank].next(GROUP, &round, self.now).unwrap() {
                Next::Send { receiver, messages } => {
                    for message in messages {
                        let frame = Frame {
                            kind: Kind::Ballot,
                            group: GROUP,
                            round: number,
                            body: message.to_vec(),
                        };
                        let receiver = &mut self.states[receiver];
                        receiver.receive(rank, frame, self.now).unwrap();
                    }
                    return true;
                }
                Next::Done(tally) => {
                    self.rounds[rank].insert(number, Some(tally));
                    return true;
                }
                Next::Wait(_) => {}
            }
        }
        false
    }

    /// Returns the numbers of ranks for which a round is over, and checks its outcome.
    fn finished(&self, round: u64) -> usize {
        let ballots = (0..self.states.len()).map(|of| ballot_of(of, round));
        let expected = ballots.reduce(Ballot::merge);
        let tallies = self
            .rounds
            .iter()
            .filter_map(|rounds| rounds.get(&round)?.as_ref());
        tallies
            .map(|tally| assert_eq!(Some(tally.ballot), expected))
            .count()
    }
}

#[test]
fn ranks_may_enter_a_round_that_they_have_left_out_while_they_are_in_a_later_one() {
    for ranks in [2, 5, 33] {
        let mut group = LateVotes::new(ranks);
        let others = 1..ranks;
        (0..ranks).for_each(|rank| group.enter(rank, 2));
        assert_eq!(group.finished(2), ranks);
        // All leave out round 4, and enter round 6, but rank 0 enters round 4 after all.
        others.clone().for_each(|rank| group.enter(rank, 6));
        assert!(
            others
                .clone()
                .all(|rank| group.states[rank].awaited_round(GROUP, 5).is_none())
        );
        group.enter(0, 4);
        let told = others
            .clone()
            .filter(|&rank| group.states[rank].awaited_round(GROUP, 6) == Some(4));
        assert_eq!(
            told.collect::<Vec<_>>(),
            [ranks - 1],
            "it has got the first message"
        );
        assert_eq!(group.states[ranks - 1].awaited_round(GROUP, 3), None);
        // The others hear it from each other, once they enter it too.
        others.clone().rev().for_each(|rank| group.enter(rank, 4));
        assert_eq!((group.finished(4), group.finished(6)), (ranks, 0));
        group.enter(0, 6);
        assert_eq!(group.finished(6), ranks);
    }
}

#[test]
fn ballots_of_a_round_that_is_left_out_do_not_pile_up() {
    let mut group = LateVotes::new(5);
    group.enter(0, 4);
    for round in [6, 8, 10, 12] {
        (0..5).for_each(|rank| group.enter(rank, round));
        assert_eq!(group.finished(round), 5);
    }
    assert_eq!(group.states[4].awaited_round(GROUP, 20), None);
    assert!(group.states[4].groups[&GROUP].polls.len() <= 2);
}
