"""Memory of the host for tensors on GPUs, and copies of whole state dicts in it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["copy_to_host", "has_plain_memory", "host_memory", "settled"]


def host_memory(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of the host for copies from a device or to it: pinned for a GPU, if the host has some to pin.

    torch keeps pinned memory that is not used any more, and gives it out again.
    """
    if device.type == "cuda":
        try:
            return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:
            # Other memory does it too, more slowly.
            pass
    return torch.empty(size, dtype=dtype, device="cpu")


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return ``False`` for tensors that are sparse, quantized or on the meta device, or that consist of other tensors."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return is_plain and not is_traceable_wrapper_subclass(tensor)


def settled(value: Any) -> Any:
    """Return the tensor that a collective is computing once it is there, and anything else as it is."""
    return value.wait() if isinstance(value, AsyncCollectiveTensor) else value


def copy_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict in the host's memory, in which later changes of the state do not show.

    Tensors that :func:`has_plain_memory` is not true of are not copied.
    """
    copies = _Copies()
    copies.add_all(state)
    copies.wait()
    return copy.deepcopy(state, copies.memo)


class _Copies:
    """Copies of tensors, which go on until :meth:`wait` returns."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        """The copies by the ids of their tensors, as ``copy.deepcopy`` takes them."""
        self._tensors: list[torch.Tensor] = []
        """The tensors, kept so that no other object gets the id of one."""
        self._devices: set[torch.device] = set()

    def add_all(self, value: Any) -> None:
        """Copy all tensors in a nest of dicts, lists and tuples; one with two names once."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.memo:
                self._tensors.append(value)
                self.memo[id(value)] = self._copy_of(value.detach())
        elif isinstance(value, dict):
            for within in value.values():
                self.add_all(within)
        elif isinstance(value, (list, tuple)):
            for within in value:
                self.add_all(within)

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = settled(tensor)
        if isinstance(tensor, DTensor):
            # Its part is replaced, so its own memory is never touched.
            copied = torch.empty_like(tensor, device="cpu")
            copied._local_tensor = self._copy_of(tensor.to_local())
            return copied
        if isinstance(tensor, ShardedTensor):
            return tensor.to("cpu", copy=True)
        if not has_plain_memory(tensor):
            return tensor
        # In a copy that does not wait, torch would do this on the host before the elements have come.
        tensor = tensor.resolve_conj().resolve_neg()
        copied = host_memory(tuple(tensor.size()), tensor.dtype, tensor.device)
        copied.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return copied

    def wait(self) -> None:
        """Wait until the GPUs have copied everything."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
