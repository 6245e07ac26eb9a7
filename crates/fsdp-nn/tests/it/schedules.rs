//! A schedule multiplies the base of each group, which stays in the group as torch's schedulers
//! keep it.

use candle_nn::linear;
use fsdp_comm::run_local;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::torch::{StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict};
use fsdp_nn::{Decay, FsdpConfig, FullyShardedDataParallel, Optimizer, ParamGroup, Schedule};

#[test]
fn each_group_has_a_base_of_its_own_that_outlives_a_resume() {
    run_local(2, |group| {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            linear(3, 2, scope.vb())
        })
        .unwrap();
        let optimizer = |lr: f64| {
            let adamw = |lr: f64| {
                Algorithm::AdamW(AdamOptions {
                    lr,
                    ..AdamOptions::adamw()
                })
            };
            let groups = vec![
                ParamGroup::new(adamw(lr), ["weight"]),
                ParamGroup::new(adamw(10.0 * lr), ["bias"]),
            ];
            Optimizer::with_groups(model.parameters(), groups).unwrap()
        };
        let rates = |optimizer: &Optimizer| -> Vec<f64> {
            optimizer
                .groups()
                .iter()
                .map(|group| group.algorithm.lr())
                .collect()
        };
        let schedule = Schedule {
            decay: Decay::Linear,
            warmup: 2,
            steps: 6,
        };
        let mut first = optimizer(0.1);
        assert_eq!(first.groups()[0].initial_lr(), None);
        let mut expected = Vec::new();
        for step in 0..6 {
            schedule.apply(&mut first, step).unwrap();
            expected.push(rates(&first));
            assert_eq!(
                expected[step as usize],
                [0.1 * schedule.factor(step), 1.0 * schedule.factor(step)]
            );
            assert_eq!(first.groups()[1].initial_lr(), Some(1.0));
        }
        // In the middle of the warm-up, when the rates are not the bases.
        schedule.apply(&mut first, 1).unwrap();
        let options = StateDictOptions::default();
        let state = get_optimizer_state_dict(model.parameters(), &[&first], &options).unwrap();
        let mut resumed = optimizer(7.0);
        set_optimizer_state_dict(&state, model.parameters(), &mut [&mut resumed], &options)
            .unwrap();
        for step in 2..6 {
            schedule.apply(&mut resumed, step).unwrap();
            assert_eq!(rates(&resumed), expected[step as usize], "step {step}");
        }
        resumed.groups_mut()[0].set_initial_lr(0.5);
        schedule.apply(&mut resumed, 2).unwrap();
        assert_eq!(rates(&resumed), [0.5, 1.0]);
    })
    .unwrap();
}

#[test]
fn a_schedule_that_cannot_be_applied_changes_no_group() {
    run_local(1, |group| {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            linear(3, 2, scope.vb())
        })
        .unwrap();
        let adamw = || Algorithm::AdamW(AdamOptions::adamw());
        let groups = vec![
            ParamGroup::new(adamw(), ["weight"]),
            ParamGroup::new(adamw(), ["bias"]),
        ];
        let mut optimizer = Optimizer::with_groups(model.parameters(), groups).unwrap();
        let unchanged = |optimizer: &Optimizer| {
            let group = &optimizer.groups()[0];
            assert_eq!(group.algorithm.lr(), adamw().lr());
            assert_eq!(group.initial_lr(), None);
        };
        let linear = |warmup, steps| Schedule {
            decay: Decay::Linear,
            warmup,
            steps,
        };
        // One that never has a rate after its warm-up.
        for never in [linear(100, 0), linear(0, 0), linear(5, 5)] {
            let error = never.apply(&mut optimizer, 0).unwrap_err().to_string();
            assert!(error.contains("warm-up"), "{error}");
            unchanged(&optimizer);
        }
        // Another group has a base that cannot be.
        for bad in [-1.0, f64::NAN] {
            optimizer.groups_mut()[1].set_initial_lr(bad);
            linear(0, 4).apply(&mut optimizer, 1).unwrap_err();
            unchanged(&optimizer);
        }
        optimizer.groups_mut()[1].set_initial_lr(1.0);
        linear(0, 4).apply(&mut optimizer, 1).unwrap();
        let warm_up = Schedule {
            warmup: 3,
            ..Schedule::default()
        };
        warm_up.apply(&mut optimizer, 1).unwrap();
    })
    .unwrap();
}
