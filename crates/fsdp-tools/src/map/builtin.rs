//! The maps that are built in.

/// The names of the maps that are built in, and what each is for.
pub const BUILTIN: [(&str, &str); 8] = [
    (
        "llama-to-hf",
        "Llama of Meta and torchtitan to that of Hugging Face; needs `heads` and `kv_heads`",
    ),
    ("hf-to-llama", "the other way"),
    ("nanogpt-to-hf", "nanoGPT to Hugging Face's GPT-2"),
    ("hf-to-nanogpt", "the other way"),
    (
        "megatron-to-hf",
        "Megatron-core's Llama to that of Hugging Face; needs `heads` and `kv_heads`",
    ),
    ("hf-to-megatron", "the other way, with the layers stacked"),
    (
        "fused-to-hf",
        "Llama and Qwen of vLLM and SGLang to those of Hugging Face; needs `heads` and `kv_heads`",
    ),
    ("hf-to-fused", "the other way"),
];

/// Returns the text of the map of this name, and `true` if it is to be reversed; `None` for a name
/// that is not in [`BUILTIN`].
pub(super) fn find_text(name: &str) -> Option<(String, bool)> {
    let (framework, is_reversed) = match name.strip_suffix("-to-hf") {
        Some(framework) => (framework, false),
        None => (name.strip_prefix("hf-to-")?, true),
    };
    let text = match framework {
        "llama" => LLAMA.to_owned(),
        "nanogpt" => NANOGPT.to_owned(),
        "megatron" => megatron_text(),
        "fused" => FUSED.to_owned(),
        _ => return None,
    };
    Some((text, is_reversed))
}

/// The map of Meta's Llama. Its rows of queries and keys have the rotary halves of a head
/// interleaved.
const LLAMA: &str = "\
tok_embeddings.weight -> model.embed_tokens.weight
layers.{i}.attention.wq.weight -> model.layers.{i}.self_attn.q_proj.weight | permute(heads)
layers.{i}.attention.wk.weight -> model.layers.{i}.self_attn.k_proj.weight | permute(kv_heads)
layers.{i}.attention.wv.weight -> model.layers.{i}.self_attn.v_proj.weight
layers.{i}.attention.wo.weight -> model.layers.{i}.self_attn.o_proj.weight
layers.{i}.feed_forward.w1.weight -> model.layers.{i}.mlp.gate_proj.weight
layers.{i}.feed_forward.w2.weight -> model.layers.{i}.mlp.down_proj.weight
layers.{i}.feed_forward.w3.weight -> model.layers.{i}.mlp.up_proj.weight
layers.{i}.attention_norm.weight -> model.layers.{i}.input_layernorm.weight
layers.{i}.ffn_norm.weight -> model.layers.{i}.post_attention_layernorm.weight
norm.weight -> model.norm.weight
output.weight -> lm_head.weight
drop freqs_cis
drop rope.freqs
";

/// The map of nanoGPT. Hugging Face's GPT-2 has the matrices of its `Conv1D` transposed.
const NANOGPT: &str = "\
transformer.h.{i}.attn.c_attn.weight -> transformer.h.{i}.attn.c_attn.weight | transpose
transformer.h.{i}.attn.c_proj.weight -> transformer.h.{i}.attn.c_proj.weight | transpose
transformer.h.{i}.mlp.c_fc.weight -> transformer.h.{i}.mlp.c_fc.weight | transpose
transformer.h.{i}.mlp.c_proj.weight -> transformer.h.{i}.mlp.c_proj.weight | transpose
drop transformer.h.{i}.attn.bias
";

/// The rules of Megatron-core's Llama for what is in its layers, without the start of their keys.
const MEGATRON_LAYER: &str = "\
self_attention.linear_qkv.weight -> model.layers.{i}.self_attn.q_proj.weight, model.layers.{i}.self_attn.k_proj.weight, model.layers.{i}.self_attn.v_proj.weight | split_qkv(heads, kv_heads)
self_attention.linear_qkv.bias -> model.layers.{i}.self_attn.q_proj.bias, model.layers.{i}.self_attn.k_proj.bias, model.layers.{i}.self_attn.v_proj.bias | split_qkv(heads, kv_heads)
self_attention.linear_proj.weight -> model.layers.{i}.self_attn.o_proj.weight
mlp.linear_fc1.weight -> model.layers.{i}.mlp.gate_proj.weight, model.layers.{i}.mlp.up_proj.weight | split(0)
mlp.linear_fc2.weight -> model.layers.{i}.mlp.down_proj.weight
self_attention.linear_qkv.layer_norm_weight -> model.layers.{i}.input_layernorm.weight
mlp.linear_fc1.layer_norm_weight -> model.layers.{i}.post_attention_layernorm.weight
";

/// Returns the map of Megatron-core's Llama. Layers are stacked along a first dimension
/// (`torch_dist`), or have keys of their own.
fn megatron_text() -> String {
    let mut text = "embedding.word_embeddings.weight -> model.embed_tokens.weight\n".to_owned();
    for (start, operation) in [
        ("decoder.layers.", " | unstack(i)"),
        ("decoder.layers.{i}.", ""),
    ] {
        for rule in MEGATRON_LAYER.lines() {
            // `unstack` comes before all other operations.
            let end = rule.find(" |").unwrap_or(rule.len());
            let (keys, operations) = rule.split_at(end);
            text.push_str(&format!("{start}{keys}{operation}{operations}\n"));
        }
    }
    text.push_str("decoder.final_layernorm.weight -> model.norm.weight\n");
    text.push_str("output_layer.weight -> lm_head.weight\n");
    text
}

/// The map of Llama and Qwen in inference servers. They have one matrix for queries, keys and
/// values, and one for the gate and up projections.
const FUSED: &str = "\
model.layers.{i}.self_attn.qkv_proj.weight -> model.layers.{i}.self_attn.q_proj.weight, model.layers.{i}.self_attn.k_proj.weight, model.layers.{i}.self_attn.v_proj.weight | split(0, heads, kv_heads, kv_heads)
model.layers.{i}.self_attn.qkv_proj.bias -> model.layers.{i}.self_attn.q_proj.bias, model.layers.{i}.self_attn.k_proj.bias, model.layers.{i}.self_attn.v_proj.bias | split(0, heads, kv_heads, kv_heads)
model.layers.{i}.mlp.gate_up_proj.weight -> model.layers.{i}.mlp.gate_proj.weight, model.layers.{i}.mlp.up_proj.weight | split(0)
";
