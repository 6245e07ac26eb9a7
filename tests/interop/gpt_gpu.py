#!/usr/bin/env python3
"""PyTorch beside `fsdp train --device cuda`: the same GPT with FSDP2, its steps and its saves, as a line of JSON after TORCH.

  gpt_gpu.py --name NAME [--layers L --heads H --hidden C --seq T --batch B --steps S] [--bf16] [--tf32] [--plain]
             [--save DIR] [--device cpu]

--plain is without FSDP, and under autocast with --bf16. A launcher's RANK and WORLD_SIZE make it one of several ranks, which
may share a GPU. --save also saves and loads with torch.distributed.checkpoint. --device cpu is to try this script.
"""
import argparse
import json
import os
import shutil
import statistics
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gpt_fsdp import Gpt

warnings.filterwarnings("ignore")

# The first steps load kernels and fill pools.
WARM_UP = 5


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--save", default="")
    for name, default in [("layers", 12), ("heads", 12), ("hidden", 768), ("seq", 1024), ("batch", 8), ("steps", 25)]:
        parser.add_argument("--" + name, type=int, default=default)
    for name in ["bf16", "tf32", "plain"]:
        parser.add_argument("--" + name, action="store_true")
    return parser.parse_args()


def make_model(options, world):
    model = Gpt(options.layers, options.heads, options.hidden, options.seq)
    if not options.plain:
        mesh = init_device_mesh(options.device, (world,))
        precision = MixedPrecisionPolicy()
        if options.bf16:
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


class Clock:
    """Seconds between two calls, after all work of the GPU."""

    def __init__(self, device):
        self.device = device
        self.restart()

    def now(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def restart(self):
        self.start = self.now()

    def seconds(self):
        return round(self.now() - self.start, 4)


def train(model, optimizer, options, world):
    """Returns the seconds of each step, and the last loss."""
    generator = torch.Generator(options.device).manual_seed(1)
    data = torch.randint(0, 256, (1 << 20,), generator=generator)
    rows = max(options.batch // world, 1)
    clock, seconds = Clock(options.device), []
    for step in range(options.steps):
        clock.restart()
        first = (torch.arange(rows) + step * rows)[:, None] * options.seq % (len(data) - options.seq - 1)
        index = first + torch.arange(options.seq)[None]
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16 and options.plain):
            loss = model(data[index], data[index + 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        seconds.append(clock.seconds())
    return seconds, last


def save_and_load(model, optimizer, options, rank):
    """Returns the seconds of a save, of a load, and of a save in the background, also those that it makes the caller wait.

    On a GPU the machine's limits are added.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    clock, figures = Clock(options.device), {}

    def begin(directory):
        if rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()
        clock.restart()

    # The first save makes a plan, here as in fsdp. The second is like those of a run.
    for _ in range(2):
        begin(options.save)
        dcp.save(state, checkpoint_id=options.save)
        figures["save_s"] = clock.seconds()
    dist.barrier()
    clock.restart()
    dcp.load(state, checkpoint_id=options.save)
    figures["load_s"] = clock.seconds()
    for _ in range(2):
        begin(options.save + "-async")
        saving = dcp.async_save(state, checkpoint_id=options.save + "-async")
        figures["async_waited_s"] = clock.seconds()
        saving.result()
        figures["async_save_s"] = clock.seconds()
    if options.device == "cuda":
        figures.update(limits(options.save + "-raw"))
    return figures


def limits(file):
    """Returns the speed of a copy from the GPU to pinned memory, and of plain writes and reads: by one thread, and by eight."""
    size = 1 << 30
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    clock, copies = Clock("cuda"), []
    for _ in range(4):
        clock.restart()
        target.copy_(source)
        copies.append(clock.seconds())
    figures = {"copy_gb_s": round(size / min(copies) / 1e9, 1)}
    data = memoryview(target.numpy())

    def move(move_part, threads):
        """Moves all parts of the file, and returns the speed."""
        part = size // threads
        clock.restart()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda index: move_part(data[index * part : (index + 1) * part], index * part), range(threads)))
        return round(size / clock.seconds() / 1e9, 2)

    def write(part, offset):
        with open(file, "r+b", buffering=0) as raw:
            raw.seek(offset)
            raw.write(part)

    def read(part, offset):
        with open(file, "rb", buffering=0) as raw:
            raw.seek(offset)
            raw.readinto(part)

    for threads in (1, 8):
        with open(file, "wb"):
            pass
        figures[f"write_{threads}_gb_s"] = move(write, threads)
        figures[f"read_{threads}_gb_s"] = move(read, threads)
    os.remove(file)
    return figures


def main():
    options = parse()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(0)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=rank, world_size=world)
    torch.manual_seed(0)
    torch.set_default_device(options.device)
    model = make_model(options, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, loss = train(model, optimizer, options, world)
    step = statistics.median(seconds[WARM_UP:] or seconds)
    figures = {
        "name": options.name,
        "torch": torch.__version__,
        "step_ms": round(step * 1e3, 2),
        "tokens_s": round(options.batch * options.seq / step),
        "loss": round(loss, 4),
    }
    if options.device == "cuda":
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if options.save:
        figures.update(save_and_load(model, optimizer, options, rank))
    if rank == 0:
        print("TORCH", json.dumps(figures), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
