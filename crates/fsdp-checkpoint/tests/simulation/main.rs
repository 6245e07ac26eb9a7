//! The deterministic simulation of saves finds nothing, and finds every bug that is put in on
//! purpose.

#![expect(unreachable_pub, reason = "its modules are those of the example too")]

#[path = "../../examples/simulate/simulation/mod.rs"]
mod simulation;

use self::simulation::flaw::Flaw;
use self::simulation::simulate;

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
