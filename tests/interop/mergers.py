"""Conversions of 2 GiB beside PyTorch's, accelerate's and verl's: python mergers.py FSDP DIRECTORY [SIZE [RUNS]]

FSDP is the release build of the command; DIRECTORY is a place to write to, best in memory; SIZE is one of bench.py's
SIZES. Every program runs in a process of its own, start included, as a person runs it, in turns with ours. Prints a JSON
list of the medians, and of how many times as fast ours is. A merger that is not installed is left out, and said so.

verl's merger asks for a transformers model. It is a Llama of about the size that is asked for, saved as accelerate saves it (a
DCP), and as verl does: a file of DTensors for each of four ranks. verl's merger casts to bfloat16, so ours does there too.
"""

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor

warnings.filterwarnings("ignore")

RANKS = 4
# layers, width, vocabulary: parameters in float32 of about this many bytes
SIZES = {"16m": (2, 256, 4000), "256m": (2, 1024, 14000), "2g": (28, 1024, 28000)}


def config(size):
    from transformers import LlamaConfig

    layers, width, vocabulary = SIZES[size]
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=8,
        vocab_size=vocabulary,
        architectures=["LlamaForCausalLM"],
    )


def sharded(size, mesh):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    state = LlamaForCausalLM(config(size)).state_dict()
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}


def tokenizer():
    """One of a single word, because verl's merger asks for one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"word": 0}, unk_token="word")))


def write(rank, size, directory, store):
    """Saves one model as accelerate saves it (a DCP), and as verl does."""
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    state = sharded(size, mesh)
    dcp.save({"model": state}, checkpoint_id=os.path.join(directory, "pytorch_model_fsdp_0"))
    verl = os.path.join(directory, "verl")
    os.makedirs(verl, exist_ok=True)
    torch.save(state, os.path.join(verl, f"model_world_size_{RANKS}_rank_{rank}.pt"))
    if rank == 0:
        with open(os.path.join(verl, "fsdp_config.json"), "w") as file:
            json.dump({"FSDP_version": 2, "world_size": RANKS}, file)
        beside = os.path.join(verl, "huggingface")
        config(size).save_pretrained(beside)
        tokenizer().save_pretrained(beside)
    dist.barrier()
    dist.destroy_process_group()


def installed(module):
    return importlib.util.find_spec(module) is not None


def cases(fsdp, directory):
    """Each is a name, our command, theirs, and what either writes."""
    source, verl = os.path.join(directory, "pytorch_model_fsdp_0"), os.path.join(directory, "verl")
    ours, theirs = os.path.join(directory, "ours"), os.path.join(directory, "theirs")

    def python(code):
        return [sys.executable, "-W", "ignore", "-c", code]

    def convert(source, to, *options, extension=""):
        return [fsdp, "convert", source, ours + extension, "--to", to, *options]

    save = "torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f"
    yield "dcp_to_torch_save", convert(source, "torch", extension=".pt"), python(f"from {save}; f({source!r}, {theirs + '.pt'!r})")
    if installed("accelerate"):
        merge = f"from accelerate.utils import merge_fsdp_weights as f; f({source!r}, {theirs!r}, safe_serialization=True)"
        yield "accelerate's merge", convert(source, "hf"), python(merge)
    else:
        print("accelerate is not installed: left out", file=sys.stderr)
    if installed("verl"):
        merge = ["-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", verl, "--target_dir", theirs]
        yield "verl's merger", convert(verl, "hf", "--dtype", "bfloat16"), [sys.executable, "-W", "ignore", *merge]
    else:
        print("verl is not installed: left out", file=sys.stderr)


def clear(directory):
    for name in os.listdir(directory):
        if name.startswith(("ours", "theirs")):
            path = os.path.join(directory, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def timed(command, directory):
    clear(directory)
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")
    return elapsed


def main():
    fsdp, place, *rest = sys.argv[1:]
    size, runs = (rest + ["2g", "3"][len(rest) :])[:2]
    directory = tempfile.mkdtemp(prefix="mergers-", dir=place)
    found = []
    try:
        store = os.path.join(directory, "store")
        mp.start_processes(write, (size, directory, store), nprocs=RANKS, start_method="spawn")
        for name, ours, theirs in cases(fsdp, directory):
            pairs = []
            for index in range(int(runs)):
                # Each of the two comes first in half of the pairs.
                first, second = (ours, theirs) if index % 2 == 0 else (theirs, ours)
                times = timed(first, directory), timed(second, directory)
                pairs.append(times if index % 2 == 0 else times[::-1])
            mine, other = (statistics.median(times) for times in zip(*pairs))
            ratio = statistics.median(other / mine for mine, other in pairs)
            case = {"case": name, "size": size, "ranks": RANKS, "seconds": mine, "their_seconds": other, "ratio": ratio}
            print(case, file=sys.stderr)
            found.append(case)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
