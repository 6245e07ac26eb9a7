#!/usr/bin/env python3
"""`fsdp convert` and the library torch_checkpointing: each reads what the other wrote.

  rank_files.py FSDP_BINARY FIXTURES WORK_DIRECTORY

Run by `cargo xtask interop`. The library's processes meet through gloo; where it asks for a GPU, it is told of the CPU.
"""
import os
import pathlib
import socket
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, RawSerialization, SafetensorsSerialization, TorchSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torch.utils.serialization.config import load as load_config

warnings.filterwarnings("ignore")

TRAINER = {"step": 7, "loss": [1.5, float("inf")], "nested": {"name": "é", "none": None}}
BLOB = b"\x00\x01raw\xff"


def check(what, holds):
    if not holds:
        sys.exit(f"differs: {what}")


def fsdp(binary, *arguments):
    command = [str(part) for part in (binary, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    check(f"{' '.join(command)}\n{done.stdout}{done.stderr}", done.returncode == 0)


def whole_state():
    torch.manual_seed(3)
    model = {
        "rows.weight": torch.randn(9, 6),
        "columns.weight": torch.randn(4, 10).to(torch.bfloat16),
        "few.bias": torch.randn(1),
        "scalar": torch.tensor(5),
        "mask": torch.tensor([True, False, True]),
    }
    moments = {"state": {0: {"exp_avg": model["rows.weight"] * 2, "step": torch.tensor(3.0)}}}
    return {"model": model, "optimizer": moments | {"param_groups": [{"lr": 0.01, "betas": (0.9, 0.95), "params": [0]}]}}


def cut(state, mesh, empty=False):
    """The same state with its larger tensors as DTensors."""
    if isinstance(state, dict):
        return {key: cut(value, mesh, empty) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    state = torch.zeros_like(state) if empty else state
    if state.dim() == 0 or state.dtype == torch.bool:
        return state
    dimension = 1 if state.dim() > 1 and state.shape[1] == 10 else 0
    placements = [Replicate(), Shard(dimension)] if mesh.ndim == 2 else [Shard(dimension)]
    part = distribute_tensor(state, mesh, placements)
    local = part.to_local().detach().clone().contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=part.shape, stride=part.stride())


def same(found, expected):
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, torch.Tensor):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return found == expected


def manager_of(items, default):
    config = CheckpointManager.Config.with_sync_save()
    config.items, config.default = items, default
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(config)


def layouts():
    """Every layout that the library writes, by name: the items' specifications, and the default one."""
    reshard = DefaultResharder()
    json = ItemSpec(layout=LayoutInfo("rank_{rank}/trainer.json", JsonSerialization()))
    raw = ItemSpec(layout=LayoutInfo("blob_{rank}.bin", RawSerialization()))
    safetensors = LayoutInfo("weights/part-{rank}.safetensors", SafetensorsSerialization())
    torch_file = LayoutInfo("rank_{rank}/model.pt", TorchSerialization())
    return {
        "usual": ({}, ItemSpec(resharder=reshard)),
        "bare": ({}, ItemSpec()),
        "own": ({"model": ItemSpec(layout=torch_file, resharder=reshard), "trainer": json, "blob": raw}, ItemSpec(resharder=reshard)),
        "safetensors": ({"model": ItemSpec(layout=safetensors, resharder=reshard), "trainer": json, "blob": raw}, ItemSpec()),
        "bare-own": ({"model": ItemSpec(layout=torch_file), "trainer": json, "blob": raw}, ItemSpec()),
    }


def in_job(rank, world, port, work, job):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_device = torch.tensor
    torch.tensor = lambda *args, device=None, **options: on_device(*args, **options)
    torch.Tensor.cuda = lambda tensor: tensor
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world // 2, 2) if world > 3 else (world,))
    job(work, mesh)
    dist.barrier()
    dist.destroy_process_group()


def save_all(work, mesh):
    state = cut(whole_state(), mesh)
    for name, (items, default) in layouts().items():
        manager = manager_of(items, default)
        manager.save(str(work / f"{name}-{dist.get_world_size()}"), state | {"trainer": TRAINER, "blob": BLOB})
        manager.close()


def load_all(work, mesh):
    expected = whole_state()
    for directory in sorted(work.glob("written-*")):
        # Non-tensor values of a resharded item stay as they are in the target: that is the library's way.
        state = cut(expected, mesh, empty=True)
        reshard = ItemSpec(resharder=DefaultResharder())
        manager = manager_of({"model": reshard, "optimizer": reshard}, None)
        loaded = manager.load(str(directory), into=state, strict=True)
        for item in ("model", "optimizer"):
            check(f"{item} of {directory} on {dist.get_world_size()} ranks", same(loaded[item], expected[item]))
        manager.close()


def run(world, work, job):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_job, (world, port, work, job), nprocs=world)


def check_places(file):
    """torch may compute where storages are instead of looking it up: both must be the same bytes."""
    load_config.calculate_storage_offsets = True
    computed = torch.load(file, weights_only=True, mmap=True)
    load_config.calculate_storage_offsets = False
    check(f"the places of storages in {file}", same(computed, torch.load(file, weights_only=True)))


def main():
    binary, _, work = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    expected = whole_state()
    for world in (1, 2, 4):
        run(world, work, save_all)
        for name in layouts():
            source, file = work / f"{name}-{world}", work / f"{name}-{world}.pt"
            fsdp(binary, "verify", source, "--level", "deep")
            fsdp(binary, "convert", source, file, "--to", "torch")
            check_places(file)
            found = torch.load(file, weights_only=True)
            check(f"{name} of {world} ranks", same(found, expected | {"trainer": TRAINER, "blob": BLOB}))
        print(f"ok: {len(layouts())} layouts of torch_checkpointing of {world} ranks, read", flush=True)
    for ranks in (1, 3, 4):
        fsdp(binary, "convert", work / "own-4", work / f"written-{ranks}", "--to", "torch-checkpointing", "--world-size", ranks)
    for world in (1, 2, 3, 4):
        run(world, work, load_all)
        print(f"ok: what `--to torch-checkpointing` wrote, loaded by the library on {world} ranks", flush=True)


if __name__ == "__main__":
    main()
