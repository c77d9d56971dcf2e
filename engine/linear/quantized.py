"""Linears of quantized checkpoints: each part read into its canonical form, parts stacked, the whole laid out for its
device. A part that its checkpoint left plain stays plain."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.weights import to_matrix
from engine.kernels.weights import why_not as why_not_cuda
from engine.linear import DenseLinear, Linear, LinearLoader, Placement, Projection
from engine.linear.canonical import CanonicalLinear
from engine.linear.cpu import pack_int4, pack_int8, pack_minima
from engine.linear.cuda import CudaKernels, CudaLinear
from engine.linear.joined import JoinedLinear
from engine.linear.products import CpuProducts
from quant.checkpoint import forms as canonical
from quant.checkpoint.forms import Dense, Int4Groups, Int4Minima, Int8Rows, Weight, stack_rows
from quant.checkpoint.linear import read_linear
from quant.checkpoint.source import TensorSource, finite
from quant.checkpoint.spec import Int8Spec, QuantSpec

Quantize = Literal["int8"]
Reader = Callable[[TensorSource, str, int, int], canonical.CheckpointLinear]  # source, prefix, inputs, outputs


def quantized_reader(spec: QuantSpec | None, quantize: Quantize | None) -> Reader | None:
    """None where all weights are plain. `quantize` rounds plain weights to eight bits, except the head's."""
    if spec is not None and quantize is not None:
        raise ValueError("weights that are quantized already are not quantized again")
    how = Int8Spec() if quantize == "int8" else spec
    if how is None:
        return None

    def read(source: TensorSource, prefix: str, inputs: int, outputs: int) -> canonical.CheckpointLinear:
        found = read_linear(source, prefix, how, inputs, outputs)
        if isinstance(found.weight, Dense):
            finite(found.weight.weight, f"{prefix}.weight")
        return found

    return read


def loader_of(read: Reader) -> LinearLoader:
    kernels = CudaKernels()

    def load(source: TensorSource, projection: Projection, placement: Placement) -> Linear:
        moved = source if placement.device.type == "cpu" else _Moved(source, placement.device)
        shapes = zip(projection.prefixes, projection.out_features, strict=True)
        parts = [read(moved, prefix, projection.in_features, rows) for prefix, rows in shapes]
        return _join(parts, placement, kernels)

    return load


def _join(parts: list[canonical.CheckpointLinear], placement: Placement, kernels: CudaKernels) -> Linear:
    biases = [part.bias for part in parts]
    bias = torch.cat([one.float() for one in biases if one is not None]) if None not in biases else None
    one = parts[0].weight if len(parts) == 1 else stack_rows([part.weight for part in parts])
    if one is not None:
        parts.clear()  # what was stacked is not needed beside the stack
        return place_weight(one, bias, placement, kernels)
    return JoinedLinear(tuple(place_weight(part.weight, part.bias, placement, kernels) for part in parts))


def place_weight(
    weight: Weight,
    bias: torch.Tensor | None,
    placement: Placement,
    kernels: CudaKernels | None = None,
    *,
    unpack: bool = True,
) -> Linear:
    """`kernels`: how a GPU multiplies; None, as for a CPU without products: by plain tiles. `unpack`: whether packed
    weights that no kernel reads become plain on a GPU."""
    bias = None if bias is None else bias.to(placement.device, torch.float32)
    if isinstance(weight, Dense):
        matrix = placement.matrix(*weight.shape).copy_(weight.weight)
        return DenseLinear(matrix, None if bias is None else bias.to(placement.dtype), placement.products)
    if placement.device.type == "cpu":
        return _on_cpu(weight, bias, placement.products)
    if isinstance(weight, Int4Minima):
        return CanonicalLinear(weight, bias)
    weight = _to_device(weight, placement.device)
    if why_not_cuda(weight) is None:
        return CudaLinear(to_matrix(weight), bias, kernels)
    return _unpacked(weight, bias, placement) if unpack else CanonicalLinear(weight, bias)


def _unpacked(weight: Int4Groups | Int8Rows, bias: torch.Tensor | None, placement: Placement) -> Linear:
    """Plain, at two or four times the memory, where the kernels read the weight's shape in bfloat16 only: without them
    the whole model would be many times slower."""
    shape = torch.empty(weight.shape, dtype=placement.dtype, device="meta")
    if why_not_cuda(Dense(shape)) is not None:
        return CanonicalLinear(weight, bias)
    plain = shape if placement.device.type == "meta" else weight.dequantize(placement.dtype)
    return DenseLinear(plain, None if bias is None else bias.to(placement.dtype))


def _on_cpu(
    weight: Int4Groups | Int4Minima | Int8Rows, bias: torch.Tensor | None, products: CpuProducts | None
) -> Linear:
    if products is None:
        return CanonicalLinear(weight, bias)
    if isinstance(weight, Int4Groups):
        return pack_int4(weight, bias, products)
    if isinstance(weight, Int4Minima):
        return pack_minima(weight, bias, products)
    return pack_int8(weight, bias, products)


def _to_device(weight: Int4Groups | Int8Rows, device: torch.device) -> Int4Groups | Int8Rows:
    if isinstance(weight, Int8Rows):
        return Int8Rows(weight.q.to(device), weight.scale.to(device))
    return Int4Groups(weight.packed.to(device), weight.scale.to(device), weight.zero.to(device), weight.group)


@dataclass(frozen=True, slots=True)
class _Moved:
    """Copies tensors to a device as they are read, to unpack them there."""

    source: TensorSource
    device: torch.device

    def names(self) -> Collection[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self.source.tensor(name).to(self.device)
