"""Inspect, verify, compare, convert, merge, sign and load sharded checkpoints, without running a pickle.

A checkpoint is a directory of ``torch.distributed.checkpoint`` (DCP), a safetensors file or directory, a file of
``torch.save``, or of another supported format, which is recognized by its content. A path may also be an ``s3://``, ``gs://``
or ``az://`` URL.

    >>> import fsdp_checkpoint as fc
    >>> fc.inspect("step-20")["bytes"]
    >>> fc.verify("step-20")
    >>> fc.convert("step-20", "model.safetensors", to="safetensors", include=["model.*"], rename={"model.": ""})
    >>> state = fc.load("step-20", framework="torch")

All functions but ``load`` are commands of ``fsdp``, and return the JSON object that the command of the same name writes with
``--json``. ``ls``, ``log`` and ``prune`` are for the folder of a run's checkpoints. Errors are subclasses of
:class:`CheckpointError`.

``fsdp_checkpoint.torch`` has a ``StorageWriter`` and a ``StorageReader`` for ``torch.distributed.checkpoint``, and
``fsdp_checkpoint.torch_checkpointing`` a storage for the library of that name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from ._embedded import Report
from ._embedded import report as _report
from ._load import Framework, load
from ._place import Place
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
    "__version__",
    "cat",
    "convert",
    "diff",
    "digest",
    "inspect",
    "load",
    "log",
    "ls",
    "merge",
    "prune",
    "reshard",
    "sign",
    "verify",
]

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """Return the version, which takes longer to find out than the whole package takes to import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("fsdp-checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Format = Literal["dcp", "safetensors", "hf", "hf-sharded", "torch", "torch-checkpointing"]
"""A format that can be written."""


def inspect(path: Place) -> Report:
    """Return the contents of a checkpoint: its format, step, tensors with dtypes, shapes and boxes, and values.

    Only metadata is read. ``report["tensors"]`` has for each tensor its ``name``, ``dtype``, ``shape``, ``bytes`` and
    ``boxes``, and for each box its ``offsets``, ``sizes``, ``rank`` and ``file``.

    Raises:
        IncompleteError: There is no committed checkpoint.
        CorruptError: Its metadata is damaged.
    """
    return _report("inspect", path)


def cat(path: Place, name: str, *, stats: bool = False, npy: Place | None = None) -> Report:
    """Return one tensor or value of a checkpoint as JSON.

    ``report["elements"]`` lists the elements of a tensor, row-major, of at most 2**20; ``report["value"]`` is a value. What JSON
    has no numbers for is text: NaN, infinities, complex numbers, and in values also bytes and very large integers. An object that
    only running code could build is described by its type (``$type``), arguments and state; none of them is executed.
    :func:`load` returns tensors and values themselves.

    Args:
        path: A checkpoint of any format.
        name: The key of the tensor or value, as in the list of :func:`inspect`.
        stats: Return counts, extremes, mean and deviation as ``report["stats"]``, instead of the elements.
        npy: A new file for NumPy to which the elements are written instead.

    Raises:
        DifferenceError: The checkpoint has no such key.
        UsageError: The tensor has too many elements for JSON; it has no ``stats``, or no dtype in NumPy; or ``npy`` exists.
    """
    return _report("cat", path, name, stats=stats, npy=npy)


def verify(
    path: Place,
    level: Literal["structure", "sizes", "hashes", "deep"] = "hashes",
    *,
    seal: bool = False,
    signature: Place | None = None,
    public_key: Place | None = None,
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
        IncompleteError: There is no committed checkpoint, or a file that ``signature`` vouches for is missing.
        StorageError: The checkpoint, or the key, cannot be read.
        UnsupportedError: The checkpoint cannot be checked, such as one of an unknown format.
        UnsafeError: The checkpoint names files outside of itself, or ``signature`` is not that of the key.
    """
    return _report(
        "verify", path, finding="ok", level=level, seal=seal, signature=signature, public_key=public_key, threads=threads
    )


def sign(
    path: Place,
    key: Place,
    *,
    signature: Place | None = None,
    overwrite: bool = False,
    threads: int | None = None,
) -> Report:
    """Sign every byte of a checkpoint with a key, in the format of OpenSSF Model Signing.

    ``report["signature"]`` is the path of the signature, which :func:`verify` checks. ``report["signed"]`` has the number of
    ``files`` that it vouches for, the hash over all of them (``root``), and the hash of the public key (``key``).

    Args:
        path: A checkpoint of any format.
        key: The path of the private key: PEM of the curve P-256, without a password.
        signature: The path to write the signature to; by default ``model.sig`` in a directory, and ``NAME.sig`` beside a file.
        overwrite: Replace a signature that is there.
        threads: The number of threads that hash; by default one for each core.

    Raises:
        CorruptError: The checkpoint is damaged. Nothing is signed.
        IncompleteError: There is no committed checkpoint.
        StorageError: The checkpoint, or the key, cannot be read.
        UsageError: The signature exists already, or the key cannot be used.
    """
    return _report("sign", path, key=key, signature=signature, overwrite=overwrite, threads=threads)


def diff(
    first: Place,
    second: Place,
    *,
    tolerance: float = 0.0,
    full: bool = False,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    map: Place | None = None,
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
    return _report(
        "diff",
        first,
        second,
        finding="equal",
        tolerance=float(tolerance),
        full=full,
        include=include,
        exclude=exclude,
        map=map,
        map_reverse=map_reverse,
        set=set,
        threads=threads,
    )


def digest(path: Place, *, recorded: bool = False, threads: int | None = None) -> Report:
    """Return the digest of a checkpoint, which is the same for the same state in any format and layout.

    With ``recorded``, it is the digest that was recorded when the checkpoint was saved, and no data is read.
    """
    return _report("digest", path, recorded=recorded, threads=threads)


def reshard(
    source: Place,
    destination: Place,
    world_size: int,
    *,
    drop_opaque: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
) -> Report:
    """Write a checkpoint as a DCP directory for another number of ranks, in bounded memory.

    The destination is committed as a whole, or not at all. Ctrl-C leaves nothing behind. With ``dry_run``, nothing is written.
    ``drop_opaque`` leaves out opaque values (objects that only running code could build) if they cannot be copied.
    """
    return _report(
        "reshard",
        source,
        destination,
        world_size=world_size,
        drop_opaque=drop_opaque,
        overwrite=overwrite,
        dry_run=dry_run,
        threads=threads,
    )


def convert(
    source: Place,
    destination: Place,
    to: Format,
    *,
    world_size: int | None = None,
    max_shard_size: str | int | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    prefix: str | None = None,
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None,
    cast_optimizer: bool = False,
    dequantize: bool = False,
    map: Place | None = None,
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
        world_size: The number of ranks of the destination, for ``dcp``, ``hf-sharded`` and
            ``torch-checkpointing``.
        max_shard_size: The largest size of a file, for ``hf``: a text such as ``"2GiB"``, or a number of bytes.
        include: A glob, or several. Only keys that match one of them are written.
        exclude: A glob, or several. Keys that match one of them are not written.
        rename: Prefixes of keys and their replacements. Only the first prefix that matches a key is replaced.
        prefix: Text to put before all keys, after ``rename``.
        dtype: The dtype to which floating-point tensors are cast, except optimizer state.
        cast_optimizer: Cast optimizer state too, except its hyperparameters and counts.
        dequantize: Multiply weights of 8 bits by the scales beside them.
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
    return _report(
        "convert",
        source,
        destination,
        to=to,
        world_size=world_size,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        rename=rename,
        prefix=prefix,
        dtype=dtype,
        cast_optimizer=cast_optimizer,
        dequantize=dequantize,
        map=map,
        map_reverse=map_reverse,
        set=set,
        tp=tp,
        tp_rule=tp_rule,
        with_=with_,
        drop_opaque=drop_opaque,
        overwrite=overwrite,
        dry_run=dry_run,
        threads=threads,
    )


def merge(
    sources: Place | Iterable[Place],
    destination: Place,
    to: Format,
    *,
    weights: Iterable[float] = (),
    lora: Place | None = None,
    world_size: int | None = None,
    max_shard_size: str | int | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    with_: Place | None = None,
    drop_opaque: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    threads: int | None = None,
) -> Report:
    """Write the average of checkpoints, or a base with a LoRA adapter merged into it, and return a report.

    Floating-point tensors are averaged, except optimizer state. Everything else is taken from the first checkpoint. The destination
    is committed as a whole, or not at all. Ctrl-C leaves nothing behind.

        >>> fc.merge(["step-80", "step-90", "step-100"], "averaged", to="hf")
        >>> fc.merge("Llama-3-8B", "merged", to="hf", lora="run/adapter")

    Args:
        sources: The checkpoints to average, of any formats, or the base of the adapter.
        destination: The path to write to. It must not exist, unless ``overwrite`` is set.
        to: The format to write.
        weights: The weight of each checkpoint, in their order; by default all are equal. They are divided by their sum.
        lora: The directory of a LoRA adapter, as PEFT saves it.
        world_size: The number of ranks of the destination, for ``dcp``, ``hf-sharded`` and
            ``torch-checkpointing``.
        max_shard_size: The largest size of a file, for ``hf``: a text such as ``"2GiB"``, or a number of bytes.
        include: A glob, or several. Only keys that match one of them are written.
        exclude: A glob, or several. Keys that match one of them are not written.
        rename: Prefixes of keys and their replacements. Only the first prefix that matches a key is replaced.
        with_: A directory whose configuration and tokenizer are copied along, for ``hf``.
        drop_opaque: Leave out opaque values (objects that only running code could build) if the format cannot hold them.
        overwrite: Replace the checkpoint at the destination once everything is written.
        dry_run: Write nothing; only return what would be written.
        threads: The number of threads that read, compute and write; by default one for each core.

    Raises:
        UsageError: The request is invalid. Nothing was written.
        DifferenceError: The checkpoints differ in their keys, shapes or dtypes, or the adapter does not fit the base.
        OpaqueError: Values would be left out, and ``drop_opaque`` is not set.
    """
    is_one = isinstance(sources, (str, bytes, os.PathLike))
    return _report(
        "merge",
        destination,
        from_=[os.fsdecode(source) for source in ([sources] if is_one else sources)],
        weight=[float(weight) for weight in weights],
        lora=lora,
        to=to,
        world_size=world_size,
        max_shard_size=max_shard_size,
        include=include,
        exclude=exclude,
        rename=rename,
        with_=with_,
        drop_opaque=drop_opaque,
        overwrite=overwrite,
        dry_run=dry_run,
        threads=threads,
    )


def ls(run: Place) -> Report:
    """List the checkpoints of a run, the oldest first. Only metadata is read.

    ``report["checkpoints"]`` has the ``step`` and ``name`` of each, its ``format``, and the numbers of its ``tensors``, ``values``
    and ``bytes``. ``hashed`` is ``True`` if its files' hashes are recorded. One that cannot be opened has the reason in ``error``.

    Args:
        run: The folder of a run's checkpoints, which are known by their names: ``step-40``, ``checkpoint-40`` and the like.

    Raises:
        IncompleteError: There is no such folder.
        StorageError: The folder cannot be read.
    """
    return _report("ls", run)


def log(run: Place) -> Report:
    """Return the chain of a run's checkpoints, the newest first. Only metadata and hashes are read.

    ``report["checkpoints"]`` has the ``name``, ``digest`` and ``lineage`` of each, and ``notes`` on what is noteworthy, such as a
    fork. The lineage is its step, the checkpoint from which it continued, its configuration and its data. A chain that is broken
    does not raise an exception: ``report["whole"]`` is ``False`` then.

    Args:
        run: The folder of a run's checkpoints.

    Raises:
        IncompleteError: There is no such folder, or a checkpoint has lost its metadata.
        CorruptError: The metadata of a checkpoint is damaged.
        StorageError: The folder, or a checkpoint, cannot be read.
    """
    # With a damaged checkpoint the chain is not whole either, but that is raised.
    return _report("log", run, finding="whole", finding_error=DifferenceError)


def prune(run: Place, keep: int, *, keep_every: int | None = None, yes: bool = False) -> Report:
    """Remove the old checkpoints of a run, or only return which they are, unless ``yes`` is set.

    ``report["removed"]`` has the names of those that are removed, or would be. ``report["stay"]`` has the ``name`` of each old
    checkpoint that is kept, and the ``reason``: somebody reads it, or its directory has files that do not belong to it.
    ``report["unfinished"]`` is the same for those that are gone, but of which some files could not be removed. The next call
    removes these files, and has their directories in ``report["leftovers"]``.

    Args:
        run: The folder of a run's checkpoints.
        keep: The number of newest checkpoints that are kept.
        keep_every: Checkpoints whose step is a multiple of this are kept too.
        yes: Remove them.

    Raises:
        UsageError: No checkpoint that would be kept is whole, or it is not known which are older. Nothing was removed.
        IncompleteError: There is no such folder.
        StorageError: The folder cannot be read, or a checkpoint cannot be removed. All others are removed then.
    """
    return _report("prune", run, keep=keep, keep_every=keep_every, yes=yes)
