"""The other half of a pair with `pytorch.rs`: the same network under FSDP2 of PyTorch, on CPUs.

    torchrun --nproc-per-node 2 examples/pytorch.py --load step-10 --save step-20

It saves with the package fsdp_checkpoint if that is installed, and with torch.distributed.checkpoint's own writer if not.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

try:
    from fsdp_checkpoint.torch import StorageWriter
except ImportError:
    StorageWriter = None

STEPS = 10
ROWS = 12


def batch(step):
    """Return the rows of a step, and what the network is to say of them."""
    x = (torch.arange(ROWS * 8, dtype=torch.float32).reshape(ROWS, 8) * 0.37 + step).sin()
    return x, x[:, :4].sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", help="checkpoint to go on from, of PyTorch or of `pytorch.rs`")
    parser.add_argument("--save", required=True)
    options = parser.parse_args()

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    begin = 0
    if options.load:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=options.load)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        begin = state["step"]

    rows = ROWS // ranks
    for step in range(begin, begin + STEPS):
        x, y = (t[rank * rows : (rank + 1) * rows] for t in batch(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": begin + STEPS}
    if StorageWriter is None:
        dcp.save(state, checkpoint_id=options.save)
    else:
        dcp.save(state, storage_writer=StorageWriter(options.save))
    loss = loss.detach()
    dist.all_reduce(loss)
    if rank == 0:
        print(f"step {begin + STEPS}: loss {loss.item() / ranks:.6f}, saved to {options.save}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
