"""A storage for ``torch_checkpointing``, the library that follows ``torch.distributed.checkpoint``.

One option makes a program save with it:

    >>> from torch_checkpointing import CheckpointManager
    >>> from fsdp_checkpoint.torch_checkpointing import StorageConfig
    >>> manager = CheckpointManager(CheckpointManager.Config(storage_config=StorageConfig()))

Every file is synced to the disk when it is closed, and hashed while it is written. A checkpoint is committed with one rename,
after its directories are synced too; then it has the hashes of all its files in ``.integrity``, which reads and
``fsdp verify`` check. What is written is what the library's own storage writes, and it reads that too.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_checkpointing.storage import base_storage

from . import _native
from .errors import StorageError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Storage", "StorageConfig"]

_INTEGRITY = ".integrity"
"""The file of the hashes of a directory, and the end of the name of those of one file, beside it."""

_PIECE = 8 << 20
"""The bytes that are read at once to hash a file that something else has written."""

_URL = re.compile(r"[a-z][a-z0-9]+:/")

_logger = logging.getLogger(__name__)


class _NoDirectoryError(StorageError, FileNotFoundError, RuntimeError):
    """A file whose directory is not there. The library's own storage raises a ``RuntimeError``."""


class _OccupiedError(StorageError, FileExistsError):
    """A destination of a rename that something else is in."""


@dataclass
class StorageConfig(base_storage.StorageConfig):
    """Makes a :class:`Storage`: the ``storage_config`` of ``CheckpointManager``, of savers and of readers."""

    def create_storage(self) -> Storage:
        """Return a storage for directories of this machine, or that are mounted here."""
        return Storage()


class Storage(base_storage.Storage):
    """Directories whose files are durable when they are committed, hashed while they are written, and checked when they are read.

    While a checkpoint is written, the hashes of each file lie beside it in ``NAME.integrity``. The rename of the directory joins
    them in ``.integrity``. A file that was put there in another way is hashed then. :meth:`ls` shows neither of the two. A file
    that is renamed by itself has no hashes any more.
    """

    def __init__(self) -> None:
        self._opened: dict[Path, tuple[tuple[int, ...], _native.HashedFiles]] = {}

    def stream_read(self, path: Path, read_args: base_storage.ReadArgs | None = None) -> io.RawIOBase:
        """Open a file for reading. What is read of it is checked, if there are hashes of it.

        Raises:
            CorruptError: The file differs from its hashes.
        """
        reader = _Reader(self._open(_local(path)))
        if read_args is not None and not read_args.pre_read_full_file:
            return reader
        # The library takes a buffer in memory where it asks for a raw stream.
        whole: Any = io.BytesIO(reader.readall())
        return whole

    def read(self, path: Path, read_args: base_storage.ReadArgs | None = None) -> bytes:
        """Return the bytes of a file, checked if there are hashes of it."""
        return _Reader(self._open(_local(path))).readall()

    def stream_write(self, path: Path) -> io.IOBase:
        """Open a file for writing. It is durable, and has its hashes, once it is closed."""
        return _Writer(_local(path))

    def write(self, path: Path, data: Buffer) -> None:
        """Write a whole file, which is durable when this returns."""
        with _Writer(_local(path)) as writer:
            writer.write(data)

    def delete(self, path: Path) -> None:
        """Delete a file and its hashes."""
        os.remove(_local(path))
        _beside(path).unlink(missing_ok=True)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Create a directory, and those above it unless ``recursive`` is off. Their names are durable when this returns."""
        _local(path)
        missing = [directory for directory in [path, *path.parents] if not directory.exists()]
        if recursive:
            os.makedirs(path, exist_ok=True)
        else:
            os.mkdir(path)
        for directory in missing:
            _sync(directory.parent)

    def rmdir(self, path: Path) -> None:
        """Remove a directory and all that is in it."""
        shutil.rmtree(_local(path))

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
        **_: object,
    ) -> None:
        """Move a file or a directory to exactly this place. That of a directory commits a checkpoint: it is durable afterwards.

        A file replaces a file, and a directory replaces an empty one.

        Raises:
            OSError: Something else is at the destination. Nothing was changed.
        """
        source, destination = _local(src_path), _local(dst_path)
        if not source.is_dir():
            self._rename_file(source, destination)
        elif not destination.exists() or (destination.is_dir() and not os.listdir(destination)):
            _join_hashes(source)
            _sync_tree(source)
            _move(source, destination, is_directory=True)
        else:
            raise _occupied(source, destination)
        _sync(destination.parent)
        if source.parent != destination.parent:
            _sync(source.parent)

    def _rename_file(self, source: Path, destination: Path) -> None:
        if destination.is_dir():
            raise _occupied(source, destination)
        # Hashes of other bytes must not lie beside the file, whenever this ends.
        _beside(destination).unlink(missing_ok=True)
        _move(source, destination, is_directory=False)
        _beside(source).unlink(missing_ok=True)

    def ls(self, path: Path) -> list[str]:
        """Return the names in a directory, but for those of hashes."""
        names = set(os.listdir(_local(path)))
        return [
            name
            for name in names
            if name != _INTEGRITY and not (name.endswith(_INTEGRITY) and name.removesuffix(_INTEGRITY) in names)
        ]

    def exists(self, path: Path) -> bool:
        """Return ``True`` if there is a file or a directory."""
        return _local(path).exists()

    def getsize(self, path: Path) -> int:
        """Return the length of a file in bytes."""
        return os.path.getsize(_local(path))

    def isdir(self, path: Path) -> bool:
        """Return ``True`` if there is a directory."""
        return _local(path).is_dir()

    def remap_path(self, path: Path) -> str:
        """Return the path as text."""
        return str(path)

    def _open(self, path: Path) -> _native.HashedFile:
        """Open a file with its hashes: those beside it, or else those of the nearest directory above it that has some."""
        if _beside(path).is_file():
            return _native.HashedFiles(os.fspath(path.parent), path.name).file(path.name)
        directory = next((above for above in path.parents if (above / _INTEGRITY).is_file()), path.parent)
        return self._directory(directory).file(path.relative_to(directory).as_posix())

    def _directory(self, directory: Path) -> _native.HashedFiles:
        """Return an open directory, whose hashes are read again only if they have changed."""
        try:
            status = os.stat(directory / _INTEGRITY)
        except FileNotFoundError:
            return _native.HashedFiles(os.fspath(directory), None)
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        found = self._opened.get(directory)
        if found is None or found[0] != version:
            found = version, _native.HashedFiles(os.fspath(directory), None)
            # Of all checkpoints only the last is kept: its files are read one after the other.
            self._opened = {directory: found}
        return found[1]


class _Writer(io.RawIOBase):
    """A file that is being written, and hashed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # What is there now is going to change.
        _beside(path).unlink(missing_ok=True)
        try:
            self._file: io.BufferedWriter | None = path.open("wb")
        except FileNotFoundError as error:
            raise _NoDirectoryError(f"`{path.parent}` is not there: create it before `{path.name}` is written") from error
        self._hasher = _native.FileHasher()

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        if self._file is None:
            raise ValueError(f"`{self._path}` is closed")
        view = memoryview(data)
        if view.nbytes > 0:
            view = view.cast("B")
            self._hasher.update(view)
            self._file.write(view)
        return view.nbytes

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        file, self._file = getattr(self, "_file", None), None
        if file is not None:
            with file:
                file.flush()
                _sync_open(file.fileno())
            _write_durably(_beside(self._path), self._hasher.finish(self._path.name))
        super().close()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None and self._file is not None:
            # What is there is only a part, and gets no hashes.
            self._file.close()
            self._file = None
        self.close()


class _Reader(io.RawIOBase):
    """A file that is checked where it is read."""

    def __init__(self, file: _native.HashedFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if start + offset < 0:
            raise ValueError(f"a position before the start of the file: {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Buffer, /) -> int:
        # The views are given back even if this fails: the library unmaps the memory then.
        with memoryview(buffer) as view, view.cast("B") as memory:
            length = min(len(memory), max(self._file.size - self._position, 0))
            with memory[:length] as wanted:
                self._file.read_into(self._position, wanted)
        self._position += length
        return length

    def readall(self) -> bytes:
        rest = self._file.read_from(self._position) if self._position < self._file.size else b""
        self._position += len(rest)
        return rest


def _local(path: Path) -> Path:
    """Return the path, unless it is a URL, of which `Path` drops a slash."""
    if _URL.match(str(path)):
        advice = "`fsdp_checkpoint.torch.StorageWriter` saves to object stores"
        raise UnsupportedError(f"`{path}` is no directory, and this storage is for directories; {advice}")
    return Path(path)


def _occupied(source: Path, destination: Path) -> _OccupiedError:
    return _OccupiedError(
        f"`{source}` cannot be moved to `{destination}`, where something else is: remove that, or choose another place"
    )


def _beside(path: Path) -> Path:
    """Return the path of the hashes of one file."""
    return path.with_name(path.name + _INTEGRITY)


def _files_below(directory: Path) -> Iterator[Path]:
    """Return all files in a directory and in those below it, in a fixed order."""
    for folder, folders, names in os.walk(directory):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names))


def _join_hashes(directory: Path) -> None:
    """Write the hashes of all files of a directory to one file, if some of them have hashes beside them, and remove those."""
    files = set(_files_below(directory))
    beside = {_beside(file) for file in files} & files
    if not beside:
        return
    parts = [
        (file.relative_to(directory).as_posix(), _beside(file).read_bytes() if _beside(file) in beside else _hash(file))
        for file in sorted(files - beside - {directory / _INTEGRITY})
    ]
    # A crash before the rename leaves no checkpoint, so it does not matter which of these files it leaves.
    _write_durably(directory / _INTEGRITY, _native.join_integrity(parts))
    for path in beside:
        path.unlink()


def _hash(path: Path) -> bytes:
    """Return the hashes of a file that something else has written, which is durable afterwards."""
    hasher = _native.FileHasher()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
        _sync_open(file.fileno())
    return hasher.finish(path.name)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        _sync_open(file.fileno())


def _move(source: Path, destination: Path, *, is_directory: bool) -> None:
    """Rename a file or a directory. Where the two are on different file systems it is copied, and then removed."""
    try:
        (os.rename if is_directory else os.replace)(source, destination)
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    _logger.warning("`%s` and `%s` are on different file systems: it is copied, which is no single step", source, destination)
    if not is_directory:
        shutil.copy2(source, destination)
        _sync(destination)
        os.remove(source)
        return
    destination.mkdir(exist_ok=True)
    if (source / _INTEGRITY).exists():
        # It lists all files, so it tells of a copy that has ended halfway that files are missing.
        shutil.copy2(source / _INTEGRITY, destination)
    shutil.copytree(source, destination, dirs_exist_ok=True)
    for file in _files_below(destination):
        _sync(file)
    _sync_tree(destination)
    shutil.rmtree(source)


def _sync_tree(directory: Path) -> None:
    """Make the names in a directory, and in those below it, durable."""
    for folder, _, _ in os.walk(directory, topdown=False):
        _sync(Path(folder))


def _sync(path: Path) -> None:
    """Make a file or the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync_open(descriptor)
    finally:
        os.close(descriptor)


def _sync_open(descriptor: int) -> None:
    """Sync an open file. macOS has a call of its own for what reaches the disk."""
    import fcntl

    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is None:
        os.fsync(descriptor)
    else:
        fcntl.fcntl(descriptor, full_sync)
