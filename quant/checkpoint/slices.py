"""Reads the part of a model that one of several ranks computes: some outputs of a linear, or some of its inputs.

`SlicedTensors` cuts tensors as they lie in the files, so that only a part is read. A form in which that would change a
number, such as a row that is rounded as a whole, is read whole and cut in memory (`narrowed`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import CheckpointLinear, Dense, Int4Groups, Int4Minima, Int8Rows, Weight
from quant.checkpoint.gguf.kinds import KINDS
from quant.checkpoint.source import TensorSource
from quant.checkpoint.spec import WHOLE_ROW, AwqSpec, GgufSpec, Int8Spec, PackedSpec, QuantSpec


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers [first, last) of an axis of `of`."""

    first: int
    last: int
    of: int

    @property
    def size(self) -> int:
        return self.last - self.first

    @property
    def whole(self) -> bool:
        return self.size == self.of


@dataclass(frozen=True, slots=True)
class LinearSlice:
    """The outputs and inputs of a linear that a rank computes. `adds_bias`: whether it adds the bias; of ranks that
    each compute a part of the same sums, one does."""

    outputs: Span
    inputs: Span
    adds_bias: bool = True


Slices = Mapping[str, LinearSlice]  # by linear or norm, its name without `.weight`; what is not named is whole

# The logical axes of a linear's tensors: outputs and inputs, in the order of their dimensions.
_AXES: Final = {
    "weight": "oi",
    "bias": "o",
    "scales": "io",
    "weight_packed": "oi",
    "weight_scale": "oi",
    "weight_zero_point": "oi",
    "weight_g_idx": "i",
    "SCB": "o",
}
_WORD: Final = 8  # four-bit numbers in an int32
_GGUF_VALUES: Final = {kind.name: kind.values for kind in KINDS.values()}


class SlicedTensors:
    """A `TensorSource` that holds a part of another one."""

    def __init__(self, source: TensorSource, slices: Slices, spec: QuantSpec | None = None) -> None:
        self._source = source
        self._slices = slices
        self._gemv = isinstance(spec, AwqSpec) and spec.layout == "gemv"

    def names(self) -> Collection[str]:
        return self._source.names()

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self._source.shape(name)
        return tuple(last - first for first, last in self._cut(name, whole))

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of the source's tensor, or a copy where its content depends on what is cut."""
        prefix, _, kind = name.rpartition(".")
        found, cut = self._source.tensor(name), self._slices.get(prefix)
        if cut is None:
            return found
        if kind == "weight_shape":
            return found.new_tensor((cut.outputs.size, cut.inputs.size))
        for axis, (first, last) in enumerate(self._cut(name, tuple(found.shape))):
            found = found.narrow(axis, first, last - first)
        if kind == "bias" and not cut.adds_bias:
            return torch.zeros_like(found)
        if kind == "weight_g_idx" and cut.inputs.first:
            return torch.where(found < 0, found, found - found.min())
        return found

    def _cut(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Returns first and last of each dimension. Raises BadTensor where a border lies within what the file packs."""
        prefix, _, kind = name.rpartition(".")
        cut = self._slices.get(prefix)
        if cut is None:
            return tuple((0, size) for size in shape)
        axes = self._axes(kind)[: len(shape)]
        if not axes:
            return tuple((0, size) for size in shape)
        spans = [cut.outputs if axis == "o" else cut.inputs for axis in axes]
        words = kind == "weight_zero_point" and self._source.dtype(name) == torch.int32
        found = []
        for at, (span, size) in enumerate(zip(spans, shape, strict=True)):
            found.append(_places(name, span, size, _WORD if words and at == 0 else None))
        return tuple(found)

    def _axes(self, kind: str) -> str:
        if kind in ("qweight", "qzeros", "scales"):
            return "oi" if self._gemv else "io"
        return _AXES.get(kind, "" if kind in ("weight_shape", "weight_format") else "oi")  # others: blocks of GGUF


def _places(name: str, span: Span, size: int, packed: int | None) -> tuple[int, int]:
    """Converts a span of an axis to places in a dimension of `size`, in each of which `packed` numbers lie."""
    if span.whole or size == 1:  # one scale for a whole row
        return 0, size
    found = []
    for at in (span.first, span.last):
        place, within = divmod(at * size, span.of) if packed is None else divmod(at, packed)
        if at == span.of:
            place, within = size, 0
        if within:
            raise BadTensor(name, f"a part that ends at {at} of {span.of} in whole groups", f"{size} groups")
        found.append(place)
    return found[0], found[1]


def read_whole(source: TensorSource, prefix: str, cut: LinearSlice, spec: QuantSpec | None) -> bool:
    """Returns whether a part of the inputs must be cut in memory: eight-bit rows that are rounded while they are read,
    and AWQ's GEMV layout, which pads the groups of a row."""
    if cut.inputs.whole:
        return False
    if isinstance(spec, Int8Spec):
        return spec.covers(prefix) and source.dtype(f"{prefix}.weight") != torch.int8
    if isinstance(spec, GgufSpec):
        return spec.covers(prefix) and spec.form(prefix) == "int8"
    return isinstance(spec, AwqSpec) and spec.layout == "gemv" and spec.covers(prefix)


def narrowed(found: CheckpointLinear, cut: LinearSlice) -> CheckpointLinear:
    """Cuts a linear that was read whole. What is returned owns its memory, but for a dense weight."""
    bias = found.bias
    if bias is not None:
        bias = bias[cut.outputs.first : cut.outputs.last].clone() if cut.adds_bias else None
        bias = bias if bias is not None else torch.zeros(cut.outputs.size)
    return CheckpointLinear(_narrowed(found.weight, cut.outputs, cut.inputs), bias)


def _narrowed(weight: Weight, outputs: Span, inputs: Span) -> Weight:
    rows = slice(outputs.first, outputs.last)
    if isinstance(weight, Dense):
        return Dense(weight.weight[rows, inputs.first : inputs.last])
    if isinstance(weight, Int8Rows):
        return Int8Rows(weight.q[rows, inputs.first : inputs.last].clone(), weight.scale[rows].clone())
    whole_rows = weight.group == inputs.of
    group = inputs.size if whole_rows else weight.group
    if not whole_rows and (inputs.first % group or inputs.last % group):
        raise BadTensor("a packed weight", f"parts of {inputs.size} inputs in whole groups", f"groups of {group}")
    packed = weight.packed[rows, inputs.first // 2 : inputs.last // 2].clone()
    groups = slice(None) if whole_rows else slice(inputs.first // group, inputs.last // group)
    scale = weight.scale[rows, groups].clone()
    if isinstance(weight, Int4Minima):
        return Int4Minima(packed, scale, weight.minimum[rows, groups].clone(), group)
    return Int4Groups(packed, scale, weight.zero[rows, groups].clone(), group)


def why_not(prefix: str, cut: LinearSlice, spec: QuantSpec | None) -> str | None:
    """Returns why a linear cannot be cut so, in this format, or None."""
    unit = _unit(prefix, spec)
    if unit is not None and not cut.inputs.whole and cut.inputs.size % unit:
        return f"{prefix} has {cut.inputs.size} inputs a rank, and groups of {unit}"
    if _packs_outputs(prefix, spec) and cut.outputs.first % _WORD:
        return f"{prefix} has {cut.outputs.size} outputs a rank, and the file packs them in words of {_WORD}"
    return None


def _packs_outputs(prefix: str, spec: QuantSpec | None) -> bool:
    if isinstance(spec, AwqSpec):
        return spec.layout == "gemm" and spec.covers(prefix)
    scheme = spec.scheme(prefix) if isinstance(spec, PackedSpec) else None
    return scheme is not None and not scheme.symmetric


def _unit(prefix: str, spec: QuantSpec | None) -> int | None:
    """Returns how many neighbouring inputs share a scale or lie in one word; None: any may be cut off."""
    if spec is None or not spec.covers(prefix):
        return None
    if isinstance(spec, AwqSpec):
        return _WORD if spec.group == WHOLE_ROW else spec.group
    if isinstance(spec, PackedSpec):
        scheme = spec.scheme(prefix)
        return None if scheme is None else _WORD if scheme.group == WHOLE_ROW else scheme.group
    if isinstance(spec, GgufSpec):
        return None if spec.form(prefix) == "int8" else _GGUF_VALUES[spec.kinds[prefix]]
    return None
