"""Converts pickled weights of a folder to safetensors: `whippet convert`."""

from __future__ import annotations

from collections.abc import Sequence

from service.cli.interpreter import run_module


def run(argv: Sequence[str]) -> int:
    return run_module("quant", ["convert", *argv])
