"""The walk over the layers for up to 512 tokens on a CPU: in C, one call for all layers and one for the head.

Each token stands for itself: at its position, over its sequence's keys up to there, its own and those of the step
included. So rows of one token, drafts and pieces of a prompt are all the same here.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch

from engine.kv.kv_cache import KvCache
from engine.linear import DenseLinear, Linear, Placement
from engine.linear.cpu import Int4Cpu, Int8Cpu
from engine.linear.joined import JoinedLinear
from engine.linear.products import TYPES, CpuProducts, Int4, Int8, PlainMatrix
from engine.model import features
from engine.model.attention import RowSpan
from engine.model.weights import Layer, Weights
from engine.settings import PAGE_SIZE
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.tensors import LayerForm, Product, layer_form

MOST_TOKENS: Final = 512  # of a step
MOST_ROWS: Final = 16  # tokens that this walk takes at any position, and rows of logits that it computes
# More tokens than MOST_ROWS are taken before this position, since torch's attention, which reads keys in blocks, wins
# behind long contexts: where torch has about as many threads, and where it has at most half as many.
NEAR_POSITIONS: Final = 512
FAR_POSITIONS: Final = 4096
SPLIT: Final = 512  # positions that one unit of attention reads at most, as in walk.c
_BITS4, _BITS8, _BITS16, _BITS32 = range(4)
_pointer = ctypes.c_void_p
_long = ctypes.c_long


def why_no_cpu_walk(config: ModelConfig, placement: Placement) -> str | None:
    if placement.device.type != "cpu":
        return "the walk in C is for CPUs"
    if placement.products is None:
        narrow = placement.dtype != torch.float32
        return "there is no C compiler for the walk" if narrow else "weights of 32 bits are multiplied by torch"
    return features.why_not(config)


def open_cpu_walk(config: ModelConfig, weights: Weights, rope: torch.Tensor, placement: Placement) -> CpuWalk | str:
    """Opens the walk, or returns why there is none."""
    reason = why_no_cpu_walk(config, placement)
    if reason is not None or placement.products is None:
        return reason or ""
    try:
        return CpuWalk(config, weights, rope, placement.products)
    except NotWalkable as unfit:
        return str(unfit)


class NotWalkable(Exception):
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


@dataclass(slots=True)
class _KeptStructures:
    """Structures that C reads, and their tensors, live as long as the model."""

    kept: list[object] = field(default_factory=list)

    def linear(self, linear: Linear, inputs: int, outputs: int) -> _WalkLinear:
        """Describes a linear to the library. Raises NotWalkable."""
        flat = _flat(linear)
        parts = (_WalkPart * len(flat))(*(_part(one, inputs) for one in flat))
        biases = [(_bias(one), part.outputs) for one, part in zip(flat, parts, strict=True)]
        bias = None
        if any(one is not None for one, _ in biases):
            bias = torch.cat([torch.zeros(count) if one is None else one.float() for one, count in biases])
        if sum(part.outputs for part in parts) != outputs:
            raise NotWalkable("a linear has other outputs than its layer")
        self.kept += [linear, parts, bias]
        return _WalkLinear(parts, None if bias is None else bias.data_ptr(), len(flat), inputs, outputs)

    def floats(self, tensor: torch.Tensor) -> int:
        """The address of contiguous float32 numbers."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            tensor = tensor.float().contiguous()
        self.kept.append(tensor)
        return tensor.data_ptr()


class CpuWalk:
    """The weights, in the form that `walk.c` reads, must stay where they are."""

    def __init__(self, config: ModelConfig, weights: Weights, angles: torch.Tensor, products: CpuProducts) -> None:
        """angles: float32 [positions, 2, head_dim]. Raises NotWalkable."""
        self._library = products.library
        self._library.walk_room.restype = self._library.walk_units.restype = _long
        self._threads = products.walkers
        self._reach = FAR_POSITIONS if 2 * torch.get_num_threads() <= self._threads else NEAR_POSITIONS
        self._held = held = _KeptStructures()
        self._vocabulary, self._most_units = config.vocab_size, int(self._library.walk_units())
        self._most_heads = max(config.heads, config.kv_heads)
        form = layer_form(config)
        made = [self._layer(form, one) for one in weights.layers]
        layers = (_WalkLayer * len(made))(*made)
        held.kept.append(layers)
        head = held.linear(weights.head, config.hidden_size, config.vocab_size)
        self._model = _Model(
            *(layers, held.floats(weights.norm.weight), held.floats(angles), head),
            *(len(made), config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.intermediate_size),
            config.norm_eps,
        )
        self._room = torch.empty(0)

    def _layer(self, form: LayerForm, layer: Layer) -> _WalkLayer:
        held = self._held

        def linear(made: Linear, product: Product) -> _WalkLinear:
            return held.linear(made, product.inputs, sum(product.outputs))

        return _WalkLayer(
            held.floats(layer.input_norm.weight),
            held.floats(layer.mlp_norm.weight),
            None if layer.head_norm is None else held.floats(layer.head_norm.weight),
            linear(layer.qkv, form.qkv),
            linear(layer.output, form.output),
            linear(layer.gate_up, form.gate_up),
            linear(layer.down, form.down),
            layer.window or 0,
        )

    def takes(self, spans: Sequence[RowSpan], cache: KvCache) -> bool:
        tokens = sum(span.count for span in spans)
        last = _last(spans)
        near = tokens <= MOST_ROWS or (tokens <= MOST_TOKENS and last < self._reach)
        units = tokens * (last // SPLIT + 1) * self._most_heads
        return near and units <= self._most_units and cache.heads_outside

    def forward(
        self, x: torch.Tensor, spans: Sequence[RowSpan], positions: torch.Tensor, slots: torch.Tensor, cache: KvCache
    ) -> None:
        """x float32 [tokens, hidden], contiguous: embeddings, which become what the last layer leaves. Writes keys and
        values."""
        last, held = _last(spans), cache.storage
        pages = _table(spans, last // PAGE_SIZE + 1)
        step = _Step(
            x=x.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            pages=pages.data_ptr(),
            cache=held.data_ptr(),
            rows=x.shape[0],
            widest=pages.shape[1],
            cached=held.shape[3] * held.shape[4],
            narrow=held.dtype == torch.uint8,
            splits=last // SPLIT + 1,
            threads=self._threads,
        )
        self._go(self._library.walk_layers, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], before the last norm → [rows, vocab], float32."""
        hidden = hidden.contiguous()
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


def _last(spans: Sequence[RowSpan]) -> int:
    """The greatest position of a step."""
    return max(span.end for span in spans) - 1


def _table(spans: Sequence[RowSpan], widest: int) -> torch.Tensor:
    """int32 [tokens, widest]: the pages of each token's sequence."""
    table = array("i")
    for span in spans:
        row = array("i", span.pages[:widest])
        row.frombytes(bytes(row.itemsize * (widest - len(row))))
        table.extend(row * span.count)
    return torch.frombuffer(table, dtype=torch.int32).view(-1, widest)


def _flat(linear: Linear) -> Sequence[Linear]:
    return [one for part in linear.parts for one in _flat(part)] if isinstance(linear, JoinedLinear) else [linear]


def _bias(linear: Linear) -> torch.Tensor | None:
    return linear.bias if isinstance(linear, DenseLinear | Int4Cpu | Int8Cpu) else None


def _part(linear: Linear, inputs: int) -> _WalkPart:
    """Describes one matrix of a linear. Raises NotWalkable."""
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
            raise NotWalkable(f"a plain weight of {weight.dtype} lies otherwise than C reads it")
    else:
        raise NotWalkable(f"no product in C takes a {type(linear).__name__}")
    if own != inputs:
        raise NotWalkable("a linear has other inputs than its layer")
    return _WalkPart(kind, outputs, made)
