"""The commands on checkpoints, run inside this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from . import _native
from ._place import Place
from .errors import CheckpointError, IncompleteError, StorageError, UnsafeError, UnsupportedError, UsageError

Report = dict[str, Any]
"""A JSON object, as the command writes it with ``--json``."""

_NO_FINDING = (IncompleteError, StorageError, UnsafeError, UnsupportedError, UsageError)
"""Errors after which nothing is known of the checkpoint: it is not there, for instance, or cannot be read."""


def report(
    command: str,
    *places: Place,
    finding: str | None = None,
    finding_error: type[CheckpointError] = CheckpointError,
    **options: object,
) -> Report:
    """Run a command on checkpoints, and return its JSON.

    Some commands end with an error although they have a report, such as ``verify`` on a damaged checkpoint. ``finding`` names the
    field that is false in such a report; then the report is returned and the error is dropped.

    Args:
        command: The name of the command.
        places: Its arguments: paths, URLs, or the key of a tensor.
        finding: The field that is false in the report of a command that has found what it looks for.
        finding_error: The class of the errors that such a report replaces; all others are raised.
        options: Its options, by their names without dashes; see :func:`_words`.
    """
    # Not for the command, which imports this module too.
    import json

    words = [word for name, value in options.items() for word in _words(name, value)]
    output, error = _native.report([command, *words, "--json", "--", *map(os.fsdecode, places)])
    found: Report | None = json.loads(output) if output else None
    is_finding = found is not None and finding is not None and not found[finding]
    if isinstance(error, _NO_FINDING):
        # A file that is missing from a checkpoint is a finding all the same: its problem names the file.
        problems = (found or {}).get("problems", [])
        is_finding = is_finding and isinstance(error, IncompleteError) and any(problem["file"] for problem in problems)
    is_finding = is_finding and isinstance(error, finding_error)
    if error is not None and not is_finding:
        raise error
    if found is None:
        raise CheckpointError(f"`fsdp {command}` returned nothing")
    return found


def _words(name: str, value: object) -> list[str]:
    """Return an option as the words of a command line.

    ``None`` and ``False`` leave it out, and ``True`` gives it without a value. A list gives it once for each item, and a mapping
    once for each ``key=item``. An underscore at the end of the name, which keeps it from being a word of Python, is dropped.
    """
    option = "--" + name.removesuffix("_").replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, (str, bytes, os.PathLike)):
        items: Iterable[object] = [os.fsdecode(value)]
    elif isinstance(value, Mapping):
        items = _assignments(name, value)
    else:
        items = value if isinstance(value, Iterable) else [value]
    # In one piece, so that a value may begin with a dash.
    return [f"{option}={_text(item)}" for item in items]


def _text(item: object) -> str:
    """Return the text of an item: the name of a path, which may be bytes, and the digits of a number."""
    return os.fsdecode(item) if isinstance(item, (bytes, os.PathLike)) else str(item)


def _assignments(name: str, items: Mapping[str, object]) -> list[str]:
    """Return ``key=item`` for each item. The command takes everything before the first ``=`` for the key."""
    for key in items:
        if "=" in key:
            raise UsageError(f"a key of `{name}` cannot contain `=`: `{key}`")
    return [f"{key}={item}" for key, item in items.items()]
