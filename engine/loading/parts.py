"""Reads the linears of one rank of a split model."""

from __future__ import annotations

from engine.linear.quantized import Reader
from engine.loading.dummy import DummyLinears
from quant.checkpoint.forms import CheckpointLinear
from quant.checkpoint.slices import Slices, narrowed, read_whole
from quant.checkpoint.source import TensorSource
from quant.checkpoint.spec import QuantSpec


def of_part(read: Reader, whole: TensorSource, slices: Slices, spec: QuantSpec | None) -> Reader:
    """Returns a reader of parts, which is given a source that holds parts alone. What cannot be read in parts, and
    made-up numbers, are read from `whole` and cut."""

    def read_part(source: TensorSource, prefix: str, inputs: int, outputs: int) -> CheckpointLinear:
        cut = slices.get(prefix)
        if cut is None or not (isinstance(read, DummyLinears) or read_whole(whole, prefix, cut, spec)):
            return read(source, prefix, inputs, outputs)
        return narrowed(read(whole, prefix, cut.inputs.of, cut.outputs.of), cut)

    return read_part
