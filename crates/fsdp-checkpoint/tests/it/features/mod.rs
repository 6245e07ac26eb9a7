//! A training with each feature has the losses of torch's FSDP and the keys of its checkpoints, and
//! goes on at another number of ranks as if it had never stopped. `features.py` has recorded
//! torch's.

mod run;

use fsdp_comm::run_local;
use fsdp_nn::{BackwardPrefetch, FsdpConfig, ShardingStrategy};
use serde_json::Value;

use self::run::{Run, STEPS, Told, keys, ranks_of};

/// The features, with the limits of the differences of losses: from torch's, and from those of
/// another number of ranks.
const FEATURES: [(&str, f64, f64); 23] = [
    ("none", 1e-5, 1e-6),
    ("no reshard", 1e-5, 1e-6),
    ("accumulate", 1e-5, 1e-6),
    ("clip", 1e-5, 1e-6),
    ("clip by the largest", 1e-5, 1e-6),
    ("frozen", 1e-5, 1e-6),
    ("checkpoint", 1e-5, 1e-6),
    ("constant", 1e-5, 1e-6),
    ("cosine", 1e-5, 1e-6),
    ("linear", 1e-5, 1e-6),
    ("scaler", 1e-5, 1e-6),
    ("average", 1e-5, 1e-6),
    ("hybrid", 1e-5, 1e-6),
    ("synchronized", 1e-5, 1e-6),
    ("summoned", 1e-5, 1e-6),
    ("ignored", 1e-5, 1e-6),
    ("offload", 1e-5, 1e-6),
    ("adafactor", 1e-5, 1e-6),
    ("muon", 1e-5, 1e-6),
    // Each rank's gradient is rounded on its way, so other ranks round other numbers.
    ("bf16 hook", 1e-5, 1e-4),
    ("fp16 hook", 1e-5, 2e-5),
    // Sums of products in bf16 and f16 are rounded otherwise, by half a unit in the last of 8 and
    // 11 bits.
    ("mixed precision", 2e-3, 2e-3),
    ("sharded scaler", 3e-4, 3e-4),
];

fn torch(feature: &str) -> Value {
    let found: Value = serde_json::from_str(include_str!("features.json")).unwrap();
    found[feature].clone()
}

fn assert_near(found: &[f64], expected: &[f64], limit: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= limit,
            "{what}, number {step}: {found} is not {expected}"
        );
    }
}

/// Trains a whole run on as many ranks as torch has.
fn whole(feature: &str, config: fn() -> FsdpConfig) -> Vec<Told> {
    let ranks = run_local(ranks_of(feature), |group| {
        let mut run = Run::new(&group, feature, config());
        let mut told = run.train(0..STEPS);
        told.others.extend(run.loss_of_average());
        told
    });
    ranks.unwrap()
}

/// Compares the losses with torch's.
fn check(feature: &str, limit: f64, config: fn() -> FsdpConfig) {
    let expected = torch(feature);
    let numbers = |key: &str, rank: usize| -> Vec<f64> {
        serde_json::from_value(expected[key][rank].clone()).unwrap()
    };
    for (rank, told) in whole(feature, config).iter().enumerate() {
        assert_near(
            &told.losses,
            &numbers("losses", rank),
            limit,
            &format!("the losses of {feature} on rank {rank}"),
        );
        assert_near(
            &told.others,
            &numbers("told", rank),
            limit,
            &format!("what {feature} tells on rank {rank}"),
        );
    }
}

#[test]
fn losses_are_those_of_torch_with_each_feature() {
    for (feature, limit, _) in FEATURES {
        check(feature, limit, FsdpConfig::default);
    }
}

#[test]
fn losses_of_torch_come_with_every_way_to_gather() {
    for feature in [
        "none",
        "accumulate",
        "checkpoint",
        "frozen",
        "hybrid",
        "ignored",
        "summoned",
    ] {
        check(feature, 1e-5, || FsdpConfig {
            backward_prefetch: Some(BackwardPrefetch::Pre),
            forward_prefetch: true,
            ..FsdpConfig::default()
        });
        check(feature, 1e-5, || FsdpConfig {
            strategy: ShardingStrategy::NoShard,
            ..FsdpConfig::default()
        });
        check(feature, 1e-5, || FsdpConfig {
            cpu_offload: true,
            ..FsdpConfig::default()
        });
    }
}

#[test]
fn a_checkpoint_has_the_keys_of_torch_with_each_feature() {
    for (feature, ..) in FEATURES {
        let dir = tempfile::tempdir().unwrap();
        run_local(ranks_of(feature), |group| {
            let mut run = Run::new(&group, feature, FsdpConfig::default());
            run.train(0..STEPS);
            run.save(dir.path(), STEPS);
        })
        .unwrap();
        let expected: Vec<String> = serde_json::from_value(torch(feature)["keys"].clone()).unwrap();
        assert_eq!(keys(dir.path(), STEPS), expected, "{feature}");
    }
}

/// Trains the first half of a run on some ranks, and the second half on others.
fn interrupted(feature: &str, from: usize, to: usize) -> Vec<Told> {
    let dir = tempfile::tempdir().unwrap();
    run_local(from, |group| {
        let mut run = Run::new(&group, feature, FsdpConfig::default());
        run.train(0..STEPS / 2);
        run.save(dir.path(), STEPS / 2);
    })
    .unwrap();
    let ranks = run_local(to, |group| {
        let mut run = Run::new(&group, feature, FsdpConfig::default());
        let step = run.resume(dir.path());
        let mut told = run.train(step..STEPS);
        told.others.extend(run.loss_of_average());
        told
    });
    ranks.unwrap()
}

/// Returns the last of what the ranks tell, beginning with this step.
fn after(told: &[Told], step: u64, others: usize) -> Vec<Told> {
    let last = |numbers: &[f64], count: usize| numbers[numbers.len() - count..].to_vec();
    let count = usize::try_from(STEPS - step).unwrap();
    told.iter()
        .map(|told| Told {
            losses: last(&told.losses, count),
            others: last(&told.others, others),
        })
        .collect()
}

/// The means over the ranks.
fn means(told: &[Told]) -> Told {
    let mean = |of: fn(&Told) -> &Vec<f64>| -> Vec<f64> {
        let count = of(&told[0]).len();
        (0..count)
            .map(|at| told.iter().map(|told| of(told)[at]).sum::<f64>() / told.len() as f64)
            .collect()
    };
    Told {
        losses: mean(|told| &told.losses),
        others: mean(|told| &told.others),
    }
}

/// Features that change what a step computes, also those that torch itself does not have.
fn resumed_features() -> impl Iterator<Item = (&'static str, f64)> {
    FEATURES
        .into_iter()
        .map(|(feature, _, limit)| (feature, limit))
        .chain([("schedule-free", 1e-6)])
}

#[test]
fn a_run_that_goes_on_at_the_same_number_of_ranks_has_the_same_bits() {
    for (feature, _) in resumed_features() {
        let ranks = ranks_of(feature);
        let found = interrupted(feature, ranks, ranks);
        let expected = after(
            &whole(feature, FsdpConfig::default),
            STEPS / 2,
            found[0].others.len(),
        );
        assert_eq!(found, expected, "{feature}");
    }
}

#[test]
fn a_run_that_goes_on_at_another_number_of_ranks_has_the_same_losses() {
    for (feature, limit) in resumed_features() {
        let whole = whole(feature, FsdpConfig::default);
        for (from, to) in [(1, 2), (2, 4), (4, 1), (2, 1)] {
            let found = interrupted(feature, from, to);
            let expected = means(&after(&whole, STEPS / 2, found[0].others.len()));
            let found = means(&found);
            let what = format!("{feature} from {from} to {to} ranks");
            assert_near(&found.losses, &expected.losses, limit, &what);
            assert_near(&found.others, &expected.others, limit, &what);
        }
    }
}
