//! State on a GPU: loaded there, and saved from there, with the bits that CPUs saved. `cargo xtask
//! gpu` runs this where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other test programs ask for the rest")]
#[path = "../../fsdp-comm/tests/stand_in/mod.rs"]
mod stand_in;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, StateDictOptions, TrainState,
    get_state_dict, load_whole, save, step_path,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{HostBytes, HostBytesMut, release};
use fsdp_nn::algorithm::{
    AdafactorOptions, AdagradOptions, AdamOptions, Algorithm, ScheduleFreeOptions, SgdOptions,
};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, MixedPrecision, Optimizer, ShardingStrategy, Unit,
};
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

/// Returns a lock with which a test is alone, because others would change what it counts.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn what_cpus_saved_goes_to_gpus_and_back_bit_for_bit() {
    let _alone = alone();
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

/// The numbers of bytes that the stand-in has counted in the process, and of waits of this thread.
#[derive(Debug, Clone, Copy)]
struct Counts {
    to_host: u64,
    to_device: u64,
    pinned: u64,
    host_waits: u64,
    stream_waits: u64,
}

/// Returns what the stand-in has counted so far; zeros with a real driver.
fn counts() -> Counts {
    let stand_in::Counts {
        process, thread, ..
    } = stand_in::counts().unwrap_or_default();
    Counts {
        to_host: process.bytes_down,
        to_device: process.bytes_up,
        pinned: process.bytes_pinned,
        host_waits: thread.host_waits,
        stream_waits: thread.stream_waits,
    }
}

impl Counts {
    /// Returns what was counted since an earlier time.
    fn since(self, earlier: Counts) -> Counts {
        Counts {
            to_host: self.to_host - earlier.to_host,
            to_device: self.to_device - earlier.to_device,
            pinned: self.pinned - earlier.pinned,
            host_waits: self.host_waits - earlier.host_waits,
            stream_waits: self.stream_waits - earlier.stream_waits,
        }
    }
}

/// A model of two layers, of which the larger one takes several pieces and blocks.
type Large = FullyShardedDataParallel<(Unit<Linear>, Linear)>;

/// The input of the larger layer, and its output.
const WIDTHS: [usize; 2] = [1200, 900];

fn large_run(
    group: ProcessGroup,
    config: FsdpConfig,
    algorithm: &Algorithm,
) -> TrainState<LargeModules> {
    let model: Large = FullyShardedDataParallel::new(group, config, |scope| {
        let [input, output] = WIDTHS;
        Ok((
            scope
                .pp("a")
                .unit(|scope| linear(input, output, scope.vb()))?,
            linear(output, 3, scope.vb().pp("head"))?,
        ))
    })
    .unwrap();
    let mut optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
    if matches!(algorithm, Algorithm::ScheduleFreeAdamW(_)) {
        optimizer.train().unwrap();
    }
    TrainState::new(model, vec![optimizer])
}

type LargeModules = (Unit<Linear>, Linear);

/// Computes gradients, which differ from call to call.
fn backward(run: &TrainState<LargeModules>, number: usize) {
    let device = Device::new_cuda(0).unwrap();
    let x = (Tensor::ones((2, WIDTHS[0]), DType::F32, &device).unwrap() * (number as f64)).unwrap();
    let loss = run
        .model
        .forward(|(a, head)| {
            let x = x.to_dtype(head.weight().dtype())?;
            head.forward(&a.forward(&x)?.tanh()?)?
                .to_dtype(DType::F32)?
                .sqr()?
                .mean_all()
        })
        .unwrap();
    run.model.backward(&loss).unwrap();
}

fn step(run: &mut TrainState<LargeModules>) {
    run.optimizers[0].step().unwrap();
    run.model.parameters().zero_grad();
}

fn on_gpu() -> FsdpConfig {
    FsdpConfig {
        device: Device::new_cuda(0).unwrap(),
        ..FsdpConfig::default()
    }
}

/// Checks that saves in the background, each right before a step, have the digests of saves that
/// nothing disturbs.
fn assert_background_saves_are_unharmed(
    world: usize,
    config: &FsdpConfig,
    algorithm: &Algorithm,
    pinned_bytes: Option<usize>,
) {
    let dir = tempfile::tempdir().unwrap();
    let digests = run_local(world, |group| {
        let options = CheckpointerOptions {
            pinned_bytes,
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let mut run = large_run(group, config.clone(), algorithm);
        backward(&run, 1);
        step(&mut run);
        let mut digests = Vec::new();
        for number in 1..=3 {
            backward(&run, number);
            let now = checkpointer.save(2 * number as u64, &run).unwrap();
            checkpointer
                .save_async(2 * number as u64 + 1, &run)
                .unwrap();
            if number == 2 {
                backward(&run, 7);
            }
            step(&mut run);
            let later = checkpointer.wait().unwrap().unwrap();
            assert_eq!(
                later.digest, now.digest,
                "save {number} with {config:?}, {algorithm:?}, {pinned_bytes:?}"
            );
            digests.push(now.digest.unwrap().to_string());
        }
        digests
    });
    let mut digests = digests.unwrap().remove(0);
    digests.dedup();
    assert_eq!(digests.len(), 3, "each step changes the state");
}

#[test]
fn a_step_right_after_a_background_save_changes_nothing_in_the_checkpoint() {
    let _alone = alone();
    let adamw = Algorithm::AdamW(AdamOptions::adamw());
    for pinned_bytes in [None, Some(0), Some(3 << 20)] {
        assert_background_saves_are_unharmed(2, &on_gpu(), &adamw, pinned_bytes);
    }
    for algorithm in [
        Algorithm::Sgd(SgdOptions {
            lr: 0.1,
            momentum: 0.9,
            ..SgdOptions::default()
        }),
        Algorithm::Adagrad(AdagradOptions::default()),
        Algorithm::Adafactor(AdafactorOptions::default()),
        Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default()),
    ] {
        assert_background_saves_are_unharmed(1, &on_gpu(), &algorithm, None);
    }
    let no_shard = FsdpConfig {
        strategy: ShardingStrategy::NoShard,
        ..on_gpu()
    };
    assert_background_saves_are_unharmed(2, &no_shard, &adamw, None);
    let offloaded = FsdpConfig {
        cpu_offload: true,
        ..on_gpu()
    };
    assert_background_saves_are_unharmed(2, &offloaded, &adamw, None);
    let mixed = FsdpConfig {
        mixed_precision: MixedPrecision {
            param: Some(DType::BF16),
            ..MixedPrecision::default()
        },
        ..on_gpu()
    };
    assert_background_saves_are_unharmed(2, &mixed, &adamw, None);
    let frozen = FsdpConfig {
        requires_grad: std::sync::Arc::new(|fqn| !fqn.ends_with("bias")),
        ..on_gpu()
    };
    assert_background_saves_are_unharmed(2, &frozen, &adamw, None);
}

/// Returns the bytes of a run's state that are on a GPU.
fn gpu_bytes(run: &TrainState<LargeModules>) -> u64 {
    let state = state(&run.model, &run.optimizers[0]);
    let values = flatten_state_dict(&state).unwrap().values;
    let tensors = values.values().flat_map(StateValue::candle_tensors);
    tensors
        .filter(|tensor| tensor.device().is_cuda())
        .map(|tensor| (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64)
        .sum()
}

#[test]
fn a_save_copies_each_byte_once_and_training_does_not_wait_for_it() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = large_run(group, on_gpu(), &Algorithm::AdamW(AdamOptions::adamw()));
        backward(&run, 1);
        step(&mut run);
        let state_bytes = gpu_bytes(&run);
        assert!(state_bytes > 12_000_000, "{state_bytes}");
        let has_counts = counts().to_device > 0;

        let before = counts();
        checkpointer.save(1, &run).unwrap();
        let saved = counts().since(before);
        assert!(!has_counts || saved.to_host == state_bytes, "{saved:?}");
        assert_eq!(saved.to_device, 0);

        // The first save in the background pins its memory there.
        checkpointer.save_async(2, &run).unwrap();
        checkpointer.wait().unwrap();
        // A step without a save, to compare with.
        backward(&run, 2);
        let before = counts();
        step(&mut run);
        let plain_step = counts().since(before);

        backward(&run, 3);
        let before = counts();
        checkpointer.save_async(3, &run).unwrap();
        let called = counts().since(before);
        backward(&run, 4);
        let before_step = counts();
        step(&mut run);
        let stepped = counts().since(before_step);
        let report = checkpointer.wait().unwrap().unwrap();
        let saved = counts().since(before);
        assert_eq!(called.host_waits, 0, "{called:?}");
        assert_eq!(
            saved.pinned, 0,
            "the memory of the first save is used again"
        );
        assert_eq!(stepped.host_waits, plain_step.host_waits);
        assert!(
            stepped.stream_waits <= plain_step.stream_waits + 1,
            "only the GPU waits, once: {stepped:?}"
        );
        assert!(report.waited.is_zero());
        // What the forwards and backwards copy is little.
        assert!(
            !has_counts || (state_bytes..state_bytes + 10_000).contains(&saved.to_host),
            "{saved:?}"
        );
    })
    .unwrap();
}

#[test]
fn a_load_copies_each_byte_once_into_the_live_tensors() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let mut run = large_run(group.clone(), on_gpu(), &adamw);
        backward(&run, 1);
        step(&mut run);
        let saved = checkpointer.save(1, &run).unwrap();
        let state_bytes = gpu_bytes(&run);
        backward(&run, 2);
        step(&mut run);
        let has_counts = counts().to_device > 0;
        for turn in 0..2 {
            let before = counts();
            checkpointer.load(1, &mut run).unwrap();
            let loaded = counts().since(before);
            assert!(
                !has_counts || loaded.to_device == state_bytes,
                "{loaded:?} {state_bytes}"
            );
            assert_eq!(loaded.to_host, 0);
            assert!(turn == 0 || loaded.pinned == 0, "{loaded:?}");
        }
        let again = checkpointer.save(2, &run).unwrap();
        assert_eq!(again.digest, saved.digest);
    })
    .unwrap();
}

#[test]
fn tensors_on_gpus_that_no_guard_covers_are_copied_at_once() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    run_local(1, |group| {
        // Each thread has a stream of its own, so the tensors are made in this one.
        let device = Device::new_cuda(0).unwrap();
        let tensor = Tensor::ones(3_000_000, DType::F32, &device).unwrap();
        let rows = Tensor::ones((30, 20), DType::F32, &device).unwrap();
        let mut state = StateDict::new();
        state.insert("whole", tensor.clone());
        state.insert("part", tensor.narrow(0, 1_000_000, 70_000).unwrap());
        state.insert("transposed", rows.t().unwrap());
        state.insert("list", StateValue::List(vec![rows.clone().into()]));
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        for number in [1, 2] {
            checkpointer.save_async(number, &state).unwrap();
            for tensor in [&tensor, &rows] {
                HostBytesMut::write(tensor).unwrap().fill(7);
            }
            checkpointer.wait().unwrap().unwrap();
            let path = step_path(dir.path(), number);
            let loaded = load_whole(path, &[], &LoadOptions::default()).unwrap();
            let values = flatten_state_dict(&loaded).unwrap().values;
            assert_eq!(values.len(), 4);
            let expected = if number == 1 {
                1f32
            } else {
                f32::from_ne_bytes([7; 4])
            };
            for (key, value) in values {
                let StateValue::Tensor(tensor) = value else {
                    panic!("{key} is a tensor")
                };
                let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                assert!(
                    values.iter().all(|&value| value == expected),
                    "{key} of save {number}"
                );
            }
        }
    })
    .unwrap();
}

#[test]
fn a_failure_of_one_rank_is_an_error_on_every_rank_and_the_next_save_works() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    run_local(2, |group| {
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let run = large_run(group.clone(), on_gpu(), &adamw);
        checkpointer.save_async(1, &run).unwrap();
        checkpointer.wait().unwrap().unwrap();
        // No directory can be made below a file.
        let pinned = counts().pinned;
        let started = checkpointer.save_async(file.path().join("below"), &run);
        assert!(started.and_then(|_| checkpointer.wait()).is_err());
        checkpointer.save_async(2, &run).unwrap();
        checkpointer.wait().unwrap().unwrap();
        assert_eq!(counts().pinned, pinned, "the memory was given back");
        if group.rank() == 1 {
            let weight = run.model.parameters().parameter("a.weight").unwrap();
            for shard in weight.shards() {
                release(&shard.tensor).unwrap();
            }
        }
        assert!(checkpointer.save(3, &run).is_err());
        let started = checkpointer.save_async(4, &run);
        assert!(started.and_then(|_| checkpointer.wait()).is_err());
        let fresh = large_run(group, on_gpu(), &adamw);
        checkpointer.save_async(5, &fresh).unwrap();
        checkpointer.wait().unwrap().unwrap();
    })
    .unwrap();
}
