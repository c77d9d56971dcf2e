"""One linear layer from a checkpoint of any served format, in its canonical form."""

from __future__ import annotations

import torch

from quant.checkpoint.awq import read_awq
from quant.checkpoint.bnb import read_int8
from quant.checkpoint.errors import BadTensor, NotFinite
from quant.checkpoint.forms import CheckpointLinear, Dense, Int8Rows, Weight
from quant.checkpoint.gguf.blocks import read_gguf
from quant.checkpoint.packed import read_packed
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.source import FLOATS, TensorSource, describe, fetch, fetch_floats
from quant.checkpoint.spec import AwqSpec, GgufSpec, Int8Spec, PackedSpec, QuantSpec


def read_linear(
    source: TensorSource, layer: str, spec: QuantSpec | None, in_features: int, out_features: int
) -> CheckpointLinear:
    """The layer called `layer` (without `.weight`). Its tensors decide its form: a skipped layer is simply dense.

    What is returned owns its memory, but for a dense weight: that is the source's own tensor.
    """
    if in_features < 1 or out_features < 1:
        raise BadTensor(layer, "at least one input and one output", f"{in_features} and {out_features}")
    name = f"{layer}.bias"
    bias = fetch_floats(source, name, (out_features,)).clone() if name in source.names() else None
    return CheckpointLinear(_weight(source, layer, spec, in_features, out_features), bias)


def tensor_names(layer: str, spec: QuantSpec | None) -> tuple[str, ...]:
    """The tensors a layer may be stored in, without its bias: to check a folder for missing and surplus tensors."""
    stems: tuple[str, ...] = ()
    if isinstance(spec, AwqSpec):
        stems = ("qweight", "qzeros", "scales")
    elif isinstance(spec, PackedSpec):
        stems = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    elif isinstance(spec, Int8Spec):
        stems = ("SCB", "weight_format")
    elif isinstance(spec, GgufSpec):
        stems = (spec.kinds[layer].lower(),) if spec.covers(layer) else ()
    return (f"{layer}.weight", *(f"{layer}.{stem}" for stem in stems))


def _weight(source: TensorSource, layer: str, spec: QuantSpec | None, inputs: int, outputs: int) -> Weight:
    name = f"{layer}.weight"
    if isinstance(spec, AwqSpec | PackedSpec):
        packed = f"{layer}.qweight" if isinstance(spec, AwqSpec) else f"{layer}.weight_packed"
        if packed in source.names():
            if name in source.names():
                raise BadTensor(name, f"nothing beside {packed}", "both")
            if isinstance(spec, AwqSpec):
                return read_awq(source, layer, spec, inputs, outputs)
            return read_packed(source, layer, spec, inputs, outputs)
        if name not in source.names() and spec.covers(layer):
            raise BadTensor(packed, "a packed int32 tensor", "no such tensor")
    if isinstance(spec, GgufSpec) and spec.covers(layer):
        return read_gguf(source, layer, spec, inputs, outputs)
    if isinstance(spec, Int8Spec) and _holds_int8(source, layer):
        return read_int8(source, layer, inputs, outputs)
    dense = _dense(source, name, inputs, outputs)
    if isinstance(spec, Int8Spec) and spec.covers(layer):
        return _rounded(name, dense)  # the config asks for eight bits, the file still has floats
    return Dense(dense)


def _rounded(name: str, dense: torch.Tensor) -> Int8Rows:
    try:
        return round_rows(dense)
    except NotFinite as error:
        raise BadTensor(name, "finite numbers", "NaN or infinity") from error


def _dense(source: TensorSource, name: str, inputs: int, outputs: int) -> torch.Tensor:
    if name in source.names() and source.dtype(name) not in FLOATS:
        raise BadTensor(
            name,
            describe((outputs, inputs), FLOATS),
            f"{describe(source.shape(name), (source.dtype(name),))}, which no quantization config explains",
        )
    return fetch(source, name, (outputs, inputs), FLOATS)


def _holds_int8(source: TensorSource, layer: str) -> bool:
    name = f"{layer}.weight"
    return f"{layer}.SCB" in source.names() or (name in source.names() and source.dtype(name) == torch.int8)
