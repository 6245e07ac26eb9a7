//! Sharding changes where numbers live, not what they are: the same losses as plain candle, on any
//! number of ranks, with every strategy and in both `use_orig_params` modes.

use candle_core::{DType, Device};
use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use fsdp::nn::NnError;
use fsdp::prelude::*;
use fsdp_cli::data::{Batches, Text, VOCAB};
use fsdp_cli::gpt::{Gpt, GptConfig};
use fsdp_cli::ranks::Ranks;

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    heads: 2,
    hidden: 16,
    seq: 16,
    vocab: VOCAB,
};
const BATCH: usize = 12;
const STEPS: u64 = 30;
/// High enough that 30 steps go a long way.
const LR: f64 = 3e-3;

fn batches(ranks: usize, accumulation: usize) -> Batches {
    Batches {
        batch: BATCH,
        seq: CONFIG.seq,
        ranks,
        accumulation,
    }
}

/// Plain candle, from the values that the sharded model starts from.
fn plain_losses(initial: &[(String, Vec<f32>)]) -> Vec<f64> {
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let model = Gpt::new(&Scope::plain(vb), &CONFIG).unwrap();
    let vars = variables.data().lock().unwrap().clone();
    assert_eq!(vars.len(), initial.len());
    for (fqn, values) in initial {
        let value =
            candle_core::Tensor::from_slice(values, vars[fqn].shape(), &Device::Cpu).unwrap();
        vars[fqn].set(&value).unwrap();
    }
    let params = ParamsAdamW {
        lr: LR,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
    };
    let mut optimizer = candle_nn::AdamW::new(variables.all_vars(), params).unwrap();
    let text = Text::builtin();
    let step = |step| {
        let batches = batches(1, 1);
        let (tokens, targets) = batches
            .batch(&text, batches.rows_of(step), (0, 0), &Device::Cpu)
            .unwrap();
        let loss = model.loss(&tokens, &targets).unwrap();
        optimizer.backward_step(&loss).unwrap();
        f64::from(loss.to_scalar::<f32>().unwrap())
    };
    (0..STEPS).map(step).collect()
}

fn adamw() -> Algorithm {
    Algorithm::AdamW(AdamOptions {
        lr: LR,
        ..AdamOptions::adamw()
    })
}

struct Run {
    ranks: usize,
    accumulation: usize,
    config: FsdpConfig,
}

/// Losses of the global batch, which every rank must agree on to the bit.
fn sharded_losses(run: &Run) -> Vec<f64> {
    let text = Text::builtin();
    let ranks = Ranks {
        count: run.ranks,
        ..Ranks::default()
    };
    let per_rank = ranks.run(|group| -> Result<Vec<f64>, NnError> {
        let rank = group.rank();
        let batches = batches(run.ranks, run.accumulation);
        let model = FullyShardedDataParallel::new(group, run.config.clone(), |scope| {
            Gpt::new(scope, &CONFIG)
        })?;
        let mut optimizer = Optimizer::new(model.parameters(), adamw())?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let backward = |part| -> Result<f64, NnError> {
                let (tokens, targets) =
                    batches.batch(&text, batches.rows_of(step), (rank, part), &Device::Cpu)?;
                let loss = model
                    .forward(|gpt| gpt.loss(&tokens, &targets)? * batches.weight(rank, part))?;
                model.backward(&loss)?;
                Ok(f64::from(loss.to_scalar::<f32>()?))
            };
            let last = run.accumulation - 1;
            let mut loss = [0.0];
            for part in 0..last {
                loss[0] += model.no_sync(|_| backward(part))?;
            }
            loss[0] += backward(last)?;
            optimizer.step()?;
            model.parameters().zero_grad();
            model.group().all_reduce(&mut loss, ReduceOp::Avg)?;
            losses.push(loss[0]);
        }
        Ok(losses)
    });
    let per_rank: Vec<Vec<f64>> = per_rank.unwrap().into_iter().map(Result::unwrap).collect();
    assert!(
        per_rank.iter().all(|losses| *losses == per_rank[0]),
        "ranks disagree about the loss"
    );
    per_rank.into_iter().next().unwrap()
}

/// Two replicas where the number of ranks allows it.
fn config(strategy: ShardingStrategy, use_orig_params: bool, ranks: usize) -> FsdpConfig {
    let replicas = if ranks.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, ranks / replicas],
        &["replicate", "shard"],
        ranks,
    )
    .unwrap();
    let mesh = (strategy == ShardingStrategy::HybridShard).then_some(mesh);
    FsdpConfig {
        strategy,
        use_orig_params,
        mesh,
        ..FsdpConfig::default()
    }
}

fn initial_values() -> Vec<(String, Vec<f32>)> {
    let build = |group| -> Result<Vec<(String, Vec<f32>)>, NnError> {
        let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
            Gpt::new(scope, &CONFIG)
        })?;
        let parameters = model.parameters();
        let value = |fqn: &str| -> Result<(String, Vec<f32>), NnError> {
            Ok((
                fqn.to_owned(),
                parameters
                    .parameter(fqn)?
                    .to_whole()?
                    .flatten_all()?
                    .to_vec1()?,
            ))
        };
        parameters.fqns().map(value).collect()
    };
    run_local(1, build).unwrap().pop().unwrap().unwrap()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / expected.abs();
        assert!(
            error < 1e-4,
            "{what}: step {step}: loss {found} is not {expected}"
        );
    }
}

#[test]
fn losses_are_those_of_plain_candle_for_all_ranks_strategies_and_modes() {
    let plain = plain_losses(&initial_values());
    assert!(
        plain[STEPS as usize - 1] < plain[0] - 1.0,
        "the model learns: {plain:?}"
    );
    // The 12 rows of a step are 2 or 3 for each of 5 ranks.
    for ranks in 1..=5 {
        for strategy in ShardingStrategy::ALL {
            for use_orig_params in [true, false] {
                let config = config(strategy, use_orig_params, ranks);
                let losses = sharded_losses(&Run {
                    ranks,
                    accumulation: 1,
                    config,
                });
                assert_close(
                    &losses,
                    &plain,
                    &format!("{ranks} ranks, {strategy}, use_orig_params {use_orig_params}"),
                );
            }
        }
    }
}

#[test]
fn gradients_accumulated_without_communication_give_the_losses_of_one_backward() {
    let plain = plain_losses(&initial_values());
    for (ranks, accumulation) in [(1, 4), (2, 3), (3, 2), (3, 3)] {
        for strategy in ShardingStrategy::ALL {
            let config = config(strategy, true, ranks);
            let losses = sharded_losses(&Run {
                ranks,
                accumulation,
                config,
            });
            assert_close(
                &losses,
                &plain,
                &format!("{ranks} ranks, {strategy}, {accumulation} backwards"),
            );
        }
    }
}
