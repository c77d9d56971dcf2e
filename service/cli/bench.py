"""Measures this machine or a running server: `whippet bench`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("bench", argv)
