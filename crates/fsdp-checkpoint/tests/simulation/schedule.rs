//! One rank runs at a time, and a seed decides which: so every run can be repeated exactly.

use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use fsdp_comm::Turns;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The panic of a rank that is killed.
#[derive(Debug)]
pub(crate) struct Killed;

thread_local! {
    /// The rank whose thread this is.
    static RANK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns the rank that runs on this thread; `None` on a thread of no rank.
pub(crate) fn current_rank() -> Option<usize> {
    RANK.get()
}

/// The state of a rank in the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It has not begun.
    Absent,
    /// It may run, or runs.
    Ready,
    /// It waits for something that another rank does.
    Waiting,
    /// It waited while no other rank could go on either. When it runs again, its wait has failed.
    GivenUp,
    /// It has ended.
    Done,
}

#[derive(Debug)]
struct State {
    ranks: Vec<Standing>,
    killed: Vec<bool>,
    /// The only rank that may run now.
    running: Option<usize>,
    random: StdRng,
    /// A rank that is seldom let run.
    slow: Option<usize>,
    /// `true` if at some time all ranks waited for each other.
    hung: bool,
}

/// The order in which the ranks of one job run.
#[derive(Debug)]
pub(crate) struct Schedule {
    state: Mutex<State>,
    /// For each rank, the signal that it may run.
    turns: Vec<Condvar>,
}

impl Schedule {
    pub(crate) fn new(ranks: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let slow = (ranks > 1 && random.random_bool(0.3)).then(|| random.random_range(0..ranks));
        let (standing, killed) = (vec![Standing::Absent; ranks], vec![false; ranks]);
        let state = State {
            ranks: standing,
            killed,
            running: None,
            random,
            slow,
            hung: false,
        };
        Schedule {
            state: Mutex::new(state),
            turns: (0..ranks).map(|_| Condvar::new()).collect(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn ranks(&self) -> usize {
        self.turns.len()
    }

    /// Marks a rank as killed: it ends at the next thing that it does.
    pub(crate) fn kill(&self, rank: usize) {
        let mut state = self.lock();
        state.killed[rank] = true;
        wake_all(&mut state);
    }

    pub(crate) fn is_killed(&self, rank: usize) -> bool {
        self.lock().killed[rank]
    }

    /// Returns `true` if at some time all ranks waited for each other.
    pub(crate) fn has_hung(&self) -> bool {
        self.lock().hung
    }

    /// Perhaps lets another rank run. The rank whose thread this is ends here if it was killed
    /// meanwhile.
    pub(crate) fn pass(&self) {
        let Some(rank) = current_rank() else { return };
        let mut state = self.lock();
        if state.random.random_bool(0.3) {
            self.next(&mut state);
            state = self.until_turn(state, rank);
        }
        end_if_killed(state, rank);
    }

    /// Chooses the rank that runs next.
    fn next(&self, state: &mut State) {
        let mut ready: Vec<usize> = (0..state.ranks.len())
            .filter(|&rank| state.ranks[rank] == Standing::Ready)
            .collect();
        if ready.is_empty() {
            // Nobody can go on: the deadline of all that wait is over.
            for standing in &mut state.ranks {
                if *standing == Standing::Waiting {
                    *standing = Standing::GivenUp;
                    state.hung = true;
                }
            }
            ready = (0..state.ranks.len())
                .filter(|&rank| state.ranks[rank] == Standing::GivenUp)
                .collect();
        }
        if ready.len() > 1 && state.random.random_bool(0.95) {
            let slow = state.slow;
            ready.retain(|&rank| Some(rank) != slow);
        }
        state.running =
            (!ready.is_empty()).then(|| ready[state.random.random_range(0..ready.len())]);
        if let Some(rank) = state.running {
            self.turns[rank].notify_one();
        }
    }

    /// Waits until this rank may run.
    fn until_turn<'s>(
        &'s self,
        mut state: MutexGuard<'s, State>,
        rank: usize,
    ) -> MutexGuard<'s, State> {
        while state.running != Some(rank) {
            state = self.turns[rank]
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

/// Makes all ranks that wait ready, because what they wait for may have happened.
fn wake_all(state: &mut State) {
    for standing in &mut state.ranks {
        if *standing == Standing::Waiting {
            *standing = Standing::Ready;
        }
    }
}

/// Ends the thread of a rank that has been killed, by a panic.
fn end_if_killed(state: MutexGuard<'_, State>, rank: usize) {
    let is_killed = state.killed[rank];
    drop(state);
    // While a rank ends, its values are dropped, and that may lead here again. A second panic would
    // abort the program.
    if is_killed && !std::thread::panicking() {
        resume_unwind(Box::new(Killed));
    }
}

impl Turns for Schedule {
    fn begin(&self, rank: usize) {
        RANK.set(Some(rank));
        let mut state = self.lock();
        state.ranks[rank] = Standing::Ready;
        // The ranks start together: the last one to begin chooses the first to run.
        if state
            .ranks
            .iter()
            .all(|standing| *standing != Standing::Absent)
        {
            self.next(&mut state);
        }
        drop(self.until_turn(state, rank));
    }

    fn end(&self) {
        let Some(rank) = RANK.take() else { return };
        let mut state = self.lock();
        state.ranks[rank] = Standing::Done;
        self.next(&mut state);
    }

    fn wait(&self) -> bool {
        let Some(rank) = current_rank() else {
            return true;
        };
        let mut state = self.lock();
        if !state.killed[rank] {
            state.ranks[rank] = Standing::Waiting;
            self.next(&mut state);
            state = self.until_turn(state, rank);
        }
        let has_given_up = state.ranks[rank] == Standing::GivenUp;
        state.ranks[rank] = Standing::Ready;
        end_if_killed(state, rank);
        !has_given_up
    }

    fn changed(&self) {
        wake_all(&mut self.lock());
    }
}
