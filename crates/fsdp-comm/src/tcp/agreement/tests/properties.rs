//! Properties of groups, whatever their ranks and the network do.

use super::*;

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

/// Checks in groups of these sizes that a rank that waits alone names rank 1, which dies. All
/// others come much later.
fn assert_named_by_a_rank_that_waits_alone(waiting: usize, sizes: &[usize]) {
    for &ranks in sizes {
        let others = (0..ranks).filter(|rank| ![1, waiting].contains(rank));
        let mut faults: Vec<_> = others
            .map(|rank| (rank, RankFault::Late(1, TIMEOUT / 2)))
            .collect();
        faults.push((1, RankFault::DiesBefore(1)));
        let world = World::new(ranks, 3, 5, &faults).run();
        world.assert_failed_at_once();
        assert!(matches!(
            world.ranks[waiting].error,
            Some((_, CommError::RankLeft { rank: 1, .. }))
        ));
    }
}

#[test]
fn a_rank_that_dies_is_named_by_a_rank_that_waits_alone_and_is_not_connected_to_it() {
    assert_named_by_a_rank_that_waits_alone(12, &[33, 50, 1024]);
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
    assert_named_by_a_rank_that_waits_alone(2, &[3, 8, 33, 50, 1024]);
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
                votes_by_message: false,
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
        let ballots = ballots_of(self.states.len(), round);
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
