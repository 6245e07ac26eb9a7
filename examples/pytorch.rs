//! One half of a pair with `pytorch.py`: both train the same network, and each goes on from what
//! the other saved.
//!
//! ```console
//! cargo run -p fsdp-examples --bin pytorch -- --save step-10 --ranks 3
//! python examples/pytorch.py --load step-10 --save step-20
//! cargo run -p fsdp-examples --bin pytorch -- --load step-20 --save step-30
//! ```

use anyhow::{Context as _, Result};
use candle_core::{Device, Module, Tensor};
use candle_nn::{Linear, linear};
use clap::Parser;
use fsdp::checkpoint::Location;
use fsdp::prelude::*;

/// Take ten steps, from a checkpoint of PyTorch or of this program.
#[derive(Parser)]
struct Options {
    /// Checkpoint to go on from, PyTorch's or ours [default: begin]
    #[arg(long)]
    load: Option<Location>,
    /// Place for the new checkpoint
    #[arg(long)]
    save: Location,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4))]
    ranks: u8,
}

const STEPS: i64 = 10;
/// The rows of a step, on all ranks together: a multiple of the numbers of ranks.
const ROWS: usize = 12;

/// Returns the rows of a step, and what the network is to say of them. `pytorch.py` has the same.
fn batch(step: i64) -> candle_core::Result<(Tensor, Tensor)> {
    let x = Tensor::arange(0f32, (ROWS * 8) as f32, &Device::Cpu)?.reshape((ROWS, 8))?;
    let x = (x * 0.37)?.affine(1.0, step as f64)?.sin()?;
    let y = x.narrow(1, 0, 4)?.sum_keepdim(1)?;
    Ok((x, y))
}

fn train(group: &ProcessGroup, options: &Options) -> Result<()> {
    // The names of parameters are those of a `torch.nn.Sequential` of Linear, Tanh and Linear.
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
        let first: Unit<Linear> = scope.pp("0").unit(|scope| linear(8, 16, scope.vb()))?;
        Ok((first, linear(16, 1, scope.vb().pp("2"))?))
    })?;
    let adamw = AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    };
    let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(adamw))?;
    let mut run = TrainState::new(model, vec![optimizer]);
    run.values.insert("step", 0i64);
    let mut checkpointer = Checkpointer::new("runs", group, CheckpointerOptions::default())?;
    if let Some(from) = &options.load {
        checkpointer.load(from, &mut run)?;
    }
    let begin = run
        .values
        .plain_at(&["step"])
        .and_then(PlainValue::as_int)
        .context("`step` is no number")?;
    let rows = ROWS / group.world_size();
    let mut loss = [f64::NAN];
    for step in begin..begin + STEPS {
        // Each rank computes its part of the batch.
        let (all_x, all_y) = batch(step)?;
        let x = all_x.narrow(0, group.rank() * rows, rows)?;
        let y = all_y.narrow(0, group.rank() * rows, rows)?;
        let mine = run.model.forward(|(first, last)| {
            (last.forward(&first.forward(&x)?.tanh()?)? - &y)?
                .sqr()?
                .mean_all()
        })?;
        run.model.backward(&mine)?;
        run.optimizers[0].step()?;
        run.model.parameters().zero_grad();
        loss = [f64::from(mine.to_scalar::<f32>()?)];
        group.all_reduce(&mut loss, ReduceOp::Avg)?;
    }
    run.values.insert("step", begin + STEPS);
    checkpointer.save(&options.save, &run)?;
    if group.rank() == 0 {
        println!(
            "step {}: loss {:.6}, saved to {}",
            begin + STEPS,
            loss[0],
            options.save
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let done = run_local(options.ranks.into(), |group| train(&group, &options))?;
    done.into_iter().collect()
}
