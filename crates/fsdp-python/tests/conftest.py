"""Fixtures of the tests: checkpoints that PyTorch wrote, from the folder of the whole project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bfloat16", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]  # fmt: skip
"""dtypes of torch. Older versions lack the last ones."""


def of_every_dtype(fill: int) -> dict[str, torch.Tensor]:
    """Return a tensor of each dtype of torch, with bytes that begin with this one."""
    import torch

    found = {}
    for name in DTYPES:
        # Each has memory of its own: `torch.save` refuses several dtypes in one memory.
        raw = torch.arange(fill, fill + 48, dtype=torch.uint8)
        if hasattr(torch, name):
            found[name] = (raw % 2 if name == "bool" else raw).view(getattr(torch, name))
    return found


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    import torch

    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name


@pytest.fixture
def dcp_checkpoint() -> Path:
    """A DCP directory that two ranks of PyTorch's FSDP2 saved."""
    return FIXTURES / "fsdp2_adamw_ws2" / "dcp"


@pytest.fixture
def bf16_checkpoint() -> Path:
    """The same in bfloat16."""
    return FIXTURES / "fsdp2_bf16_adamw_ws2" / "dcp"


@pytest.fixture
def keys() -> Path:
    """A directory with a private key, `key.pem`, and its public key, `key.pub.pem`."""
    return ROOT / "crates" / "fsdp-tools" / "tests" / "fixtures" / "signed"
