"""What a rank of the tests in `test_ranks.py` does: a process with gloo."""

import gc
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_checkpoint.torch import StorageReader, StorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Failing(dcp.DefaultSavePlanner):
    """A planner that fails in the middle of writing."""

    def resolve_data(self, write_item):
        raise RuntimeError(f"rank {dist.get_rank()} has no data")


def whole(value, rows):
    """Return the tensor that all ranks share."""
    return torch.arange(rows * 64, dtype=torch.float32).reshape(rows, 64) + value


def state(tensor, step, mesh):
    """Return a state dict of tensors that are sharded in several ways."""
    return {
        "sharded": distribute_tensor(tensor, mesh, [Shard(0)]),
        "columns": distribute_tensor(tensor.bfloat16(), mesh, [Shard(1)]),
        "replicated": distribute_tensor(tensor[:2], mesh, [Replicate()]),
        "plain": tensor[0].clone(),
        "step": step,
    }


def run(rank, ranks, store, outcomes, path, verbs, rows=64):
    """Do one thing after the other: `("save", 5)`, `("fail", 6)`, `("load", 5)`; and tell how it ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    # A path may be another on each rank.
    path = os.fspath(path).replace("RANK", str(rank))
    writer = StorageWriter(path)
    for verb, value in verbs:
        tensor = whole(value, rows)
        outcomes.put((rank, verb, "begins"))
        try:
            if verb == "load":
                loaded = state(torch.zeros_like(tensor), 0, mesh)
                dcp.load(loaded, storage_reader=StorageReader(path))
                assert torch.equal(loaded["sharded"].full_tensor(), tensor)
                assert torch.equal(loaded["columns"].full_tensor(), tensor.bfloat16())
                assert torch.equal(loaded["replicated"].to_local(), tensor[:2])
                assert torch.equal(loaded["plain"], tensor[0]) and loaded["step"] == value
            else:
                planner = Failing() if verb == "fail" and rank == ranks - 1 else None
                dcp.save(state(tensor, value, mesh), storage_writer=writer, planner=planner)
        except BaseException as error:
            outcomes.put((rank, verb, repr(getattr(error, "failures", error))))
        else:
            outcomes.put((rank, verb, "done"))
    # Some versions of torch keep the writer in a circle with an error. What a failed save has left goes with the writer.
    del writer
    gc.collect()
    dist.destroy_process_group()
