//! The whole parameters on every rank are those of the model, and what is written back is the
//! model's from then on.

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_nn::torch::{StateDictOptions, get_model_state_dict};
use fsdp_nn::{
    BuildError, FsdpConfig, FullyShardedDataParallel, MixedPrecision, NnError, Optimizer,
    ShardingStrategy, Unit,
};
use fsdp_state::StateValue;

type Model = FullyShardedDataParallel<(Unit<Linear>, Linear)>;

fn model(group: &ProcessGroup, config: FsdpConfig) -> Model {
    let world = group.world_size();
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    let config = FsdpConfig {
        mesh: Some(mesh),
        seed: 4,
        ..config
    };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        scope.tie("again.weight", "a.weight");
        Ok((
            scope.pp("a").unit(|scope| linear(3, 5, scope.vb()))?,
            linear(5, 2, scope.vb().pp("b"))?,
        ))
    });
    model.unwrap()
}

/// The model's parameters by way of a state dict.
fn values(model: &Model) -> Vec<Vec<f32>> {
    let options = StateDictOptions {
        full_state_dict: true,
        ..StateDictOptions::default()
    };
    let state = get_model_state_dict(model.parameters(), &options).unwrap();
    let tensor = |fqn: &str| {
        state
            .get(fqn)
            .and_then(StateValue::as_tensor)
            .unwrap()
            .flatten_all()
            .unwrap()
    };
    model
        .parameters()
        .fqns()
        .map(|fqn| tensor(fqn).to_vec1().unwrap())
        .collect()
}

#[test]
fn they_have_the_bits_of_the_model_and_give_theirs_back() {
    let bf16 = MixedPrecision {
        param: Some(DType::BF16),
        ..MixedPrecision::default()
    };
    for world in 1..=4 {
        for strategy in ShardingStrategy::ALL {
            for mixed_precision in [MixedPrecision::default(), bf16] {
                run_local(world, |group| {
                    let model = model(
                        &group,
                        FsdpConfig {
                            strategy,
                            mixed_precision,
                            ..FsdpConfig::default()
                        },
                    );
                    let before = values(&model);
                    let mut whole = model.parameters().summon_full_params().unwrap();
                    let found = whole
                        .iter()
                        .map(|(_, tensor)| tensor.flatten_all().unwrap().to_vec1().unwrap());
                    assert_eq!(found.collect::<Vec<Vec<f32>>>(), before);
                    // By the other name of a tied one.
                    let halved = (whole.get("again.weight").unwrap() / 2.0).unwrap();
                    whole.set("again.weight", halved).unwrap();
                    whole.write_back().unwrap();
                    let mut expected = before.clone();
                    expected[0].iter_mut().for_each(|value| *value /= 2.0);
                    assert_eq!(values(&model), expected, "{strategy} on {world}");
                    // Computed with, too.
                    let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu).unwrap();
                    let found = model
                        .forward(|(unit, _)| unit.forward(&x)?.sum_all()?.to_dtype(DType::F32))
                        .unwrap();
                    let sum: f32 = expected[..2].iter().flatten().sum();
                    assert!((found.to_scalar::<f32>().unwrap() - sum).abs() < 0.05);
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn what_is_dropped_changes_nothing_and_until_then_nobody_else_can() {
    run_local(2, |group| {
        let model = model(&group, FsdpConfig::default());
        let mut optimizer =
            Optimizer::new(model.parameters(), Algorithm::Sgd(SgdOptions::default())).unwrap();
        let before = values(&model);
        let x = Tensor::ones((1, 3), DType::F32, &Device::Cpu).unwrap();
        let loss = model
            .forward(|(unit, head)| head.forward(&unit.forward(&x)?)?.sum_all())
            .unwrap();
        model.backward(&loss).unwrap();
        let mut whole = model.parameters().summon_full_params().unwrap();
        let zeros = whole.get("b.bias").unwrap().zeros_like().unwrap();
        whole.set("b.bias", zeros).unwrap();
        assert!(matches!(optimizer.step(), Err(NnError::UnitInUse { .. })));
        drop(whole);
        assert_eq!(values(&model), before);
        optimizer.step().unwrap();
        assert_ne!(values(&model), before);
    })
    .unwrap();
}

#[test]
fn values_that_differ_between_ranks_are_an_error_that_names_the_parameter_and_changes_nothing() {
    run_local(3, |group| {
        let model = model(&group, FsdpConfig::default());
        let before = values(&model);
        let mut whole = model.parameters().summon_full_params().unwrap();
        let own = (whole.get("b.weight").unwrap() + group.rank() as f64).unwrap();
        whole.set("b.weight", own).unwrap();
        let error = whole.write_back().unwrap_err();
        assert!(
            matches!(error, NnError::DifferentModels { .. })
                && error.to_string().contains("b.weight"),
            "{error}"
        );
        assert_eq!(values(&model), before);
        let mut whole = model.parameters().summon_full_params().unwrap();
        assert!(matches!(
            whole.set("c", Tensor::new(1f32, &Device::Cpu).unwrap()),
            Err(NnError::UnknownParameter { .. })
        ));
        assert!(matches!(
            whole.set("b.bias", Tensor::new(1f32, &Device::Cpu).unwrap()),
            Err(NnError::Build(BuildError::Conflict { .. }))
        ));
    })
    .unwrap();
}
