"""Writes pad.json: what torch.nn.functional.pad makes of many paddings in all modes.

python pad.py > pad.json
"""

import itertools
import json
import random

import torch
import torch.nn.functional as F

SHAPES = {1: [5], 2: [3, 4], 3: [2, 3, 4], 4: [2, 2, 3, 3]}


def torch_pad(tensor, padding, mode):
    if mode == "constant":
        return F.pad(tensor, padding, mode, 7)
    if mode == "circular":
        for size, before, after in zip(reversed(tensor.shape), padding[::2], padding[1::2]):
            # More than negative padding leaves: torch fails, or returns memory that it never wrote.
            if max(before, after) > max(0, size + min(before, 0) + min(after, 0)):
                raise RuntimeError("too little to wrap around")
    # torch pads one dimension less than the tensor has, or two less, and never the first.
    pairs = len(padding) // 2
    padding = padding + [0, 0] * max(0, tensor.dim() - pairs - 2)
    extra = max(0, len(padding) // 2 + 1 - tensor.dim())
    for _ in range(extra):
        tensor = tensor.unsqueeze(0)
    padded = F.pad(tensor, padding, mode)
    for _ in range(extra):
        padded = padded.squeeze(0)
    return padded


def case(dtype, shape, padding, mode):
    numel = torch.Size(shape).numel()
    # Fractions for floats; negative values too.
    tensor = (torch.arange(numel, dtype=torch.float64) - 3).mul(1.0 if dtype == "int64" else 0.5)
    tensor = tensor.to(getattr(torch, dtype)).reshape(shape)
    expected = {"dtype": dtype, "shape": shape, "padding": padding, "mode": mode}
    try:
        padded = torch_pad(tensor, padding, mode)
        expected |= {"padded_shape": list(padded.shape), "padded": padded.flatten().tolist()}
    except RuntimeError:
        expected["refused"] = True
    return expected


def main():
    torch.manual_seed(0)
    random.seed(0)
    cases = []
    for dtype, mode in itertools.product(["float32", "int64"], ["constant", "reflect", "replicate", "circular"]):
        # Every padding of five elements by -6 to 6.
        if dtype == "int64":
            cases += [case(dtype, [5], [a, b], mode) for a in range(-6, 7) for b in range(-6, 7)]
        for dims, shape in SHAPES.items():
            for pairs in range(1, min(dims, 4 if mode == "constant" else 3) + 1):
                for largest in (1, 2, 3):
                    cases.append(case(dtype, shape, [random.randint(-1, largest) for _ in range(2 * pairs)], mode))
    print("[")
    print(",\n".join(json.dumps(one, separators=(",", ":")) for one in cases))
    print("]")


main()
