"""Writes features.json: losses of a small model that torch's FSDP2 trains with each feature, on two ranks.

Run `python3 features.py > features.json` with torch 2.15 and transformers 5.
"""

import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

RANKS = 2
STEPS = 8
SIZES = [(6, 8), (8, 8), (8, 6)]


def numbers(seed, count):
    """Numbers that the test makes again, instead of reading them: a linear congruential generator's upper bits."""
    found = []
    for _ in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        found.append((seed >> 8) / 2**23 - 1)
    return found


def tensor(seed, *shape):
    return torch.tensor(numbers(seed, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)


class Model(torch.nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*sizes) for sizes in SIZES)
        self.recomputes = recomputes
        for index, layer in enumerate(self.layers):
            layer.weight.data = tensor(10 + index, *layer.weight.shape) * 0.5
            layer.bias.data = tensor(20 + index, *layer.bias.shape) * 0.5

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
            x = torch.tanh(x)
        return x


def train(rank, feature):
    """Returns the losses of this rank, and what else the feature tells in each step."""
    model = Model(recomputes=feature == "checkpoint")
    if feature == "frozen":
        model.layers[1].weight.requires_grad_(False)
    options = {}
    if feature == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if feature == "no reshard":
        options["reshard_after_forward"] = False
    # torch averages no model that FSDP2 shards, so that one is not.
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)) if feature == "average" else None
    if average is None:
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedules = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, 3),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, 2, STEPS),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, 2, STEPS),
    }
    schedule = schedules[feature]() if feature in schedules else None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) if feature == "scaler" else None
    losses, told = [], []
    for step in range(STEPS):
        parts = 2 if feature == "accumulate" else 1
        sum_of_parts = 0.0
        for part in range(parts):
            if parts > 1:
                model.set_requires_gradient_sync(part + 1 == parts)
            seed = 1000 + step * 16 + rank * 4 + part
            loss = (model(tensor(seed, 4, 6)).float() - tensor(seed + 5000, 4, 6)).square().mean() / parts
            sum_of_parts += loss.item()
            if scaler is None:
                loss.backward()
            else:
                # One rank's gradients overflow in one of the steps.
                overflows = step == 4 and rank == 1
                scaler.scale(loss * float("inf") if overflows else loss).backward()
        if average is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        if feature in ("clip", "clip by the largest"):
            kind = 2.0 if feature == "clip" else float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
            told.append(norm.full_tensor().item())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            told.append(scaler.get_scale())
        if schedule is not None:
            schedule.step()
            told.append(schedule.get_last_lr()[0])
        if average is not None:
            average.update_parameters(model)
        optimizer.zero_grad()
        losses.append(sum_of_parts)
    if average is not None:
        seed = 9000 + rank
        told.append((average.module(tensor(seed, 4, 6)) - tensor(seed + 5000, 4, 6)).square().mean().item())
    return losses, told


FEATURES = [
    "none",
    "no reshard",
    "accumulate",
    "clip",
    "clip by the largest",
    "frozen",
    "checkpoint",
    "constant",
    "cosine",
    "linear",
    "scaler",
    "average",
    "mixed precision",
]


def run(rank, queue):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29571", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for feature in FEATURES:
        queue.put((feature, rank, *train(rank, feature)))
    dist.destroy_process_group()


def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=run, args=(rank, queue)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = {feature: {"losses": [None] * RANKS, "told": [None] * RANKS} for feature in FEATURES}
    for _ in range(RANKS * len(FEATURES)):
        feature, rank, losses, told = queue.get()
        found[feature]["losses"][rank] = losses
        found[feature]["told"][rank] = told
    for process in ranks:
        process.join()
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
