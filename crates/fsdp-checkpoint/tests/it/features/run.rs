//! The training of `features.py`, on any number of ranks.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear};
use fsdp_checkpoint::{
    Checkpointer, CheckpointerOptions, StateDictOptions, TrainState, set_model_state_dict,
    step_path,
};
use fsdp_comm::ProcessGroup;
use fsdp_flat::ShardedTensor;
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::{AdafactorOptions, AdamOptions, MuonOptions, ScheduleFreeOptions};
use fsdp_nn::{
    Algorithm, AveragedModel, ClipOptions, CommHook, Decay, FsdpConfig, FullyShardedDataParallel,
    GradNorm, GradScaler, GradScalerOptions, MixedPrecision, OnNonFinite, Optimizer, ParamGroup,
    Recomputed, Schedule, ShardingStrategy, Unit,
};
use fsdp_state::{StateDict, StateValue};

/// The steps of a whole training.
pub(crate) const STEPS: u64 = 8;
const SIZES: [(usize, usize); 3] = [(6, 8), (8, 8), (8, 6)];
/// The rows of a batch of one of torch's ranks.
const ROWS: usize = 4;
/// The weight that some features treat apart.
const SPECIAL: &str = "layers.1.weight";

type Layers = Vec<Unit<Recomputed<Linear>>>;

/// The ranks that torch trains a feature on. Their batches together are the batch of all ranks
/// here, however many there are.
pub(crate) fn ranks_of(feature: &str) -> usize {
    if feature == "hybrid" { 4 } else { 2 }
}

/// The report of a training run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Told {
    /// The loss of this rank in each step.
    pub(crate) losses: Vec<f64>,
    /// Numbers that the feature brings, on this rank.
    pub(crate) others: Vec<f64>,
}

/// A run with a feature.
pub(crate) struct Run {
    feature: String,
    group: ProcessGroup,
    state: TrainState<Layers>,
    schedule: Option<Schedule>,
}

/// The numbers of `features.py`.
fn tensor(seed: u32, shape: &[usize]) -> Tensor {
    let mut seed = seed;
    let numbers = (0..shape.iter().product()).map(|_| {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(seed >> 8) / f64::from(1 << 23) - 1.0) as f32
    });
    Tensor::from_vec(numbers.collect(), shape, &Device::Cpu).unwrap()
}

fn scalar(tensor: &Tensor) -> f64 {
    tensor.to_dtype(DType::F64).unwrap().to_scalar().unwrap()
}

/// The values of all parameters before the first step.
fn initial_values() -> Vec<(String, Tensor)> {
    let values = SIZES
        .into_iter()
        .zip(0u32..)
        .flat_map(|((inputs, outputs), index)| {
            [
                ("weight", 10, vec![outputs, inputs]),
                ("bias", 20, vec![outputs]),
            ]
            .map(|(name, seed, shape)| {
                (
                    format!("layers.{index}.{name}"),
                    (tensor(seed + index, &shape) * 0.5).unwrap(),
                )
            })
        });
    values.collect()
}

fn config_of(feature: &str, world: usize, config: FsdpConfig) -> FsdpConfig {
    let mixed_precision = |param| {
        let (param, reduce) = (Some(param), Some(DType::F32));
        MixedPrecision {
            param,
            reduce,
            cast_inputs: true,
            ..MixedPrecision::default()
        }
    };
    match feature {
        "no reshard" => FsdpConfig {
            strategy: ShardingStrategy::ShardGradOp,
            ..config
        },
        "frozen" => FsdpConfig {
            requires_grad: Arc::new(|fqn| fqn != SPECIAL),
            ..config
        },
        "ignored" => FsdpConfig {
            ignored_states: Arc::new(|fqn| fqn == SPECIAL),
            ..config
        },
        "mixed precision" => FsdpConfig {
            mixed_precision: mixed_precision(DType::BF16),
            ..config
        },
        "sharded scaler" => FsdpConfig {
            mixed_precision: mixed_precision(DType::F16),
            ..config
        },
        "offload" => FsdpConfig {
            cpu_offload: true,
            ..config
        },
        "hybrid" => {
            let replicas = world.min(2);
            let mesh = DeviceMesh::new(
                &[replicas, world / replicas],
                &["replicate", "shard"],
                world,
            )
            .unwrap();
            FsdpConfig {
                strategy: ShardingStrategy::HybridShard,
                mesh: Some(mesh),
                ..config
            }
        }
        _ => config,
    }
}

fn optimizers_of(feature: &str, model: &FullyShardedDataParallel<Layers>) -> Vec<Optimizer> {
    let parameters = model.parameters();
    let adamw = Algorithm::AdamW(AdamOptions {
        lr: 0.01,
        ..AdamOptions::adamw()
    });
    let groups = match feature {
        "muon" => {
            let (matrices, others): (Vec<&str>, Vec<&str>) =
                parameters.fqns().partition(|fqn| fqn.ends_with("weight"));
            let muon = Algorithm::Muon(MuonOptions {
                lr: 0.02,
                ..MuonOptions::default()
            });
            vec![
                ParamGroup::new(muon, matrices),
                ParamGroup::new(adamw, others),
            ]
        }
        "adafactor" => {
            let adafactor = Algorithm::Adafactor(AdafactorOptions {
                lr: 0.05,
                ..AdafactorOptions::default()
            });
            vec![ParamGroup::new(adafactor, parameters.fqns())]
        }
        "schedule-free" => {
            let options = ScheduleFreeOptions {
                lr: 0.02,
                warmup_steps: 3,
                ..ScheduleFreeOptions::default()
            };
            vec![ParamGroup::new(
                Algorithm::ScheduleFreeAdamW(options),
                parameters.fqns(),
            )]
        }
        _ => vec![ParamGroup::new(adamw, parameters.fqns())],
    };
    groups
        .into_iter()
        .map(|group| Optimizer::with_groups(parameters, vec![group]).unwrap())
        .collect()
}

impl Run {
    /// Makes a run before its first step. `config` has what the feature does not say.
    pub(crate) fn new(group: &ProcessGroup, feature: &str, config: FsdpConfig) -> Self {
        let config = config_of(feature, group.world_size(), config);
        let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
            let layer = |(index, (inputs, outputs)): (usize, &(usize, usize))| {
                let linear = |scope: &fsdp_nn::Scope| linear(*inputs, *outputs, scope.vb());
                let recomputes = feature == "checkpoint";
                scope
                    .pp("layers")
                    .pp(index)
                    .unit(|scope| Ok(Recomputed::when(recomputes, linear(scope)?)))
            };
            SIZES.iter().enumerate().map(layer).collect()
        });
        let model = model.unwrap();
        let optimizers = optimizers_of(feature, &model);
        let mut state = TrainState::new(model, optimizers);
        let options = GradScalerOptions {
            init_scale: 1024.0,
            growth_interval: 2,
            ..GradScalerOptions::default()
        };
        let has_scaler = ["scaler", "sharded scaler"].contains(&feature);
        state.scaler = has_scaler.then(|| GradScaler::new(options).unwrap());
        let decays = [
            ("constant", 3, Decay::Constant),
            ("cosine", 2, Decay::Cosine),
            ("linear", 2, Decay::Linear),
        ];
        let schedule = decays.into_iter().find(|(name, ..)| *name == feature);
        let schedule = schedule.map(|(_, warmup, decay)| Schedule {
            decay,
            warmup,
            steps: STEPS,
        });
        let mut run = Run {
            feature: feature.to_owned(),
            group: group.clone(),
            state,
            schedule,
        };
        run.set_initial_values();
        if feature == "average" {
            run.state.average =
                Some(AveragedModel::new(run.state.model.parameters(), 0.75).unwrap());
        }
        match feature {
            "bf16 hook" => run
                .state
                .model
                .register_comm_hook(CommHook::Bf16Compress)
                .unwrap(),
            "fp16 hook" => run
                .state
                .model
                .register_comm_hook(CommHook::Fp16Compress)
                .unwrap(),
            _ => {}
        }
        run
    }

    fn set_initial_values(&mut self) {
        let parameters = self.state.model.parameters();
        let is_wrong = self.feature == "synchronized" && self.group.rank() != 0;
        for (fqn, value) in initial_values() {
            let value = if is_wrong {
                value.zeros_like().unwrap()
            } else {
                value
            };
            match parameters
                .ignored_states()
                .iter()
                .find(|(name, _)| *name == fqn)
            {
                Some((_, var)) => var.set(&value).unwrap(),
                None => parameters
                    .set_parameter(&fqn, &ShardedTensor::from_whole(&value))
                    .unwrap(),
            }
        }
        if self.feature == "synchronized" {
            let mut of_rank_0 = StateDict::new();
            if self.group.rank() == 0 {
                of_rank_0.extend(
                    initial_values()
                        .into_iter()
                        .map(|(fqn, value)| (fqn, StateValue::Tensor(value))),
                );
            }
            let options = StateDictOptions {
                full_state_dict: true,
                broadcast_from_rank0: true,
                ..StateDictOptions::default()
            };
            set_model_state_dict(&of_rank_0, parameters, &options).unwrap();
        }
    }

    /// The rows of this rank: an equal part of those of all of torch's ranks, whose numbers come
    /// from these seeds.
    fn rows(&self, seed_of: impl Fn(u32) -> u32) -> (Tensor, Tensor) {
        let torch_ranks = ranks_of(&self.feature);
        let batch = |offset: u32| {
            let of_rank =
                |rank: usize| tensor(seed_of(u32::try_from(rank).unwrap()) + offset, &[ROWS, 6]);
            let all = Tensor::cat(&(0..torch_ranks).map(of_rank).collect::<Vec<_>>(), 0).unwrap();
            let rows = torch_ranks * ROWS / self.group.world_size();
            all.narrow(0, self.group.rank() * rows, rows)
                .unwrap()
                .contiguous()
                .unwrap()
        };
        (batch(0), batch(5000))
    }

    fn loss(&self, (x, y): &(Tensor, Tensor), parts: f64) -> Tensor {
        let loss = self.state.model.forward(|layers| {
            let output = layers
                .iter()
                .try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
            (output.to_dtype(DType::F32)? - y)?.sqr()?.mean_all()? / parts
        });
        loss.unwrap()
    }

    /// Trains these steps.
    pub(crate) fn train(&mut self, steps: Range<u64>) -> Told {
        let mut told = Told::default();
        if self.feature == "schedule-free" {
            self.state.optimizers[0].train().unwrap();
        }
        for step in steps {
            self.step(step, &mut told);
        }
        told
    }

    fn step(&mut self, step: u64, told: &mut Told) {
        let feature = self.feature.clone();
        if feature == "summoned" && [1, 5].contains(&step) {
            told.others.push(self.halve());
        }
        if let Some(schedule) = &self.schedule {
            schedule.apply(&mut self.state.optimizers[0], step).unwrap();
        }
        let parts = if ["accumulate", "hybrid"].contains(&feature.as_str()) {
            2
        } else {
            1
        };
        let mut sum = 0.0;
        for part in 0..parts {
            let is_last = part + 1 == parts;
            self.state
                .model
                .set_requires_gradient_sync(is_last || feature == "hybrid");
            self.state.model.set_requires_all_reduce(is_last);
            let seed = 1000 + u32::try_from(step).unwrap() * 16 + part;
            let loss = self.loss(&self.rows(|rank| seed + rank * 4), parts.into());
            sum += scalar(&loss);
            // One rank's gradients overflow in one of the steps.
            let overflows = step == 4 && self.group.rank() + 1 == self.group.world_size();
            let scaled = match &self.state.scaler {
                Some(scaler) if overflows => {
                    scaler.scale(&(loss * f64::INFINITY).unwrap()).unwrap()
                }
                Some(scaler) => scaler.scale(&loss).unwrap(),
                None => loss,
            };
            let others = self.state.model.backward(&scaled).unwrap();
            for (_, var) in self.state.model.parameters().ignored_states() {
                told.others
                    .push(scalar(&others.get(var).unwrap().sum_all().unwrap()));
            }
        }
        told.losses.push(sum);
        let clip = [
            ("clip", GradNorm::L2),
            ("clip by the largest", GradNorm::Infinity),
        ];
        if let Some((_, norm)) = clip.into_iter().find(|(name, _)| *name == feature) {
            let options = ClipOptions {
                norm,
                on_non_finite: OnNonFinite::Error,
            };
            told.others.push(
                self.state
                    .model
                    .parameters()
                    .clip_grad_norm_with(0.05, options)
                    .unwrap(),
            );
        }
        let TrainState {
            model,
            optimizers,
            scaler,
            average,
            ..
        } = &mut self.state;
        for optimizer in optimizers.iter_mut() {
            match scaler {
                Some(scaler) => drop(scaler.step(optimizer).unwrap()),
                None => optimizer.step().unwrap(),
            }
        }
        if let Some(scaler) = scaler {
            scaler.update().unwrap();
            told.others.push(scaler.get_scale());
        }
        if let Some(schedule) = &self.schedule {
            // torch tells the rate of the next step.
            told.others.push(0.01 * schedule.factor(step + 1));
        }
        if let Some(average) = average {
            average.update().unwrap();
        }
        model.parameters().zero_grad();
    }

    /// Halves a weight, and returns the sum of what it was.
    fn halve(&self) -> f64 {
        let mut whole = self.state.model.parameters().summon_full_params().unwrap();
        let weight = whole.get(SPECIAL).unwrap().clone();
        whole.set(SPECIAL, (&weight / 2.0).unwrap()).unwrap();
        whole.write_back().unwrap();
        scalar(&weight.sum_all().unwrap())
    }

    /// Returns the loss of the averaged model, if there is one.
    pub(crate) fn loss_of_average(&mut self) -> Option<f64> {
        self.state.average.as_mut()?.swap().unwrap();
        let loss = self.loss(&self.rows(|rank| 9000 + rank), 1.0);
        Some(scalar(&loss))
    }

    /// Saves the run after this many steps.
    pub(crate) fn save(&mut self, dir: &Path, step: u64) {
        let mut checkpointer =
            Checkpointer::new(dir, &self.group, CheckpointerOptions::default()).unwrap();
        if self.feature == "schedule-free" {
            self.state.optimizers[0].eval().unwrap();
        }
        checkpointer.save(step, &self.state).unwrap();
    }

    /// Loads the newest checkpoint, and returns the number of its steps.
    pub(crate) fn resume(&mut self, dir: &Path) -> u64 {
        let mut checkpointer =
            Checkpointer::new(dir, &self.group, CheckpointerOptions::default()).unwrap();
        let (checkpoint, report) = checkpointer.load_latest(&mut self.state).unwrap().unwrap();
        assert!(
            report.missing.is_empty() && report.unexpected.is_empty(),
            "{report:?}"
        );
        checkpoint.step
    }
}

/// The names in the metadata of the checkpoint after these steps.
pub(crate) fn keys(dir: &Path, step: u64) -> Vec<String> {
    let path = step_path(dir, step);
    let checkpoint =
        fsdp_formats::checkpoint::open(path, fsdp_formats::reader::OpenOptions::default()).unwrap();
    let mut keys: Vec<String> = checkpoint.metadata().entries.keys().cloned().collect();
    keys.sort_unstable();
    keys
}
