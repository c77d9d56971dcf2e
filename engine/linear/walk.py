"""Calls the walk of `walk.c` with the addresses of tensors: one call a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from engine.linear import DenseLinear, Linear
from engine.linear.cpu import Int4Cpu, Int8Cpu
from engine.linear.joined import JoinedLinear
from engine.linear.products import TYPES, CpuProducts, Int4, Int8, PlainMatrix

SPLIT: Final = 512  # positions that one unit of attention reads at most, as in walk.c
_BITS4, _BITS8, _BITS16, _BITS32 = range(4)
_pointer = ctypes.c_void_p
_long = ctypes.c_long


class Unfit(Exception):
    """The walk does not support this model; the text is the reason in one line."""


class _Wide(ctypes.Structure):
    _fields_: ClassVar[Any] = [("w", _pointer), ("width", _long)]


class _As(ctypes.Union):
    _fields_: ClassVar[Any] = [("four", Int4), ("eight", Int8), ("sixteen", PlainMatrix), ("thirty_two", _Wide)]


class _WalkPart(ctypes.Structure):
    _fields_: ClassVar[Any] = [("kind", _long), ("outputs", _long), ("weight", _As)]


class _WalkLinear(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *(("parts", ctypes.POINTER(_WalkPart)), ("bias", _pointer)),
        *(("count", _long), ("inputs", _long), ("outputs", _long)),
    ]


class _WalkLayer(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *(("input_norm", _pointer), ("mlp_norm", _pointer), ("head_norm", _pointer)),
        *(("qkv", _WalkLinear), ("output", _WalkLinear), ("gate_up", _WalkLinear), ("down", _WalkLinear)),
        ("window", _long),
    ]


class _Model(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *(("layers", ctypes.POINTER(_WalkLayer)), ("norm", _pointer), ("angles", _pointer), ("head", _WalkLinear)),
        *((name, _long) for name in ("count", "hidden", "heads", "kv_heads", "dim", "inner")),
        ("epsilon", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, _pointer) for name in ("x", "logits", "positions", "slots", "pages", "cache", "room")),
        *((name, _long) for name in ("rows", "widest", "cached", "narrow", "splits", "threads")),
    ]


@dataclass(frozen=True, slots=True)
class WalkedLayer:
    """One layer: float32 weights of norms, and linears."""

    input_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor
    head_norm: torch.Tensor | None  # [heads + kv_heads, dim]
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True)
class WalkedModel:
    layers: tuple[WalkedLayer, ...]
    norm: torch.Tensor
    head: Linear
    angles: torch.Tensor  # float32 [positions, 2, dim]
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    epsilon: float


@dataclass(frozen=True, slots=True)
class WalkedRows:
    """Positions of a step's tokens, and their part of the cache."""

    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]
    pages: torch.Tensor  # int32 [rows, widest]
    last: int  # the greatest of the positions
    cache: torch.Tensor  # [layers, 2, kv_heads, pages, 16, dim]: float32, or bytes of e4m3


@dataclass(slots=True)
class _KeptStructures:
    """Structures that C reads, and the tensors made for it: they live as long as the model."""

    kept: list[object] = field(default_factory=list)

    def linear(self, linear: Linear, inputs: int, outputs: int) -> _WalkLinear:
        """Describes a linear to the library. Raises Unfit."""
        flat = _flat(linear)
        parts = (_WalkPart * len(flat))(*(_part(one, inputs) for one in flat))
        biases = [(_bias(one), part.outputs) for one, part in zip(flat, parts, strict=True)]
        bias = None
        if any(one is not None for one, _ in biases):
            bias = torch.cat([torch.zeros(count) if one is None else one.float() for one, count in biases])
        if sum(part.outputs for part in parts) != outputs:
            raise Unfit("a linear has other outputs than its layer")
        self.kept += [linear, parts, bias]
        return _WalkLinear(parts, None if bias is None else bias.data_ptr(), len(flat), inputs, outputs)

    def floats(self, tensor: torch.Tensor) -> int:
        """Returns the address of contiguous float32 numbers."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            tensor = tensor.float().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()


class Walk:
    """Holds a model in the form that `walk.c` reads. Its weights must stay where they are."""

    def __init__(self, model: WalkedModel, products: CpuProducts) -> None:
        """Describes the model to the library. Raises Unfit."""
        self._library = products.library
        self._library.walk_room.restype = self._library.walk_units.restype = _long
        self._threads = products.walkers
        self._held = _KeptStructures()
        self._vocabulary, self._most_units = model.vocabulary, int(self._library.walk_units())
        made = [self._layer(model, one) for one in model.layers]
        layers = (_WalkLayer * len(made))(*made)
        self._held.kept.append(layers)
        sizes = (len(made), model.hidden, model.heads, model.kv_heads, model.dim, model.inner)
        norm, angles = self._held.floats(model.norm), self._held.floats(model.angles)
        head = self._held.linear(model.head, model.hidden, model.vocabulary)
        self._model = _Model(layers, norm, angles, head, *sizes, model.epsilon)
        self._units = model.kv_heads, model.heads
        self._room = torch.empty(0)

    def _layer(self, model: WalkedModel, layer: WalkedLayer) -> _WalkLayer:
        held, queries, keys = self._held, model.heads * model.dim, model.kv_heads * model.dim
        head_norm = None if layer.head_norm is None else held.floats(layer.head_norm)
        return _WalkLayer(
            held.floats(layer.input_norm),
            held.floats(layer.mlp_norm),
            head_norm,
            held.linear(layer.qkv, model.hidden, queries + 2 * keys),
            held.linear(layer.output, queries, model.hidden),
            held.linear(layer.gate_up, model.hidden, 2 * model.inner),
            held.linear(layer.down, model.inner, model.hidden),
            layer.window or 0,
        )

    def takes(self, rows: int, last: int) -> bool:
        """Whether the tokens, the last at position `last`, are few enough."""
        return rows * (last // SPLIT + 1) * max(self._units) <= self._most_units

    def layers(self, x: torch.Tensor, rows: WalkedRows) -> None:
        """Transforms x float32 [rows, hidden], contiguous, in place from embeddings to the last layer's output."""
        splits = rows.last // SPLIT + 1
        cached = rows.cache.shape[3] * rows.cache.shape[4]
        step = _Step(
            x=x.data_ptr(),
            positions=rows.positions.data_ptr(),
            slots=rows.slots.data_ptr(),
            pages=rows.pages.data_ptr(),
            cache=rows.cache.data_ptr(),
            rows=x.shape[0],
            widest=rows.pages.shape[1],
            cached=cached,
            narrow=rows.cache.dtype == torch.uint8,
            splits=splits,
            threads=self._threads,
        )
        self._go(self._library.walk_layers, step)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shapes: hidden float32 [rows, hidden], contiguous → float32 [rows, vocabulary]."""
        logits = hidden.new_empty(hidden.shape[0], self._vocabulary)
        step = _Step(
            x=hidden.data_ptr(), logits=logits.data_ptr(), rows=hidden.shape[0], splits=1, threads=self._threads
        )
        self._go(self._library.walk_head, step)
        return logits

    def _go(self, walk: Any, step: _Step) -> None:
        model, held = ctypes.byref(self._model), ctypes.byref(step)
        floats = self._library.walk_room(model, held)
        if floats > self._room.numel():
            self._room = torch.empty(floats)
        step.room = self._room.data_ptr()
        walk(model, held)


def _flat(linear: Linear) -> Sequence[Linear]:
    return [one for part in linear.parts for one in _flat(part)] if isinstance(linear, JoinedLinear) else [linear]


def _bias(linear: Linear) -> torch.Tensor | None:
    return linear.bias if isinstance(linear, DenseLinear | Int4Cpu | Int8Cpu) else None


def _part(linear: Linear, inputs: int) -> _WalkPart:
    """Describes one matrix of a linear. Raises Unfit."""
    if isinstance(linear, Int4Cpu):
        (outputs, own, group), q = linear.shape, linear.q
        zero = linear.zero.data_ptr()
        points, minima = (zero, None) if linear.zero.dtype == torch.uint8 else (None, zero)
        scale = linear.scale
        four = Int4(q.data_ptr(), scale.data_ptr(), points, minima, group, TYPES[scale.dtype])
        made, kind = _As(four=four), _BITS4
    elif isinstance(linear, Int8Cpu):
        outputs, own = linear.outputs, linear.q.shape[1]
        made, kind = _As(eight=Int8(linear.q.data_ptr(), linear.scale.data_ptr())), _BITS8
    elif isinstance(linear, DenseLinear):
        (outputs, own), weight = linear.weight.shape, linear.weight
        if weight.dtype.itemsize == 2 and weight.is_contiguous():
            made, kind = _As(sixteen=PlainMatrix(weight.data_ptr(), TYPES[weight.dtype])), _BITS16
        elif weight.dtype == torch.float32 and weight.stride(0) == 1:
            made, kind = _As(thirty_two=_Wide(weight.data_ptr(), weight.stride(1))), _BITS32
        else:
            raise Unfit(f"a plain weight of {weight.dtype} lies otherwise than C reads it")
    else:
        raise Unfit(f"no product in C takes a {type(linear).__name__}")
    if own != inputs:
        raise Unfit("a linear has other inputs than its layer")
    return _WalkPart(kind, outputs, made)
