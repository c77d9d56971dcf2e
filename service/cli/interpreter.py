"""Runs a module in another Python process with the same packages, so that the command itself needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command(module: str, arguments: Sequence[str]) -> list[str]:
    """The current folder is not importable there."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> Mapping[str, str]:
    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


def run_module(module: str, arguments: Sequence[str]) -> int:
    """Runs on this terminal and handles ctrl-C itself."""
    with subprocess.Popen(command(module, arguments), env=environment()) as child:
        while True:
            try:
                return _exit_code(child.wait())
            except KeyboardInterrupt:
                continue


def _exit_code(returned: int) -> int:
    """A process that a signal ended has 128 and its number, as in shells."""
    return 128 - returned if returned < 0 else returned
