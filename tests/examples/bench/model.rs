//! The state that is saved and loaded: a GPT and its AdamW state, on some ranks.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{Device, Tensor};
use clap::ValueEnum;
use fsdp::prelude::*;
use fsdp_cli::gpt::{Gpt, GptConfig};
use fsdp_cli::ranks::Ranks;
use fsdp_tests::counting_allocator::{live_bytes, peak_bytes, reset_peak};

/// Bytes of parameters and their AdamW state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Size {
    /// For trying the bench itself.
    #[value(name = "16m")]
    Small,
    #[value(name = "256m")]
    Medium,
    #[value(name = "2g")]
    Large,
}

impl Size {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Size::Small => "16m",
            Size::Medium => "256m",
            Size::Large => "2g",
        }
    }

    pub(crate) const fn config(self) -> GptConfig {
        match self {
            Size::Small => GptConfig {
                layers: 2,
                heads: 4,
                hidden: 192,
                seq: 64,
                vocab: 2000,
            },
            Size::Medium => GptConfig {
                layers: 6,
                heads: 8,
                hidden: 512,
                seq: 64,
                vocab: 3400,
            },
            Size::Large => GptConfig {
                layers: 12,
                heads: 16,
                hidden: 1024,
                seq: 64,
                vocab: 13600,
            },
        }
    }
}

/// One rank's model and optimizer.
pub(crate) struct Training {
    pub(crate) run: TrainState<Gpt>,
    tokens: Tensor,
}

impl Training {
    /// A model that has done one step, so that no page of its state is untouched.
    pub(crate) fn new(group: ProcessGroup, size: Size, config: FsdpConfig) -> Result<Self> {
        let gpt = size.config();
        let rank = group.rank() as u32;
        let model = FullyShardedDataParallel::new(group, config, |scope| Gpt::new(scope, &gpt))?;
        let optimizer = Optimizer::new(model.parameters(), Algorithm::AdamW(AdamOptions::adamw()))?;
        let tokens: Vec<u32> = (0..=gpt.seq as u32)
            .map(|i| (i * 7 + rank) % gpt.vocab as u32)
            .collect();
        let run = TrainState::new(model, vec![optimizer]);
        let mut training = Training {
            run,
            tokens: Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?,
        };
        training.step()?;
        Ok(training)
    }

    pub(crate) fn step(&mut self) -> Result<()> {
        let length = self.tokens.dim(1)? - 1;
        let inputs = self.tokens.narrow(1, 0, length)?;
        let targets = self.tokens.narrow(1, 1, length)?;
        let TrainState {
            model, optimizers, ..
        } = &mut self.run;
        let loss = model.forward(|gpt| gpt.loss(&inputs, &targets))?;
        model.backward(&loss)?;
        optimizers.iter_mut().try_for_each(Optimizer::step)?;
        model.parameters().zero_grad();
        Ok(())
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        self.run.model.group()
    }

    /// Views of this rank's shards, in dicts that are made anew, so that a load may fill them.
    pub(crate) fn state(&self) -> Result<StateDict> {
        let parts = self.run.state_dict()?.into_iter();
        Ok(parts
            .map(|(key, part)| match part {
                StateValue::Dict(part) => (key, part.into_iter().collect::<StateDict>().into()),
                part => (key, part),
            })
            .collect())
    }
}

/// Runs `f` on so many ranks, each with its share of the machine's threads; the first rank's result
/// comes back.
pub(crate) fn on_ranks<T: Send>(
    count: usize,
    f: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<T> {
    let results = Ranks {
        count,
        ..Ranks::default()
    }
    .run(f)?;
    let mut results = results.into_iter().collect::<Result<Vec<T>>>()?;
    Ok(results.swap_remove(0))
}

/// Tensor bytes that this rank holds.
pub(crate) fn state_bytes(state: &StateDict) -> usize {
    let mut bytes = 0;
    let counted = fsdp::state::traverse_state_dict(state, |_, value| {
        bytes += match value {
            StateValue::Sharded(tensor) => tensor
                .shards()
                .iter()
                .map(|shard| tensor_bytes(&shard.tensor))
                .sum(),
            StateValue::Tensor(tensor) => tensor_bytes(tensor),
            _ => 0,
        };
        Ok::<_, std::convert::Infallible>(())
    });
    match counted {
        Ok(()) => bytes,
        Err(never) => match never {},
    }
}

fn tensor_bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// The result of [`timed`].
pub(crate) struct Timed<T> {
    /// From the first rank's start to the last one's end.
    pub(crate) time: Duration,
    /// The most heap that was in use on all ranks together, beyond what was before.
    pub(crate) peak: u64,
    pub(crate) value: T,
}

/// Runs `f` on all ranks at once.
pub(crate) fn timed<T>(group: &ProcessGroup, f: impl FnOnce() -> Result<T>) -> Result<Timed<T>> {
    group.barrier()?;
    let before = live_bytes();
    if group.rank() == 0 {
        reset_peak();
    }
    group.barrier()?;
    let start = Instant::now();
    let value = f()?;
    group.barrier()?;
    let time = start.elapsed();
    let peak = peak_bytes().saturating_sub(before) as u64;
    group.barrier()?;
    Ok(Timed { time, peak, value })
}
