"""`whippet rollback`: turns one optimisation off on a running server and shows what that changes."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    """The flags are those of `bench.live`."""
    return run_module("bench.live", argv)
