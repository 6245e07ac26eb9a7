"""PyTorch on the work that `cargo xtask bench` measures: python bench.py SIZE RANKS GROUPS PLACES RUNS

SIZE is a name of SIZES; RANKS are processes with gloo; GROUPS are some of save,full,load,conversions, and plugin, which
needs our wheel;
PLACES are NAME=DIRECTORY. Prints a JSON list of cases under the names of the bench. A time is rank 0's, from barrier
to barrier; each is the median of RUNS.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

warnings.filterwarnings("ignore")

# layers, width, vocabulary
SIZES = {"16m": (2, 192, 2000), "256m": (6, 512, 3400), "2g": (12, 1024, 13600)}
POSITIONS = 64
RESHARDS = [(4, 2), (1, 4), (4, 1), (3, 5)]


class Block(nn.Module):
    """The parameters of a block of GPT-2; nothing is computed."""

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class Gpt(nn.Module):
    def __init__(self, size):
        super().__init__()
        layers, width, vocabulary = SIZES[size]
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(POSITIONS, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)


def adamw(model):
    """An optimizer that has done a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def fsdp2(size):
    from torch.distributed.fsdp import fully_shard

    model = Gpt(size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(size):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = Gpt(size)
    for index, block in enumerate(model.h):
        model.h[index] = FSDP(block, device_id=torch.device("cpu"), use_orig_params=True)
    return FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)


def times(runs, run, before=lambda: None):
    found = []
    for _ in range(runs):
        before()
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def remove(path):
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def save_cases(size, places, runs):
    model = fsdp2(size)
    optimizer = adamw(model)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    for place, directory in places.items():
        path = os.path.join(directory, "saved")
        yield "save", place, times(runs, lambda: dcp.save(state, checkpoint_id=path), lambda: remove(path))
        remove(path)


def full_cases(size, places, runs):
    from torch.distributed.fsdp import (
        FullyShardedDataParallel as FSDP,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    if dist.get_world_size() == 1:
        # Nothing is gathered then: torch hands out the live tensors themselves.
        return
    place = next(iter(places))
    model = fsdp2(size)
    optimizer = adamw(model)
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    load = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    yield "full gather to rank 0", place, times(runs, lambda: get_state_dict(model, optimizer, options=gather))
    whole, states = get_state_dict(model, optimizer, options=gather)

    def broadcast():
        set_model_state_dict(model, dict(whole), options=load)
        set_optimizer_state_dict(model, optimizer, dict(states), options=load)

    yield "broadcast from rank 0", place, times(runs, broadcast)
    del model, optimizer, whole, states

    model = fsdp1(size)
    optimizer = adamw(model)
    kind = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())
    with FSDP.state_dict_type(model, *kind):
        yield "optim_state_dict", place, times(runs, lambda: FSDP.optim_state_dict(model, optimizer))
        state = FSDP.optim_state_dict(model, optimizer)
        to_load = lambda: FSDP.optim_state_dict_to_load(model, optimizer, state)
        yield "optim_state_dict_to_load", place, times(runs, to_load)


def saved_at(directory, ranks):
    return os.path.join(directory, f"of-{ranks}")


def write_for_load(size, places, runs):
    model = fsdp2(size)
    state = dict(zip(("model", "optim"), get_state_dict(model, adamw(model))))
    for directory in places.values():
        dcp.save(state, checkpoint_id=saved_at(directory, dist.get_world_size()))
    return ()


def load_cases(size, places, runs):
    ranks = dist.get_world_size()
    model = fsdp2(size)
    state = dict(zip(("model", "optim"), get_state_dict(model, adamw(model))))
    for place, directory in places.items():
        for saved in sorted({ranks, *(saved for saved, to in RESHARDS if to == ranks)}):
            path = saved_at(directory, saved)
            if not os.path.isdir(path):
                continue
            name = "load" if saved == ranks else f"load, saved on {saved}"
            yield name, place, times(runs, lambda: dcp.load(state, checkpoint_id=path))


def in_turns(runs, first, second, before=lambda: None):
    """The medians of two that are run by turns. Each goes first every other time: the system may just have got memory back."""
    found = ([], [])
    for turn in range(runs):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append(times(1, (first, second)[which], before))
    return [statistics.median(each) for each in found]


def plugin_cases(size, places, runs):
    """torch.distributed.checkpoint with our storage, and with its own."""
    from fsdp_checkpoint.torch import StorageReader, StorageWriter

    model = fsdp2(size)
    state = dict(zip(("model", "optim"), get_state_dict(model, adamw(model))))
    for place, directory in places.items():
        path = os.path.join(directory, "saved")
        save = lambda: dcp.save(state, storage_writer=StorageWriter(path))
        load = lambda: dcp.load(state, storage_reader=StorageReader(path))
        plain_save = lambda: dcp.save(state, checkpoint_id=path)
        plain_load = lambda: dcp.load(state, checkpoint_id=path)
        for name, pair, before in [
            ("save", (save, plain_save), lambda: remove(path)),
            ("load", (load, plain_load), lambda: None),
        ]:
            if name == "load":
                # Both read what the plug-in wrote, with its hashes.
                remove(path)
                save()
            ours, plain = in_turns(runs, *pair, before)
            yield f"{name} with the plug-in", place, ours
            yield name, place, plain
        remove(path)


GROUPS = {
    "save": save_cases,
    "full": full_cases,
    "write": write_for_load,
    "load": load_cases,
    "plugin": plugin_cases,
}


def rank_main(rank, ranks, rendezvous, size, groups, places, runs, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    found = []
    for group in groups:
        for name, place, seconds in GROUPS[group](size, places, runs):
            found.append({"name": name, "size": size, "ranks": ranks, "place": place, "seconds": seconds})
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def on_ranks(ranks, *arguments):
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, os.path.join(directory, "store"), *arguments, queue)
        running = mp.start_processes(rank_main, arguments, nprocs=ranks, join=False, start_method="spawn")
        found = queue.get()
        while not running.join():
            pass
    return found


def conversion_cases(size, places, runs):
    """Each in a process of its own, as a user runs it, start included: ours takes milliseconds to start."""
    import subprocess

    place, directory = next(iter(places.items()))
    on_ranks(4, size, ["write"], {place: directory}, runs)
    path, target = saved_at(directory, 4), os.path.join(directory, "converted.pt")
    code = f"from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f({path!r}, {target!r})"
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
        found.append(time.perf_counter() - start)
        os.unlink(target)
    yield "DCP to safetensors", place, statistics.median(found)


def main():
    size, ranks, groups, places, runs = sys.argv[1:]
    ranks, groups, runs = int(ranks), groups.split(","), int(runs)
    roots = dict(place.split("=", 1) for place in places.split(","))
    places = {name: tempfile.mkdtemp(prefix="torch-bench-", dir=root) for name, root in roots.items()}
    try:
        found = []
        if "conversions" in groups:
            groups.remove("conversions")
            for name, place, seconds in conversion_cases(size, places, runs):
                found.append({"name": name, "size": size, "ranks": 1, "place": place, "seconds": seconds})
        if "load" in groups:
            for saved in {ranks, *(saved for saved, to in RESHARDS if to == ranks)}:
                on_ranks(saved, size, ["write"], places, runs)
        if groups:
            found += on_ranks(ranks, size, groups, places, runs)
        print(json.dumps(found))
    finally:
        for directory in places.values():
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
