"""Another Python process that finds the same packages as this one: torch stays out of the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The words that run a module in this interpreter, the current folder not importable."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> Mapping[str, str]:
    """So that the process finds the packages that this one would."""
    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


def run_module(module: str, arguments: Sequence[str]) -> int:
    """In the foreground, on this terminal; ctrl-C reaches it and it alone answers. Returns its exit code."""
    with subprocess.Popen(command(module, arguments), env=environment()) as child:
        while True:
            try:
                return _exit_code(child.wait())
            except KeyboardInterrupt:
                continue


def _exit_code(returned: int) -> int:
    """As a shell tells a signal."""
    return 128 - returned if returned < 0 else returned
