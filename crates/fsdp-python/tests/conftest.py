"""Fixtures of the tests: checkpoints that PyTorch wrote, from the folder of the whole project."""

from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures"


@pytest.fixture
def dcp_checkpoint() -> Path:
    """A DCP directory that two ranks of PyTorch's FSDP2 saved."""
    return FIXTURES / "fsdp2_adamw_ws2" / "dcp"


@pytest.fixture
def bf16_checkpoint() -> Path:
    """The same in bfloat16."""
    return FIXTURES / "fsdp2_bf16_adamw_ws2" / "dcp"
