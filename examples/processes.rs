//! Ranks that are processes, which a launcher starts: `fsdp launch`, torchrun, or whatever sets
//! `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and, to tell this job from others,
//! `FSDP_JOB_ID`.
//!
//! ```console
//! cargo build -p fsdp-examples
//! fsdp launch --nproc 4 -- target/debug/processes runs/processes
//! ```

use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear};
use fsdp::comm::{BackendKind, Environment, init_process_group};
use fsdp::prelude::*;

/// The number of steps of one run of the program.
const STEPS: u64 = 10;

fn main() -> Result<()> {
    let out = std::env::args()
        .nth(1)
        .context("usage: processes DIRECTORY")?;
    // Meets the other ranks. A rank that is missing is an error after the group's deadline, on
    // every rank that came.
    let group = init_process_group(BackendKind::Tcp)?;
    // This rank's number on its host: the GPU to use, say.
    let local_rank = Environment::from_env()?.local_rank.unwrap_or(group.rank());

    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        let hidden: Unit<Linear> = scope.pp("hidden").unit(|scope| linear(4, 16, scope.vb()))?;
        Ok((hidden, linear(16, 1, scope.vb().pp("out"))?))
    })?;
    let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
    let mut run = TrainState::new(model, vec![optimizer]);
    let mut checkpointer = Checkpointer::new(out, &group, CheckpointerOptions::default())?;
    // A launcher that starts a failed job again starts the same command: it goes on from the newest
    // checkpoint.
    let done = checkpointer
        .load_latest(&mut run)?
        .map_or(0, |(checkpoint, _)| checkpoint.step);

    let x = Tensor::full(group.rank() as f32 + 1.0, (2, 4), &Device::Cpu)?.to_dtype(DType::F32)?;
    let mut loss = [f64::NAN];
    for _ in 0..STEPS {
        let mine = run.model.forward(|(hidden, out)| {
            out.forward(&hidden.forward(&x)?.tanh()?)?.sqr()?.mean_all()
        })?;
        run.model.backward(&mine)?;
        run.optimizers[0].step()?;
        run.model.parameters().zero_grad();
        loss = [f64::from(mine.to_scalar::<f32>()?)];
        group.all_reduce(&mut loss, ReduceOp::Avg)?;
    }
    checkpointer.save(done + STEPS, &run)?;
    println!(
        "rank {} of {} ({local_rank} here): loss {:.6}",
        group.rank(),
        group.world_size(),
        loss[0]
    );
    Ok(())
}
