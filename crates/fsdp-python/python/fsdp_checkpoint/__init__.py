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
    seal: bool = False,
    signature: Place | None = None,
    public_key: str | os.PathLike[str] | None = None,
    threads: int | None = None,
) -> Report:
    """Check a checkpoint without loading it, and return a report.

    Damage does not raise an exception: ``report["ok"]`` is ``False`` then, and ``report["problems"]`` lists what is
    wrong, with the ``file`` and ``offset`` of each problem. NaN and infinities, which ``level="deep"`` counts, do not count as
    problems.

    Args:
        path: A checkpoint of any format.
        level: How much to check. Each level includes those before it.
        seal: Add hashes to a checkpoint that has none, if no problem is found.
        signature: A signature that must vouch for every file. ``public_key`` is needed with it.
        public_key: The path of the public key of the signature, in PEM.
        threads: The number of threads that read and check; by default one for each core.

    Raises:
        IncompleteError: There is no committed checkpoint.
        StorageError: The checkpoint, or the key, cannot be read.
        UnsupportedError: The checkpoint cannot be checked, such as one of an unknown format.
        UnsafeError: The checkpoint names files outside of itself.
    """
    options = ["verify", "--level", level, *_flag("--seal", seal), *_option("--threads", threads)]
    options += [*_option("--signature", _text(signature)), *_option("--public-key", _text(public_key))]
    return _report(options, [path], finding="ok")


def diff(
    first: Place,
    second: Place,
    *,
    tolerance: float = 0.0,
    full: bool = False,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    map: str | os.PathLike[str] | None = None,
    map_reverse: bool = False,
    set: Mapping[str, int] | None = None,
    threads: int | None = None,
) -> Report:
    """Compare two checkpoints of any formats, tensor by tensor.

    ``report["equal"]`` is ``True`` if they have the same contents; otherwise ``report["differences"]`` lists the differences by
    name and kind.

    Args:
        first: A checkpoint of any format.
        second: Another one, of any format.
        tolerance: The largest absolute difference at which two numbers count as equal. With 0 they must be equal bit for bit.
        full: Read all data, also where both checkpoints have recorded digests.
        include: A glob, or several. Only keys that match one of them are compared.
        exclude: A glob, or several. Keys that match one of them are not compared.
        map: A file of rules, or the name of a built-in map, that changes the keys and shapes of the first checkpoint before they
            are compared.
        map_reverse: Apply the rules of ``map`` from right to left.
        set: Numbers for the names in the map, such as ``{"heads": 32}``.
        threads: The number of threads that read and compare; by default one for each core.
    """
    options = ["diff", "--tolerance", repr(float(tolerance)), *_flag("--full", full), *_option("--threads", threads)]
    options += [*_globs("--include", include), *_globs("--exclude", exclude), *_map(map, map_reverse, set)]
    return _report(options, [first, second], finding="equal")


def digest(path: Place, *, recorded: bool = False, threads: int | None = None) -> Report:
    """Return the digest of a checkpoint, which is the same for the same state in any format and layout.

    With ``recorded``, it is the digest that was recorded when the checkpoint was saved, and no data is read.
    """
    return _report(["digest", *_flag("--recorded", recorded), *_option("--threads", threads)], [path])


def reshard(
    source: Place,
    destination: Place,
    world_size: int,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
) -> Report:
    """Write a checkpoint as a DCP directory for another number of ranks, in bounded memory.

    The destination is committed as a whole, or not at all. Ctrl-C leaves nothing behind. With ``dry_run``, nothing is written.
    """
    options = ["reshard", "--world-size", str(world_size), *_flag("--overwrite", overwrite), *_flag("--dry-run", dry_run)]
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
    map: str | os.PathLike[str] | None = None,
    map_reverse: bool = False,
    set: Mapping[str, int] | None = None,
    tp: int | None = None,
    tp_rule: str | Iterable[str] = (),
    with_: Place | None = None,
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
        map: A file of rules, or the name of a built-in map such as ``"llama-to-hf"``, that changes keys and shapes.
        map_reverse: Apply the rules of ``map`` from right to left.
        set: Numbers for the names in the map or in ``tp_rule``, such as ``{"heads": 32}``. By default they are taken from a
            ``config.json``.
        tp: Write separate files for each of this many tensor-parallel ranks, for ``hf``.
        tp_rule: A rule, or several, for how ``tp`` cuts tensors, such as ``"mixer.in_proj=colwise"``.
        with_: A directory whose configuration and tokenizer are copied along, for ``hf``.
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
    for old, new in (rename or {}).items():
        # In the command's `OLD=NEW` the first `=` ends OLD.
        if "=" in old:
            raise UsageError(f"a prefix to rename cannot contain `=`: `{old}`")
        options += _option("--rename", f"{old}={new}")
    options += [*_option("--dtype", dtype), *_option("--threads", threads), *_map(map, map_reverse, set)]
    options += [*_option("--tp", tp), *_globs("--tp-rule", tp_rule), *_option("--with", _text(with_))]
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


def _text(place: Place | None) -> str | None:
    return None if place is None else os.fspath(place)


def _map(map: str | os.PathLike[str] | None, map_reverse: bool, set: Mapping[str, int] | None) -> list[str]:
    """Return the options that change keys and shapes."""
    numbers = [option for name, number in (set or {}).items() for option in _option("--set", f"{name}={number}")]
    return [*_option("--map", _text(map)), *_flag("--map-reverse", map_reverse), *numbers]


def _globs(name: str, globs: str | Iterable[str]) -> list[str]:
    """Return an option for each glob or rule. A string is a single one."""
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
    if isinstance(error, (IncompleteError, StorageError, UnsafeError, UnsupportedError, UsageError)):
        # A checkpoint that is not there or cannot be read is no finding. One that lacks a file is: its problem names the file.
        problems = (report or {}).get("problems", [])
        is_finding = is_finding and isinstance(error, IncompleteError) and any(problem["file"] for problem in problems)
    if error is not None and not is_finding:
        raise error
    if report is None:
        raise CheckpointError(f"`fsdp {options[0]}` returned nothing")
    return report
