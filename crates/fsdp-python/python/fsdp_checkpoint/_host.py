"""Memory of the host for tensors on GPUs, and copies of whole state dicts in it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["copy_to_host", "has_plain_memory", "host_memory"]


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
    """Return ``True`` if the elements of a tensor are in memory, one like the other, and not in other tensors."""
    is_plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta)
    return is_plain and not is_traceable_wrapper_subclass(tensor)


def copy_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict in the host's memory, in which later changes of the state do not show.

    Tensors that :func:`has_plain_memory` is not true of are not copied.
    """
    copies = _Copies()
    copied: dict[str, Any] = copies.copy_of(state)
    copies.wait()
    return copied


class _Copies:
    """Copies of values, which go on until :meth:`wait` returns."""

    def __init__(self) -> None:
        self._of_tensors: dict[int, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy_of(self, value: Any) -> Any:
        """Return a copy of a value. Dicts, lists and tuples of any class become plain ones, as in torch's own copies."""
        if isinstance(value, torch.Tensor):
            # A tensor with two names is copied once.
            if id(value) not in self._of_tensors:
                self._of_tensors[id(value)] = self._copy_of_tensor(value.detach())
            return self._of_tensors[id(value)]
        if isinstance(value, dict):
            return {key: self.copy_of(within) for key, within in value.items()}
        if isinstance(value, (list, tuple)):
            copied = [self.copy_of(within) for within in value]
            return tuple(copied) if isinstance(value, tuple) else copied
        return copy.deepcopy(value)

    def _copy_of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            # Its part is replaced, so its own memory is never touched.
            copied = torch.empty_like(tensor, device="cpu")
            copied._local_tensor = self._copy_of_tensor(tensor.to_local())
            return copied
        if isinstance(tensor, ShardedTensor):
            return tensor.to("cpu", copy=True)
        if not has_plain_memory(tensor):
            return tensor
        copied = host_memory(tuple(tensor.size()), tensor.dtype, tensor.device)
        copied.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        return copied

    def wait(self) -> None:
        """Wait until the GPUs have copied everything."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
