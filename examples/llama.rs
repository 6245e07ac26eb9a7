//! The Llama of candle-transformers, unchanged, sharded over ranks: it continues some tokens. Each
//! rank reads its part of the weights from Hugging Face's files, keeps only that part, and gathers
//! all weights for a forward.
//!
//! ```console
//! cargo run -p fsdp-examples --bin tiny-llama -- runs/tiny-llama
//! cargo run -p fsdp-examples --bin llama -- --model runs/tiny-llama --ranks 4
//! ```

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Tensor};
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use clap::Parser;
use fsdp::prelude::*;

/// Continue tokens with a sharded Llama.
#[derive(Parser)]
struct Options {
    /// Directory with config.json and the model's safetensors files
    #[arg(long)]
    model: PathBuf,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    ranks: u8,
    /// The tokens to continue
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    prompt: Vec<u32>,
    /// Number of tokens to add
    #[arg(long, default_value_t = 8)]
    tokens: usize,
}

// ANCHOR: config
fn read_config(options: &Options) -> Result<Config> {
    let path = options.model.join("config.json");
    let text =
        std::fs::read(&path).with_context(|| format!("failed to read `{}`", path.display()))?;
    let config: LlamaConfig = serde_json::from_slice(&text)?;
    Ok(config.into_config(false))
}
// ANCHOR_END: config

fn generate(group: ProcessGroup, options: &Options) -> Result<Vec<u32>> {
    let rank = group.rank();
    let llama = read_config(options)?;
    // ANCHOR: build
    let config = FsdpConfig {
        // Nothing is trained, so candle need not keep what a backward would want.
        requires_grad: Arc::new(|_| false),
        ..FsdpConfig::default()
    };
    let read = FromCheckpointOptions::default();
    let model = from_checkpoint(group, config, options.model.as_path(), &read, |scope| {
        Llama::load(scope.vb(), &llama)
    })?;
    // ANCHOR_END: build

    // ANCHOR: generate
    let mut cache = Cache::new(true, DType::F32, &llama, &Device::Cpu)?;
    let mut tokens = options.prompt.clone();
    let mut position = 0;
    for _ in 0..options.tokens {
        let input = Tensor::new(&tokens[position..], &Device::Cpu)?.unsqueeze(0)?;
        let scores = model.forward(|llama| llama.forward(&input, position, &mut cache))?;
        position = tokens.len();
        // The likeliest token. Every rank computes the same.
        tokens.push(scores.squeeze(0)?.argmax(0)?.to_scalar()?);
    }
    // ANCHOR_END: generate

    let parameters = model.parameters();
    // The root stays whole until the next forward, unless told otherwise.
    parameters.reshard()?;
    if rank == 0 {
        let mut whole = 0;
        for name in parameters.fqns() {
            whole += parameters.shape(name)?.iter().product::<usize>();
        }
        let kept = parameters.parameter_bytes();
        let peak = parameters.peak_parameter_bytes();
        println!(
            "the model has {} bytes; this rank keeps {kept}, and had at most {peak}",
            whole * 4
        );
    }
    Ok(tokens)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let tokens = run_local(options.ranks.into(), |group| generate(group, &options))?;
    let tokens: Vec<Vec<u32>> = tokens.into_iter().collect::<Result<_>>()?;
    println!(
        "{}",
        tokens[0]
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(",")
    );
    Ok(())
}
