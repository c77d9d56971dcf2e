"""Reads the linears of a GGUF file, and records what their conversion costs in memory and precision."""

from __future__ import annotations

from quant.checkpoint.forms import CheckpointLinear, Dense
from quant.checkpoint.gguf.blocks import StorageCosts, read_gguf
from quant.checkpoint.linear import read_linear
from quant.checkpoint.source import TensorSource, fetch_floats, finite
from quant.checkpoint.spec import GgufSpec


class GgufLinears:
    def __init__(self, spec: GgufSpec, costs: StorageCosts) -> None:
        self._spec = spec
        self._costs = costs

    def __call__(self, source: TensorSource, prefix: str, inputs: int, outputs: int) -> CheckpointLinear:
        if not self._spec.covers(prefix):
            found = read_linear(source, prefix, self._spec, inputs, outputs)
            if isinstance(found.weight, Dense):
                finite(found.weight.weight, f"{prefix}.weight")
            return found
        name = f"{prefix}.bias"
        bias = fetch_floats(source, name, (outputs,)).clone() if name in source.names() else None
        return CheckpointLinear(read_gguf(source, prefix, self._spec, inputs, outputs, self._costs), bias)
