//! The cost of sharding if there is nothing to shard: the same training step in plain candle and on one rank, in turns in
//! one run, so that both run under the same conditions. `--json` prints an object.

use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use fsdp::nn::NnError;
use fsdp::prelude::*;
use fsdp_cli::data::{Batches, Text, VOCAB};
use fsdp_cli::gpt::{Gpt, GptConfig};
use serde_json::json;

const CONFIG: GptConfig = GptConfig { layers: 2, heads: 4, hidden: 128, seq: 128, vocab: VOCAB };
const BATCHES: Batches = Batches { batch: 8, seq: 128, ranks: 1, accumulation: 1 };
const WARM_UP: u64 = 3;
const STEPS: u64 = 40;

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
    let plain = Gpt::new(&Scope::plain(VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu)), &CONFIG)?;
    let mut plain_optimizer = candle_nn::AdamW::new(variables.all_vars(), ParamsAdamW::default())?;
    let sharded = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| Gpt::new(scope, &CONFIG))?;
    let mut sharded_optimizer = Optimizer::new(sharded.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
    let (mut plain_times, mut sharded_times) = (Vec::new(), Vec::new());
    for step in 0..WARM_UP + STEPS {
        let (tokens, targets) = BATCHES.batch(&text, step, 0, 0, &Device::Cpu)?;
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

#[expect(clippy::print_stdout, reason = "the measurement is what this prints")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    for result in run_local(1, measure)? {
        let (plain, sharded) = result?;
        let ratio = sharded.as_secs_f64() / plain.as_secs_f64();
        if std::env::args().any(|argument| argument == "--json") {
            let (plain, sharded) = (plain.as_secs_f64(), sharded.as_secs_f64());
            println!("{}", json!({ "plain_seconds": plain, "sharded_seconds": sharded, "ratio": ratio }));
        } else {
            println!("plain candle {plain:.2?} a step, fsdp on one rank {sharded:.2?}: {ratio:.3} times as long");
        }
    }
    Ok(())
}
