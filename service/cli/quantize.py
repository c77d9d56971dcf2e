"""Makes 4-bit or 8-bit weights of a model folder: `whippet quantize`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("quant", ["quantize", *argv])
