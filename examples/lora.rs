//! LoRA: trains small adapters beside the frozen weights of a Llama, over ranks, and writes them as
//! a directory that the Python package `peft` opens. Run again, it goes on from the newest
//! checkpoint.
//!
//! ```console
//! cargo run -p fsdp-examples --bin tiny-llama -- runs/tiny-llama
//! cargo run -p fsdp-examples --bin lora -- --model runs/tiny-llama --out runs/lora --ranks 2 --check
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use candle_core::{D, DType, Device, IndexOp as _, Module, Tensor};
use candle_nn::{Embedding, Init, Linear, VarBuilder, embedding, linear_no_bias};
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use clap::Parser;
use fsdp::nn::torch::{StateDictOptions, get_model_state_dict};
use fsdp::ops;
use fsdp::prelude::*;
use serde_json::json;

/// Train LoRA adapters of a Llama.
#[derive(Parser)]
struct Options {
    /// Directory with config.json and model.safetensors
    #[arg(long)]
    model: PathBuf,
    /// Directory of the checkpoints and of the adapters
    #[arg(long)]
    out: PathBuf,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=8))]
    ranks: u8,
    /// Total number of steps, those of earlier runs included
    #[arg(long, default_value_t = 20)]
    steps: u64,
    /// Compare the model, before it is trained, with that of candle-transformers
    #[arg(long)]
    check: bool,
}

/// The rank of the adapters' matrices.
const RANK: usize = 4;
const ALPHA: f64 = 8.0;
/// The rows of a step, on all ranks together, and the tokens of a row.
const ROWS: usize = 8;
const TIME: usize = 12;

// ANCHOR: adapter
/// A frozen matrix with an adapter beside it, under the names that peft gives them.
struct Lora {
    base: Linear,
    a: Tensor,
    b: Tensor,
}

impl Lora {
    fn new(inputs: usize, outputs: usize, scope: &Scope) -> candle_core::Result<Self> {
        let random = Init::Randn {
            mean: 0.0,
            stdev: 1.0 / RANK as f64,
        };
        Ok(Lora {
            base: linear_no_bias(inputs, outputs, scope.vb())?,
            a: scope
                .vb()
                .pp("lora_A")
                .get_with_hints((RANK, inputs), "weight", random)?,
            // Zeros: at first the adapter adds nothing.
            b: scope.vb().pp("lora_B").get_with_hints(
                (outputs, RANK),
                "weight",
                Init::Const(0.0),
            )?,
        })
    }
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let adapted = ops::linear(&ops::linear(x, &self.a, None)?, &self.b, None)?;
        self.base.forward(x)? + adapted * (ALPHA / RANK as f64)
    }
}

/// Returns `true` for the parameters that are trained.
fn is_adapter(name: &str) -> bool {
    name.contains(".lora_A.") || name.contains(".lora_B.")
}
// ANCHOR_END: adapter

// ANCHOR: model
struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    fn new(config: &Config, scope: &Scope) -> candle_core::Result<Self> {
        let weight = scope
            .vb()
            .get_with_hints(config.hidden_size, "weight", Init::Const(1.0))?;
        Ok(RmsNorm {
            weight,
            eps: config.rms_norm_eps,
        })
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        // Those of candle and candle-transformers are fused, and have no backward.
        ops::rms_norm(x, &self.weight, self.eps)
    }
}

struct Block {
    input_norm: RmsNorm,
    q: Lora,
    k: Linear,
    v: Lora,
    o: Linear,
    attention_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    heads: usize,
    kv_heads: usize,
}

impl Block {
    fn new(config: &Config, scope: &Scope) -> candle_core::Result<Self> {
        let hidden = config.hidden_size;
        let intermediate = config.intermediate_size;
        let kv = hidden / config.num_attention_heads * config.num_key_value_heads;
        let attention = scope.pp("self_attn");
        let mlp = scope.pp("mlp");
        Ok(Block {
            input_norm: RmsNorm::new(config, &scope.pp("input_layernorm"))?,
            q: Lora::new(hidden, hidden, &attention.pp("q_proj"))?,
            k: linear_no_bias(hidden, kv, attention.vb().pp("k_proj"))?,
            v: Lora::new(hidden, kv, &attention.pp("v_proj"))?,
            o: linear_no_bias(hidden, hidden, attention.vb().pp("o_proj"))?,
            attention_norm: RmsNorm::new(config, &scope.pp("post_attention_layernorm"))?,
            gate: linear_no_bias(hidden, intermediate, mlp.vb().pp("gate_proj"))?,
            up: linear_no_bias(hidden, intermediate, mlp.vb().pp("up_proj"))?,
            down: linear_no_bias(intermediate, hidden, mlp.vb().pp("down_proj"))?,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
        })
    }

    /// `cos` and `sin` are the angles of each position, `[time, width / 2]`.
    fn forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> candle_core::Result<Tensor> {
        let (rows, time, hidden) = x.dims3()?;
        let width = hidden / self.heads;
        let input = self.input_norm.forward(x)?;
        let q = by_head(&self.q.forward(&input)?, width)?;
        let k = by_head(&self.k.forward(&input)?, width)?;
        let v = by_head(&self.v.forward(&input)?, width)?;
        // A head of keys and values serves several heads of queries.
        let copies = self.heads / self.kv_heads;
        let q = ops::rope(&q, cos, sin)?;
        let k = repeated(&ops::rope(&k, cos, sin)?, copies)?;
        let v = repeated(&v, copies)?;
        let attention =
            ops::scaled_dot_product_attention(&q, &k, &v, true, (width as f64).powf(-0.5))?;
        let x = (x + self
            .o
            .forward(&attention.transpose(1, 2)?.reshape((rows, time, hidden))?)?)?;
        let input = self.attention_norm.forward(&x)?;
        let gated = (self.gate.forward(&input)?.silu()? * self.up.forward(&input)?)?;
        &x + self.down.forward(&gated)?
    }
}

/// Splits `[rows, time, heads * width]` into heads, `[rows, heads, time, width]`.
fn by_head(x: &Tensor, width: usize) -> candle_core::Result<Tensor> {
    let (rows, time, hidden) = x.dims3()?;
    x.reshape((rows, time, hidden / width, width))?
        .transpose(1, 2)?
        .contiguous()
}

/// Repeats each head, `[rows, heads, time, width]`, as often as there are `copies`.
fn repeated(x: &Tensor, copies: usize) -> candle_core::Result<Tensor> {
    let (rows, heads, time, width) = x.dims4()?;
    Tensor::stack(&vec![x; copies], 2)?.reshape((rows, heads * copies, time, width))
}

/// The Llama of candle-transformers with adapters, of operations that have gradients. Names are
/// Hugging Face's.
struct Model {
    tokens: Embedding,
    blocks: Vec<Unit<Block>>,
    norm: RmsNorm,
    head: Linear,
    rope_theta: f64,
    width: usize,
}

impl Model {
    fn new(config: &Config, scope: &Scope) -> candle_core::Result<Self> {
        let layers = scope.pp("model.layers");
        let mut blocks = Vec::new();
        for index in 0..config.num_hidden_layers {
            blocks.push(layers.pp(index).unit(|scope| Block::new(config, scope))?);
        }
        Ok(Model {
            tokens: embedding(
                config.vocab_size,
                config.hidden_size,
                scope.vb().pp("model.embed_tokens"),
            )?,
            blocks,
            norm: RmsNorm::new(config, &scope.pp("model.norm"))?,
            head: linear_no_bias(
                config.hidden_size,
                config.vocab_size,
                scope.vb().pp("lm_head"),
            )?,
            rope_theta: config.rope_theta.into(),
            width: config.hidden_size / config.num_attention_heads,
        })
    }

    /// Returns the scores of the next token at each position, `[rows, time, vocabulary]`.
    fn forward(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        let time = tokens.dim(1)?;
        let half = self.width / 2;
        let frequencies = (0..half).map(|index| {
            let exponent = -2.0 * index as f64 / self.width as f64;
            self.rope_theta.powf(exponent) as f32
        });
        let frequencies = Tensor::from_iter(frequencies, tokens.device())?.reshape((1, half))?;
        let positions = Tensor::arange(0f32, time as f32, tokens.device())?.reshape((time, 1))?;
        let angles = positions.matmul(&frequencies)?;
        let cos = angles.cos()?;
        let sin = angles.sin()?;
        let mut x = self.tokens.forward(tokens)?;
        for block in &self.blocks {
            x = block.run(|block| block.forward(&x, &cos, &sin))?;
        }
        self.head.forward(&self.norm.forward(&x)?)
    }

    fn loss(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let time = rows.dim(1)? - 1;
        let scores = self.forward(&rows.narrow(1, 0, time)?)?;
        let targets = rows.narrow(1, 1, time)?.flatten_all()?;
        ops::cross_entropy(&scores.flatten_to(D::Minus2)?, &targets)
    }
}
// ANCHOR_END: model

fn read_config(directory: &Path) -> Result<Config> {
    let path = directory.join("config.json");
    let text =
        std::fs::read(&path).with_context(|| format!("failed to read `{}`", path.display()))?;
    let config: LlamaConfig = serde_json::from_slice(&text)?;
    ensure!(
        config.rope_scaling.is_none(),
        "this example knows no scaling of rotary embeddings"
    );
    ensure!(
        config.tie_word_embeddings != Some(true),
        "this example knows no tied embeddings"
    );
    Ok(config.into_config(false))
}

// ANCHOR: build
/// Builds the sharded model with the weights of `directory`. Only the adapters are trained.
fn build(group: &ProcessGroup, config: &Config, directory: &Path) -> Result<TrainState<Model>> {
    let frozen = FsdpConfig {
        requires_grad: Arc::new(is_adapter),
        ..FsdpConfig::default()
    };
    let model =
        FullyShardedDataParallel::new(group.clone(), frozen, |scope| Model::new(config, scope))?;
    // The published weights have no adapters: those keep their initial values. Anything else that
    // is missing is an error.
    let mut base = TrainState::new(model, Vec::new());
    let load = LoadOptions {
        strict: false,
        cast: true,
        ..LoadOptions::default()
    };
    let options = CheckpointerOptions {
        load,
        ..CheckpointerOptions::default()
    };
    let report = Checkpointer::new(directory, group, options)?.load(directory, &mut base)?;
    let missing: Vec<&String> = report
        .missing
        .iter()
        .filter(|name| !is_adapter(name))
        .collect();
    ensure!(
        missing.is_empty(),
        "`{}` lacks {missing:?}",
        directory.display()
    );
    ensure!(
        report.unexpected.is_empty(),
        "the model has no place for {:?}",
        report.unexpected
    );

    let adamw = Algorithm::AdamW(AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    });
    let optimizer = Optimizer::new(base.model.parameters(), adamw)?;
    base.optimizers.push(optimizer);
    Ok(base)
}
// ANCHOR_END: build

// ANCHOR: check
/// Compares the scores after a row of tokens with those of candle-transformers' own Llama, built
/// whole from the same files.
fn check(run: &TrainState<Model>, config: &Config, directory: &Path) -> Result<()> {
    let tensors =
        candle_core::safetensors::load(directory.join("model.safetensors"), &Device::Cpu)?;
    let theirs = Llama::load(
        VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu),
        config,
    )?;
    let mut cache = Cache::new(false, DType::F32, config, &Device::Cpu)?;
    let tokens = rows(config, 0, &[0])?;
    let ours = run
        .model
        .forward(|model| model.forward(&tokens)?.i((.., TIME, ..)))?;
    let difference = (ours - theirs.forward(&tokens, 0, &mut cache)?)?
        .abs()?
        .max_all()?
        .to_scalar::<f32>()?;
    if run.model.group().rank() == 0 {
        println!("largest difference to candle-transformers: {difference:e}");
    }
    ensure!(
        difference < 1e-4,
        "the model does not compute what candle-transformers computes"
    );
    Ok(())
}
// ANCHOR_END: check

/// Returns rows of tokens `[rows, TIME + 1]` to learn: each token is a multiple of the one before
/// it. Take your tokenizer here.
fn rows(config: &Config, step: u64, rows: &[usize]) -> candle_core::Result<Tensor> {
    let vocabulary = config.vocab_size as u64;
    let mut tokens = Vec::new();
    for &row in rows {
        let mut token = (step * 7 + row as u64 * 3 + 1) % vocabulary;
        for _ in 0..=TIME {
            tokens.push(token as u32);
            token = (token * 5 + 2) % vocabulary;
        }
    }
    Tensor::from_vec(tokens, (rows.len(), TIME + 1), &Device::Cpu)
}

// ANCHOR: train
fn train(group: &ProcessGroup, options: &Options) -> Result<()> {
    let config = read_config(&options.model)?;
    let mut run = build(group, &config, &options.model)?;
    if options.check {
        check(&run, &config, &options.model)?;
    }
    // The frozen weights are the same in every checkpoint: from the second one on they are links to
    // the files of the first.
    let save = SaveOptions {
        incremental: true,
        ..SaveOptions::default()
    };
    let mut checkpointer = Checkpointer::new(
        options.out.as_path(),
        group,
        CheckpointerOptions {
            save,
            ..CheckpointerOptions::default()
        },
    )?;
    let done = checkpointer
        .load_latest(&mut run)?
        .map_or(0, |(checkpoint, _)| checkpoint.step);
    let mine: Vec<usize> = (0..ROWS)
        .filter(|row| row % group.world_size() == group.rank())
        .collect();
    for step in done..options.steps {
        let rows = rows(&config, step, &mine)?;
        // Ranks may differ by a row: each row counts the same.
        let weight = (mine.len() * group.world_size()) as f64 / ROWS as f64;
        let loss = run.model.forward(|model| model.loss(&rows)? * weight)?;
        run.model.backward(&loss)?;
        run.optimizers[0].step()?;
        run.model.parameters().zero_grad();
        let mut global = [f64::from(loss.to_scalar::<f32>()?)];
        group.all_reduce(&mut global, ReduceOp::Avg)?;
        let steps_done = step + 1;
        if steps_done % 10 == 0 || steps_done == options.steps {
            checkpointer.save(steps_done, &run)?;
            if group.rank() == 0 {
                println!("step {steps_done}: loss {:.6}, saved", global[0]);
            }
        }
    }
    write_adapters(&run, &options.out.join("adapter"))
}
// ANCHOR_END: train

// ANCHOR: export
/// Writes the adapters as a directory of peft's, on rank 0, which alone gets them whole.
fn write_adapters(run: &TrainState<Model>, directory: &Path) -> Result<()> {
    let adapters = StateDictOptions {
        ignore_frozen_params: true,
        full_state_dict: true,
        cpu_offload: true,
        fqn_renames: vec![(String::new(), "base_model.model".to_owned())],
        ..StateDictOptions::default()
    };
    let adapters = get_model_state_dict(run.model.parameters(), &adapters)?;
    if run.model.group().rank() > 0 {
        return Ok(());
    }
    let tensors = adapters
        .iter()
        .filter_map(|(name, value)| Some((name.clone(), value.as_tensor()?.clone())));
    std::fs::create_dir_all(directory)?;
    candle_core::safetensors::save(
        &tensors.collect(),
        directory.join("adapter_model.safetensors"),
    )?;
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    });
    std::fs::write(
        directory.join("adapter_config.json"),
        serde_json::to_string_pretty(&config)?,
    )?;
    println!("wrote the adapters to `{}`", directory.display());
    Ok(())
}
// ANCHOR_END: export

fn main() -> Result<()> {
    let options = Options::parse();
    let done = run_local(options.ranks.into(), |group| train(&group, &options))?;
    done.into_iter().collect()
}
