"""Writes matrices.json: what torch's Muon and Adafactor make of given parameters and gradients.

Run `python3 matrices.py > matrices.json` with torch 2.15.
"""

import json
import math

import torch

torch.set_num_threads(1)


def values(seed, shape):
    """Numbers that the test makes again, instead of reading them: a linear congruential generator's upper bits."""
    numbers = []
    for _ in range(math.prod(shape)):
        seed = (seed * 1664525 + 1013904223) % 2**32
        numbers.append((seed >> 8) / 2**23 - 1)
    return torch.tensor(numbers, dtype=torch.float64).to(torch.float32).reshape(shape)


CASES = [
    ("Muon", [6, 4], {"lr": 0.02}),
    ("Muon", [4, 7], {"lr": 0.1, "momentum": 0.8, "nesterov": False, "weight_decay": 0.0}),
    ("Muon", [5, 5], {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw"}),
    (
        "Muon",
        [8, 3],
        {"lr": 0.05, "adjust_lr_fn": "spectral_unclamped", "ns_steps": 3, "ns_coefficients": [3.0, -3.2, 1.2]},
    ),
    ("Adafactor", [6, 4], {}),
    ("Adafactor", [7], {"lr": 0.1, "weight_decay": 0.1}),
    ("Adafactor", [2, 3, 5], {"lr": 0.3, "d": 2.0, "eps": [0.001, 0.01], "maximize": True}),
    ("Adafactor", [4, 3], {"lr": 0.5, "beta2_decay": -0.3, "weight_decay": 0.05}),
]
STEPS = 3

cases = []
for optimizer, shape, options in CASES:
    param = torch.nn.Parameter(values(1, shape))
    chosen = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    optim = getattr(torch.optim, optimizer)([param], **chosen)
    for step in range(STEPS):
        param.grad = values(100 + step, shape)
        optim.step()
    state = {key: [list(value.shape), value.flatten().tolist()] for key, value in optim.state[param].items()}
    lists = {"param": param.detach().flatten().tolist(), "state": state}
    cases.append({"optimizer": optimizer, "shape": shape, "options": options, "steps": STEPS, **lists})
lines = ",\n".join("  " + json.dumps(case) for case in cases)
print('{\n "torch": "' + torch.__version__.partition("+")[0] + '",\n "cases": [\n' + lines + "\n ]\n}")
