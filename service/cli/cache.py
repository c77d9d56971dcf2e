"""`whippet cache replay`: traces through the caches. `bench.replay` runs them in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    """The flags are those of `bench.replay`."""
    return run_module("bench.replay", argv)
