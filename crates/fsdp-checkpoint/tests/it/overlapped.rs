//! A save in the background copies a training run while training goes on, and holds what the state
//! was when it was asked for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, linear};
use fsdp_checkpoint::{
    CheckpointError, Checkpointer, CheckpointerOptions, KeptUnchanged, LoadOptions, LoadReport,
    StateDictOptions, Stateful, TrainState, get_model_state_dict, load_whole, set_model_state_dict,
    step_path,
};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_flat::storage::{HostSliceMut, release};
use fsdp_flat::{LocalShard, ShardedTensor};
use fsdp_formats::checkpoint::Checkpoint;
use fsdp_layout::TensorBox;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{
    AveragedModel, FsdpConfig, FullyShardedDataParallel, Optimizer, Scope, ShardingStrategy, Unit,
};
use fsdp_state::{StateDict, StateValue};

/// The size of the layer: its copy takes longer than a step of the optimizer takes to begin.
const WIDTH: usize = 1500;

/// Builds a model of one layer, which is part of the root unit, or a unit of its own.
type Build<M> = fn(&Scope) -> candle_core::Result<M>;

fn in_root(scope: &Scope) -> candle_core::Result<Linear> {
    linear(WIDTH, WIDTH, scope.vb().pp("layer"))
}

fn in_unit(scope: &Scope) -> candle_core::Result<Unit<Linear>> {
    scope
        .pp("layer")
        .unit(|scope| linear(WIDTH, WIDTH, scope.vb()))
}

fn run(group: ProcessGroup, config: FsdpConfig) -> TrainState<Linear> {
    run_of(group, config, in_root)
}

fn run_of<M>(group: ProcessGroup, config: FsdpConfig, build: Build<M>) -> TrainState<M> {
    let model = FullyShardedDataParallel::new(group, config, build).unwrap();
    let optimizer =
        Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw())).unwrap();
    let average = AveragedModel::new(model.parameters(), 0.9).unwrap();
    let mut run = TrainState::new(model, vec![optimizer]);
    run.average = Some(average);
    run
}

fn backward<M: Module>(run: &TrainState<M>) {
    let x = Tensor::ones((1, WIDTH), DType::F32, &Device::Cpu).unwrap();
    let loss = run
        .model
        .forward(|layer| layer.forward(&x)?.sqr()?.mean_all())
        .unwrap();
    run.model.backward(&loss).unwrap();
}

fn step<M>(run: &mut TrainState<M>) {
    run.optimizers[0].step().unwrap();
    run.average.as_mut().unwrap().update().unwrap();
}

#[test]
fn a_step_right_after_the_call_changes_nothing_in_the_checkpoint() {
    let strategies = [
        ShardingStrategy::FullShard,
        ShardingStrategy::ShardGradOp,
        ShardingStrategy::NoShard,
    ];
    for (strategy, world) in strategies.into_iter().zip([2, 3, 1]) {
        let config = FsdpConfig {
            strategy,
            ..FsdpConfig::default()
        };
        assert_saves_are_unharmed(world, &config, in_root);
        assert_saves_are_unharmed(world, &config, in_unit);
    }
}

/// Checks that saves in the background have the digests of saves that nothing disturbs.
fn assert_saves_are_unharmed<M: Module>(world: usize, config: &FsdpConfig, build: Build<M>) {
    let dir = tempfile::tempdir().unwrap();
    let digests = run_local(world, |group| {
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let mut run = run_of(group, config.clone(), build);
        backward(&run);
        step(&mut run);
        let mut digests = Vec::new();
        for number in 1..=4 {
            backward(&run);
            let now = checkpointer.save(2 * number, &run).unwrap();
            checkpointer.save_async(2 * number + 1, &run).unwrap();
            if number % 2 == 0 {
                backward(&run);
            }
            step(&mut run);
            let later = checkpointer.wait().unwrap().unwrap();
            assert_eq!(later.digest, now.digest, "save {number} with {config:?}");
            digests.push(now.digest.unwrap().to_string());
            run.model.parameters().zero_grad();
        }
        digests
    });
    let mut digests = digests.unwrap().remove(0);
    digests.dedup();
    assert_eq!(digests.len(), 4, "each step changes the state");
}

#[test]
fn whatever_changes_the_state_waits_until_it_has_been_read() {
    run_local(1, |group| {
        let mut run = run(group, FsdpConfig::default());
        backward(&run);
        step(&mut run);
        let parameters = run.model.parameters().clone();
        let weight = parameters.parameter("layer.weight").unwrap();
        assert_waits("step", &parameters, &mut || {
            run.optimizers[0].step().unwrap()
        });
        assert_waits("set_parameter", &parameters, &mut || {
            parameters.set_parameter("layer.weight", &weight).unwrap()
        });
        let mut averaged = run.average.take().unwrap();
        let state = averaged.state_dict().unwrap();
        assert_waits("update", &parameters, &mut || averaged.update().unwrap());
        assert_waits("load of the average", &parameters, &mut || {
            averaged.load_state_dict(&state).unwrap()
        });
        assert_waits("swap", &parameters, &mut || averaged.swap().unwrap());
        averaged.swap().unwrap();
        let options = StateDictOptions::default();
        let model = get_model_state_dict(&parameters, &options).unwrap();
        assert_waits("set_model_state_dict", &parameters, &mut || {
            set_model_state_dict(&model, &parameters, &options).unwrap();
        });
        assert_waits("lend", &parameters, &mut || parameters.lend().unwrap());
        assert!(
            parameters.keep_unchanged().is_none(),
            "somebody may write at any time"
        );
    })
    .unwrap();
}

/// Checks that `change` returns only after a reader of the values has ended, and that the guard
/// tells of the wait.
fn assert_waits(name: &str, parameters: &fsdp_nn::ShardedParameters, change: &mut dyn FnMut()) {
    let has_ended = AtomicBool::new(false);
    let guard = parameters.keep_unchanged().unwrap();
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            // Long enough for a change that does not wait to be over.
            thread::sleep(Duration::from_millis(100));
            has_ended.store(true, Ordering::SeqCst);
            guard.release()
        });
        change();
        assert!(has_ended.load(Ordering::SeqCst), "`{name}` did not wait");
        assert!(
            reader.join().unwrap() > Duration::ZERO,
            "`{name}` has waited"
        );
    });
}

#[test]
fn tensors_that_no_guard_covers_are_copied_at_once() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let mut run = run(group.clone(), FsdpConfig::default());
        let tensor = Tensor::ones((1, 1000), DType::F32, &Device::Cpu).unwrap();
        let bounds = TensorBox::new(vec![group.rank(), 0], vec![1, 1000]);
        let shards = vec![LocalShard { bounds, tensor }];
        let own = ShardedTensor::new(DType::F32, vec![2, 1000], shards).unwrap();
        // A key that begins like a guarded one.
        run.values.insert("average.mine", own.clone());
        let whole = Tensor::ones(1000, DType::F32, &Device::Cpu).unwrap();
        run.values.insert("whole", whole.clone());
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer.save_async(1, &run).unwrap();
        HostSliceMut::<f32>::write(&whole).unwrap().fill(7.0);
        HostSliceMut::<f32>::write(&own.shards()[0].tensor)
            .unwrap()
            .fill(7.0);
        checkpointer.wait().unwrap().unwrap();
    })
    .unwrap();
    let state = load_whole(step_path(dir.path(), 1), &[], &LoadOptions::default()).unwrap();
    for key in ["average.mine", "whole"] {
        let tensor = state.get(key).and_then(StateValue::as_tensor).unwrap();
        assert_eq!(
            tensor.max_all().unwrap().to_scalar::<f32>().unwrap(),
            1.0,
            "{key}"
        );
    }
}

#[test]
fn the_average_of_another_model_is_copied_at_once() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let (mut run, mut other) = (
            run(group.clone(), FsdpConfig::default()),
            run(group.clone(), FsdpConfig::default()),
        );
        backward(&other);
        step(&mut other);
        std::mem::swap(&mut run.average, &mut other.average);
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        let before = checkpointer.save(1, &run).unwrap();
        other.model.parameters().zero_grad();
        backward(&other);
        other.optimizers[0].step().unwrap();
        checkpointer.save_async(2, &run).unwrap();
        run.average.as_mut().unwrap().update().unwrap();
        assert_eq!(checkpointer.wait().unwrap().unwrap().digest, before.digest);
    })
    .unwrap();
}

/// A run whose weights are released as soon as the save has been asked for.
struct Lost(TrainState<Linear>);

impl Stateful for Lost {
    fn state_dict(&self) -> Result<StateDict, CheckpointError> {
        self.0.state_dict()
    }

    fn state_to_save(&self) -> Result<(StateDict, Option<KeptUnchanged>), CheckpointError> {
        if self.0.model.group().rank() == 1 {
            let weight = self.0.model.parameters().parameter("layer.weight").unwrap();
            release(&weight.shards()[0].tensor).unwrap();
        }
        self.0.state_to_save()
    }

    fn load_state_dict(
        &mut self,
        checkpoint: &dyn Checkpoint,
        group: &ProcessGroup,
        options: &LoadOptions,
    ) -> Result<LoadReport, CheckpointError> {
        self.0.load_state_dict(checkpoint, group, options)
    }
}

#[test]
fn what_cannot_be_copied_later_on_one_rank_is_an_error_on_every_rank_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let lost = Lost(run(group.clone(), FsdpConfig::default()));
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer.save_async(1, &lost).unwrap();
        let error = checkpointer.wait().unwrap_err();
        assert!(error.to_string().contains("freed"), "{error}");
        // Nobody waits for a copy that has failed.
        lost.0.model.parameters().lend().unwrap();
    })
    .unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn views_that_may_be_written_at_any_time_are_copied_at_once() {
    let dir = tempfile::tempdir().unwrap();
    run_local(2, |group| {
        let run = run(group.clone(), FsdpConfig::default());
        let mut checkpointer =
            Checkpointer::new(dir.path(), &group, CheckpointerOptions::default()).unwrap();
        checkpointer.save(1, &run).unwrap();
        assert!(
            run.state_to_save().unwrap().1.is_some(),
            "a save only reads"
        );
        let views = run.state_dict().unwrap();
        let before = checkpointer.save(2, &run).unwrap();
        checkpointer.save_async(3, &run).unwrap();
        let model = views.get("model").and_then(StateValue::as_dict).unwrap();
        let weight = model
            .get("layer.weight")
            .and_then(StateValue::as_sharded)
            .unwrap();
        HostSliceMut::<f32>::write(&weight.shards()[0].tensor)
            .unwrap()
            .fill(7.0);
        assert_eq!(checkpointer.wait().unwrap().unwrap().digest, before.digest);
    })
    .unwrap();
}
