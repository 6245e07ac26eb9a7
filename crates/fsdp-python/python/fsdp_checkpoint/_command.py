"""The command ``fsdp`` that comes with the package."""

from __future__ import annotations

import signal
import sys

from . import _native


def main() -> None:
    """Run the command line of this process."""
    # Python's own handlers would wait for Python code, which does not run meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.run(["fsdp", *sys.argv[1:]]))
