"""A model of shapes alone, which takes no memory: it shows what would serve it, and with which kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from engine.linear import DenseLinear, Linear, Placement, Projection
from engine.linear.cuda import CudaLinear
from engine.linear.joined import JoinedLinear
from engine.linear.quantized import place_weight
from engine.loading.dummy import DummyLinears
from engine.loading.formats import FolderFormat
from engine.model.weights import Layer, Weights, load_weights
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.source import TensorSource
from quant.checkpoint.spec import GgufSpec, QuantSpec
from quant.checkpoint.tensors import Shapes, plain_tensors

_META = torch.device("meta")


def shape_weights(config: ModelConfig, form: FolderFormat, dtype: torch.dtype, device: str = "cuda") -> Weights:
    """`device`: the type of the one that is to have them. A CPU keeps packed weights of any shape packed."""

    def linear(_: TensorSource, projection: Projection, nowhere: Placement) -> Linear:
        return _linear(form.in_memory, projection, nowhere, packed=device == "cpu")

    return load_weights(config, _Shapes(plain_tensors(config), dtype), linear, Placement(dtype, _META))


def fewer_layers(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
    """Keeps as many layers as show every kind of layer behind every kind that it follows."""
    layers = weights.layers
    kinds = [_kind(layer) for layer in layers]
    last = {pair: at for at, pair in enumerate(pairwise(kinds))}
    kept: list[int] = []
    for at in sorted(last.values()):
        kept += [at + 1] if kept and kept[-1] == at else [at, at + 1]
    if not kept:
        return config, weights
    windows = tuple(layers[at].window for at in kept)
    return replace(config, windows=windows), replace(weights, layers=tuple(layers[at] for at in kept))


def _linear(spec: QuantSpec | None, projection: Projection, nowhere: Placement, *, packed: bool) -> Linear:
    kept = {_kept(spec, prefix) for prefix in projection.prefixes}
    if len(kept) > 1:  # plain parts beside packed ones
        each = zip(projection.prefixes, projection.out_features, strict=True)
        parts = (Projection((prefix,), (rows,), projection.in_features, projection.bias) for prefix, rows in each)
        return JoinedLinear(tuple(_linear(spec, part, nowhere, packed=packed) for part in parts))
    rows, columns = sum(projection.out_features), projection.in_features
    bias = torch.empty(rows, dtype=torch.float32, device=_META) if projection.bias else None
    if spec is None or kept == {"plain"}:
        return DenseLinear(nowhere.matrix(rows, columns), None if bias is None else bias.to(nowhere.dtype))
    read = DummyLinears(spec, 0, _META)(_Shapes({}, nowhere.dtype), projection.prefixes[0], columns, rows)
    return place_weight(read.weight, bias, nowhere, unpack=not packed)


def _kept(spec: QuantSpec | None, prefix: str) -> str:
    """The form of a part, as far as it decides whether parts can be stacked."""
    if spec is None or not spec.covers(prefix):
        return "plain"
    return spec.form(prefix) if isinstance(spec, GgufSpec) else "packed"


@dataclass(frozen=True, slots=True)
class _Shapes:
    """A checkpoint of tensors without numbers."""

    shapes: Shapes
    type: torch.dtype

    def names(self) -> Collection[str]:
        return self.shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self.type

    def tensor(self, name: str) -> torch.Tensor:
        return torch.empty(self.shapes[name], dtype=self.type, device=_META)


def _kind(layer: Layer) -> tuple[object, ...]:
    """What two layers that are served alike have in common."""
    linears: Sequence[Linear] = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return (layer.window, *(_form(linear) for linear in linears))


def _form(linear: Linear) -> tuple[object, ...]:
    if isinstance(linear, CudaLinear):
        matrix = linear.matrix
        return matrix.format, matrix.rows, matrix.columns, matrix.group, linear.bias is None
    if isinstance(linear, DenseLinear):
        return (*linear.weight.shape, linear.bias is None)
    return (type(linear),)
