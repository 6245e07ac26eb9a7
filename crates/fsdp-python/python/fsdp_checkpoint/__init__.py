"""Inspect, verify, compare, convert, reshard and load sharded checkpoints, without running a pickle.

A checkpoint is a directory of ``torch.distributed.checkpoint`` (DCP), a safetensors file or directory, a file of
``torch.save``, or of another supported format, which is recognized by its content. If object stores are built in, a path
may also be an ``s3://``, ``gs://`` or ``az://`` URL.

    >>> import fsdp_checkpoint as fc
    >>> fc.inspect("step-20")["bytes"]
    >>> fc.verify("step-20")
    >>> fc.convert("step-20", "model.safetensors", to="safetensors", include=["model.*"], rename={"model.": ""})
    >>> state = fc.load("step-20", framework="torch")

``inspect``, ``verify``, ``diff``, ``digest``, ``convert`` and ``reshard`` return the JSON object that the command ``fsdp``
of the same name writes with ``--json``. Errors are subclasses of :class:`CheckpointError`.

``fsdp_checkpoint.torch`` has a ``StorageWriter`` and a ``StorageReader`` for ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from . import _native
from ._load import Framework, load
from .errors import (
    AfterCommitError,
    CheckpointError,
    CorruptError,
    DifferenceError,
    IncompleteError,
    NoSpaceError,
    OpaqueError,
    StorageError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)

__all__ = [
    "AfterCommitError",
    "CheckpointError",
    "CorruptError",
    "DifferenceError",
    "Framework",
    "IncompleteError",
    "NoSpaceError",
    "OpaqueError",
    "StorageError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
    "convert",
    "diff",
    "digest",
    "inspect",
    "load",
    "reshard",
    "verify",
]

Place = str | os.PathLike[str]
"""A path, or the URL of an object store."""

Report = dict[str, Any]
"""A JSON object, as the command writes it with ``--json``."""


def inspect(path: Place) -> Report:
    """Return the contents of a checkpoint: its format, step, tensors with dtypes, shapes and boxes, and values.

    Only metadata is read. ``report["tensors"]`` has for each tensor its ``name``, ``dtype``, ``shape``, ``bytes`` and
    ``boxes``, and for each box its ``offsets``, ``sizes``, ``rank`` and ``file``.

    Raises:
        IncompleteError: There is no committed checkpoint.
        CorruptError: Its metadata is damaged.
    """
    return _report(["inspect"], [path])


def verify(
    path: Place,
    level: Literal["structure", "sizes", "hashes", "deep"] = "hashes",
    *,
    threads: int | None = None,
) -> Report:
    """Check a checkpoint without loading it, and return a report.

    Damage does not raise an exception: ``report["ok"]`` is ``False`` then, and ``report["problems"]`` lists what is
    wrong, with the ``file`` and ``offset`` of each problem. NaN and infinities, which ``level="deep"`` counts, do not count as
    problems.

    Args:
        path: A checkpoint of any format.
        level: How much to check. Each level includes those before it.
        threads: The number of threads that read and check; by default one for each core.

    Raises:
        IncompleteError: There is no committed checkpoint.
        UnsafeError: The checkpoint names files outside of itself.
    """
    return _report(["verify", "--level", level, *_option("--threads", threads)], [path], finding="ok")


def diff(first: Place, second: Place, *, tolerance: float = 0.0, threads: int | None = None) -> Report:
    """Compare two checkpoints of any formats, tensor by tensor.

    ``report["equal"]`` is ``True`` if they have the same contents; otherwise ``report["differences"]`` lists the differences by
    name and kind.

    Args:
        first: A checkpoint of any format.
        second: Another one, of any format.
        tolerance: The largest absolute difference at which two numbers count as equal. With 0 they must be equal bit for bit.
        threads: The number of threads that read and compare; by default one for each core.
    """
    options = ["diff", "--tolerance", repr(float(tolerance)), *_option("--threads", threads)]
    return _report(options, [first, second], finding="equal")


def digest(path: Place, *, threads: int | None = None) -> Report:
    """Return the digest of a checkpoint, which is the same for the same state in any format and layout."""
    return _report(["digest", *_option("--threads", threads)], [path])


def reshard(
    source: Place,
    destination: Place,
    world_size: int,
    *,
    overwrite: bool = False,
    threads: int | None = None,
) -> Report:
    """Write a checkpoint as a DCP directory for another number of ranks, in bounded memory.

    The destination is committed as a whole, or not at all. Ctrl-C leaves nothing behind.
    """
    options = ["reshard", "--world-size", str(world_size), *_flag("--overwrite", overwrite)]
    return _report([*options, *_option("--threads", threads)], [source, destination])


def convert(
    source: Place,
    destination: Place,
    to: Literal["dcp", "safetensors", "hf", "hf-sharded", "torch"],
    *,
    world_size: int | None = None,
    max_shard_size: str | int | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    prefix: str | None = None,
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None,
    cast_optimizer: bool = False,
    drop_opaque: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
) -> Report:
    """Write a checkpoint in another format, in bounded memory, and return a report.

    The destination is committed as a whole, or not at all. Ctrl-C leaves nothing behind.

    Args:
        source: A checkpoint of any format.
        destination: The path to write to. It must not exist, unless ``overwrite`` is set.
        to: The format to write.
        world_size: The number of ranks of the destination, for ``dcp`` and ``hf-sharded``.
        max_shard_size: The largest size of a file, for ``hf``: a text such as ``"2GiB"``, or a number of bytes.
        include: A glob, or several. Only keys that match one of them are written.
        exclude: A glob, or several. Keys that match one of them are not written.
        rename: Prefixes of keys and their replacements. Only the first prefix that matches a key is replaced.
        prefix: Text to put before all keys, after ``rename``.
        dtype: The dtype to which floating-point tensors are cast, except optimizer state.
        cast_optimizer: Cast optimizer state too.
        drop_opaque: Leave out opaque values (objects that only running code could build) if the format cannot hold them.
        overwrite: Replace the checkpoint at the destination once everything is written.
        dry_run: Write nothing; only return what would be written.
        threads: The number of threads that read, hash and write; by default one for each core.

    Raises:
        UsageError: The request is invalid. Nothing was written.
        OpaqueError: Values would be left out, and ``drop_opaque`` is not set.
    """
    options = ["convert", "--to", to, *_option("--world-size", world_size), *_option("--prefix", prefix)]
    options += _option("--max-shard-size", max_shard_size)
    options += [*_globs("--include", include), *_globs("--exclude", exclude)]
    options += [option for old, new in (rename or {}).items() for option in _option("--rename", f"{old}={new}")]
    options += [*_option("--dtype", dtype), *_option("--threads", threads)]
    flags = {
        "--cast-optimizer": cast_optimizer,
        "--drop-opaque": drop_opaque,
        "--overwrite": overwrite,
        "--dry-run": dry_run,
    }
    options += [option for name, wanted in flags.items() for option in _flag(name, wanted)]
    return _report(options, [source, destination])


def _option(name: str, value: object) -> list[str]:
    """Return an option of the command line, in one piece, so that a value may begin with a dash."""
    return [] if value is None else [f"{name}={value}"]


def _globs(name: str, globs: str | Iterable[str]) -> list[str]:
    """Return an option for each glob. A string is one glob."""
    return [option for glob in ([globs] if isinstance(globs, str) else globs) for option in _option(name, glob)]


def _flag(name: str, wanted: bool) -> list[str]:
    return [name] if wanted else []


def _report(options: list[str], places: list[Place], finding: str | None = None) -> Report:
    """Run a command on checkpoints, and return its JSON.

    ``finding`` is the field that is false where the command has found what it looks for, and ends with an error.
    """
    output, error = _native.report([*options, "--json", "--", *(os.fspath(place) for place in places)])
    report: Report | None = json.loads(output) if output else None
    is_finding = report is not None and finding is not None and not report[finding]
    if error is not None and not is_finding:
        raise error
    if report is None:
        raise CheckpointError(f"`fsdp {options[0]}` returned nothing")
    return report
