//! State on a GPU: loaded there, and saved from there, with the bits that CPUs saved. `cargo xtask
//! gpu` runs this where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, StateDictOptions, TrainState,
    get_state_dict, load_whole, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::HostBytes;
use fsdp_nn::algorithm::{AdagradOptions, AdamOptions, Algorithm};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, ShardingStrategy, Unit};
use fsdp_state::{StateDict, StateValue, flatten_state_dict};

type Model = FullyShardedDataParallel<(Unit<Linear>, Linear)>;

fn model(
    group: ProcessGroup,
    device: Device,
    strategy: ShardingStrategy,
    use_orig_params: bool,
) -> Model {
    let config = FsdpConfig {
        strategy,
        use_orig_params,
        device,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group, config, |scope| {
        Ok((
            scope.pp("a").unit(|scope| linear(5, 7, scope.vb()))?,
            linear(7, 2, scope.vb().pp("head"))?,
        ))
    })
    .unwrap()
}

fn state(model: &Model, optimizer: &Optimizer) -> StateDict {
    let (m, o) = get_state_dict(
        model.parameters(),
        &[optimizer],
        &StateDictOptions::default(),
    )
    .unwrap();
    [("model", m.into()), ("optim", o.into())]
        .into_iter()
        .collect()
}

/// Trains three steps on CPUs, and saves.
fn train_and_save(path: &Path, algorithm: &Algorithm) {
    run_local(2, |group| {
        let model = model(
            group.clone(),
            Device::Cpu,
            ShardingStrategy::FullShard,
            true,
        );
        let mut optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
        let x = Tensor::ones((2, 5), candle_core::DType::F32, &Device::Cpu).unwrap();
        for _ in 0..3 {
            let loss = model
                .forward(|(a, head)| head.forward(&a.forward(&x)?.tanh()?)?.sqr()?.mean_all())
                .unwrap();
            model.backward(&loss).unwrap();
            optimizer.step().unwrap();
            model.parameters().zero_grad();
        }
        save(
            path,
            &state(&model, &optimizer),
            &group,
            &SaveOptions::default(),
        )
        .unwrap();
    })
    .unwrap();
}

/// Returns every value of a checkpoint by flat key, as bits.
fn bits(path: &Path) -> Vec<(String, String)> {
    let state = load_whole(path, &[], &LoadOptions::default()).unwrap();
    let mut values: Vec<(String, String)> = flatten_state_dict(&state)
        .unwrap()
        .values
        .into_iter()
        .map(|(key, value)| match value {
            StateValue::Tensor(t) => (
                key,
                format!("{:?} {:?}", t.dims(), HostBytes::read(&t).unwrap().to_vec()),
            ),
            other => (key, format!("{other:?}")),
        })
        .collect();
    values.sort();
    values
}

#[test]
fn what_cpus_saved_goes_to_gpus_and_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let algorithms = [
        Algorithm::AdamW(AdamOptions {
            amsgrad: true,
            ..AdamOptions::adamw()
        }),
        Algorithm::Adam(AdamOptions::default()),
        Algorithm::Adagrad(AdagradOptions::default()),
    ];
    for (case, algorithm) in algorithms.iter().enumerate() {
        let cpus = dir.path().join(format!("cpus-{case}"));
        train_and_save(&cpus, algorithm);
        for (world, strategy, use_orig_params) in [
            (1, ShardingStrategy::NoShard, true),
            (2, ShardingStrategy::NoShard, true),
            (2, ShardingStrategy::FullShard, false),
            (3, ShardingStrategy::FullShard, true),
        ] {
            let what = format!("{case}-{world}-{strategy}-{use_orig_params}");
            let (gpus, later) = (
                dir.path().join(&what),
                dir.path().join(format!("{what}-later")),
            );
            run_local(world, |group| {
                let model = model(
                    group.clone(),
                    Device::new_cuda(0).unwrap(),
                    strategy,
                    use_orig_params,
                );
                let optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
                let mut run = TrainState::new(model, vec![optimizer]);
                let mut checkpointer =
                    Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
                checkpointer.load(&cpus, &mut run).unwrap();
                let model = &run.model;
                for fqn in model.parameters().fqns() {
                    let parameter = model.parameters().parameter(fqn).unwrap();
                    assert!(
                        parameter
                            .shards()
                            .iter()
                            .all(|shard| shard.tensor.device().is_cuda()),
                        "{fqn}"
                    );
                }
                let state = state(model, &run.optimizers[0]);
                save(&gpus, &state, &group, &SaveOptions::default()).unwrap();
                checkpointer.save_async(&later, &state).unwrap();
                checkpointer.wait().unwrap();
            })
            .unwrap();
            assert_eq!(bits(&gpus), bits(&cpus), "{what}");
            assert_eq!(bits(&later), bits(&cpus), "{what}");
        }
    }
}
