"""Writes features.json: losses of a small model that torch's FSDP trains with each feature, and the keys of its checkpoint.

Run `python3 features.py > features.json` with torch 2.15 and transformers 5.
"""

import json
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, _init_utils, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

STEPS = 8
SIZES = [(6, 8), (8, 8), (8, 6)]

# Features of FSDP1 only: FSDP2 has no such argument, or refuses it on CPUs.
OF_FSDP1 = ["bf16 hook", "fp16 hook", "synchronized", "summoned", "sharded scaler"]
# torch averages no model that FSDP2 shards, and these optimizers refuse its parameters, so these models are replicas.
REPLICATED = ["average", "muon", "adafactor"]
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
    "bf16 hook",
    "fp16 hook",
    "hybrid",
    "synchronized",
    "summoned",
    "ignored",
    "sharded scaler",
    "offload",
    "muon",
    "adafactor",
]


def ranks_of(feature):
    return 4 if feature == "hybrid" else 2


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


def shard(model, feature, rank):
    """Shards a model as a feature says. The module to train is returned."""
    if feature in REPLICATED:
        return model
    if feature in OF_FSDP1:
        options = {}
        if feature == "synchronized":
            options["sync_module_states"] = True
            if rank != 0:
                for parameter in model.parameters():
                    parameter.data.fill_(7.0)
        if feature == "sharded scaler":
            options["mixed_precision"] = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
        policy = ModuleWrapPolicy({torch.nn.Linear})
        cpu = torch.device("cpu")
        model = FSDP1(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=True, **options)
        hooks = {"bf16 hook": default_hooks.bf16_compress_hook, "fp16 hook": default_hooks.fp16_compress_hook}
        if feature in hooks:
            state = default_hooks.LowPrecisionState(process_group=dist.group.WORLD)
            model.register_comm_hook(state, hooks[feature])
        return model
    options = {}
    if feature == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if feature == "no reshard":
        options["reshard_after_forward"] = False
    if feature == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if feature == "hybrid":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options["mesh"] = mesh
    if feature == "ignored":
        options["ignored_params"] = {model.layers[1].weight}
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def save(state):
    """Saves a state, and returns the names in its metadata."""
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    dcp.save(state, checkpoint_id=paths[0])
    keys = sorted(dcp.FileSystemReader(paths[0]).read_metadata().state_dict_metadata)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(paths[0])
    return keys


def train(rank, feature):
    """Returns the losses of this rank, what else the feature tells in each step, and the keys of the checkpoint."""
    model = Model(recomputes=feature == "checkpoint")
    ignored = model.layers[1].weight
    if feature == "frozen":
        ignored.requires_grad_(False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75)) if feature == "average" else None
    model = shard(model, feature, rank)
    parameters = [parameter for parameter in model.parameters() if feature != "ignored" or parameter is not ignored]
    if feature == "muon":
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    elif feature == "adafactor":
        optimizers = [torch.optim.Adafactor(parameters, lr=0.05)]
    else:
        optimizers = [torch.optim.AdamW(parameters, lr=0.01)]
    schedules = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizers[0], 3),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizers[0], 2, STEPS),
        "linear": lambda: get_linear_schedule_with_warmup(optimizers[0], 2, STEPS),
    }
    schedule = schedules[feature]() if feature in schedules else None
    scaler = None
    if feature == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    if feature == "sharded scaler":
        scaler = ShardedGradScaler(device="cpu", init_scale=1024.0, growth_interval=2)
    losses, told = [], []
    for step in range(STEPS):
        if feature == "summoned" and step in (1, 5):
            with FSDP1.summon_full_params(model, writeback=True):
                weight = model.module.layers[1].weight
                told.append(weight.sum().item())
                weight.data.mul_(0.5)
        parts = 2 if feature in ("accumulate", "hybrid") else 1
        sum_of_parts = 0.0
        for part in range(parts):
            if feature == "accumulate":
                model.set_requires_gradient_sync(part + 1 == parts)
            if feature == "hybrid":
                model.set_requires_all_reduce(part + 1 == parts)
            seed = 1000 + step * 16 + rank * 4 + part
            loss = (model(tensor(seed, 4, 6)).float() - tensor(seed + 5000, 4, 6)).square().mean() / parts
            sum_of_parts += loss.item()
            if scaler is None:
                loss.backward()
            else:
                # One rank's gradients overflow in one of the steps.
                overflows = step == 4 and rank == 1
                scaler.scale(loss * float("inf") if overflows else loss).backward()
        if feature in REPLICATED:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks_of(feature)
        if feature in ("clip", "clip by the largest"):
            kind = 2.0 if feature == "clip" else float("inf")
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=kind)
            told.append(norm.full_tensor().item())
        if feature == "ignored":
            told.append(ignored.grad.sum().item())
            ignored.grad = None
        for optimizer in optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
            told.append(scaler.get_scale())
        if schedule is not None:
            schedule.step()
            told.append(schedule.get_last_lr()[0])
        if average is not None:
            average.update_parameters(model)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(sum_of_parts)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizers)}
    if scaler is not None:
        state["scaler"] = scaler.state_dict()
    if average is not None:
        state["average"] = average.state_dict()
        seed = 9000 + rank
        told.append((average.module(tensor(seed, 4, 6)) - tensor(seed + 5000, 4, 6)).square().mean().item())
    return losses, told, save(state)


def run(rank, ranks, port, queue):
    # The hooks of torch want a stream, which CPUs do not have.
    torch.Tensor.record_stream = lambda tensor, stream: None
    # gloo broadcasts the memory of CPUs, but torch looks for GPUs before it does.
    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for feature in FEATURES:
        if ranks_of(feature) == ranks:
            queue.put((feature, rank, *train(rank, feature)))
    dist.destroy_process_group()


def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    found = {}
    for feature in FEATURES:
        unknown = [None] * ranks_of(feature)
        found[feature] = {"losses": unknown.copy(), "told": unknown.copy(), "keys": None}
    processes = []
    for ranks, port in [(2, 29571), (4, 29572)]:
        processes += [context.Process(target=run, args=(rank, ranks, port, queue), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for _ in range(sum(ranks_of(feature) for feature in FEATURES)):
        feature, rank, losses, told, keys = queue.get(timeout=100)
        found[feature]["losses"][rank] = losses
        found[feature]["told"][rank] = told
        found[feature]["keys"] = keys
    for process in processes:
        process.join()
    # A line for each feature.
    lines = [f"{json.dumps(feature)}: {json.dumps(what)}" for feature, what in found.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
