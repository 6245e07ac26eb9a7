//! Steps of every kind on ranks over NCCL, which have the losses of a CPU. A process for each rank
//! goes through all of them.

use std::sync::Arc;

use candle_core::{DType, Device};
use fsdp::comm::{BackendKind, init_process_group};
use fsdp::flat::storage::cuda::{Streams, open};
use fsdp::nn::algorithm::{AdafactorOptions, MuonOptions, ScheduleFreeOptions};
use fsdp::nn::{FinishOptions, GradScalerOptions, MixedPrecision, NnError, ParamGroup};
use fsdp::prelude::*;
use fsdp_cli::data::{Batches, Text, VOCAB};
use fsdp_cli::gpt::{Gpt, GptConfig};

/// A model for which the stand-in for a GPU needs little time.
const CONFIG: GptConfig = GptConfig {
    layers: 1,
    heads: 2,
    hidden: 16,
    seq: 8,
    vocab: VOCAB,
};
const STEPS: u64 = 3;
const LR: f64 = 1e-2;

/// One kind of step.
#[derive(Debug, Clone, Copy)]
struct Case {
    optimizer: &'static str,
    strategy: ShardingStrategy,
    precision: Option<DType>,
    cpu_offload: bool,
    accumulation: usize,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            optimizer: "adamw",
            strategy: ShardingStrategy::FullShard,
            precision: None,
            cpu_offload: false,
            accumulation: 1,
        }
    }
}

const OPTIMIZERS: [&str; 8] = [
    "adamw",
    "adam",
    "sgd",
    "momentum",
    "adagrad",
    "adafactor",
    "muon",
    "schedule-free",
];

/// Returns the kinds of steps for so many ranks.
fn cases(ranks: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    if ranks == 4 {
        // Two replicas of two shards.
        for optimizer in ["adamw", "adafactor", "muon"] {
            cases.push(Case {
                optimizer,
                strategy: ShardingStrategy::HybridShard,
                ..Case::default()
            });
        }
        return cases;
    }
    for optimizer in OPTIMIZERS {
        for precision in [None, Some(DType::BF16)] {
            cases.push(Case {
                optimizer,
                precision,
                ..Case::default()
            });
        }
    }
    for optimizer in ["adamw", "adafactor", "muon"] {
        cases.push(Case {
            optimizer,
            cpu_offload: true,
            ..Case::default()
        });
        cases.push(Case {
            optimizer,
            precision: Some(DType::F16),
            accumulation: 2,
            ..Case::default()
        });
        for strategy in [ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard] {
            cases.push(Case {
                optimizer,
                strategy,
                ..Case::default()
            });
        }
    }
    cases
}

impl Case {
    /// Returns the options of a model on a device.
    fn config(&self, ranks: usize, device: &Device) -> FsdpConfig {
        let is_hybrid = self.strategy == ShardingStrategy::HybridShard && ranks > 1;
        let mesh = || DeviceMesh::new(&[2, ranks / 2], &["replicate", "shard"], ranks).unwrap();
        FsdpConfig {
            device: device.clone(),
            // A single rank has the whole model anyway.
            strategy: if ranks == 1 {
                ShardingStrategy::NoShard
            } else {
                self.strategy
            },
            mesh: is_hybrid.then(mesh),
            mixed_precision: MixedPrecision {
                param: self.precision,
                reduce: self.precision.map(|_| DType::F32),
                ..MixedPrecision::default()
            },
            cpu_offload: self.cpu_offload,
            ..FsdpConfig::default()
        }
    }

    fn optimizer(&self, parameters: &Arc<ShardedParameters>) -> Optimizer {
        let adam = AdamOptions {
            lr: LR,
            ..AdamOptions::adamw()
        };
        let sgd = |momentum| {
            Algorithm::Sgd(SgdOptions {
                lr: LR,
                momentum,
                ..SgdOptions::default()
            })
        };
        let algorithm = match self.optimizer {
            "adamw" => Algorithm::AdamW(adam),
            "adam" => Algorithm::Adam(adam),
            "sgd" => sgd(0.0),
            "momentum" => sgd(0.9),
            "adagrad" => Algorithm::Adagrad(AdagradOptions {
                lr: LR,
                ..AdagradOptions::default()
            }),
            "adafactor" => Algorithm::Adafactor(AdafactorOptions {
                lr: LR,
                ..AdafactorOptions::default()
            }),
            "schedule-free" => Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions {
                lr: LR,
                ..ScheduleFreeOptions::default()
            }),
            "muon" => {
                let muon = Algorithm::Muon(MuonOptions {
                    lr: LR,
                    ..MuonOptions::default()
                });
                let (matrices, others): (Vec<&str>, Vec<&str>) = parameters
                    .fqns()
                    .partition(|fqn| parameters.shape(fqn).unwrap().len() == 2);
                let groups = vec![
                    ParamGroup::new(muon, matrices),
                    ParamGroup::new(Algorithm::AdamW(adam), others),
                ];
                return Optimizer::with_groups(parameters, groups).unwrap();
            }
            other => panic!("`{other}` is not known"),
        };
        Optimizer::new(parameters, algorithm).unwrap()
    }

    /// Trains for some steps. Returns the loss of each, and whether it was skipped.
    fn train(&self, group: ProcessGroup, device: &Device) -> Result<Vec<(f64, bool)>, NnError> {
        let (rank, ranks) = (group.rank(), group.world_size());
        let batches = Batches {
            batch: 8,
            seq: CONFIG.seq,
            ranks,
            accumulation: self.accumulation,
        };
        let text = Text::builtin();
        let config = self.config(ranks, device);
        let model = FullyShardedDataParallel::new(group, config, |scope| Gpt::new(scope, &CONFIG))?;
        let mut optimizers = [self.optimizer(model.parameters())];
        let mut scaler = (self.precision == Some(DType::F16)).then(|| {
            // A scale with which the gradients of the first step overflow.
            let options = GradScalerOptions {
                init_scale: f64::from(1u32 << 24),
                ..GradScalerOptions::default()
            };
            GradScaler::new(options).unwrap()
        });
        optimizers.iter_mut().try_for_each(Optimizer::train)?;
        let mut outcomes = Vec::new();
        for step in 0..STEPS {
            let backward = |part| {
                let rows = batches.rows_of(step);
                let (tokens, targets) = batches.batch(&text, rows, (rank, part), device)?;
                let weight = batches.weight(rank, part);
                let loss = model.forward(|gpt| gpt.loss(&tokens, &targets)? * weight)?;
                let scaled = match &scaler {
                    Some(scaler) => scaler.scale(&loss)?,
                    None => loss.clone(),
                };
                model.backward(&scaled)?;
                Ok::<_, NnError>(loss.detach())
            };
            let mut losses = Vec::new();
            for part in 0..self.accumulation - 1 {
                losses.push(model.no_sync(|_| backward(part))?);
            }
            losses.push(backward(self.accumulation - 1)?);
            let options = FinishOptions {
                max_norm: 0.5,
                losses: &losses,
                ..FinishOptions::default()
            };
            let finished =
                model
                    .parameters()
                    .finish_step(&mut optimizers, scaler.as_mut(), &options)?;
            let loss = finished.losses.iter().sum::<f64>() / ranks as f64;
            outcomes.push((loss, finished.is_skipped));
        }
        Ok(outcomes)
    }
}

/// Goes through all kinds of steps as one rank of a job.
pub(crate) fn run_rank() {
    let group = init_process_group(BackendKind::Nccl).unwrap();
    let gpu = open(0, Streams::PerThread).unwrap();
    for case in cases(group.world_size()) {
        let found = case.train(group.clone(), &gpu).unwrap();
        if case.precision.is_none() {
            let again = case.train(group.clone(), &gpu).unwrap();
            assert_eq!(found, again, "{case:?} has the same bits each time");
        }
        let (losses, skipped): (Vec<f64>, Vec<bool>) = found.into_iter().unzip();
        let cpu = fsdp::comm::run_local(1, |group| case.train(group, &Device::Cpu)).unwrap();
        let cpu = cpu.into_iter().next().unwrap().unwrap();
        let (expected, expected_skipped): (Vec<f64>, Vec<bool>) = cpu.into_iter().unzip();
        assert_eq!(skipped, expected_skipped, "{case:?}");
        assert_eq!(skipped[0], case.precision == Some(DType::F16), "{case:?}");
        let relative = if case.precision.is_some() { 1e-2 } else { 1e-3 };
        let is_close =
            |(loss, expected): (&f64, &f64)| (loss - expected).abs() / expected < relative;
        assert!(
            losses.iter().zip(&expected).all(is_close),
            "{case:?}: {losses:?}, on a CPU {expected:?}"
        );
    }
    // The last step may still be under way.
    gpu.synchronize().unwrap();
}
