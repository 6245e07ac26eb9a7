//! Two costs beside that of a training step, each measured in one run, so that all is under the
//! same conditions: that of sharding if there is nothing to shard, against plain candle in turns;
//! and that of a comparison of replicas, on two ranks that hold the whole state each. `--json`
//! prints an object.

use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use fsdp::checkpoint::{CheckpointError, TrainState, check_replicas};
use fsdp::nn::NnError;
use fsdp::prelude::*;
use fsdp_cli::data::{Batches, Text, VOCAB};
use fsdp_cli::gpt::{Gpt, GptConfig};
use serde_json::json;

const CONFIG: GptConfig = GptConfig {
    layers: 2,
    heads: 4,
    hidden: 128,
    seq: 128,
    vocab: VOCAB,
};
const BATCHES: Batches = Batches {
    batch: 8,
    seq: 128,
    ranks: 1,
    accumulation: 1,
};
const WARM_UP: u64 = 3;
const STEPS: u64 = 40;
/// The steps from one comparison of replicas to the next, as the book advises.
const CHECK_EVERY: f64 = 100.0;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn timed<E>(step: impl FnOnce() -> Result<(), E>) -> Result<Duration, E> {
    let start = Instant::now();
    step()?;
    Ok(start.elapsed())
}

/// Medians of plain candle and of `fsdp`.
fn measure(group: ProcessGroup) -> Result<(Duration, Duration), NnError> {
    let text = Text::builtin();
    let variables = VarMap::new();
    let plain = Gpt::new(
        &Scope::plain(VarBuilder::from_varmap(
            &variables,
            DType::F32,
            &Device::Cpu,
        )),
        &CONFIG,
    )?;
    let mut plain_optimizer = candle_nn::AdamW::new(variables.all_vars(), ParamsAdamW::default())?;
    let sharded = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
        Gpt::new(scope, &CONFIG)
    })?;
    let mut sharded_optimizer =
        Optimizer::new(sharded.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
    let mut plain_times = Vec::new();
    let mut sharded_times = Vec::new();
    for step in 0..WARM_UP + STEPS {
        let (tokens, targets) =
            BATCHES.batch(&text, BATCHES.rows_of(step), (0, 0), &Device::Cpu)?;
        let plain_time = timed(|| plain_optimizer.backward_step(&plain.loss(&tokens, &targets)?))?;
        let sharded_time = timed(|| -> Result<(), NnError> {
            let loss = sharded.forward(|gpt| gpt.loss(&tokens, &targets))?;
            sharded.backward(&loss)?;
            sharded_optimizer.step()?;
            sharded.parameters().zero_grad();
            Ok(())
        })?;
        if step >= WARM_UP {
            plain_times.push(plain_time);
            sharded_times.push(sharded_time);
        }
    }
    Ok((median(plain_times), median(sharded_times)))
}

/// Medians of a step, and of a comparison of replicas.
fn measure_check(group: ProcessGroup) -> Result<(Duration, Duration), CheckpointError> {
    let text = Text::builtin();
    let config = FsdpConfig {
        strategy: ShardingStrategy::NoShard,
        ..FsdpConfig::default()
    };
    let batches = Batches {
        ranks: group.world_size(),
        ..BATCHES
    };
    let model =
        FullyShardedDataParallel::new(group.clone(), config, |scope| Gpt::new(scope, &CONFIG))?;
    let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
    let mut run = TrainState::new(model, vec![optimizer]);
    let mut step_times = Vec::new();
    let mut check_times = Vec::new();
    for step in 0..WARM_UP + STEPS {
        let (tokens, targets) = batches
            .batch(
                &text,
                batches.rows_of(step),
                (group.rank(), 0),
                &Device::Cpu,
            )
            .map_err(NnError::from)?;
        let step_time = timed(|| -> Result<(), NnError> {
            let loss = run.model.forward(|gpt| gpt.loss(&tokens, &targets))?;
            run.model.backward(&loss)?;
            run.optimizers[0].step()?;
            run.model.parameters().zero_grad();
            Ok(())
        })?;
        // A rank that is late is not to count as part of the comparison.
        group.barrier().map_err(NnError::from)?;
        let check_time = timed(|| check_replicas(&run, &group))?;
        if step >= WARM_UP {
            step_times.push(step_time);
            check_times.push(check_time);
        }
    }
    Ok((median(step_times), median(check_times)))
}

#[expect(clippy::print_stdout, reason = "the measurement is what this prints")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (plain, sharded) = run_local(1, measure)?.remove(0)?;
    let (step, check) = run_local(2, measure_check)?.remove(0)?;
    let ratio = sharded.as_secs_f64() / plain.as_secs_f64();
    let share = check.as_secs_f64() / (CHECK_EVERY * step.as_secs_f64());
    if std::env::args().any(|argument| argument == "--json") {
        let object = json!({
            "plain_seconds": plain.as_secs_f64(),
            "sharded_seconds": sharded.as_secs_f64(),
            "ratio": ratio,
            "replicas_step_seconds": step.as_secs_f64(),
            "replicas_check_seconds": check.as_secs_f64(),
            "replicas_share_of_100_steps": share,
        });
        println!("{object}");
    } else {
        println!(
            "plain candle {plain:.2?} a step, fsdp on one rank {sharded:.2?}: {ratio:.3} times as long"
        );
        println!(
            "two replicas {step:.2?} a step, a comparison {check:.2?}: {:.3} % if it is done every {CHECK_EVERY} steps",
            share * 100.0
        );
    }
    Ok(())
}
