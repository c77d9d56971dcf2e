"""Runs a module in another Python process with the same packages, so that the command itself needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """Arguments that run a module in this interpreter; the current folder is not importable."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> Mapping[str, str]:
    """Returns the environment with a PYTHONPATH that finds the packages of this process."""
    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Runs in the foreground on this terminal and handles ctrl-C itself. Returns its exit code."""
    with subprocess.Popen(command(module, arguments), env=environment()) as child:
        while True:
            try:
                return _exit_code(child.wait())
            except KeyboardInterrupt:
                continue


def _exit_code(returned: int) -> int:
    """Returns 128 and the signal's number, as shells have it, for a process that a signal ended."""
    return 128 - returned if returned < 0 else returned
