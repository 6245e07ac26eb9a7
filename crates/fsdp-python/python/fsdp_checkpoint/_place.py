"""The type of a checkpoint's place."""

from __future__ import annotations

import os

__all__ = ["Place"]

Place = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""A path, or the URL of an object store."""
