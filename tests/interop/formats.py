#!/usr/bin/env python3
"""What `fsdp reshard` and `fsdp convert` wrote, opened by the libraries whose formats these are.

  formats.py FSDP_BINARY FIXTURES WORK_DIRECTORY

Run by `cargo xtask interop`. Prints a line for each case; exits 1 at the first difference.
"""
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import warnings

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

warnings.filterwarnings("ignore")


def fsdp(binary, *arguments):
    command = [str(part) for part in (binary, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")


def bits(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same_tensor(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def same(a, b):
    """Nested values, where a dict is a dict and a tuple a tuple, whatever their classes."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and same_tensor(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and {str(k) for k in a} == {str(k) for k in b} and all(
            same(a[k], b[k] if k in b else b[str(k)]) for k in a)
    if isinstance(a, (set, frozenset)):
        return isinstance(b, (set, frozenset)) and a == b
    if isinstance(a, (list, tuple)):
        return isinstance(a, list) == isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def tensors(directory):
    """All tensors of a DCP directory, read by torch's own planner."""
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)
             for key, entry in metadata.items() if hasattr(entry, "size")}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def check(case, equal):
    if not equal:
        sys.exit(f"{case}: differs")


def torch_files(binary, sources, work):
    """`torch.load(weights_only=True)`: the same nested values that torch's own offline converter makes."""
    for source in sources:
        file, expected = work / "file.pt", work / "expected.pt"
        fsdp(binary, "convert", source, file, "--to", "torch", "--overwrite")
        found = torch.load(file, weights_only=True)
        dcp_to_torch_save(source, expected)
        check(f"{source} to torch", same(torch.load(expected, weights_only=False), found))
    print(f"ok: torch.load(weights_only=True) of {len(sources)} checkpoints converted to torch", flush=True)


def safetensors_files(binary, sources, work):
    """One file, and files with an index: opened by the safetensors package as transformers does it."""
    raw = (torch.complex32, torch.complex128)
    for number, source in enumerate(sources):
        expected = tensors(source)
        file, directory = work / f"{number}.safetensors", work / f"{number}-hf"
        fsdp(binary, "convert", source, file, "--to", "safetensors")
        fsdp(binary, "convert", source, directory, "--to", "hf", "--max-shard-size", "3KB")
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        names = set(index["weight_map"].values())
        check(f"files of {directory}", names == {path.name for path in directory.glob("*.safetensors")})
        total = 0
        for place in [file, *(directory / name for name in sorted(names))]:
            with safe_open(place, framework="pt") as opened:
                check(f"the format of {place}", opened.metadata()["format"] == "pt")
                for key in opened.keys():
                    check(f"{key} in {place}", place == file or index["weight_map"][key] == place.name)
                    tensor = opened.get_tensor(key)
                    total += 0 if place == file else tensor.numel() * tensor.element_size()
                    # Tensors inside values have keys by their paths.
                    if key in expected:
                        wanted = expected[key]
                        wanted = bits(wanted).reshape(tensor.shape) if wanted.dtype in raw else wanted
                        check(f"{key} in {place}", same_tensor(tensor, wanted))
        with safe_open(file, framework="pt") as opened:
            check(f"keys of {file}", expected.keys() <= set(opened.keys()) and expected.keys() <= index["weight_map"].keys())
        check(f"bytes of {directory}", total == index["metadata"]["total_size"])
    print(f"ok: the safetensors package opens {len(sources)} checkpoints, as one file and by an index", flush=True)


def dtypes_of_safetensors(binary, work):
    """Every dtype that the safetensors package writes, packed ones too: the same through DCP, torch, Hugging Face and back."""
    source, torch_file = work / "dtypes.safetensors", work / "dtypes.pt"
    named = [value for value in vars(safetensors.torch).get("_SIZE") if isinstance(value, torch.dtype)]
    written = {}
    for dtype in named:
        numel = 12 * dtype.itemsize
        data = torch.randint(0, 2 if dtype == torch.bool else 256, (numel,), dtype=torch.uint8)
        written[str(dtype)] = data.reshape(3, -1).view(dtype)
    check("the dtypes of safetensors", torch.float4_e2m1fn_x2 in named and torch.float8_e8m0fnu in named)
    safetensors.torch.save_file(written, source)
    torch.save(written, torch_file)
    for place in (source, torch_file):
        directory, back = work / "dtypes-dcp", work / "dtypes-back.safetensors"
        fsdp(binary, "convert", place, directory, "--to", "dcp", "--world-size", "2", "--overwrite")
        check(f"{place} to dcp", same(written, tensors(directory)))
        fsdp(binary, "convert", directory, back, "--to", "safetensors", "--overwrite")
        check(f"{place} to dcp and safetensors", same(written, safetensors.torch.load_file(back)))
        fsdp(binary, "convert", back, work / "dtypes-back.pt", "--to", "torch", "--overwrite")
        check(f"{place} and to torch", same(written, torch.load(work / "dtypes-back.pt", weights_only=True)))
        fsdp(binary, "convert", place, work / "dtypes-hf", "--to", "hf", "--overwrite")
        found = {}
        for file in (work / "dtypes-hf").glob("*.safetensors"):
            found |= safetensors.torch.load_file(file)
        check(f"{place} to hf", same(written, found))
    print(f"ok: {len(named)} dtypes of the safetensors package through every format", flush=True)


def hugging_face_reader(binary, sources, work):
    """torch's own reader of safetensors shards."""
    for number, source in enumerate(sources):
        shards = work / f"{number}-shards"
        fsdp(binary, "convert", source, shards, "--to", "hf-sharded", "--world-size", 3)
        expected = tensors(source)
        state = {key: torch.empty_like(tensor) for key, tensor in expected.items()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(shards)), no_dist=True)
        for key, tensor in expected.items():
            check(f"{key} in {shards}", same_tensor(tensor, state[key]))
    print(f"ok: torch's HuggingFaceStorageReader opens {len(sources)} checkpoints as shards", flush=True)


def load_sharded(rank, world, port, directories, expected):
    """One rank of a job that loads each directory as DTensors, and compares all of it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    expected = torch.load(expected, weights_only=True)
    for directory in directories:
        for dimension in (0, 1):
            state = {}
            for key, tensor in expected.items():
                empty = torch.zeros_like(tensor)
                shardable = tensor.dim() > dimension and tensor.dtype.is_floating_point and tensor.element_size() > 1
                state[key] = distribute_tensor(empty, mesh, [Shard(dimension)]) if shardable else empty
            dcp.load(state, checkpoint_id=directory)
            for key, tensor in expected.items():
                found = state[key].full_tensor() if hasattr(state[key], "full_tensor") else state[key]
                check(f"{key} of {directory} on {world} ranks", same_tensor(found, tensor))
    # gloo may abort a rank whose peer closes its connections first.
    dist.barrier()
    dist.destroy_process_group()


def sharded_loads(binary, sources, work):
    for number, source in enumerate(sources):
        expected = work / f"{number}-expected.pt"
        torch.save(tensors(source), expected)
        resharded, converted, file = work / f"{number}-3", work / f"{number}-dcp", work / f"{number}-again.safetensors"
        fsdp(binary, "reshard", source, resharded, "--world-size", 3)
        fsdp(binary, "convert", source, file, "--to", "safetensors")
        fsdp(binary, "convert", file, converted, "--to", "dcp", "--world-size", 2)
        for world in (1, 2, 3, 4):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            torch.multiprocessing.spawn(load_sharded, (world, port, [resharded, converted], expected), nprocs=world)
            print(f"ok: {source.parent.name}, resharded and converted, loaded by dcp.load on {world} ranks", flush=True)


class MetaLlama:
    """Llama as Meta and torchtitan name it, with the rotary halves of a head interleaved, written from its definition."""

    width, heads, kv_heads, layers, words, hidden = 32, 4, 2, 2, 61, 48

    def __init__(self):
        torch.manual_seed(7)
        kv_width = self.width // self.heads * self.kv_heads
        self.state = {"tok_embeddings.weight": torch.randn(self.words, self.width)}
        for i in range(self.layers):
            for name, shape in {
                "attention.wq": (self.width, self.width),
                "attention.wk": (kv_width, self.width),
                "attention.wv": (kv_width, self.width),
                "attention.wo": (self.width, self.width),
                "feed_forward.w1": (self.hidden, self.width),
                "feed_forward.w2": (self.width, self.hidden),
                "feed_forward.w3": (self.hidden, self.width),
                "attention_norm": (self.width,),
                "ffn_norm": (self.width,),
            }.items():
                self.state[f"layers.{i}.{name}.weight"] = torch.randn(shape) / 5
        self.state["norm.weight"] = torch.randn(self.width)
        self.state["output.weight"] = torch.randn(self.words, self.width)

    def config(self):
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "vocab_size": self.words,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
        }

    def normed(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.state[f"{name}.weight"]

    def turned(self, x):
        positions, size = x.shape[0], x.shape[-1]
        frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
        turns = torch.polar(torch.ones(positions, size // 2), torch.outer(torch.arange(positions).float(), frequencies))
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turns[:, None, :]).flatten(-2)

    def logits(self, words):
        x = self.state["tok_embeddings.weight"][words]
        for i in range(self.layers):
            def linear(y, name, i=i):
                return y @ self.state[f"layers.{i}.{name}.weight"].T

            y = self.normed(x, f"layers.{i}.attention_norm")
            queries = self.turned(linear(y, "attention.wq").view(len(words), self.heads, -1))
            keys = self.turned(linear(y, "attention.wk").view(len(words), self.kv_heads, -1))
            values = linear(y, "attention.wv").view(len(words), self.kv_heads, -1)
            keys, values = (z.repeat_interleave(self.heads // self.kv_heads, dim=1) for z in (keys, values))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                queries.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True)
            x = x + linear(mixed.transpose(0, 1).flatten(1), "attention.wo")
            y = self.normed(x, f"layers.{i}.ffn_norm")
            gate = torch.nn.functional.silu(linear(y, "feed_forward.w1"))
            x = x + linear(gate * linear(y, "feed_forward.w3"), "feed_forward.w2")
        return self.normed(x, "norm") @ self.state["output.weight"].T


def transformers_models(binary, work):
    """A checkpoint of torchtitan becomes a folder that transformers opens; an adapter of PEFT goes into its base."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    llama = MetaLlama()
    source, configuration, folder = work / "titan", work / "configuration", work / "llama-hf"
    dcp.save({"model": llama.state, "train_state": {"step": 3}}, checkpoint_id=source, no_dist=True)
    configuration.mkdir()
    (configuration / "config.json").write_text(json.dumps(llama.config()))
    (configuration / "tokenizer_config.json").write_text("{}")
    fsdp(binary, "convert", source, folder, "--to", "hf", "--include", "model.*", "--rename", "model.=",
         "--map", "llama-to-hf", "--set", f"heads={llama.heads}", "--set", f"kv_heads={llama.kv_heads}",
         "--with", configuration)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = torch.randint(0, llama.words, (11,))
    with torch.no_grad():
        found, expected = model(words[None]).logits[0], llama.logits(words)
    check("the logits of a Llama of torchtitan in transformers", torch.allclose(found, expected, rtol=1e-4, atol=1e-4))
    print("ok: a Llama of torchtitan, opened by transformers with equal logits", flush=True)

    for name, options in {
        "plain": {"r": 4, "lora_alpha": 10},
        "rslora": {"r": 6, "lora_alpha": 5, "use_rslora": True, "alpha_pattern": {"q_proj": 3}},
        "patterns": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"],
                     "alpha_pattern": {r"layers\.0\..*(q|v).proj": 3, "down.proj": 5, "_proj": 100},
                     "rank_pattern": {r"layers\.(?!0\.)\d+\.mlp\..*": 2}},
        "embedding": {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head"]},
    }.items():
        options.setdefault("target_modules", ["q_proj", "down_proj"])
        tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(**options))
        with torch.no_grad():
            for key, parameter in tuned.named_parameters():
                if "lora_" in key or "modules_to_save" in key:
                    parameter.copy_(torch.randn_like(parameter))
        adapter, merged = work / f"adapter-{name}", work / f"merged-{name}"
        tuned.save_pretrained(adapter)
        fsdp(binary, "merge", "--from", folder, "--lora", adapter, merged, "--to", "hf")
        ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).state_dict()
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
        check(f"the keys of a merged adapter ({name})", ours.keys() == theirs.keys())
        for key, tensor in theirs.items():
            check(f"{key} of a merged adapter ({name})", torch.allclose(ours[key], tensor, rtol=1e-5, atol=1e-5))
        print(f"ok: an adapter of PEFT ({name}) merged as PEFT merges it", flush=True)


def tied_models(binary, work):
    """An adapter that changes both layers of a tied weight goes into its base; one that changes only one is refused."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2, tie_word_embeddings=True)
    base = work / "tied"
    LlamaForCausalLM(config).save_pretrained(base)
    layers = ["embed_tokens", "lm_head"]
    changes = {"embedding": {"target_modules": layers[:1]}, "output": {"target_modules": layers[1:]}}
    changes |= {"both": {"target_modules": layers}}
    changes |= {f"whole {name}": {"target_modules": ["q_proj"], "modules_to_save": change["target_modules"]}
                for name, change in changes.items()}
    for number, ((name, change), tying) in enumerate((item, tying) for item in changes.items() for tying in (False, True)):
        options = LoraConfig(r=2, lora_alpha=4, ensure_weight_tying=tying, **change)
        tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), options)
        with torch.no_grad():
            for key, parameter in tuned.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter))
        adapter, merged = work / f"tied-adapter-{number}", work / f"tied-merged-{number}"
        tuned.save_pretrained(adapter)
        command = [binary, "merge", "--from", base, "--lora", adapter, merged, "--to", "hf"]
        if not tying:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            check(f"a refusal of a change of a tied weight ({name})", done.returncode != 0 and "PEFT" in done.stderr)
            continue
        subprocess.run(command, capture_output=True, check=True)
        words = torch.arange(11)[None]
        with torch.no_grad():
            ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(words).logits
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            # PEFT's own merge adds the change of each of the two layers to the one weight.
            theirs = PeftModel.from_pretrained(model, adapter)(words).logits
        check(f"the logits of a tied model ({name})", torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4))
    print("ok: adapters of tied models, merged as PEFT applies them or refused", flush=True)


def main():
    binary, fixtures, work = (pathlib.Path(argument) for argument in sys.argv[1:])
    work.mkdir(parents=True)
    sources = sorted(path.parent for path in fixtures.glob("*/dcp/.metadata"))
    every = fixtures / "dtypes" / "every"
    torch_files(binary, [*sources, every], work)
    safetensors_files(binary, [*sources, every], work)
    plain = [fixtures / name / "dcp" for name in ("fsdp2_adamw_ws2", "fsdp1_flat_adamw_ws2", "hsdp2_adamw_ws4")]
    dtypes_of_safetensors(binary, work)
    hugging_face_reader(binary, plain, work)
    transformers_models(binary, work)
    tied_models(binary, work)
    sharded_loads(binary, [fixtures / "misc_ws3" / "dcp", fixtures / "fsdp2_bf16_adamw_ws2" / "dcp"], work)


if __name__ == "__main__":
    main()
