"""Replays traces through the caches: `whippet cache replay`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("bench.replay", argv)
