//! Parameters that the configuration leaves alone are candle's own, whole on every rank, and saved
//! with the model.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
use fsdp_comm::run_local;
use fsdp_nn::torch::{StateDictOptions, get_model_state_dict, set_model_state_dict};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Scope, Unit};
use fsdp_state::StateValue;

type Net = (Unit<Linear>, Linear);

fn build(scope: &Scope) -> candle_core::Result<Net> {
    Ok((
        scope.pp("a").unit(|scope| linear(3, 4, scope.vb()))?,
        linear(4, 2, scope.vb().pp("b"))?,
    ))
}

fn loss((a, b): &Net, rank: usize) -> candle_core::Result<Tensor> {
    let x = (Tensor::arange(0f32, 6f32, &Device::Cpu)?.reshape((2, 3))? + rank as f64)?;
    b.forward(&a.forward(&x)?.tanh()?)?.sqr()?.mean_all()
}

#[test]
fn their_gradients_are_those_of_the_ranks_own_batch_and_the_others_are_reduced() {
    for world in 1..=3 {
        run_local(world, |group| {
            let ignored = |name: &str| name == "a.weight" || name == "b.bias";
            let config = FsdpConfig {
                ignored_states: Arc::new(ignored),
                ..FsdpConfig::default()
            };
            let model = FullyShardedDataParallel::new(group.clone(), config, build).unwrap();
            let parameters = model.parameters();
            assert_eq!(
                parameters.fqns().collect::<Vec<_>>(),
                ["a.bias", "b.weight"]
            );
            let names: Vec<&str> = parameters
                .ignored_states()
                .iter()
                .map(|(name, _)| name.as_str())
                .collect();
            assert_eq!(names, ["a.weight", "b.bias"]);
            let store = model
                .backward(&model.forward(|net| loss(net, group.rank())).unwrap())
                .unwrap();

            // The same model in plain candle.
            let variables = VarMap::new();
            let plain = build(&Scope::plain(VarBuilder::from_varmap(
                &variables,
                DType::F32,
                &Device::Cpu,
            )))
            .unwrap();
            let state = get_model_state_dict(
                parameters,
                &StateDictOptions {
                    full_state_dict: true,
                    ..Default::default()
                },
            );
            for (name, value) in &state.unwrap() {
                variables.data().lock().unwrap()[name]
                    .set(value.as_tensor().unwrap())
                    .unwrap();
            }
            let expected = loss(&plain, group.rank()).unwrap().backward().unwrap();
            for (name, var) in parameters.ignored_states() {
                let expected = expected
                    .get(&variables.data().lock().unwrap()[name])
                    .unwrap()
                    .clone();
                let found = store.get(var).unwrap();
                assert_eq!(found.dims(), expected.dims(), "{name}");
                let difference = (found - expected)
                    .unwrap()
                    .abs()
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .max(0)
                    .unwrap();
                assert!(difference.to_scalar::<f32>().unwrap() < 1e-6, "{name}");
            }
            assert!(parameters.gradient("b.weight").unwrap().is_some());
        })
        .unwrap();
    }
}

#[test]
fn a_model_state_dict_has_them_and_sets_them() {
    run_local(2, |group| {
        let config = FsdpConfig {
            ignored_states: Arc::new(|name: &str| name.starts_with("b.")),
            ..FsdpConfig::default()
        };
        let model = FullyShardedDataParallel::new(group.clone(), config.clone(), build).unwrap();
        let state = get_model_state_dict(model.parameters(), &StateDictOptions::default()).unwrap();
        let mut keys: Vec<&str> = state.keys().collect();
        keys.sort_unstable();
        assert_eq!(keys, ["a.bias", "a.weight", "b.bias", "b.weight"]);
        let bias = state.get("b.bias").and_then(StateValue::as_tensor).unwrap();
        assert_eq!(bias.dims(), [2]);
        let other =
            FullyShardedDataParallel::new(group, FsdpConfig { seed: 9, ..config }, build).unwrap();
        set_model_state_dict(&state, other.parameters(), &StateDictOptions::default()).unwrap();
        let find = |name: &str| {
            other
                .parameters()
                .ignored_states()
                .iter()
                .find(|(other, _)| other == name)
                .unwrap()
                .1
                .clone()
        };
        assert_eq!(
            find("b.bias").to_vec1::<f32>().unwrap(),
            bias.to_vec1::<f32>().unwrap()
        );
    })
    .unwrap();
}
