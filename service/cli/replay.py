"""`whippet replay`: does the steps again that an engine recorded before a fault, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    """The flags are those of `engine.worker.replay`."""
    return run_module("engine.worker.replay", argv)
