//! Language models that write: Llama and its kin.

use std::cell::RefCell;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    bigcode, deepseek2, falcon, gemma, gemma2, gemma3, glm4_new, granite, helium, llama, mamba,
    mistral, olmo, olmo2, phi, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe, stable_lm, starcoder2,
};
use serde::de::DeserializeOwned;

use crate::check::{Case, Forward};

/// The configuration of a small model, with the keys of all of these.
const CONFIG: &str = r#"{
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": false,
    "attention_bias": false, "sliding_window": 16, "max_window_layers": 4, "use_sliding_window": false,
    "use_flash_attn": false, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": false,
    "decoder_sparse_step": 1, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12,
    "num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "norm_topk_prob": true,
    "n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "query_pre_attn_scalar": 8, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    "partial_rotary_factor": 0.5, "qk_layernorm": false, "use_qkv_bias": true, "use_bias": true, "mlp_bias": false,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "alibi": false, "new_decoder_architecture": false,
    "multi_query": true, "parallel_attn": true, "bias": false,
    "qk_rope_head_dim": 4, "kv_lora_rank": 8, "v_head_dim": 8, "qk_nope_head_dim": 4,
    "d_model": 16, "n_layer": 4, "pad_vocab_size_multiple": 8
}"#;

/// Reads the configuration as every one of these models reads its own.
fn config<T: DeserializeOwned>() -> T {
    serde_json::from_str(CONFIG).unwrap()
}

/// Reads the configuration with another value of one key.
fn config_with<T: DeserializeOwned>(found: &str, other: &str) -> T {
    assert!(CONFIG.contains(found));
    serde_json::from_str(&CONFIG.replace(found, other)).unwrap()
}

/// Several heads of keys and values are no contiguous tensor, which some models need.
const ONE_HEAD: [&str; 2] = ["\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1"];

/// One row of tokens, for models that mistake several.
fn row() -> Tensor {
    tokens().narrow(0, 0, 1).unwrap()
}

fn tokens() -> Tensor {
    Tensor::new(&[[3u32, 1, 4, 1, 5], [9, 2, 6, 5, 3]], &Device::Cpu).unwrap()
}

/// Makes a forward of a model that its forward changes.
macro_rules! changing {
    ($model:expr, $x:ident, $self:ident => $forward:expr) => {{
        let model = RefCell::new($model);
        let forward: Forward = Box::new(move |$x: &Tensor| {
            let $self = &mut *model.borrow_mut();
            $forward
        });
        Ok(forward)
    }};
}

type Build = fn(VarBuilder<'static>) -> candle_core::Result<Forward>;

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, build: Build| Case {
        name,
        input: tokens,
        build,
    };
    let of_row = |name, build: Build| Case {
        name,
        input: row,
        build,
    };
    vec![
        case("Llama", |vb| {
            let config: llama::LlamaConfig = config();
            let config = config.into_config(false);
            let cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
            changing!((llama::Llama::load(vb, &config)?, cache), x, model => model.0.forward(x, 0, &mut model.1))
        }),
        case(
            "Qwen2",
            |vb| changing!(qwen2::ModelForCausalLM::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "Qwen2-MoE",
            |vb| changing!(qwen2_moe::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "Qwen3",
            |vb| changing!(qwen3::ModelForCausalLM::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "Qwen3-MoE",
            |vb| changing!(qwen3_moe::ModelForCausalLM::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "Mistral",
            |vb| changing!(mistral::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "DeepSeek-V2",
            |vb| changing!(deepseek2::DeepSeekV2::new(&config_with("\"norm_topk_prob\": true", "\"norm_topk_prob\": false"), vb)?, x, model => model.forward(x, 0)),
        ),
        case("Gemma", |vb| {
            // It takes one of the two only.
            let config = config_with("hidden_act\"", "other_act\"");
            changing!(gemma::Model::new(false, &config, vb)?, x, model => model.forward(x, 0))
        }),
        case(
            "Gemma 2",
            |vb| changing!(gemma2::Model::new(false, &config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "Gemma 3",
            |vb| changing!(gemma3::Model::new(false, &config_with(ONE_HEAD[0], ONE_HEAD[1]), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "Phi",
            |vb| changing!(phi::Model::new(&config(), vb)?, x, model => model.forward(x)),
        ),
        case(
            "Phi-3",
            |vb| changing!(phi3::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        of_row(
            "Falcon",
            |vb| changing!(falcon::Falcon::load(vb, config())?, x, model => model.forward(x)),
        ),
        case(
            "StableLM",
            |vb| changing!(stable_lm::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "StarCoder2",
            |vb| changing!(starcoder2::Model::new(&config_with(ONE_HEAD[0], ONE_HEAD[1]), vb)?, x, model => model.forward(x, 0)),
        ),
        case("GPT-BigCode", |vb| {
            let config = bigcode::Config {
                vocab_size: 32,
                max_position_embeddings: 64,
                num_hidden_layers: 4,
                hidden_size: 16,
                layer_norm_epsilon: 1e-5,
                n_inner: Some(24),
                num_attention_heads: 2,
                multi_query: true,
                use_cache: false,
            };
            changing!(bigcode::GPTBigCode::load(vb, config)?, x, model => model.forward(x, 0))
        }),
        case(
            "OLMo",
            |vb| changing!(olmo::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case(
            "OLMo 2",
            |vb| changing!(olmo2::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case("Granite", |vb| {
            let config: granite::GraniteConfig = config();
            let config = config.into_config(false);
            let cache = granite::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
            changing!((granite::Granite::load(vb, &config)?, cache), x, model => model.0.forward(x, 0, &mut model.1))
        }),
        case(
            "Helium",
            |vb| changing!(helium::Model::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        of_row(
            "GLM-4",
            |vb| changing!(glm4_new::ModelForCausalLM::new(&config(), vb)?, x, model => model.forward(x, 0)),
        ),
        case("Mamba", |vb| {
            let config: mamba::Config = config();
            let model = mamba::Model::new(&config, vb.pp("backbone"))?;
            let forward: Forward = Box::new(move |tokens: &Tensor| {
                let mut state = mamba::State::new(1, &config, DType::F32, &Device::Cpu)?;
                model.forward(
                    &tokens.narrow(1, 0, 1)?.squeeze(1)?.narrow(0, 0, 1)?,
                    &mut state,
                )
            });
            Ok(forward)
        }),
    ]
}
