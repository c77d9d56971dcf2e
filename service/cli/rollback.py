"""Turns one optimisation off on a running server and prints the effect: `whippet rollback`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("bench.live", argv)
