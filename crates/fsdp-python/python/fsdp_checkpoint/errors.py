"""Exceptions of this package: one class for each kind of failure, as the exit codes of the command ``fsdp`` have them."""

from __future__ import annotations

__all__ = [
    "AfterCommitError",
    "CheckpointError",
    "CorruptError",
    "DifferenceError",
    "IncompleteError",
    "NoSpaceError",
    "OpaqueError",
    "StorageError",
    "UnsafeError",
    "UnsupportedError",
    "UsageError",
]


class CheckpointError(Exception):
    """An error of this package. Its text names the file, the tensor or the rank, and all causes.

    Attributes:
        exit_code: The exit code with which the command ``fsdp`` would end.
        hint: Advice on what to do, or ``None``.
    """

    exit_code: int = 1
    hint: str | None = None

    def __reduce__(self) -> tuple[object, tuple[int, str, str | None]]:
        # torch sends the exceptions of a rank to all others: the hint and the code go with them.
        return exception_of, (self.exit_code, str(self), self.hint)


class UsageError(CheckpointError, ValueError):
    """An invalid argument or option. Nothing was changed."""

    exit_code = 2


class CorruptError(CheckpointError):
    """A checkpoint whose bytes are not what they should be."""

    exit_code = 10


class IncompleteError(CheckpointError, FileNotFoundError):
    """A checkpoint that is incomplete or was never committed, or none at all."""

    exit_code = 11


class UnsupportedError(CheckpointError):
    """A checkpoint of a version or a kind that is not supported."""

    exit_code = 12


class UnsafeError(CheckpointError):
    """A checkpoint that asks for something that would not be safe, such as running a pickle."""

    exit_code = 13


class StorageError(CheckpointError, OSError):
    """The operating system or an object store refused to read or write."""

    exit_code = 14


class NoSpaceError(StorageError):
    """No space is left."""

    exit_code = 15


class DifferenceError(CheckpointError):
    """Two things that should match do not: a tensor that is missing, or of another shape."""

    exit_code = 17


class AfterCommitError(CheckpointError):
    """A checkpoint that is in its place, but something failed after that."""

    exit_code = 19


class OpaqueError(UsageError):
    """Objects that the output format cannot hold, which would be left out. ``drop_opaque=True`` allows that."""

    exit_code = 20


_CLASSES: dict[int, type[CheckpointError]] = {
    error.exit_code: error
    for error in (
        UsageError,
        CorruptError,
        IncompleteError,
        UnsupportedError,
        UnsafeError,
        StorageError,
        NoSpaceError,
        DifferenceError,
        AfterCommitError,
        OpaqueError,
    )
}


def exception_of(exit_code: int, message: str, hint: str | None) -> CheckpointError:
    """Return the exception of an exit code, with its message and hint."""
    error = _CLASSES.get(exit_code, CheckpointError)(message)
    error.exit_code = exit_code
    error.hint = hint
    if hint is not None:
        error.add_note(f"hint: {hint}")
    return error
