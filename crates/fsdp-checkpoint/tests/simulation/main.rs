//! The deterministic simulation of saves: real code of `fsdp-checkpoint`, `fsdp-formats` and
//! `fsdp-comm` on a simulated disk. It finds nothing, and finds every bug that is put in on
//! purpose.
//!
//! A seed decides everything: how many ranks a job has, which of them runs when, what they save,
//! which operation fails, and at which one a rank, the job or the machine ends. After each job the
//! checker opens what is left:
//!
//! - a checkpoint that a save has confirmed is there, whole, and holds the bits that were saved;
//! - what an unconfirmed save has left is the old checkpoint or the new one;
//! - the run resumes from the newest checkpoint, and no rank with another state;
//! - a checkpoint that is read stays whole, also while others replace or remove it;
//! - all ranks of a save succeed, or none does, and no rank waits forever;
//! - of ranks that save to the same place without knowing of each other, one succeeds;
//! - the next job removes what crashed ones have left.

mod asked;
mod disk;
mod files;
mod flaw;
mod job;
mod journal;
mod rivals;
mod schedule;
mod simulate;
mod state;

use self::flaw::Flaw;
use self::simulate::simulate;

/// The number of simulations that find each bug.
const SEEDS: u64 = 400;

#[test]
fn nothing_that_was_saved_is_lost_or_wrong() {
    for seed in 0..150 {
        if let Err(error) = simulate(seed, None) {
            panic!("`cargo xtask simulate --seeds 1 --seed {seed}`: {error:#}");
        }
    }
}

#[test]
fn a_seed_repeats_every_operation() {
    let (mut struck, mut links) = (0, 0);
    for seed in 0..20 {
        let first = simulate(seed, None).unwrap();
        assert_eq!(simulate(seed, None).unwrap(), first, "seed {seed}");
        assert!(first.operations > 0);
        struck += first.struck;
        links += first.links;
    }
    assert!(struck > 5, "only {struck} jobs were struck");
    assert!(links > 5, "only {links} files were linked");
}

#[test]
fn every_bug_that_is_put_in_is_found() {
    for flaw in Flaw::ALL {
        assert!(
            (0..SEEDS).any(|seed| simulate(seed, Some(flaw)).is_err()),
            "{flaw:?} was not found"
        );
    }
}

#[test]
#[ignore = "`cargo xtask simulate` runs it, with the seeds that it was given"]
fn the_seeds_that_were_asked_for() {
    asked::run().unwrap();
}
