//! The backend itself: options for joining a job, and the rounds of a group.

use std::sync::Arc;
use std::time::Duration;

#[cfg(any(feature = "mpi", feature = "nccl"))]
use bytes::Bytes;

use super::node::Node;
use super::rendezvous::{self, Participant};
use super::shared::SharedMemory;
use super::sockets::{self, Member};
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::backend::SETUP_ROUNDS;
#[cfg(any(test, feature = "nccl"))]
use crate::backend::Tally;
use crate::backend::{Backend, Members, Plan, Planner, Round, Vote};
use crate::blame;
use crate::deadline::{DEFAULT_DEADLINE, deadline_after};
use crate::environment::Environment;
use crate::error::CommError;
use crate::group::ProcessGroup;
use crate::link::{LinkedBackend, SimulatedLink};
use crate::store::TcpStore;

/// The options with which a process joins its job through the `tcp` backend.
///
/// ```no_run
/// use fsdp_comm::{Environment, TcpOptions};
/// let options = TcpOptions { shared_memory: false, ..TcpOptions::default() };
/// let group = options.connect(&Environment::from_env()?)?;
/// # Ok::<(), fsdp_comm::CommError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpOptions {
    /// The deadline of the rendezvous and of the group; [`DEFAULT_DEADLINE`] by default.
    pub deadline: Duration,
    /// `true`, which is the default, if this rank shares memory with others on its host. If one
    /// rank of a group does not, no rank of that group does.
    pub shared_memory: bool,
    /// The size of the largest job in which every two ranks connect at the start; 32 by default. In
    /// a larger job each rank connects to about `2 log2(ranks)` others at the start, and to others
    /// when it needs to. What rank 0 chooses counts for all ranks of a job.
    pub connect_all_up_to: usize,
    /// A simulated network link before this rank, for tests and benches; none by default.
    pub link: Option<SimulatedLink>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            deadline: DEFAULT_DEADLINE,
            shared_memory: true,
            connect_all_up_to: 32,
            link: None,
        }
    }
}

impl TcpOptions {
    /// Takes this process's place in its job: waits for all other ranks, and creates the group of
    /// all.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] names the ranks that came and those that did not.
    pub fn connect(&self, environment: &Environment) -> Result<ProcessGroup, CommError> {
        let backend = Arc::new(self.connect_backend(environment)?);
        let backend = LinkedBackend::behind(backend, self.link);
        let ranks_on_host = environment.local_world_size.unwrap_or(1);
        Ok(ProcessGroup::new(backend, self.deadline, ranks_on_host))
    }

    /// Joins the job as [`connect`](Self::connect) does, and returns the backend itself. A failure
    /// for which other ranks are to blame is recorded for the launcher.
    pub(crate) fn connect_backend(
        &self,
        environment: &Environment,
    ) -> Result<TcpBackend, CommError> {
        let meet = || {
            let deadline = deadline_after(self.deadline);
            let store = rendezvous::open(environment, self.deadline)?;
            let participant = Participant {
                rank: environment.rank,
                world_size: environment.world_size,
                address: environment.master(),
                timeout: self.deadline,
                deadline,
                connect_all_up_to: self.connect_all_up_to,
            };
            TcpBackend::meet(&participant, store, self.shared_memory)
        };
        blame::record(environment.rank, meet())
    }
}

/// One rank of one group.
#[derive(Debug)]
pub(crate) struct TcpBackend {
    node: Arc<Node>,
    members: Members,
    /// `None` if the group sends everything over sockets.
    memory: Option<SharedMemory>,
}

impl TcpBackend {
    /// Waits for all other ranks of a job at a store.
    pub(crate) fn meet(
        participant: &Participant,
        store: TcpStore,
        shared_memory: bool,
    ) -> Result<Self, CommError> {
        let node = rendezvous::meet(participant, store, shared_memory)?;
        let members = Members::world(participant.rank, participant.world_size);
        let round = Round::rendezvous(participant.timeout, participant.deadline);
        TcpBackend::new(node, members, &round)
    }

    /// Opens a group on this rank, and sets up its shared memory where all of its ranks can share
    /// it.
    fn new(node: Arc<Node>, members: Members, round: &Round<'_>) -> Result<Self, CommError> {
        // Frames for the group may have come already, from ranks that were faster.
        node.inbox()
            .change(|state| state.open(members.id, &members.global_ranks));
        let mut backend = TcpBackend {
            node,
            members,
            memory: None,
        };
        backend.memory = SharedMemory::new(backend.member(), round).inspect_err(|error| {
            // The others may still be in an earlier step, and would wait for this rank in vain.
            backend.node.abort(backend.members.id, 0, error);
        })?;
        Ok(backend)
    }

    /// Creates the group of `members`, which are ranks of this one: see [`Backend::subgroup`].
    pub(crate) fn create_subgroup(
        &self,
        round: &Round<'_>,
        members: Members,
    ) -> Result<Self, CommError> {
        TcpBackend::new(Arc::clone(&self.node), members, round)
    }

    /// Returns this rank of the group, for rounds over sockets.
    fn member(&self) -> Member<'_> {
        Member {
            node: &self.node,
            group: self.members.id,
            ranks: &self.members.global_ranks,
            rank: self.members.rank,
        }
    }

    /// Carries out a round of the group's operations up to the plan, which this returns. A group
    /// that has failed stays failed.
    pub(crate) fn plan<'p>(
        &self,
        round: &Round<'_>,
        vote: &Vote<'_>,
        plan: Planner<'p, '_>,
    ) -> Result<Option<Plan<'p>>, CommError> {
        if let Some(failure) = self.node.failure(self.members.id, round, &[]) {
            return Err(failure);
        }
        // All ranks of the group have found the same when they set it up, so all go the same way.
        match &self.memory {
            Some(memory) if !round.votes_by_message => {
                plan(&memory.vote(self.member(), round, vote)?)
            }
            _ => plan(&self.member().vote(round, vote)?),
        }
    }
}

/// The votes that a backend leaves out while all goes well, and makes up for if something goes
/// wrong.
#[cfg(any(test, feature = "nccl"))]
impl TcpBackend {
    /// Returns the number of the first round, up to `last_number`, that another rank has entered
    /// but this one has not. It may be a round that is long over on this rank.
    pub(crate) fn awaited_round(&self, last_number: u64) -> Option<u64> {
        let inbox = self.node.inbox().lock();
        inbox.awaited_round(self.members.id, last_number)
    }

    /// Votes in a round that this rank has left out, with all others, which must call this too. Any
    /// thread may, also while another one is in a later round.
    pub(crate) fn vote_late(&self, round: &Round<'_>, vote: &Vote<'_>) -> Result<Tally, CommError> {
        self.member().vote(round, vote)
    }
}

/// The methods for backends that move only tensors in another way.
#[cfg(any(feature = "mpi", feature = "nccl"))]
impl TcpBackend {
    /// Waits for all ranks of a new group, before any of its operations, and exchanges a record
    /// with them.
    pub(crate) fn exchange_at_setup(
        &self,
        round: &Round<'_>,
        record: &[u8],
    ) -> Result<Vec<Bytes>, CommError> {
        const LAST_SETUP_ROUND: u64 = SETUP_ROUNDS - 1;
        self.member()
            .exchange(round, LAST_SETUP_ROUND, record)
            .inspect_err(|error| self.abort(LAST_SETUP_ROUND, error))
    }

    /// Returns the reason that a round which still needs all other ranks cannot end, if there is
    /// one.
    pub(crate) fn failure(&self, round: &Round<'_>) -> Option<CommError> {
        let others: Vec<usize> = self.member().others().collect();
        self.node.failure(self.members.id, round, &others)
    }

    /// Returns the error that has ended the group in this round or an earlier one, if this rank has
    /// heard of one.
    #[cfg(feature = "nccl")]
    pub(crate) fn group_error(&self, round: &Round<'_>) -> Option<CommError> {
        let inbox = self.node.inbox().lock();
        inbox.group_error(self.members.id, round)
    }

    /// Tells all ranks of the job that this one leaves, and waits until all others have told the
    /// same, but no longer than `timeout` (`None` waits without end). Returns `true` if all have; a
    /// rank that ends or stops without a word has not.
    #[cfg(feature = "mpi")]
    pub(crate) fn say_goodbye(&self, timeout: Option<Duration>) -> bool {
        self.node.say_goodbye(timeout)
    }
}

impl Backend for TcpBackend {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn round<'p>(
        &self,
        round: &Round<'_>,
        vote: &Vote<'_>,
        send: &[u8],
        plan: Planner<'p, '_>,
    ) -> Result<(), CommError> {
        // If no bytes move, or a rank has an error, the round ends here, in the same way on all
        // ranks, because all have the same outcome.
        let Some(plan) = self.plan(round, vote, plan)? else {
            return Ok(());
        };
        match &self.memory {
            Some(memory) => memory.transfer(self.member(), round, send, plan),
            None => sockets::transfer(self.member(), round, send, plan),
        }
    }

    fn subgroup(&self, round: &Round<'_>, members: Members) -> Result<Arc<dyn Backend>, CommError> {
        Ok(Arc::new(self.create_subgroup(round, members)?))
    }

    fn abort(&self, round: u64, error: &CommError) {
        self.node.abort(self.members.id, round, error);
    }
}

impl Drop for TcpBackend {
    fn drop(&mut self) {
        self.node.inbox().lock().close(self.members.id);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::thread;
    use std::time::Instant;

    use super::super::frame::{CHUNK_BYTES, Kind, Notice, OutgoingFrame};
    use super::*;
    use crate::backend::{Destination, Direction, Filler, SETUP_ROUNDS};
    use crate::ballot::Ballot;

    /// A vote in which nothing is compared.
    const BLANK: Vote<'_> = Vote {
        ballot: Ballot::blank(),
        attachment: &[],
    };

    /// Joins a job of two ranks.
    fn connect(rank: usize, port: u16, shared_memory: bool) -> Arc<TcpBackend> {
        let environment = Environment::from_variables(|name| match name {
            "RANK" => Some(rank.to_string()),
            "WORLD_SIZE" => Some("2".to_owned()),
            "MASTER_ADDR" => Some("127.0.0.1".to_owned()),
            "MASTER_PORT" => Some(port.to_string()),
            "FSDP_JOB_ID" => Some("job".to_owned()),
            _ => None,
        });
        let options = TcpOptions {
            shared_memory,
            ..TcpOptions::default()
        };
        Arc::new(options.connect_backend(&environment.unwrap()).unwrap())
    }

    /// Returns both ranks of a job.
    fn pair(shared_memory: bool) -> [Arc<TcpBackend>; 2] {
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        thread::scope(|scope| {
            let second = scope.spawn(|| connect(1, port, shared_memory));
            [connect(0, port, shared_memory), second.join().unwrap()]
        })
    }

    /// Returns the first round of a group, which may take so long.
    fn round(timeout: Duration) -> Round<'static> {
        Round {
            number: SETUP_ROUNDS,
            sequence: 0,
            operation: "test",
            timeout,
            deadline: deadline_after(timeout),
            votes_by_message: false,
        }
    }

    /// Returns a new group of both ranks, for this one of them.
    fn both(rank: usize) -> Members {
        Members {
            id: 7,
            global_ranks: vec![0, 1],
            rank,
        }
    }

    fn gather_much(backend: Arc<TcpBackend>) {
        let own = vec![backend.members.rank as u8 + 1; 20 << 20];
        let mut all = vec![0; 2 * own.len()];
        ProcessGroup::new(backend, DEFAULT_DEADLINE, 1)
            .all_gather_into(&mut all, &own)
            .unwrap();
        assert!(
            all.iter()
                .enumerate()
                .all(|(at, &byte)| usize::from(byte) == at / own.len() + 1)
        );
    }

    #[test]
    fn only_a_few_chunks_of_a_rank_are_in_memory_however_much_it_sends() {
        let [backend, other] = pair(false);
        thread::scope(|scope| {
            scope.spawn(|| gather_much(other));
            let node = Arc::clone(&backend.node);
            let gathering = scope.spawn(|| gather_much(backend));
            let mut max_chunks = 0;
            while !gathering.is_finished() {
                max_chunks = max_chunks.max(node.inbox().lock().max_waiting_chunks());
                thread::sleep(Duration::from_micros(20));
            }
            assert!((1..=4).contains(&max_chunks), "{max_chunks} chunks waited");
        });
    }

    #[test]
    fn only_a_few_chunks_wait_for_a_rank_that_takes_them_slowly_and_sends_none() {
        const BYTES: usize = 20 * CHUNK_BYTES;
        let [receiver, sender] = pair(false);
        let (round, bytes) = (round(Duration::from_secs(20)), vec![1; BYTES]);
        let mut max_chunks = 0;
        thread::scope(|scope| {
            scope.spawn(|| {
                let fillers = [(), ()].map(|()| Filler::new(Vec::new()));
                let destination = Destination::Copy(fillers.into());
                sender
                    .round(
                        &round,
                        &BLANK,
                        &bytes,
                        one_way(vec![0..BYTES, 0..0], vec![0..0; 2], destination),
                    )
                    .unwrap();
            });
            let take = Box::new(|offset: usize, pieces: &[&[u8]]| {
                assert!(
                    pieces
                        .iter()
                        .flat_map(|piece| *piece)
                        .all(|byte| *byte == 1)
                );
                if offset.is_multiple_of(CHUNK_BYTES) {
                    thread::sleep(Duration::from_millis(20));
                    max_chunks = max_chunks.max(receiver.node.inbox().lock().max_waiting_chunks());
                }
            });
            let ranges = vec![0..BYTES; 2];
            let planner = one_way(vec![0..BYTES, 0..0], ranges, Destination::Reduce(take));
            receiver.round(&round, &BLANK, &bytes, planner).unwrap();
        });
        assert!((1..=4).contains(&max_chunks), "{max_chunks} chunks waited");
    }

    /// Returns a planner for a round in which all bytes go to rank 0.
    fn one_way<'p>(
        sent_ranges: Vec<Range<usize>>,
        received_ranges: Vec<Range<usize>>,
        destination: Destination<'p>,
    ) -> Planner<'p, 'p> {
        let largest_transfer_bytes = received_ranges
            .iter()
            .chain(&sent_ranges)
            .map(ExactSizeIterator::len)
            .max()
            .unwrap_or(0);
        let plan = Plan {
            direction: Direction::Gather { root: 0 },
            largest_transfer_bytes,
            sent_ranges,
            received_ranges,
            destination,
        };
        Box::new(|_| Ok(Some(plan)))
    }

    #[test]
    fn a_group_that_fails_in_the_middle_of_a_frame_does_not_end_the_connection_of_others() {
        let ranks = pair(false);
        let [sender, receiver] = &ranks;
        let round = round(Duration::from_millis(150));
        let (is_over, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            // Nothing is taken from the socket until it takes no more, and the round's deadline is
            // over.
            let busy = receiver.node.inbox().lock();
            scope.spawn(|| {
                let body = vec![0; CHUNK_BYTES];
                let chunk = OutgoingFrame {
                    receiver: 1,
                    kind: Kind::Chunk,
                    group: 7,
                    round: round.number,
                    body: &body,
                };
                while !is_over.load(Ordering::Relaxed) && sender.node.send(&chunk, &round).is_ok() {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
            let mut before = usize::MAX;
            while Instant::now() < round.deadline || sent.load(Ordering::Relaxed) != before {
                before = sent.load(Ordering::Relaxed);
                thread::sleep(Duration::from_millis(300));
            }
            is_over.store(true, Ordering::Relaxed);
            drop(busy);
        });
        thread::scope(|scope| {
            let barriers = ranks
                .map(|rank| scope.spawn(|| ProcessGroup::new(rank, DEFAULT_DEADLINE, 1).barrier()));
            barriers
                .into_iter()
                .for_each(|barrier| barrier.join().unwrap().unwrap());
        });
    }

    #[test]
    fn a_rank_that_leaves_is_not_taken_for_one_that_died_by_a_rank_that_still_sends_to_it() {
        let [receiver, sender] = pair(false);
        let round = round(Duration::from_secs(20));
        let heartbeat = |to| Notice::new(to, Kind::Heartbeat, &b""[..]);
        let beat = |rank: &TcpBackend, to| rank.node.write(&heartbeat(to), &round);
        // While the receiver's inbox is locked, it reads none of the frames that the other rank has
        // sent.
        let busy = receiver.node.inbox().lock();
        // Then the other rank sends more small frames than the system delivers at once, and leaves.
        // The last of them, and the goodbye, still wait in the system.
        (0..100).for_each(|_| beat(&sender, 0).unwrap());
        drop(sender);
        thread::scope(|scope| {
            let sends = scope.spawn(|| while beat(&receiver, 1).is_ok() {});
            // Let it fail to send to the rank that has left, before it reads on.
            thread::sleep(Duration::from_millis(300));
            drop(busy);
            sends.join().unwrap();
        });
        let error = receiver.node.send(&heartbeat(1), &round).unwrap_err();
        assert!(
            matches!(&error, CommError::RankLeft { reason, .. } if reason == "has left the group"),
            "{error}"
        );
    }

    #[test]
    fn ranks_make_up_for_a_vote_that_they_have_left_out() {
        let [first, second] = pair(false);
        let late = Round {
            number: SETUP_ROUNDS + 2,
            ..round(Duration::from_secs(20))
        };
        let failed = Ballot {
            failed_rank: 0,
            ..Ballot::blank()
        };
        let vote = Vote {
            ballot: failed,
            ..BLANK
        };
        thread::scope(|scope| {
            let failed = scope.spawn(|| first.vote_late(&late, &vote));
            while second.awaited_round(SETUP_ROUNDS + 7) != Some(late.number) {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(second.awaited_round(SETUP_ROUNDS + 1), None);
            let tally = second.vote_late(&late, &BLANK).unwrap();
            assert!(!tally.ballot.is_unanimous());
            assert_eq!(failed.join().unwrap(), Ok(tally));
        });
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_rank_that_comes_to_make_a_group_after_the_others_gave_up_gets_their_error() {
        let [first, second] = pair(true);
        let error = first
            .create_subgroup(&round(Duration::from_millis(200)), both(0))
            .unwrap_err();
        assert!(
            matches!(&error, CommError::Timeout { missing, .. } if missing[..] == [1]),
            "{error}"
        );
        // The second rank has got the first message of the first one, and no other one will come.
        assert_eq!(
            second
                .create_subgroup(&round(Duration::from_secs(20)), both(1))
                .unwrap_err(),
            error
        );
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_rank_whose_deadline_ends_before_it_hears_why_another_gave_up_has_the_same_error() {
        let [first, second] = pair(true);
        let barrier = |rank: &TcpBackend, timeout| {
            rank.round(&round(timeout), &BLANK, b"", Box::new(|_| Ok(None)))
        };
        let error = barrier(&second, Duration::from_millis(100)).unwrap_err();
        assert!(
            matches!(&error, CommError::Timeout { missing, .. } if missing[..] == [0]),
            "{error}"
        );
        thread::scope(|scope| {
            let late = scope.spawn(|| barrier(&first, Duration::ZERO));
            thread::sleep(Duration::from_millis(200));
            second.abort(SETUP_ROUNDS, &error);
            assert_eq!(late.join().unwrap(), Err(error));
        });
    }

    #[test]
    fn a_rank_that_has_found_an_error_too_returns_that_of_the_first_to_give_up() {
        let [first, second] = pair(true);
        let short = round(Duration::from_millis(100));
        let error = second
            .round(&short, &BLANK, b"", Box::new(|_| Ok(None)))
            .unwrap_err();
        let own_error = short.rank_left_error(1, "of this test");
        let conclude = |error: CommError| {
            let memory = first.memory.as_ref().unwrap();
            memory.conclude(first.member(), &short, 0, Err(error))
        };
        // The first one has not told its error yet, or never does.
        assert_eq!(conclude(own_error.clone()), Err(own_error.clone()));
        thread::scope(|scope| {
            let late = scope.spawn(|| conclude(own_error));
            thread::sleep(Duration::from_millis(50));
            second.abort(SETUP_ROUNDS, &error);
            assert_eq!(late.join().unwrap(), Err(error));
        });
    }
}
