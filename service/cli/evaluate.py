"""Measures a model's perplexity and its distance from another: `whippet evaluate`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("quant", ["evaluate", *argv])
