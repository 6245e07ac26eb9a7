//! Writes a Llama of random weights in the layout of Hugging Face: `config.json` and
//! `model.safetensors`. The programs `llama` and `lora` take it where no real model is at hand.
//!
//! ```console
//! cargo run -p fsdp-examples --bin tiny-llama -- runs/tiny-llama
//! ```

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context as _, Result};
use candle_core::{Device, Tensor};
use serde_json::json;

const HIDDEN: usize = 32;
const INTERMEDIATE: usize = 64;
const LAYERS: usize = 8;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const VOCABULARY: usize = 48;

fn main() -> Result<()> {
    let directory = std::env::args()
        .nth(1)
        .context("usage: tiny-llama DIRECTORY")?;
    let directory = Path::new(&directory);
    std::fs::create_dir_all(directory)?;

    let mut tensors = HashMap::new();
    // Random matrices, the same each time; norms of ones.
    let mut seed = 0u32;
    let mut matrix = |name: String, rows: usize, columns: usize| -> Result<()> {
        seed += 1;
        let values: Vec<f32> = (0..rows * columns)
            .map(|index| scattered(index as u32, seed) * 0.2)
            .collect();
        tensors.insert(
            name,
            Tensor::from_vec(values, (rows, columns), &Device::Cpu)?,
        );
        Ok(())
    };
    matrix("model.embed_tokens.weight".to_owned(), VOCABULARY, HIDDEN)?;
    matrix("lm_head.weight".to_owned(), VOCABULARY, HIDDEN)?;
    let kv = HIDDEN / HEADS * KV_HEADS;
    for layer in 0..LAYERS {
        for (name, rows, columns) in [
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ] {
            matrix(format!("model.layers.{layer}.{name}.weight"), rows, columns)?;
        }
    }
    let norms = (0..LAYERS).flat_map(|layer| {
        ["input_layernorm", "post_attention_layernorm"]
            .map(|name| format!("model.layers.{layer}.{name}.weight"))
    });
    for name in norms.chain(["model.norm.weight".to_owned()]) {
        tensors.insert(
            name,
            Tensor::from_vec(vec![1f32; HIDDEN], HIDDEN, &Device::Cpu)?,
        );
    }
    candle_core::safetensors::save(&tensors, directory.join("model.safetensors"))?;

    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": false,
        "torch_dtype": "float32",
    });
    std::fs::write(
        directory.join("config.json"),
        serde_json::to_string_pretty(&config)?,
    )?;
    println!(
        "wrote {} tensors to `{}`",
        tensors.len(),
        directory.display()
    );
    Ok(())
}

/// Returns a number between -1 and 1 that depends on both in no visible way.
fn scattered(index: u32, seed: u32) -> f32 {
    let mut bits = index.wrapping_mul(0x9e37_79b1) ^ seed.wrapping_mul(0x85eb_ca6b);
    for _ in 0..2 {
        bits = (bits ^ (bits >> 15)).wrapping_mul(0x2c1b_3c6d);
    }
    (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
}
