"""Repeats the steps that an engine recorded before a fault: `whippet replay`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("engine.worker.replay", argv)
