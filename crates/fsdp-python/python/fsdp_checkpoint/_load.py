"""Loading whole tensors, to NumPy or torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from . import _native
from ._place import Place
from .errors import DifferenceError, UnsafeError, UnsupportedError, UsageError, exception_of

# NumPy and torch are imported where they are used: the command needs neither, and is there at once without them.
if TYPE_CHECKING:
    import numpy as np
    import torch

Framework = Literal["numpy", "torch"]

_NUMPY_NAMES = {"bool": "bool_"}
"""dtypes that have another name in NumPy than in torch."""

_ML_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"})
"""dtypes that the package ``ml_dtypes`` adds to NumPy."""

_UNKNOWN_TO_NUMPY = frozenset({"complex32", "float4_e2m1fn_x2", "qint8", "quint8", "qint32"})


def load(
    path: Place,
    keys: str | Iterable[str] | None = None,
    *,
    framework: Framework = "numpy",
    skip_opaque: bool = False,
) -> dict[str, Any]:
    """Return a dict from flat keys (``model.layers.0.weight``) to the tensors and values of a checkpoint of any format.

    The tensors are whole, whatever number of ranks saved them, and on the CPU. Several threads read them straight into
    their memory and check them against the checkpoint's hashes, if it has them. No pickle is executed.

    Args:
        path: A checkpoint of any format.
        keys: The keys to load, or globs such as ``model.*``: one, or several; by default all.
        framework: ``"numpy"`` for arrays, ``"torch"`` for tensors. NumPy has no bfloat16 and no 8-bit floats by itself: such
            tensors need the package ``ml_dtypes``.
        skip_opaque: Leave out objects that only running code could build, with a warning that names them.

    Raises:
        DifferenceError: The checkpoint has no such key, or none that a glob matches.
        UnsafeError: A value is an object that only running code could build. Leave it out of ``keys``, or set ``skip_opaque``.
        UsageError: NumPy has no such dtype, or a glob is none.
    """
    make = _maker(framework)
    checkpoint = _native.Checkpoint(os.fsdecode(path))
    tensors = {name: (dtype, shape) for name, dtype, shape in checkpoint.tensors()}
    values = set(checkpoint.values())
    if keys is None:
        wanted = [*tensors, *sorted(values)]
    else:
        wanted = _selected(checkpoint, [keys] if isinstance(keys, str) else keys, {*tensors, *values})
    # A damaged checkpoint is refused before memory is allocated for its tensors, and so is one whose values are refused.
    checkpoint.check(None if keys is None else set(wanted))
    read_values = _read_values(checkpoint, [name for name in wanted if name in values], framework, skip_opaque)
    loaded: dict[str, Any] = {}
    reads = []
    for name in wanted:
        if name in tensors:
            dtype, shape = tensors[name]
            loaded[name], buffer = make(name, dtype, shape)
            reads.append((name, [0] * len(shape), shape, buffer))
        elif name in read_values:
            loaded[name] = read_values[name]
    checkpoint.read(reads)
    return loaded


def _selected(checkpoint: _native.Checkpoint, keys: Iterable[str], known: set[str]) -> list[str]:
    """Return the keys that are asked for, each once: those that are named, and those that a glob matches."""
    selected: dict[str, None] = {}
    for key in keys:
        # A key may itself have the characters of a glob.
        found = [key] if key in known else checkpoint.matching(key)
        if not found:
            raise DifferenceError(f"missing key in checkpoint: `{key}`")
        selected |= dict.fromkeys(found)
    return [*selected]


def _read_values(
    checkpoint: _native.Checkpoint, names: Iterable[str], framework: Framework, skip_opaque: bool
) -> dict[str, Any]:
    """Return the values of these keys, without those that are opaque and may be skipped."""
    found: dict[str, Any] = {}
    skipped = []
    for name in names:
        try:
            found[name] = _read_value(checkpoint, name, framework)
        except UnsafeError as error:
            if not skip_opaque:
                raise opaque_error(name, error, "leave it out of `keys`, or set `skip_opaque=True`") from error
            skipped.append(name)
    if skipped:
        listed = listing([f"`{name}`" for name in skipped])
        warnings.warn(f"left out {len(skipped)} values that only running code could build: {listed}", stacklevel=3)
    return found


def _read_value(checkpoint: _native.Checkpoint, name: str, framework: Framework) -> Any:
    """Return a value, with the tensors and the objects of types that are in it."""
    make = _maker(framework)

    def make_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        return _of_bytes(make, name, dtype, shape, data)

    return checkpoint.value(name, make_tensor, _typed_maker(framework))


def opaque_error(name: str, error: UnsafeError, advice: str) -> UnsafeError:
    """Return the error of a value that is refused, with its whole key and what can be done."""
    refused = exception_of(error.exit_code, f"`{name}` is refused: {error}; {advice}", error.hint)
    assert isinstance(refused, UnsafeError), "it has the exit code of one"
    return refused


_LISTED = 4
"""The most values that a warning names."""


def listing(items: list[str]) -> str:
    """Return the first items of a list, and how many more there are."""
    listed = ", ".join(items[:_LISTED])
    return f"{listed} and {len(items) - _LISTED} more" if len(items) > _LISTED else listed


Maker = Callable[[str, str, tuple[int, ...]], tuple[Any, "np.ndarray[Any, Any]"]]
"""A function that makes an uninitialized tensor, and returns it and its memory as bytes."""


def _maker(framework: str) -> Maker:
    if framework == "numpy":
        return _empty_array
    if framework == "torch":
        return _empty_tensor
    raise UsageError(f"there is no framework `{framework}`: it is `numpy` or `torch`")


def _empty_array(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[Any, np.ndarray[Any, Any]]:
    import numpy as np

    array = np.empty(shape, numpy_dtype(name, dtype))
    return array, array.reshape(-1).view(np.uint8)


def numpy_dtype(name: str, dtype: str) -> np.dtype[Any]:
    """Return NumPy's dtype for the tensor ``name`` of torch's dtype ``dtype``."""
    import numpy as np

    if dtype in _ML_DTYPES:
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            message = f"NumPy has no dtype for `{name}` ({dtype}): install `ml_dtypes`, or load it with framework='torch'"
            raise UsageError(message) from None
        return np.dtype(getattr(ml_dtypes, dtype))
    if dtype in _UNKNOWN_TO_NUMPY:
        raise UsageError(f"NumPy has no dtype for `{name}` ({dtype})")
    return np.dtype(getattr(np, _NUMPY_NAMES.get(dtype, dtype)))


def _empty_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[Any, np.ndarray[Any, Any]]:
    import torch

    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or dtype.startswith(("qint", "quint")):
        raise UsageError(f"torch cannot make a tensor of the dtype of `{name}` ({dtype}) from its elements")
    # The memory is allocated as bytes, which NumPy can view whatever the dtype, and then viewed as the dtype.
    memory = torch.empty(prod(shape) * found.itemsize, dtype=torch.uint8, device="cpu")
    return memory.view(found).reshape(shape), memory.numpy()


def _of_bytes(make: Maker, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    """Return a tensor that is part of the value ``name``, such as one inside a tuple, from its bytes."""
    import numpy as np

    tensor, memory = make(name, dtype, shape)
    memory[:] = np.frombuffer(data, np.uint8)
    return tensor


_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})
"""Types of ``pathlib``. Paths of another system become pure paths, since only those can be made here."""


def _typed_maker(framework: str) -> Callable[[str, Any], Any]:
    """Return the function that makes an object from the name of its type and the value that describes it."""
    return _typed_for_torch if framework == "torch" else _typed


def _typed(of: str, described: Any) -> Any:
    """Make an object of a builtin type, a path, or one of NumPy's. Those of torch's types stay the text or tuple that describes them."""
    if of.startswith("numpy."):
        return _numpy_object(of, described)
    if of == "frozenset":
        return frozenset(described)
    if of == "bytearray":
        return bytearray(described)
    module, _, name = of.rpartition(".")
    if module == "pathlib" and name in _PATHS:
        import pathlib

        try:
            return getattr(pathlib, name)(described)
        except NotImplementedError:
            return getattr(pathlib, f"Pure{name}")(described)
    return described


def _numpy_object(of: str, described: Any) -> Any:
    """Make an array, a scalar or a dtype of NumPy. The first two are described by an array or a tensor, with its dtype."""
    import numpy as np

    if of == "numpy.dtype":
        return np.dtype(described)
    array = described if isinstance(described, np.ndarray) else described.numpy()
    return array[()] if of == "numpy.generic" else array


def _typed_for_torch(of: str, described: Any) -> Any:
    import torch

    if of in ("torch.dtype", "torch.qscheme"):
        # The text comes from a file, and must not name anything else of torch.
        made = getattr(torch, described.removeprefix("torch."), None)
        if not isinstance(made, (torch.dtype, torch.qscheme)):
            raise UnsupportedError(f"this torch has no {of} `{described}`")
        return made
    if of == "torch.device":
        try:
            return torch.device(described)
        except RuntimeError as error:
            raise UnsupportedError(f"this torch has no device `{described}`") from error
    if of == "torch.Size":
        return torch.Size(described)
    return _typed(of, described)


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a contiguous tensor on the CPU as bytes."""
    return flat_bytes(tensor).numpy()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the bytes of a contiguous tensor."""
    import torch

    # A contiguous tensor of one element may have any strides, and `reshape` keeps them.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
