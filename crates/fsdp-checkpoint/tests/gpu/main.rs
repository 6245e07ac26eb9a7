//! State on a GPU: loaded there, and saved from there, with the bits that CPUs saved. `cargo xtask
//! gpu` runs this where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod counts;
mod faults;
mod files;
#[cfg(feature = "nccl")]
mod full;
mod killed;
#[cfg(feature = "nccl")]
#[path = "../../../fsdp-comm/tests/nccl_ranks/mod.rs"]
mod nccl_ranks;
mod plan;
#[expect(dead_code, reason = "other test programs need the rest")]
#[path = "../../../fsdp-comm/tests/processes/mod.rs"]
mod processes;
#[expect(dead_code, reason = "other test programs ask for the rest")]
#[path = "../../../fsdp-comm/tests/stand_in/mod.rs"]
mod stand_in;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, LoadOptions, SaveOptions, StateDictOptions, TrainState,
    get_state_dict, load_in_place, load_whole, save, state_digest, step_path,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{HostBytes, HostBytesMut};
use fsdp_nn::algorithm::{
    AdafactorOptions, AdagradOptions, AdamOptions, Algorithm, MuonOptions, ScheduleFreeOptions,
    SgdOptions,
};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, MixedPrecision, Optimizer, ParamGroup, ShardingStrategy,
    Unit,
};
use fsdp_state::{StateDict, StateValue, flatten_state_dict};

use self::counts::{counts, has_counts};
use self::files::WatchedFiles;

/// The program of each rank, in tests whose ranks are processes.
#[test]
fn rank_process() {
    match std::env::var("FSDP_TEST").as_deref() {
        #[cfg(feature = "nccl")]
        Ok("full") => full::run_rank(),
        Ok(_) => killed::run_rank(),
        Err(_) => {}
    }
}

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
fn checkpoint_bits(path: &Path) -> Vec<(String, String)> {
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
            assert_eq!(checkpoint_bits(&gpus), checkpoint_bits(&cpus), "{what}");
            assert_eq!(checkpoint_bits(&later), checkpoint_bits(&cpus), "{what}");
        }
    }
}

/// A model of two layers, of which the larger one takes several pieces and blocks.
type Large = FullyShardedDataParallel<(Unit<Linear>, Linear)>;

/// The input of the larger layer, and its output.
const WIDTHS: [usize; 2] = [1200, 900];

/// Makes a run of the large model, which `algorithm` steps; if that is Muon, it steps the smaller
/// matrix only, and AdamW the rest. With `is_tied` a second name shares the memory of the smaller
/// matrix.
fn large_run(
    group: ProcessGroup,
    config: FsdpConfig,
    algorithm: &Algorithm,
    is_tied: bool,
) -> TrainState<LargeModules> {
    let model: Large = FullyShardedDataParallel::new(group, config, |scope| {
        let [input, output] = WIDTHS;
        if is_tied {
            scope.tie("tail.weight", "head.weight");
            scope.vb().get((3, output), "tail.weight")?;
        }
        Ok((
            scope
                .pp("a")
                .unit(|scope| linear(input, output, scope.vb()))?,
            linear(output, 3, scope.vb().pp("head"))?,
        ))
    })
    .unwrap();
    let is_stepped = |fqn: &&str| !matches!(algorithm, Algorithm::Muon(_)) || *fqn == "head.weight";
    let (stepped, rest): (Vec<&str>, Vec<&str>) = model.parameters().fqns().partition(is_stepped);
    let mut groups = vec![ParamGroup::new(algorithm.clone(), stepped)];
    if !rest.is_empty() {
        let adamw = Algorithm::AdamW(AdamOptions::adamw());
        groups.push(ParamGroup::new(adamw, rest));
    }
    let mut optimizer = Optimizer::with_groups(model.parameters(), groups).unwrap();
    if matches!(algorithm, Algorithm::ScheduleFreeAdamW(_)) {
        optimizer.train().unwrap();
    }
    TrainState::new(model, vec![optimizer])
}

type LargeModules = (Unit<Linear>, Linear);

/// Computes gradients, which differ from number to number, on the first GPU.
fn backward(run: &TrainState<LargeModules>, number: usize) {
    backward_on(run, number, &Device::new_cuda(0).unwrap());
}

/// Computes gradients, which differ from number to number.
fn backward_on(run: &TrainState<LargeModules>, number: usize, device: &Device) {
    let x = (Tensor::ones((2, WIDTHS[0]), DType::F32, device).unwrap() * (number as f64)).unwrap();
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

/// Checks that saves in the background, beside which the run goes on, have the digests of saves
/// that nothing disturbs.
fn assert_background_saves_are_unharmed(
    world: usize,
    config: &FsdpConfig,
    algorithm: &Algorithm,
    pinned_bytes: Option<usize>,
    is_tied: bool,
) {
    let dir = tempfile::tempdir().unwrap();
    let digests = run_local(world, |group| {
        let options = CheckpointerOptions {
            pinned_bytes,
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let mut run = large_run(group, config.clone(), algorithm, is_tied);
        backward(&run, 1);
        step(&mut run);
        let mut digests = Vec::new();
        for number in 1..=3 {
            backward(&run, number);
            let now = checkpointer.save(2 * number as u64, &run).unwrap();
            checkpointer
                .save_async(2 * number as u64 + 1, &run)
                .unwrap();
            if number > 1 {
                backward(&run, 7);
            }
            step(&mut run);
            if number > 2 {
                backward(&run, 8);
                step(&mut run);
            }
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
        assert_background_saves_are_unharmed(2, &on_gpu(), &adamw, pinned_bytes, false);
    }
    for algorithm in [
        Algorithm::Sgd(SgdOptions {
            lr: 0.1,
            momentum: 0.9,
            ..SgdOptions::default()
        }),
        Algorithm::Adam(AdamOptions {
            amsgrad: true,
            ..AdamOptions::default()
        }),
        Algorithm::Adagrad(AdagradOptions::default()),
        Algorithm::Adafactor(AdafactorOptions::default()),
        Algorithm::Muon(MuonOptions::default()),
        Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default()),
    ] {
        assert_background_saves_are_unharmed(1, &on_gpu(), &algorithm, None, false);
    }
    assert_background_saves_are_unharmed(2, &on_gpu(), &adamw, None, true);
    let no_shard = FsdpConfig {
        strategy: ShardingStrategy::NoShard,
        ..on_gpu()
    };
    let offloaded = FsdpConfig {
        cpu_offload: true,
        ..on_gpu()
    };
    let mixed = FsdpConfig {
        mixed_precision: MixedPrecision {
            param: Some(DType::BF16),
            ..MixedPrecision::default()
        },
        ..on_gpu()
    };
    let frozen = FsdpConfig {
        requires_grad: std::sync::Arc::new(|fqn| !fqn.ends_with("bias")),
        ..on_gpu()
    };
    for config in [no_shard, offloaded, mixed, frozen] {
        assert_background_saves_are_unharmed(2, &config, &adamw, None, false);
    }
}

/// Makes a run of the large model on a GPU, with AdamW, that has done a step.
fn stepped_run(group: ProcessGroup) -> TrainState<LargeModules> {
    let adamw = Algorithm::AdamW(AdamOptions::adamw());
    let mut run = large_run(group, on_gpu(), &adamw, false);
    backward(&run, 1);
    step(&mut run);
    run
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

/// The bytes of the tensors that are written by themselves: the larger weight and its moments. The
/// others are small, and are joined in a buffer until there is enough for a write.
const LARGE_BYTES: u64 = (3 * 4 * WIDTHS[0] * WIDTHS[1]) as u64;

#[test]
fn a_save_copies_each_byte_once_and_training_does_not_wait_for_it() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let files = WatchedFiles::new();
    run_local(1, |group| {
        let options = CheckpointerOptions::default();
        let mut checkpointer =
            Checkpointer::new(files.location(dir.path()), &group, options).unwrap();
        let mut run = stepped_run(group);
        let state_bytes = gpu_bytes(&run);
        assert!(state_bytes > LARGE_BYTES, "{state_bytes}");

        let before = counts();
        checkpointer.save(1, &run).unwrap();
        let saved = counts().since(before);
        assert!(!has_counts() || saved.to_host == state_bytes, "{saved:?}");
        assert_eq!(saved.to_device, 0);
        let written = files.take_written();
        assert!(!has_counts() || written[0] == LARGE_BYTES, "{written:?}");

        // The first save in the background pins its memory there.
        checkpointer.save_async(2, &run).unwrap();
        checkpointer.wait().unwrap();
        // A step without a save, to compare with.
        backward(&run, 2);
        let before = counts();
        step(&mut run);
        let plain_step = counts().since(before);

        backward(&run, 3);
        files.take_written();
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
            !has_counts() || (state_bytes..state_bytes + 10_000).contains(&saved.to_host),
            "{saved:?}"
        );
        let written = files.take_written();
        assert!(!has_counts() || written[0] == LARGE_BYTES, "{written:?}");
    })
    .unwrap();
}

#[test]
fn a_save_to_memory_copies_each_byte_once() {
    let _alone = alone();
    let (dir, tier) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let files = WatchedFiles::new();
    run_local(1, |group| {
        let options = CheckpointerOptions {
            memory_tier: Some(files.location(tier.path())),
            ..CheckpointerOptions::default()
        };
        let mut checkpointer = Checkpointer::new(dir.path(), &group, options).unwrap();
        let run = stepped_run(group);
        let state_bytes = gpu_bytes(&run);
        checkpointer.save(1, &run).unwrap();
        files.take_written();
        let before = counts();
        checkpointer.save_to_memory(2, &run).unwrap();
        let saved = counts().since(before);
        assert!(!has_counts() || saved.to_host == state_bytes, "{saved:?}");
        let written = files.take_written();
        assert!(!has_counts() || written[0] == LARGE_BYTES, "{written:?}");
    })
    .unwrap();
}

#[test]
fn a_load_copies_each_byte_once_into_the_live_tensors() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let files = WatchedFiles::new();
    run_local(1, |group| {
        let options = CheckpointerOptions::default();
        let mut checkpointer =
            Checkpointer::new(files.location(dir.path()), &group, options).unwrap();
        let mut run = stepped_run(group.clone());
        let saved = checkpointer.save(1, &run).unwrap();
        let state_bytes = gpu_bytes(&run);
        backward(&run, 2);
        step(&mut run);
        for turn in 0..2 {
            files.take_read();
            let before = counts();
            checkpointer.load(1, &mut run).unwrap();
            let loaded = counts().since(before);
            assert!(
                !has_counts() || loaded.to_device == state_bytes,
                "{loaded:?} {state_bytes}"
            );
            assert_eq!(loaded.to_host, 0);
            assert!(turn == 0 || loaded.pinned == 0, "{loaded:?}");
            let read = files.take_read();
            assert!(!has_counts() || read[0] == LARGE_BYTES, "{read:?}");
        }
        let again = checkpointer.save(2, &run).unwrap();
        assert_eq!(again.digest, saved.digest);
    })
    .unwrap();
}

#[test]
fn long_tensors_are_loaded_through_pinned_memory_too() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let files = WatchedFiles::new();
    run_local(1, |group| {
        let device = Device::new_cuda(0).unwrap();
        // Longer and longer, and then shorter ones, which find the memory of the longer ones.
        let lengths = [9_000_000, 30_000_000, 24_000_000, 9_000_000, 300_000];
        let mut state = StateDict::new();
        for (number, length) in lengths.into_iter().enumerate() {
            let tensor = Tensor::arange(0u32, length, &device).unwrap();
            state.insert(format!("{number}"), tensor);
        }
        let path = files.location(&dir.path().join("saved"));
        let saved = save(path.clone(), &state, &group, &SaveOptions::default()).unwrap();
        let digest = state_digest(&state, &group).unwrap();
        for (_, value) in &state {
            HostBytesMut::write(value.as_tensor().unwrap())
                .unwrap()
                .fill(7);
        }
        files.take_read();
        let before = counts();
        load_in_place(path, &mut state, &group, &LoadOptions::default()).unwrap();
        let loaded = counts().since(before);
        let bytes = saved.rank_bytes;
        assert!(!has_counts() || loaded.to_device == bytes, "{loaded:?}");
        let read = files.take_read();
        assert!(!has_counts() || read[0] == bytes, "{read:?} {bytes}");
        assert!(loaded.pinned <= 256 << 20, "{loaded:?}");
        assert_eq!(state_digest(&state, &group).unwrap(), digest);
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
