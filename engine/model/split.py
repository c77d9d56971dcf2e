"""Splits a model over ranks: which heads, channels and tokens of the vocabulary each of them has. No torch.

Queries, keys and values, gate and up are split by outputs, the products behind them by inputs, whose sums the ranks add
up. Where there are fewer heads of keys than ranks, several ranks hold the same head. On CPUs, embedding and head are
split by tokens, in parts of a multiple of eight, of which the last one may be smaller; on GPUs each rank has
both whole and chooses tokens by itself. Where a step wants no more than the best token, each rank looks for it in its
part of the head, and all take the best that any has found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from quant.checkpoint.config import ModelConfig
from quant.checkpoint.slices import LinearSlice, Slices, Span, why_not
from quant.checkpoint.spec import QuantSpec
from quant.checkpoint.tensors import EMBEDDING, HEAD, Product, layer_form, layer_prefix

_UNIT: Final = 8  # tokens: what four-bit formats pack in a word


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that `rank` of `ranks` has."""

    rank: int = 0
    ranks: int = 1
    splits_vocabulary: bool = True  # else each rank has embedding and head whole

    def span(self, size: int) -> Span:
        """Returns the equal share of an axis that the ranks divide."""
        each = size // self.ranks
        return Span(self.rank * each, (self.rank + 1) * each, size)

    def kv_heads(self, config: ModelConfig) -> Span:
        """Returns the heads of keys and values that the rank's queries read."""
        if config.kv_heads >= self.ranks:
            return self.span(config.kv_heads)
        first = self.rank * config.kv_heads // self.ranks
        return Span(first, first + 1, config.kv_heads)

    def vocabulary(self, size: int) -> Span:
        """Returns the rank's tokens of the vocabulary; empty where there are too few for all ranks."""
        if not self.splits_vocabulary:
            return _all(size)
        each = -(-size // (self.ranks * _UNIT)) * _UNIT
        return Span(min(self.rank * each, size), min((self.rank + 1) * each, size), size)

    @property
    def first(self) -> bool:
        return self.rank == 0


WHOLE: Final = Part()


def own_config(config: ModelConfig, part: Part) -> ModelConfig:
    """Returns the shape of a rank's layers. The vocabulary stays the model's, since every token may come in."""
    return replace(
        config,
        heads=config.heads // part.ranks,
        kv_heads=part.kv_heads(config).size,
        intermediate_size=config.intermediate_size // part.ranks,
    )


def slices(config: ModelConfig, part: Part) -> Slices:
    """Returns what a rank reads of each linear, of the embedding and of norms over all heads."""
    found: dict[str, LinearSlice] = {}
    form = layer_form(config)
    tokens, hidden = part.vocabulary(config.vocab_size), _all(config.hidden_size)
    if part.splits_vocabulary:
        found |= {prefix: LinearSlice(tokens, hidden) for prefix in (EMBEDDING.removesuffix(".weight"), HEAD)}
    queries, keys = (_by_head(span, config) for span in (part.span(config.heads), part.kv_heads(config)))
    inner = part.span(config.intermediate_size)
    for index in range(config.layers):
        at = layer_prefix(index)
        found |= _by_outputs(at, form.qkv, (queries, keys, keys))
        found |= _by_outputs(at, form.gate_up, (inner, inner))
        found |= _by_inputs(at, form.output, queries, part)
        found |= _by_inputs(at, form.down, inner, part)
        if config.wide_qk_norm and form.query_norm is not None and form.key_norm is not None:
            found[f"{at}.{form.query_norm.name}"] = LinearSlice(queries, hidden)
            found[f"{at}.{form.key_norm.name}"] = LinearSlice(keys, hidden)
    return found


def why_not_split(config: ModelConfig, spec: QuantSpec | None, ranks: int) -> str | None:
    """Returns why the model cannot be split over `ranks` ranks, or None."""
    if config.heads % ranks:
        return f"its {config.heads} heads cannot be divided among {ranks}"
    larger, smaller = max(config.kv_heads, ranks), min(config.kv_heads, ranks)
    if larger % smaller:
        return f"its {config.kv_heads} heads of keys and values cannot be divided among {ranks}"
    if config.intermediate_size % ranks:
        return f"the {config.intermediate_size} channels of its MLP cannot be divided among {ranks}"
    if not Part(ranks - 1, ranks).vocabulary(config.vocab_size).size:
        return f"its {config.vocab_size} tokens are too few to be divided among {ranks}"
    for rank in range(ranks):
        for prefix, cut in slices(config, Part(rank, ranks)).items():
            if (reason := why_not(prefix, cut, spec)) is not None:
                return reason
    return None


def _by_head(heads: Span, config: ModelConfig) -> Span:
    dim = config.head_dim
    return Span(heads.first * dim, heads.last * dim, heads.of * dim)


def _all(size: int) -> Span:
    return Span(0, size, size)


def _by_outputs(at: str, product: Product, spans: tuple[Span, ...]) -> dict[str, LinearSlice]:
    inputs = _all(product.inputs)
    return {f"{at}.{name}": LinearSlice(span, inputs) for name, span in zip(product.linears, spans, strict=True)}


def _by_inputs(at: str, product: Product, span: Span, part: Part) -> dict[str, LinearSlice]:
    names = zip(product.linears, product.outputs, strict=True)
    return {f"{at}.{name}": LinearSlice(_all(outputs), span, adds_bias=part.first) for name, outputs in names}
