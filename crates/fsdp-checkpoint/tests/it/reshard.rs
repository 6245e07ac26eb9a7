//! A checkpoint that one number of ranks saved is loaded by any other number, bit for bit. No
//! tensor bytes move between ranks, and no more is read than is needed.

use std::path::Path;

use candle_core::{Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, StateDictOptions, TrainState,
    get_state_dict, load_whole, save,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::HostBytes;
use fsdp_nn::algorithm::{AdagradOptions, AdamOptions, Algorithm, SgdOptions};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, ShardingStrategy, Unit};
use fsdp_state::{StateDict, StateValue, flatten_state_dict};

type Model = FullyShardedDataParallel<(Unit<Linear>, Unit<Linear>, Linear)>;

fn model(
    group: ProcessGroup,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    seed: u64,
) -> Model {
    let config = FsdpConfig {
        strategy,
        use_orig_params,
        seed,
        ..FsdpConfig::default()
    };
    FullyShardedDataParallel::new(group, config, |scope| {
        Ok((
            scope.pp("a").unit(|scope| linear(5, 7, scope.vb()))?,
            scope.pp("b").unit(|scope| linear(7, 3, scope.vb()))?,
            linear(3, 2, scope.vb().pp("head"))?,
        ))
    })
    .unwrap()
}

fn step(model: &Model, optimizer: &mut Optimizer, seed: usize) {
    let x: Vec<f32> = (0..10)
        .map(|i| ((i * 37 + seed * 11) % 17) as f32 / 8.0 - 1.0)
        .collect();
    let x = Tensor::from_vec(x, (2, 5), &Device::Cpu).unwrap();
    let forward = |m: &(Unit<Linear>, Unit<Linear>, Linear)| {
        m.2.forward(&m.1.forward(&m.0.forward(&x)?.tanh()?)?)?
            .sqr()?
            .mean_all()
    };
    let loss = model.forward(forward).unwrap();
    model.backward(&loss).unwrap();
    optimizer.step().unwrap();
    model.parameters().zero_grad();
}

fn algorithms() -> Vec<Algorithm> {
    vec![
        Algorithm::AdamW(AdamOptions {
            lr: 0.01,
            amsgrad: true,
            ..AdamOptions::adamw()
        }),
        Algorithm::Adam(AdamOptions::default()),
        Algorithm::Sgd(SgdOptions {
            lr: 0.1,
            momentum: 0.9,
            ..SgdOptions::default()
        }),
        Algorithm::Sgd(SgdOptions {
            lr: 0.1,
            ..SgdOptions::default()
        }),
        Algorithm::Adagrad(AdagradOptions::default()),
    ]
}

fn whole_state(model: StateDict, optim: StateDict) -> StateDict {
    let mut train = StateDict::new();
    train.insert("step", 3i64);
    let mut state = StateDict::new();
    state.insert("model", model);
    state.insert("optim", optim);
    state.insert("train", train);
    state
}

fn options() -> StateDictOptions {
    StateDictOptions::default()
}

/// Trains three steps and saves; returns nothing but what is on disk.
fn train_and_save(
    path: &Path,
    world: usize,
    strategy: ShardingStrategy,
    use_orig_params: bool,
    algorithm: &Algorithm,
) {
    run_local(world, |group| {
        let model = model(group.clone(), strategy, use_orig_params, 1);
        let mut optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
        (0..3).for_each(|seed| step(&model, &mut optimizer, seed));
        let before = group.traffic();
        let (m, o) = get_state_dict(model.parameters(), &[&optimizer], &options()).unwrap();
        save(path, &whole_state(m, o), &group, &SaveOptions::default()).unwrap();
        assert_eq!(
            group.traffic().since(&before).tensor_bytes(),
            0,
            "a sharded save moves tensor bytes"
        );
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
        .map(|(key, value)| {
            let text = match value {
                StateValue::Tensor(t) => {
                    format!("{:?} {:?}", t.dims(), HostBytes::read(&t).unwrap().to_vec())
                }
                other => format!("{other:?}"),
            };
            (key, text)
        })
        .collect();
    values.sort();
    values
}

#[test]
fn any_world_strategy_and_mode_loads_what_another_saved() {
    let dir = tempfile::tempdir().unwrap();
    for (case, algorithm) in algorithms().iter().enumerate() {
        let saves = [
            (1, ShardingStrategy::FullShard, true),
            (2, ShardingStrategy::FullShard, false),
            (3, ShardingStrategy::ShardGradOp, true),
            (4, ShardingStrategy::FullShard, true),
            (2, ShardingStrategy::NoShard, true),
        ];
        for (from, (world, strategy, use_orig_params)) in saves.into_iter().enumerate() {
            let path = dir.path().join(format!("{case}-{from}"));
            train_and_save(&path, world, strategy, use_orig_params, algorithm);
            let saved = bits(&path);
            assert!(saved.iter().any(|(key, _)| key == "model.a.weight"));
            for (to, world) in [1, 2, 3, 5].into_iter().enumerate() {
                let again = dir.path().join(format!("{case}-{from}-{to}"));
                run_local(world, |group| {
                    // Another seed: the values must come from the checkpoint.
                    let model = model(group.clone(), ShardingStrategy::FullShard, to % 2 == 0, 2);
                    let optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
                    let mut run = TrainState::new(model, vec![optimizer]);
                    let mut checkpointer =
                        Checkpointer::new(dir.path(), &group, CheckpointerOptions::default())
                            .unwrap();
                    let report = checkpointer.load(&path, &mut run).unwrap();
                    assert!(report.is_clean(), "{report:?}");
                    checkpointer.save(&again, &run).unwrap();
                })
                .unwrap();
                assert_eq!(
                    bits(&again),
                    saved,
                    "{algorithm:?}: saved by case {from}, loaded on {world} ranks"
                );
            }
        }
    }
}

#[test]
fn training_goes_on_as_if_never_stopped() {
    let dir = tempfile::tempdir().unwrap();
    for algorithm in algorithms() {
        let path = dir.path().join("checkpoint");
        let run = |world: usize, resume: bool, steps: std::ops::Range<usize>, save_to: &Path| {
            run_local(world, |group| {
                let save = SaveOptions {
                    overwrite: true,
                    ..SaveOptions::default()
                };
                let options = CheckpointerOptions {
                    save,
                    ..CheckpointerOptions::default()
                };
                let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
                let model = model(group, ShardingStrategy::FullShard, true, 1);
                let optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
                let mut run = TrainState::new(model, vec![optimizer]);
                if resume {
                    checkpointer.load(&path, &mut run).unwrap();
                }
                steps
                    .clone()
                    .for_each(|seed| step(&run.model, &mut run.optimizers[0], seed));
                checkpointer.save(save_to, &run).unwrap();
            })
            .unwrap();
        };
        let straight = dir.path().join("straight");
        run(2, false, 0..6, &straight);
        run(2, false, 0..3, &path);
        let resumed = dir.path().join("resumed");
        run(2, true, 3..6, &resumed);
        assert_eq!(bits(&resumed), bits(&straight), "{algorithm:?}");
    }
}
