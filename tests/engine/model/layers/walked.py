"""Models of made-up weights and shapes on a CPU, steps of them, and the same steps in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from engine.kv.kv_cache import KvCache
from engine.linear import DenseLinear, Linear, Placement
from engine.linear.joined import JoinedLinear
from engine.linear.products import CpuProducts
from engine.linear.quantized import place_weight
from engine.model.attention import RowSpan, StepAttention
from engine.model.norm import RmsNorm
from engine.model.rope import rope_tables
from engine.model.transformer import StepInput, Transformer, kv_shape
from engine.model.weights import Layer, Weights
from quant.checkpoint.config import ModelConfig, parse_config
from quant.checkpoint.forms import Dense, Int4Groups, Int4Minima, Int8Rows, Weight

CPU = torch.device("cpu")
PAGE = 16


@dataclass(frozen=True)
class Shape:
    """What varies between models."""

    hidden: int = 64
    inner: int = 96
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    layers: int = 2
    vocabulary: int = 83
    window: int | None = None
    qk_norm: bool = False
    bias: bool = False
    tied: bool = True
    scaled: bool = False  # embedding, residuals, attention and logits
    form: str = "bfloat16"
    kv: torch.dtype = torch.float32


def config_of(shape: Shape) -> ModelConfig:
    family = "Granite" if shape.scaled else "Qwen3" if shape.qk_norm else "Mistral"
    scales = {"embedding_multiplier": 7.3, "residual_multiplier": 0.6, "attention_multiplier": 0.4}
    raw: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": shape.tied,
        "sliding_window": None if shape.qk_norm else shape.window,
    }
    return parse_config(raw | (scales if shape.scaled else {}), "config.json")


class Made:
    """One model, each weight in its own form, and pages with keys and values of nobody's."""

    def __init__(self, shape: Shape, products: CpuProducts, seed: int = 0, pages: int = 64) -> None:
        self.shape, self.config = shape, config_of(shape)
        self._random = torch.Generator().manual_seed(seed)
        self.placement = Placement(torch.float16 if shape.form == "float16" else torch.bfloat16, CPU, products)
        self.exact: dict[int, torch.Tensor] = {}  # float64 weights by the linear's id
        queries, keys = shape.heads * shape.dim, shape.kv_heads * shape.dim
        embedding = self._noise(shape.vocabulary, shape.hidden).to(self.placement.dtype)
        head: Linear = DenseLinear(embedding, products=products)
        self.exact[id(head)] = embedding.double()
        if not shape.tied:
            head = self._linear(shape.vocabulary, shape.hidden, False)
        layers = tuple(
            Layer(
                input_norm=self._norm(shape.hidden),
                qkv=self._linear(queries + 2 * keys, shape.hidden, shape.bias, (queries, keys, keys)),
                head_norm=self._norm(shape.heads + shape.kv_heads, shape.dim) if shape.qk_norm else None,
                output=self._linear(shape.hidden, queries, shape.bias),
                mlp_norm=self._norm(shape.hidden),
                gate_up=self._linear(2 * shape.inner, shape.hidden, shape.bias),
                down=self._linear(shape.hidden, shape.inner, shape.bias),
                window=shape.window,
            )
            for _ in range(shape.layers)
        )
        weights = Weights(embedding, layers, self._norm(shape.hidden), head)
        self.model = Transformer(self.config, weights, rope_tables(self.config, 8192, CPU), self.placement)
        self.pool = KvCache(kv_shape(self.config), pages, self.placement.activations, True, shape.kv)
        held = torch.randn(self.pool.storage.shape, generator=self._random)
        narrow = shape.kv != torch.float32
        self.pool.storage.copy_(held.to(shape.kv).view(torch.uint8) if narrow else held)

    def _noise(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random)

    def _norm(self, *size: int) -> RmsNorm:
        return RmsNorm(1 + 0.1 * self._noise(*size), 1e-5)

    def _linear(self, outputs: int, inputs: int, bias: bool, parts: Sequence[int] = ()) -> Linear:
        if self.shape.form == "mixed" and parts:
            forms = ("int4", "int8", "minima")
            made = [self._one(rows, inputs, bias, form) for rows, form in zip(parts, forms, strict=True)]
            joined = JoinedLinear(tuple(made))
            self.exact[id(joined)] = torch.cat([self.exact[id(one)] for one in made])
            return joined
        return self._one(outputs, inputs, bias, self.shape.form)

    def _one(self, outputs: int, inputs: int, bias: bool, form: str) -> Linear:
        spread = inputs**-0.5
        group = next(size for size in (32, 16, 8, 4, 2) if inputs % size == 0) if inputs % 2 == 0 else 1
        weight: Weight
        if form == "int8":
            q = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=self._random)
            weight = Int8Rows(q, torch.full((outputs,), spread / 64))
        elif form in ("int4", "minima", "mixed"):
            packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, generator=self._random)
            scale = torch.full((outputs, inputs // group), spread / 4).half()
            if form == "minima":
                weight = Int4Minima(packed, scale, (-8 * scale).half(), group)
            else:
                zero = torch.randint(6, 10, scale.shape, dtype=torch.uint8, generator=self._random)
                weight = Int4Groups(packed, scale, zero, group)
        else:
            weight = Dense((self._noise(outputs, inputs) * spread).to(self.placement.dtype))
        beside = self._noise(outputs).mul_(0.1).to(self.placement.dtype).float() if bias else None
        linear = place_weight(weight, beside, self.placement)
        self.exact[id(linear)] = weight.dequantize(torch.float64)
        return linear

    def step(self, spans: list[RowSpan]) -> StepInput:
        """A step of these rows, of tokens that differ."""
        positions = [at for span in spans for at in range(span.start, span.end)]
        places = [(span, at) for span in spans for at in range(span.start, span.end)]
        slots = [span.pages[at // PAGE] * PAGE + at % PAGE for span, at in places]
        ids = [(7 * at + 3) % self.shape.vocabulary for at in range(len(positions))]
        attention = StepAttention(spans, (self.shape.window,), self.pool, CPU)
        return StepInput(torch.tensor(ids), torch.tensor(positions), torch.tensor(slots), attention, None)


def run(made: Made, spans: list[RowSpan], fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits, on a copy of the pages, which is left as it was."""
    before = made.pool.storage.clone()
    made.model.fused = fused
    with torch.inference_mode():
        hidden = made.model.forward(made.step(spans), made.pool)
        logits = made.model.logits(hidden)
    made.pool.storage.copy_(before)
    return hidden, logits


def in_float64(made: Made, spans: list[RowSpan]) -> torch.Tensor:
    """The hidden states, each operation as its definition has it; pages are left as they were."""
    shape, step, weights = made.shape, made.step(spans), made.model.weights
    x = functional.embedding(step.token_ids, weights.embedding).double() * made.config.embedding_scale
    cos, sin = made.model.rope[step.positions].double().unsqueeze(1).unbind(2)
    held = made.pool.storage
    held = (held.view(shape.kv) if held.dtype == torch.uint8 else held).double()
    held = held.view(shape.layers, 2, shape.kv_heads, -1, shape.dim)

    def norm(one: RmsNorm, of: torch.Tensor) -> torch.Tensor:
        return of / (of.square().mean(-1, keepdim=True) + one.eps).sqrt() * one.weight.double()

    def product(linear: Linear, of: torch.Tensor) -> torch.Tensor:
        found = of @ made.exact[id(linear)].T
        parts = linear.parts if isinstance(linear, JoinedLinear) else (linear,)
        biases = [getattr(part, "bias", None) for part in parts]
        given = [one.double() for one in biases if one is not None]
        return found + torch.cat(given) if given else found

    for index, layer in enumerate(weights.layers):
        heads = product(layer.qkv, norm(layer.input_norm, x)).view(len(x), -1, shape.dim)
        turned = heads[:, : shape.heads + shape.kv_heads]
        if layer.head_norm is not None:
            turned = norm(layer.head_norm, turned)
        swapped = torch.cat(turned.chunk(2, -1)[::-1], -1)
        turned = turned * cos + swapped * sin
        keys, values = turned[:, shape.heads :], heads[:, shape.heads + shape.kv_heads :]
        for at, slot in enumerate(step.slots.tolist()):
            for which, fresh in enumerate((keys[at], values[at])):
                kept = fresh.float().to(shape.kv).double() if shape.kv != torch.float32 else fresh
                held[index, which, :, slot] = kept
        found = torch.stack([_attended(made, held[index], turned[:, : shape.heads], *one) for one in _rows(spans)])
        x = x + product(layer.output, found.reshape(len(x), -1))
        gate, up = product(layer.gate_up, norm(layer.mlp_norm, x)).chunk(2, -1)
        x = x + product(layer.down, functional.silu(gate) * up)
    return x


def _rows(spans: list[RowSpan]) -> list[tuple[int, int, list[int]]]:
    tokens = [(span.start + at, span.pages) for span in spans for at in range(span.count)]
    return [(row, position, pages) for row, (position, pages) in enumerate(tokens)]


def _attended(
    made: Made, held: torch.Tensor, queries: torch.Tensor, row: int, position: int, pages: list[int]
) -> torch.Tensor:
    shape = made.shape
    low = 0 if shape.window is None else max(0, position - shape.window + 1)
    slots = [pages[at // PAGE] * PAGE + at % PAGE for at in range(low, position + 1)]
    keys, values = (part[:, slots].repeat_interleave(shape.heads // shape.kv_heads, 0) for part in held)
    scores = (queries[row].unsqueeze(1) * keys).sum(-1) / shape.dim**0.5
    return (torch.softmax(scores, -1).unsqueeze(-1) * values).sum(1)
