"""Writes algorithm.json: what torch's optimizers make of given parameters and gradients, bit for bit.

Run `python3 algorithm.py > algorithm.json` with torch 2.15 and schedulefree 1.4.1 on a CPU that has fused multiply-add.

torch built with MKL takes square roots of float32 and float64 from it, and MKL does not round them correctly.
`param` and `state` come from torch's own steps with a correctly rounded square root in that place; `mkl` is
the parameter that torch gives as it is.
"""

import json

import numpy
import schedulefree
import torch

torch.set_num_threads(1)

# One element in each place of this cycle: ordinary ones, small, large, zero and tiny ones.
SCALES = [1.0, 0.5, 2.0**-7, 16.0, 0.0, 1.0, 2.0**-20, 1.0]


def values(seed, dtype):
    """Numbers that the test makes again, instead of reading them: a linear congruential generator's upper bits."""
    # As many as make whole vectors: torch rounds half types otherwise in the rest.
    count = 64 if dtype.itemsize == 2 else 24
    numbers = []
    for i in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        numbers.append(((seed >> 8) / 2**23 - 1) * SCALES[i % len(SCALES)])
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def bits(tensor):
    """The elements' bytes, least significant first, in hexadecimal."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes().hex()


def make(optimizer, params, options):
    package = torch.optim if hasattr(torch.optim, optimizer) else schedulefree
    return getattr(package, optimizer)(params, **options)


def run(optimizer, options, dtype, steps):
    param = torch.nn.Parameter(values(1, dtype))
    optim = make(optimizer, [param], {"foreach": False, **options})
    if optimizer == "AdamWScheduleFree":
        optim.train()
    for step in range(steps):
        param.grad = values(100 + step, dtype)
        optim.step()
    return param, optim.state[param]


def update(optimizer, options, dtype, steps):
    mkl_sqrt, mkl_sqrt_ = torch.Tensor.sqrt, torch.Tensor.sqrt_
    exact = lambda tensor: torch.from_numpy(numpy.sqrt(tensor.numpy()))
    wide = dtype in (torch.float32, torch.float64)
    mkl, _ = run(optimizer, options, dtype, steps)
    if wide:
        torch.Tensor.sqrt = exact
        torch.Tensor.sqrt_ = lambda tensor: tensor.copy_(exact(tensor))
    param, state = run(optimizer, options, dtype, steps)
    torch.Tensor.sqrt, torch.Tensor.sqrt_ = mkl_sqrt, mkl_sqrt_
    step = state.get("step")
    assert step is None or step.item() == steps
    assert not param.isnan().any()
    return {
        "optimizer": optimizer,
        "options": options,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": steps,
        "param": bits(param),
        "state": {name: bits(value) for name, value in state.items() if name != "step"},
        "mkl": bits(mkl) if wide and optimizer != "SGD" else None,
    }


def plain(value):
    """A value of a param group, with its Python type."""
    if isinstance(value, tuple):
        return {"tuple": [plain(item) for item in value]}
    return {type(value).__name__: value}


def group(optimizer, options):
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    optim = make(optimizer, [torch.nn.Parameter(torch.ones(1, 1))], options)
    entries = optim.state_dict()["param_groups"][0]
    del entries["params"]
    return {
        "optimizer": optimizer,
        "options": options,
        "group": [[key, plain(value)] for key, value in entries.items()],
    }


UPDATES = [
    ("SGD", {}, 1),
    ("SGD", {"lr": 0.1, "weight_decay": 0.05, "maximize": True}, 3),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, 1),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, 4),
    ("SGD", {"lr": 0.03, "momentum": 0.8, "dampening": 0.3}, 5),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}, 3),
    ("SGD", {"lr": 0.2, "momentum": 0.7, "dampening": -0.1, "weight_decay": 0.3, "maximize": True}, 4),
    ("Adam", {}, 1),
    ("Adam", {"lr": 0.01}, 5),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}, 4),
    ("Adam", {"lr": 0.05, "betas": [0.4, 0.7], "amsgrad": True}, 5),
    ("Adam", {"lr": 0.05, "betas": [0.5, 0.9], "maximize": True, "eps": 0.01}, 3),
    ("Adam", {"lr": 0.02, "betas": [0.0, 0.0], "amsgrad": True, "weight_decay": 0.3, "maximize": True}, 4),
    ("AdamW", {}, 2),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "betas": [0.8, 0.95]}, 5),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3, "betas": [0.8, 0.6], "amsgrad": True}, 5),
    ("AdamW", {"lr": 0.02, "weight_decay": 0.0, "maximize": True}, 3),
    ("Adagrad", {}, 1),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1}, 5),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "eps": 0.001, "maximize": True}, 4),
    ("AdamWScheduleFree", {}, 2),
    ("AdamWScheduleFree", {"lr": 0.1, "weight_decay": 0.3, "warmup_steps": 3, "r": 1.0}, 5),
    ("AdamWScheduleFree", {"lr": 0.05, "betas": [0.8, 0.95], "weight_lr_power": 0.0}, 4),
]

GROUPS = [
    ("SGD", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "foreach": True, "maximize": True}),
    ("SGD", {"momentum": 0.5, "dampening": 0.25, "differentiable": True}),
    ("Adam", {}),
    ("Adam", {"betas": [0.8, 0.9], "weight_decay": 0.1, "eps": 1e-6, "amsgrad": True, "fused": True}),
    ("AdamW", {}),
    ("AdamW", {"lr": 0.5, "betas": [0.8, 0.9], "maximize": True, "foreach": False, "capturable": True}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.2, "initial_accumulator_value": 0.3, "eps": 0.4}),
    ("Adafactor", {}),
    ("Adafactor", {"lr": 0.1, "eps": [1e-9, 0.01], "d": 2.0, "weight_decay": 0.1, "foreach": False, "maximize": True}),
    ("Muon", {}),
    ("Muon", {"lr": 0.1, "momentum": 0.8, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
    ("AdamWScheduleFree", {}),
    ("AdamWScheduleFree", {"lr": 0.1, "weight_decay": 0.3, "warmup_steps": 3, "r": 1.0, "foreach": False}),
]

updates = []
for optimizer, options, steps in UPDATES:
    for dtype in torch.float32, torch.float64, torch.bfloat16, torch.float16:
        chosen = dict(options)
        if dtype == torch.float16 and optimizer != "SGD":
            chosen.setdefault("eps", 1e-4)
        updates.append(update(optimizer, chosen, dtype, steps))

version = torch.__version__.partition("+")[0]
print("{")
print(f' "torch": "{version}",')
for name, items in ("groups", [group(*item) for item in GROUPS]), ("updates", updates):
    lines = ",\n".join("  " + json.dumps(item) for item in items)
    print(f' "{name}": [\n{lines}\n ]' + ("," if name == "groups" else ""))
print("}")
