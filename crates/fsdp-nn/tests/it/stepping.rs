//! A step counts whatever state it starts from, and a step that fails loses nothing.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{refill, release};
use fsdp_nn::algorithm::{AdamOptions, ScheduleFreeOptions, SgdOptions};
use fsdp_nn::torch::{StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict};
use fsdp_nn::{Algorithm, FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, ShardingStrategy};
use fsdp_state::StateValue;

fn options() -> StateDictOptions {
    StateDictOptions { strict: false, ..StateDictOptions::default() }
}

fn model(group: &ProcessGroup) -> FullyShardedDataParallel<Linear> {
    FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| linear(4, 1, scope.vb())).unwrap()
}

fn backward(model: &FullyShardedDataParallel<Linear>) {
    let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.sum_all()).unwrap();
    model.backward(&loss).unwrap();
}

fn adamw() -> Algorithm {
    Algorithm::AdamW(AdamOptions::adamw())
}

fn step_of(optimizer: &Optimizer, fqn: &str) -> Option<f32> {
    let state = optimizer.state_of(fqn).unwrap()?;
    Some(state.get("step")?.as_tensor().unwrap().to_scalar().unwrap())
}

fn weights(model: &FullyShardedDataParallel<Linear>) -> Vec<f32> {
    let shards = model.parameters().parameter("weight").unwrap().shards().to_vec();
    shards.iter().flat_map(|shard| shard.tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

#[test]
fn state_without_a_step_counts_from_zero() {
    run_local(1, |group| {
        let (fresh, loaded) = (model(&group), model(&group));
        let mut expected = Optimizer::new(fresh.parameters(), adamw()).unwrap();
        let mut optimizer = Optimizer::new(loaded.parameters(), adamw()).unwrap();
        // A dict without `step`.
        let mut state = get_optimizer_state_dict(fresh.parameters(), &[&expected], &options()).unwrap();
        let Some(StateValue::Dict(states)) = state.get_mut("state") else { panic!("state is a dict") };
        for fqn in ["weight", "bias"] {
            let Some(StateValue::Dict(entries)) = states.get_mut(fqn) else { panic!("{fqn} has state") };
            assert!(entries.remove("step").is_some());
        }
        let report = set_optimizer_state_dict(&state, loaded.parameters(), &mut [&mut optimizer], &options()).unwrap();
        assert_eq!(report.missing, ["bias.step", "weight.step"]);
        assert_eq!(step_of(&optimizer, "weight"), None);
        for step in 1..=3u8 {
            for (model, optimizer) in [(&fresh, &mut expected), (&loaded, &mut optimizer)] {
                backward(model);
                optimizer.step().unwrap();
                model.parameters().zero_grad();
                assert_eq!(step_of(optimizer, "weight"), Some(f32::from(step)));
            }
        }
        assert_eq!(weights(&loaded), weights(&fresh));
    })
    .unwrap();
}

#[test]
fn a_step_that_fails_keeps_the_state() {
    run_local(1, |group| {
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        backward(&model);
        optimizer.step().unwrap();
        // The moments of one parameter cannot be reached.
        let state = optimizer.state_of("weight").unwrap().unwrap();
        let moment = state["exp_avg"].as_sharded().unwrap().shards()[0].tensor.flatten_all().unwrap();
        let values = moment.to_vec1::<f32>().unwrap();
        release(&moment).unwrap();
        optimizer.step().unwrap_err();
        refill(&moment, values).unwrap();
        assert_eq!(step_of(&optimizer, "weight"), Some(1.0));
        optimizer.step().unwrap();
        assert_eq!(step_of(&optimizer, "weight"), Some(2.0));
    })
    .unwrap();
}

#[test]
fn gradients_that_are_not_finite_on_one_rank_are_an_error_on_all_and_change_nothing() {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
        for bad in [f64::NAN, f64::INFINITY] {
            run_local(3, |group| {
                let config = FsdpConfig { strategy, ..FsdpConfig::default() };
                let model = FullyShardedDataParallel::new(group.clone(), config, |scope| linear(4, 1, scope.vb()));
                let model = model.unwrap();
                let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
                let before = weights(&model);
                let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
                let scale = if group.rank() == 1 { bad } else { 1.0 };
                let loss = model.forward(|layer| layer.forward(&x)?.sqr()?.sum_all()? * scale).unwrap();
                model.backward(&loss).unwrap();
                for refused in [model.parameters().clip_grad_norm(1.0), model.parameters().finite_grad_norm()] {
                    let norm = match refused {
                        Err(NnError::NonFiniteGradients { norm }) => norm,
                        other => panic!("{other:?}"),
                    };
                    assert!(!norm.is_finite());
                }
                // Every rank has learned it, and can leave the step out.
                model.parameters().zero_grad();
                assert_eq!(weights(&model), before);
                backward(&model);
                model.parameters().clip_grad_norm(1.0).unwrap();
                optimizer.step().unwrap();
                assert!(weights(&model).iter().all(|weight| weight.is_finite()));
                // The last rank has no row of its own.
                assert!(before.is_empty() || weights(&model) != before);
            })
            .unwrap();
        }
    }
}

#[test]
fn an_optimizer_of_another_ones_groups_steps_each_parameter_once() {
    run_local(2, |group| {
        let sgd = || Algorithm::Sgd(SgdOptions { lr: 0.1, ..SgdOptions::default() });
        let (one, other) = (model(&group), model(&group));
        let mut first = Optimizer::new(one.parameters(), sgd()).unwrap();
        let mut again = Optimizer::with_groups(other.parameters(), first.groups().to_vec()).unwrap();
        for (model, optimizer) in [(&one, &mut first), (&other, &mut again)] {
            backward(model);
            optimizer.step().unwrap();
        }
        assert_eq!(weights(&one), weights(&other));
    })
    .unwrap();
}

#[test]
fn a_step_without_gradients_does_not_count_for_schedule_free_adamw() {
    run_local(2, |group| {
        let algorithm = Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default());
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), algorithm).unwrap();
        optimizer.train().unwrap();
        let before = format!("{:?}", optimizer.groups()[0].algorithm);
        optimizer.step().unwrap();
        assert_eq!(format!("{:?}", optimizer.groups()[0].algorithm), before);
        backward(&model);
        optimizer.step().unwrap();
        assert_ne!(format!("{:?}", optimizer.groups()[0].algorithm), before);
    })
    .unwrap();
}

#[test]
fn a_backward_that_candle_ran_alone_is_an_error_if_it_left_gradients_behind() {
    run_local(2, |group| {
        let model = model(&group);
        let mut optimizer = Optimizer::new(model.parameters(), adamw()).unwrap();
        // The loss reaches the weight only, so the unit's backward is not over.
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
        let loss = model.forward(|layer| x.matmul(&layer.weight().t()?)?.sqr()?.sum_all()).unwrap();
        loss.backward().unwrap();
        let error = optimizer.step().unwrap_err();
        assert!(matches!(error, NnError::BackwardNotEnded { .. }), "{error}");
    })
    .unwrap();
}
