"""A ``StorageWriter`` and a ``StorageReader`` for ``torch.distributed.checkpoint``.

One changed line makes a program save with them:

    >>> import torch.distributed.checkpoint as dcp
    >>> from fsdp_checkpoint.torch import StorageReader, StorageWriter
    >>> dcp.save(state, storage_writer=StorageWriter("step-20"))
    >>> dcp.load(state, storage_reader=StorageReader("step-20"))

What is written is a DCP directory that ``dcp.load(state, checkpoint_id="step-20")`` reads as well. It has hashes beside it
(``.integrity``), which ``StorageReader`` and ``fsdp verify`` check. It grows in a directory beside its place, is made durable,
and takes its place with one rename: a crash leaves the old checkpoint or the new one, never a mixture.

``StorageReader`` reads checkpoints of any format, safetensors and files of ``torch.save`` too, and runs no pickle of theirs.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import io
import os
import pickle
import threading
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.autograd.graph import increment_version
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _native
from ._host import copy_to_host, has_plain_memory, host_memory, settled
from ._load import bytes_of, flat_bytes, listing, opaque_error
from ._place import Place
from .errors import DifferenceError, UnsafeError, UsageError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["StorageReader", "StorageWriter"]

_VERSION = "1.0.0"

_BATCH = 256 << 20
"""The bytes that are read to other memory than the tensors' own before they are copied to their places."""


@dataclasses.dataclass(frozen=True)
class _RankPlan:
    """What the coordinator sends to each rank: the rank's number, and the name of the prepared directory or upload."""

    rank: int
    staging: str

    @property
    def prefix(self) -> str:
        """What torch's own writer begins the names of a rank's files with, if it gets a cached plan of ours."""
        return f"__{self.rank}_"


@dataclasses.dataclass(frozen=True)
class _RankReport(WriteResult):
    """The hashes of a rank's file, which travel to the coordinator as one more result."""

    report: bytes = b""
    staging: str = ""


class _Reused:
    """The ``usable`` of a plan that tells a rank to write by its cached plan: false.

    torch's planner looks at nothing else of such a plan, so this is how a rank gets to know where to write this time.
    """

    def __init__(self, rank_plan: _RankPlan) -> None:
        self._rank_plan = rank_plan

    def __bool__(self) -> bool:
        _told.rank_plan = self._rank_plan
        return False


_told = threading.local()
"""What :class:`_Reused` has told this thread: torch finishes a rank's plan and writes by it on one thread."""

_ANOTHER_SAVE = "another save has begun with this writer: each save that runs at the same time needs its own"


def _warn_of(opaque: list[tuple[str, str]]) -> None:
    """Warn of saved values that cannot be read without running their pickles, each with the reason."""
    if not opaque:
        return
    listed = listing([f"`{name}` ({reason})" for name, reason in opaque])
    warnings.warn(f"saved, but `StorageReader` loads it only with `run_pickles=True`: {listed}", stacklevel=3)


def _place(plan: SavePlan, rank_plan: _RankPlan) -> SavePlan:
    """Return the plan of a rank with the place to write to."""
    # Only torch from 2.7 on caches plans.
    if getattr(plan, "usable", True):
        return dataclasses.replace(plan, storage_data=rank_plan)
    return dataclasses.replace(plan, usable=_Reused(rank_plan))


def _named(path: str) -> str:
    """Return the same path with a name at its end, which a directory that is put in its place needs."""
    if path and "://" not in path and os.path.basename(path) in (".", ".."):
        return os.path.realpath(path)
    return path


class _Storage:
    """The path of a checkpoint: what the writer and the reader have in common."""

    def __init__(self, path: Place) -> None:
        self.path = _named(os.fsdecode(path))

    @property
    def checkpoint_id(self) -> str:
        """The path or URL of the checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        """Return ``True`` if the path is not empty. Nothing else is checked."""
        return bool(os.fsdecode(checkpoint_id))

    def _move(self, checkpoint_id: Place | None) -> None:
        """Use another path from now on, if one is given."""
        if checkpoint_id:
            self.path = _named(os.fsdecode(checkpoint_id))


class _Pieces:
    """A contiguous tensor on a GPU, whose bytes are copied to pinned memory in pieces, by several threads at once.

    So the host needs no memory for the tensor, and a piece is hashed and written while the next one is copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = flat_bytes(tensor)
        if tensor.is_cuda:
            # The threads copy in other streams than the one that has computed the tensor.
            torch.cuda.current_stream(tensor.device).synchronize()

    def __call__(self, start: int, length: int) -> np.ndarray[Any, Any]:
        """Return a copy of these bytes on the host."""
        piece = host_memory((length,), torch.uint8, self._bytes.device)
        piece.copy_(self._bytes[start : start + length])
        return bytes_of(piece)


def _source_of(tensor: torch.Tensor) -> np.ndarray[Any, Any] | _Pieces:
    """Return the bytes of a tensor, copied to the host if need be, or an object that reads them from its GPU in pieces."""
    # What is not contiguous is made so on the host, where there is more memory.
    if tensor.is_cuda and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return _Pieces(tensor)
    return bytes_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())


class StorageWriter(_Storage, storage.StorageWriter, AsyncStager):
    """Writes DCP checkpoints that are committed in one step, with hashes.

    Every rank writes one file with several threads, straight from the memory of its tensors; tensors on GPUs are copied to pinned
    memory in pieces of 4 MiB, and written from there. If one rank fails, the save fails on all ranks, and an existing checkpoint stays as it was. The files of the failed
    save are removed by the next save with this writer, by :meth:`reset`, or when the writer is deleted.

    A value that only running code can build, such as an object of a class, is saved with a warning: a reader refuses it, unless its
    ``run_pickles`` is set.

    Args:
        path: The directory of the checkpoint: a path, or the URL of an object store. Every rank must see the same storage.
        overwrite: Replace an existing checkpoint, in one step. A directory is replaced only if it is empty, or holds a checkpoint
            and nothing else.
    """

    _synchronize_after_execute = False
    """Tells torch that a state is copied when :meth:`stage` returns."""

    def __init__(self, path: Place, *, overwrite: bool = True) -> None:
        super().__init__(path)
        self.overwrite = overwrite
        self._save_id = str(uuid.uuid4())
        self._staging: _native.Staging | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state on the host, in pinned memory if it is on a GPU: ``dcp.async_save`` calls this."""
        return copy_to_host(state_dict)

    def storage_meta(self) -> StorageMeta:
        """Return the ``StorageMeta`` that is stored in ``.metadata``. It has the path, and an id of this save."""
        # A path need not be text, but the strings of a pickle must be.
        path = self.path.encode("utf-8", "backslashreplace").decode()
        return StorageMeta(checkpoint_id=path, save_id=self._save_id)

    def reset(self, checkpoint_id: Place | None = None) -> None:
        """Begin a new save, to another path if one is given."""
        self._discard()
        self._move(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """On the coordinator, prepare the directory or upload that the ranks write to."""
        if not kwargs.get("use_collectives", True):
            raise UsageError("`use_collectives=False` is not supported: all ranks commit one checkpoint together")
        self._discard()
        _told.rank_plan = None
        # torch calls `reset` for a new `checkpoint_id` only, but this for each save.
        self._save_id = str(uuid.uuid4())
        if is_coordinator:
            self._staging = _native.Staging.prepare(self.path, self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number and where to write."""
        if self._staging is None:
            raise UsageError("`prepare_global_plan` is for the coordinator, after `set_up_storage_writer`")
        name = self._staging.name
        return [_place(plan, _RankPlan(rank, name)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and sync it to the disk before returning."""
        # A cached plan has the place of the save that it was made for.
        rank_plan: _RankPlan = _told.rank_plan or plan.storage_data
        staging = self._staging or _native.Staging.join(self.path, rank_plan.staging)
        if staging.name != rank_plan.staging:
            raise UsageError(_ANOTHER_SAVE)
        tensors, values, indices = [], [], []
        # `write_rank` numbers tensors first, and then values. `indices` must have the same order.
        by_kind = sorted(plan.items, key=lambda item: item.type == WriteItemType.BYTE_IO)
        for item in by_kind:
            data = settled(planner.resolve_data(item))
            indices.append(item.index)
            if item.type == WriteItemType.BYTE_IO:
                values.append((item.index.fqn, data.getvalue()))
                continue
            if item.tensor_data is None:
                raise UsageError(f"the plan has no `tensor_data` for `{item.index.fqn}`")
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            if is_traceable_wrapper_subclass(data):
                raise UsageError(f"`{item.index.fqn}` is a `{type(data).__name__}`, which is made of several tensors: save those")
            if not has_plain_memory(data):
                raise UsageError(f"`{item.index.fqn}` is sparse, quantized or on the meta device, which this writer cannot save")
            planned = item.tensor_data.properties.dtype
            if data.dtype != planned:
                message = f"`{item.index.fqn}` is of dtype {data.dtype}, but the plan says {planned}"
                hint = "a cached plan does not follow changes of dtypes, and a planner that casts must plan the new one"
                raise UsageError(f"{message}: {hint}")
            if data.size() != chunk.sizes:
                found, expected = tuple(data.size()), tuple(chunk.sizes)
                raise UsageError(f"`{item.index.fqn}` has shape {found}, but the plan says {expected}")
            data = data.detach()
            dtype = str(data.dtype).removeprefix("torch.")
            tensors.append((item.index.fqn, dtype, [*size], [*chunk.offsets], [*chunk.sizes], _source_of(data)))
        places, report, opaque = staging.write_rank(rank_plan.rank, tensors, values)
        _warn_of(opaque)
        results: list[WriteResult] = [
            WriteResult(indices[at], length, _StorageInfo(file, offset, length)) for at, file, offset, length in places
        ]
        results.append(_RankReport(MetadataIndex(""), 0, None, report, rank_plan.staging))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata and the hashes, and commit."""
        if self._staging is None:
            raise UsageError("`finish` is for the coordinator, after `set_up_storage_writer`")
        everything = [result for of_rank in results for result in of_rank]
        reports = [result for result in everything if isinstance(result, _RankReport)]
        if any(report.staging != self._staging.name for report in reports):
            raise UsageError(_ANOTHER_SAVE)
        staging, self._staging = self._staging, None
        metadata.version = _VERSION
        metadata.storage_data = {
            result.index: result.storage_data for result in everything if not isinstance(result, _RankReport)
        }
        metadata.storage_meta = self.storage_meta()
        try:
            staging.finish(pickle.dumps(metadata), [report.report for report in reports])
        except UnsafeError as error:
            # The file that the error names is gone with the save.
            _, _, reason = str(error).rpartition(": ")
            message = f"the metadata that the planner made has an object that no reader builds: {reason}"
            raise UsageError(message) from error

    def _discard(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.discard()

    def __getstate__(self) -> dict[str, Any]:
        # `async_save` pickles the writer for its process before the save begins. A staging directory cannot be pickled.
        return {**self.__dict__, "_staging": None}


class _Spans:
    """A set of address ranges, none of which overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, length: int) -> bool:
        """Add a range, unless it overlaps with another one. Return ``True`` if it was added, or is empty."""
        if length == 0:
            return True
        at = bisect.bisect_right(self._starts, start)
        if at > 0 and self._ends[at - 1] > start:
            return False
        if at < len(self._starts) and self._starts[at] < start + length:
            return False
        self._starts.insert(at, start)
        self._ends.insert(at, start + length)
        return True


class _Batch:
    """Tensors that are read at the same time."""

    def __init__(self, checkpoint: _native.Checkpoint, planner: LoadPlanner) -> None:
        self._checkpoint = checkpoint
        self._planner = planner
        self._spans = _Spans()
        self._reads: list[Any] = []
        self._targets: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        self.staged = 0
        """The bytes of memory that are not the tensors' own."""

    def add(self, item: ReadItem, dtype: torch.dtype) -> None:
        """Add an item of the plan, which is stored in this dtype."""
        name = item.storage_index.fqn
        start = item.storage_index.offset or [0] * len(item.lengths)
        offsets = [at + within for at, within in zip(start, item.storage_offsets, strict=True)]
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            found, expected = tuple(target.size()), tuple(item.lengths)
            raise UsageError(f"`{name}`: the tensor to fill has shape {found}, but the plan says {expected}")
        direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        direct = direct and not (target.is_conj() or target.is_neg())
        # Tied weights are two keys with the same memory. Two threads must not fill it at once, so the second read gets memory of
        # its own.
        direct = direct and self._spans.add(target.data_ptr(), target.numel() * target.element_size())
        memory = target if direct else host_memory(tuple(item.lengths), dtype, target.device)
        self.staged += 0 if direct else memory.nbytes
        self._reads.append((name, offsets, [*item.lengths], bytes_of(memory)))
        self._targets.append((item, target, memory))

    def read(self) -> None:
        """Read the tensors, and put them in their places."""
        self._checkpoint.read(self._reads)
        for item, target, memory in self._targets:
            if memory is target:
                # Autograd does not see what is written past it: a backward of the old values must be an error.
                increment_version(target)
            else:
                target.copy_(memory)
            self._planner.commit_tensor(item, target)


class StorageReader(_Storage, storage.StorageReader):
    """Reads checkpoints of any format: DCP directories, safetensors, files of ``torch.save``.

    The data is checked against the checkpoint's hashes, if it has them. A rank reads only the boxes that it needs. Tensors that
    are contiguous, on the CPU and of the saved dtype are read in place, without a copy.

    Values that are not tensors are rebuilt from their pickles if they consist of plain types only. Any other value raises
    :class:`~fsdp_checkpoint.UnsafeError`, unless ``run_pickles`` is set.

    Args:
        path: The checkpoint: a path, or the URL of an object store.
        run_pickles: Let torch unpickle the stored values, which executes their pickles. Set it only for files that you trust.
    """

    def __init__(self, path: Place, *, run_pickles: bool = False) -> None:
        super().__init__(path)
        self.run_pickles = run_pickles
        self._checkpoint: _native.Checkpoint | None = None
        self._metadata: Metadata | None = None
        self._metadata_hash = ""
        self._failure: Exception | None = None

    def reset(self, checkpoint_id: Place | None = None) -> None:
        """Begin a new load, from another path if one is given."""
        self._checkpoint, self._metadata, self._failure = None, None, None
        self._move(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint, rebuilt without executing its pickle."""
        if self._failure is not None and kwargs.get("rank") is not None:
            # torch from 2.7 on drops the error of its first call, and asks for the metadata of one rank. If that failed too, some
            # versions would say no more than that there is no metadata. `set_up_storage_reader` raises the error.
            return Metadata({})
        try:
            metadata = self._read_metadata()
        except Exception as error:
            self._failure = error
            raise
        self._failure = None
        return metadata

    def _read_metadata(self) -> Metadata:
        # Each load begins here, and must see what is at the path now. torch calls `reset` for a new `checkpoint_id` only.
        self._checkpoint = None
        encoded = self._opened().metadata()
        self._metadata_hash = hashlib.sha256(encoded).hexdigest()
        metadata: Metadata = pickle.loads(encoded)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = str(uuid.uuid4())
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep the metadata, which :meth:`read_data` needs."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with a hash of the metadata that this rank has read, for :meth:`prepare_global_plan`."""
        return dataclasses.replace(plan, storage_data=self._metadata_hash)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged, if all ranks read the same checkpoint.

        Raises:
            DifferenceError: A rank has another checkpoint at its path, as after a save that not all hosts see.
        """
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                message = f"rank {rank} reads another checkpoint at `{self.path}` than rank 0"
                raise DifferenceError(f"{message}: every rank must see the same storage, and nothing may save there meanwhile")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in the plan, with several threads."""
        if self._metadata is None:
            raise UsageError("`read_data` comes after `set_up_storage_reader`")
        try:
            self._read(self._opened(), self._metadata, plan, planner)
        finally:
            # The checkpoint stays locked, and its files open, no longer than this.
            self._checkpoint = None
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, checkpoint: _native.Checkpoint, metadata: Metadata, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read everything in the plan from a checkpoint."""
        stored_as = metadata.state_dict_metadata
        is_value = [item.type == LoadItemType.BYTE_IO for item in plan.items]
        values = [item for item, is_value in zip(plan.items, is_value) if is_value]
        # All values are decoded first: one that is refused is refused before anything has changed.
        decoded = [self._decode(checkpoint, item.storage_index.fqn) for item in values]
        batch = _Batch(checkpoint, planner)
        for item in (item for item, is_value in zip(plan.items, is_value) if not is_value):
            batch.add(item, stored_as[item.storage_index.fqn].properties.dtype)
            # Memory that tensors are copied from is bounded.
            if batch.staged >= _BATCH:
                batch.read()
                batch = _Batch(checkpoint, planner)
        batch.read()
        for item, stored in zip(values, decoded, strict=True):
            planner.load_bytes(item, io.BytesIO(stored))

    def _decode(self, checkpoint: _native.Checkpoint, name: str) -> bytes:
        """Return a value as ``torch.save`` would write it, or with ``run_pickles`` as it was written."""
        if self.run_pickles:
            return checkpoint.stored_item(name)
        try:
            return checkpoint.item(name)
        except UnsafeError as error:
            hint = "`StorageReader(path, run_pickles=True)` lets torch run the stored pickles: for files that you trust"
            raise opaque_error(name, error, hint) from error

    def _opened(self) -> _native.Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = _native.Checkpoint(self.path)
        return self._checkpoint

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpoint": None, "_metadata": None, "_failure": None}
