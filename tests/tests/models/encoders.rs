//! Models that read texts and images, and those that translate.

use std::cell::RefCell;

use candle_core::{DType, Device, Module as _, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    bert, debertav2, distilbert, marian, modernbert, nomic_bert, siglip, t5, vit, xlm_roberta,
};
use serde::de::DeserializeOwned;

use crate::check::{Case, Forward};

/// The configuration of a small model, with the keys of all of these.
const CONFIG: &str = r#"{
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 64, "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-5,
    "pad_token_id": 0, "position_embedding_type": "absolute",
    "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24, "activation": "gelu",
    "global_attn_every_n_layers": 2, "global_rope_theta": 160000.0, "local_attention": 8,
    "local_rope_theta": 10000.0,
    "n_embd": 16, "n_head": 2, "n_layer": 4, "n_inner": 24, "n_positions": 64, "layer_norm_epsilon": 1e-5,
    "rotary_emb_fraction": 1.0, "rotary_emb_base": 10000.0, "rotary_emb_interleaved": false, "qkv_proj_bias": false,
    "mlp_fc1_bias": false, "mlp_fc2_bias": false, "activation_function": "swiglu", "prenorm": false,
    "relative_attention": true, "max_relative_positions": -1, "position_biased_input": false, "pos_att_type": "p2c|c2p",
    "position_buckets": 8, "share_att_key": true, "norm_rel_ebd": "layer_norm",
    "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 4, "num_heads": 2, "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0, "initializer_factor": 1.0, "feed_forward_proj": "relu", "is_encoder_decoder": true,
    "tie_word_embeddings": true, "eos_token_id": 1, "decoder_start_token_id": 0, "use_cache": false,
    "image_size": 8, "patch_size": 4, "num_channels": 3, "qkv_bias": true
}"#;

/// Reads the configuration as every one of these models reads its own.
fn config<T: DeserializeOwned>() -> T {
    serde_json::from_str(CONFIG).unwrap()
}

fn tokens() -> Tensor {
    Tensor::new(&[[3u32, 1, 4, 1, 5], [9, 2, 6, 5, 3]], &Device::Cpu).unwrap()
}

fn image() -> Tensor {
    let values: Vec<f32> = (0..2 * 3 * 8 * 8)
        .map(|i| ((i * 37 % 101) as f32) / 101.0 - 0.5)
        .collect();
    Tensor::from_vec(values, (2, 3, 8, 8), &Device::Cpu).unwrap()
}

type Build = fn(VarBuilder<'static>) -> candle_core::Result<Forward>;

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, build: Build| Case {
        name,
        input: tokens,
        build,
    };
    let seeing = |name, build: Build| Case {
        name,
        input: image,
        build,
    };
    vec![
        case("BERT", |vb| {
            let model = bert::BertModel::load(vb, &config())?;
            Ok(Box::new(move |x: &Tensor| {
                model.forward(x, &x.zeros_like()?, None)
            }))
        }),
        case("DistilBERT", |vb| {
            let model = distilbert::DistilBertModel::load(vb, &config())?;
            Ok(Box::new(move |x: &Tensor| {
                model.forward(x, &Tensor::zeros((5, 5), DType::U8, &Device::Cpu)?)
            }))
        }),
        case("DeBERTa-V2", |vb| {
            let model = debertav2::DebertaV2Model::load(vb, &config())?;
            Ok(Box::new(move |x: &Tensor| model.forward(x, None, None)))
        }),
        case("ModernBERT", |vb| {
            let model = modernbert::ModernBert::load(vb, &config())?;
            Ok(Box::new(move |x: &Tensor| {
                model.forward(x, &x.ones_like()?)
            }))
        }),
        case("XLM-RoBERTa", |vb| {
            let model = xlm_roberta::XLMRobertaModel::new(&config(), vb)?;
            Ok(Box::new(move |x: &Tensor| {
                model.forward(x, &x.ones_like()?, &x.zeros_like()?, None, None, None)
            }))
        }),
        case("Nomic BERT", |vb| {
            let model = nomic_bert::NomicBertModel::load(vb, &config())?;
            Ok(Box::new(move |x: &Tensor| model.forward(x, None, None)))
        }),
        case("T5", |vb| {
            let model = RefCell::new(t5::T5ForConditionalGeneration::load(vb, &config())?);
            Ok(Box::new(move |x: &Tensor| model.borrow_mut().forward(x, x)))
        }),
        case("Marian", |vb| {
            let config = marian::Config {
                vocab_size: 32,
                decoder_vocab_size: None,
                max_position_embeddings: 64,
                encoder_layers: 4,
                encoder_ffn_dim: 24,
                encoder_attention_heads: 2,
                decoder_layers: 4,
                decoder_ffn_dim: 24,
                decoder_attention_heads: 2,
                use_cache: false,
                is_encoder_decoder: true,
                activation_function: candle_nn::Activation::Swish,
                d_model: 16,
                decoder_start_token_id: 0,
                scale_embedding: true,
                pad_token_id: 0,
                eos_token_id: 1,
                forced_eos_token_id: 1,
                share_encoder_decoder_embeddings: true,
            };
            let model = RefCell::new(marian::MTModel::new(&config, vb)?);
            Ok(Box::new(move |x: &Tensor| {
                let mut model = model.borrow_mut();
                let read = model.encoder().forward(x, 0)?;
                model.decode(x, &read, 0)
            }))
        }),
        seeing("ViT", |vb| {
            let model = vit::Model::new(&config(), 10, vb)?;
            Ok(Box::new(move |x: &Tensor| model.forward(x)))
        }),
        seeing("SigLIP", |vb| {
            let config = siglip::VisionConfig {
                hidden_act: candle_nn::Activation::Gelu,
                ..config()
            };
            let model = siglip::VisionModel::new(&config, true, vb)?;
            Ok(Box::new(move |x: &Tensor| model.forward(x)))
        }),
    ]
}
