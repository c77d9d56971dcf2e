"""`whippet bench`: measures this machine, or a server that runs. `bench` is its body, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    """The flags are those of `python -m bench`."""
    return run_module("bench", argv)
