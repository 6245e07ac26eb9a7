#!/usr/bin/env python3
"""The storage classes of `fsdp_checkpoint` beside torch's own, with the state of FSDP2 on a GPU: save, load, and the time for
which a save in the background makes the caller wait. Prints medians of three turns, as a line of JSON after STORAGE.

  storage.py DIRECTORY [--layers N] [--width W] [--device cpu]

It needs torch and the wheel of `fsdp_checkpoint`. --device cpu is to try this script.
"""
import argparse
import json
import os
import shutil
import statistics
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_checkpoint.torch import StorageReader, StorageWriter

warnings.filterwarnings("ignore")

TURNS = 3


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def make_state(options):
    """Returns the state of a model and its optimizer after a step, and its bytes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(options.width, options.width) for _ in range(options.layers)])
    mesh = init_device_mesh(options.device, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, options.width)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # AdamW has two moments in f32 beside each parameter in f32.
    size = 12 * sum(parameter.numel() for parameter in model.parameters())
    return {"model": model_state, "optim": optimizer_state}, size


def seconds(work, device):
    """Returns the time of some work, which begins when the GPU is done, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main():
    options = parse()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo", rank=0, world_size=1)
    torch.set_default_device(options.device)
    state, size = make_state(options)
    path = os.path.join(options.directory, "checkpoint")

    def place(who, argument, storage):
        """Returns the arguments by which one side is told where the checkpoint is."""
        return {"checkpoint_id": path} if who == "torch" else {argument: storage(path)}

    times = {f"{what}_{who}": [] for what in ("save", "load", "stall") for who in ("torch", "ours")}
    for turn in range(TURNS):
        # Each side is first in some of the turns.
        for who in ("torch", "ours") if turn % 2 else ("ours", "torch"):
            shutil.rmtree(path, ignore_errors=True)
            times["save_" + who].append(seconds(lambda: dcp.save(state, **place(who, "storage_writer", StorageWriter)), options.device)[0])
            times["load_" + who].append(seconds(lambda: dcp.load(state, **place(who, "storage_reader", StorageReader)), options.device)[0])
            shutil.rmtree(path, ignore_errors=True)
            stall, saving = seconds(lambda: dcp.async_save(state, **place(who, "storage_writer", StorageWriter)), options.device)
            times["stall_" + who].append(stall)
            saving.result()
    shutil.rmtree(path, ignore_errors=True)
    figures = {name: round(statistics.median(turns), 4) for name, turns in times.items()}
    print("STORAGE", json.dumps({"gb": round(size / 1e9, 2), **figures}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
