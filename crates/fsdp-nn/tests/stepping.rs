//! A step counts whatever state it starts from, and a step that fails loses nothing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{refill, release};
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::torch::{StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict};
use fsdp_nn::{Algorithm, FsdpConfig, FullyShardedDataParallel, Optimizer};
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
