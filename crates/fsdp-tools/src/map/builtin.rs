//! The maps that are built in. Their texts are files like those that users write.

/// The names of the maps that are built in, and what each is for.
pub const BUILTIN: [(&str, &str); 16] = [
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
    (
        "qwen3-moe-to-hf",
        "Qwen3-MoE as transformers 5 computes with it, its experts stacked, to the files of Hugging \
         Face, with tensors for each expert",
    ),
    ("hf-to-qwen3-moe", "the other way"),
    ("deepseek-v3-to-hf", "the same for DeepSeek-V3"),
    ("hf-to-deepseek-v3", "the other way"),
    ("mixtral-to-hf", "the same for Mixtral"),
    ("hf-to-mixtral", "the other way"),
    (
        "gpt-oss-to-hf",
        "gpt-oss, its experts stacked and gates and ups interleaved, to tensors for each expert",
    ),
    ("hf-to-gpt-oss", "the other way"),
];

/// Returns the text of the map of this name, and `true` if it is to be reversed; `None` for a name
/// that is not in [`BUILTIN`].
pub(super) fn find_text(name: &str) -> Option<(&'static str, bool)> {
    let (framework, is_reversed) = match name.strip_suffix("-to-hf") {
        Some(framework) => (framework, false),
        None => (name.strip_prefix("hf-to-")?, true),
    };
    let text = match framework {
        "llama" => include_str!("builtin/llama.map"),
        "nanogpt" => include_str!("builtin/nanogpt.map"),
        "megatron" => include_str!("builtin/megatron.map"),
        "fused" => include_str!("builtin/fused.map"),
        "qwen3-moe" | "deepseek-v3" => include_str!("builtin/experts.map"),
        "mixtral" => include_str!("builtin/mixtral.map"),
        "gpt-oss" => include_str!("builtin/gpt_oss.map"),
        _ => return None,
    };
    Some((text, is_reversed))
}
