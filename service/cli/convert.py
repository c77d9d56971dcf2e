"""`whippet convert`: safetensors of a folder with pickled weights. `quant` makes them in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    """The flags are those of `quant`."""
    return run_module("quant", ["convert", *argv])
