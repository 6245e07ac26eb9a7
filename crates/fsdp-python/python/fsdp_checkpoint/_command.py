"""The command ``fsdp`` that comes with the package."""

from __future__ import annotations

import signal
import sys

from . import _native


def main() -> None:
    """Run the command line of this process."""
    # Python runs its signal handlers only between Python instructions, and none run until the command has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.run(["fsdp", *sys.argv[1:]]))
