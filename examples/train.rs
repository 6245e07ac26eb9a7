//! Trains a small network over ranks that are threads, and saves it with its optimizer and its
//! place in the data. Run again, it goes on from the newest checkpoint, with whatever number of
//! ranks it is given then:
//!
//! ```console
//! cargo run -p fsdp-examples --bin train -- --out runs/example --ranks 4 --steps 40
//! cargo run -p fsdp-examples --bin train -- --out runs/example --ranks 2 --steps 80
//! ```

use anyhow::{Context as _, Result};
use candle_core::{Device, Module, Tensor};
use candle_nn::{Linear, linear};
use clap::Parser;
use fsdp::checkpoint::Location;
use fsdp::nn::sampler::SamplerOptions;
use fsdp::prelude::*;

/// Train a small network, and resume it.
#[derive(Parser)]
struct Options {
    /// Directory of the checkpoints
    #[arg(long)]
    out: Location,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    ranks: u8,
    /// Total number of steps, those of earlier runs included
    #[arg(long, default_value_t = 40)]
    steps: u64,
    /// Steps from one checkpoint to the next
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    save_every: u64,
}

/// The number of samples of the data set.
const SAMPLES: u64 = 256;
/// The number of samples of a step, on all ranks together.
const BATCH: u64 = 16;
const INPUTS: usize = 8;
const HIDDEN: usize = 32;

/// A network whose hidden layers are units: each is gathered for its forward and its backward, and
/// released after them.
struct Net {
    first: Linear,
    hidden: Vec<Unit<Linear>>,
    last: Linear,
}

impl Net {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let mut hidden = Vec::new();
        for index in 0..3 {
            let layer = scope.pp("hidden").pp(index);
            hidden.push(layer.unit(|scope| linear(HIDDEN, HIDDEN, scope.vb()))?);
        }
        Ok(Net {
            first: linear(INPUTS, HIDDEN, scope.vb().pp("first"))?,
            hidden,
            last: linear(HIDDEN, 1, scope.vb().pp("last"))?,
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut x = self.first.forward(x)?.tanh()?;
        for layer in &self.hidden {
            x = (&x + layer.forward(&x)?.tanh()?)?;
        }
        self.last.forward(&x)
    }
}

/// Returns the samples with these numbers: points, and the value of a function there.
fn batch(samples: &[u64]) -> candle_core::Result<(Tensor, Tensor)> {
    let coordinate =
        |sample: u64, index: usize| ((sample * 37 + index as u64 * 101) as f32 * 0.618).sin();
    let points: Vec<f32> = samples
        .iter()
        .flat_map(|&sample| (0..INPUTS).map(move |index| coordinate(sample, index)))
        .collect();
    let x = Tensor::from_vec(points, (samples.len(), INPUTS), &Device::Cpu)?;
    let y = x.narrow(1, 0, 2)?.sum_keepdim(1)?.sin()?;
    Ok((x, y))
}

/// Trains on one rank, and returns the loss of the last step. Every rank runs the same function.
fn train(group: &ProcessGroup, options: &Options) -> Result<f64> {
    let model = FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), Net::new)?;
    let adamw = AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    };
    let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(adamw))?;
    let schedule = Schedule {
        decay: Decay::Constant,
        warmup: 5,
        ..Schedule::default()
    };
    let order = SamplerOptions {
        samples: SAMPLES,
        batch: BATCH,
        seed: 1,
        ..SamplerOptions::default()
    };

    // All that a resume needs: the model, its optimizer, and the place in the data.
    let mut run = TrainState::new(model, vec![optimizer]);
    run.sampler = Some(ShardedSampler::new(order)?);
    let retention = Retention {
        keep_last: std::num::NonZeroUsize::new(3),
        ..Retention::default()
    };
    let mut checkpointer = Checkpointer::new(
        options.out.clone(),
        group,
        CheckpointerOptions {
            retention,
            ..CheckpointerOptions::default()
        },
    )?;
    let mut done = 0;
    if let Some((checkpoint, _)) = checkpointer.load_latest(&mut run)? {
        done = checkpoint.step;
        if group.rank() == 0 {
            println!("resumed from step {done} on {} ranks", group.world_size());
        }
    }

    let mut loss = f64::NAN;
    for step in done..options.steps {
        schedule.apply(&mut run.optimizers[0], step)?;
        let sampler = run.sampler.as_mut().context("the run has a sampler")?;
        let samples = sampler.next_batch(group.rank(), group.world_size());
        let (x, y) = batch(&samples)?;
        // Gradients are averaged over ranks. Where ranks have different numbers of samples, each
        // sample counts the same.
        let weight = sampler.weight_of_sample(group.world_size());
        let mine = run
            .model
            .forward(|net| (net.forward(&x)? - &y)?.sqr()?.sum_all()? * weight)?;
        run.model.backward(&mine)?;
        run.model.parameters().clip_grad_norm(1.0)?;
        run.optimizers[0].step()?;
        run.model.parameters().zero_grad();

        let mut global = [f64::from(mine.to_scalar::<f32>()?)];
        group.all_reduce(&mut global, ReduceOp::Avg)?;
        loss = global[0];
        let steps_done = step + 1;
        if steps_done % options.save_every == 0 || steps_done == options.steps {
            checkpointer.save(steps_done, &run)?;
            if group.rank() == 0 {
                println!("step {steps_done}: loss {loss:.6}, saved");
            }
        }
    }
    Ok(loss)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let losses = run_local(options.ranks.into(), |group| train(&group, &options))?;
    // An error of one rank is an error of all.
    losses.into_iter().collect::<Result<Vec<f64>>>()?;
    Ok(())
}
