#!/usr/bin/env python3
"""Maps for stacked experts, and weights of 8 bits, beside what transformers itself makes of them.

  experts.py FSDP_BINARY UNUSED WORK_DIRECTORY

Run by `cargo xtask interop`. Prints a line for each case; exits 1 at the first difference.
"""
import json
import pathlib
import subprocess
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file

warnings.filterwarnings("ignore")

SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)
"""The sizes that all configurations have."""


def fsdp(binary, *arguments):
    command = [str(part) for part in (binary, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stderr


def check(condition, what):
    if not condition:
        sys.exit(f"differs: {what}")


def models():
    """Yield the name of each map, and a small model of random weights."""
    from transformers import (
        DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM,
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
    )

    yield "qwen3-moe", Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=24))
    yield "mixtral", MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))
    yield "deepseek-v3", DeepseekV3ForCausalLM(DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8))
    yield "gpt-oss", GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))


def same_states(a, b, what):
    check(a.keys() == b.keys(), f"{what}: {sorted(a.keys() ^ b.keys())[:5]}")
    for name, tensor in a.items():
        check(tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), f"{what}: {name}")


def test_experts(binary, work, name, model):
    """The state dict in memory and the files that `save_pretrained` writes lead to each other."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    place = work / name
    model.save_pretrained(place / "hf")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(state, place / "memory.safetensors")
    if name == "gpt-oss":
        # Its files have the experts stacked: tensors for each expert are what other programs have.
        fsdp(binary, "convert", place / "memory.safetensors", place / "apart", "--to", "hf", "--map", f"{name}-to-hf")
        apart = load_file(place / "apart" / "model-00001-of-00001.safetensors")
        experts = model.model.layers[1].mlp.experts
        gate_up = experts.gate_up_proj[3]
        check(torch.equal(apart["model.layers.1.mlp.experts.3.gate_proj.weight"], gate_up[:, ::2].T), "gate of gpt-oss")
        check(torch.equal(apart["model.layers.1.mlp.experts.3.up_proj.weight"], gate_up[:, 1::2].T), "up of gpt-oss")
        check(torch.equal(apart["model.layers.1.mlp.experts.3.up_proj.bias"], experts.gate_up_proj_bias[3, 1::2]), "bias of gpt-oss")
        fsdp(binary, "convert", place / "apart", place / "back.safetensors", "--to", "safetensors", "--map", f"hf-to-{name}")
        same_states(load_file(place / "back.safetensors"), state, name)
        return
    fsdp(binary, "convert", place / "hf", place / "stacked.safetensors", "--to", "safetensors", "--map", f"hf-to-{name}")
    same_states(load_file(place / "stacked.safetensors"), state, name)
    fsdp(binary, "convert", place / "memory.safetensors", place / "files", "--to", "hf", "--map", f"{name}-to-hf", "--with", place / "hf")
    loaded = type(model).from_pretrained(place / "files")
    tokens = torch.arange(10)[None]
    model.eval(), loaded.eval()
    check(torch.equal(model(tokens).logits, loaded(tokens).logits), f"logits of {name}")


def test_dequantize(binary, work):
    """Weights of 8 bits become what transformers makes of them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    place = work / "dequantize"
    place.mkdir(parents=True)
    dequantize = Fp8Dequantize(None)
    tensors, expected = {}, {}
    for name, shape, scale_shape in [("a", (256, 384), (2, 3)), ("b", (128, 64), (1, 1)), ("c", (64, 96), (64, 1))]:
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = torch.rand(scale_shape)
        tensors |= {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
        for dtype in (torch.bfloat16, torch.float32):
            expected[f"{name}.weight", dtype] = dequantize._dequantize_one(weight, scale, dtype)
    # Ragged blocks, which that function refuses; DeepSeek's own code multiplies like this.
    weight, scale = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(3, 2)
    wide = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    tensors |= {"ragged.weight": weight, "ragged.weight_scale_inv": scale}
    for dtype in (torch.bfloat16, torch.float32):
        expected["ragged.weight", dtype] = (weight.float() * wide).to(dtype)
    save_file(tensors, place / "model.safetensors")
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (place / "config.json").write_text(json.dumps(config))
    for dtype in ("bfloat16", "float32"):
        out = place.parent / f"dequantized-{dtype}"
        fsdp(binary, "convert", place, out, "--to", "hf", "--dequantize", "--dtype", dtype)
        written = load_file(out / "model-00001-of-00001.safetensors")
        wanted = {name: tensor for (name, of), tensor in expected.items() if of == getattr(torch, dtype)}
        same_states(written, wanted, f"dequantized {dtype}")
        config = json.loads((out / "config.json").read_text())
        check(config == {"torch_dtype": dtype}, f"config of dequantized {dtype}")


def main():
    binary, work = sys.argv[1], pathlib.Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    for name, model in models():
        test_experts(binary, work, name, model)
        print(f"experts of {name}: ok")
    test_dequantize(binary, work)
    print("weights of 8 bits: ok")


if __name__ == "__main__":
    main()
