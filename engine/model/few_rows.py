"""The walk over the layers for a few tokens on a CPU: in C, one call for all layers and one for the head.

Each token stands for itself: at its position, over the keys that its sequence has up to there, its own and those of
the step included. So rows of one token, drafts and short pieces of a prompt are all the same here.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import torch

from engine.kv.kv_cache import KvCache
from engine.linear import Placement
from engine.linear.walk import Unfit, Walk, WalkedLayer, WalkedModel, WalkedRows
from engine.model import features
from engine.model.attention import RowSpan
from engine.model.weights import Layer, Weights
from engine.settings import PAGE_SIZE
from quant.checkpoint.config import ModelConfig

MOST_ROWS: Final = 16  # tokens; torch's walk is as fast for more


class FewRows:
    """Walks over the layers of a model whose weights are on a CPU."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def takes(self, spans: Sequence[RowSpan], cache: KvCache) -> bool:
        """Whether a step of these spans is this walk's."""
        tokens = sum(span.count for span in spans)
        last = max(span.end for span in spans) - 1
        return tokens <= MOST_ROWS and cache.heads_outside and self._walk.takes(tokens, last)

    def forward(
        self, x: torch.Tensor, spans: Sequence[RowSpan], positions: torch.Tensor, slots: torch.Tensor, cache: KvCache
    ) -> None:
        """x float32 [tokens, hidden]: embeddings, which become what the last layer leaves. Writes keys and values."""
        last = max(span.end for span in spans) - 1
        rows = WalkedRows(positions, slots, _table(spans, last // PAGE_SIZE + 1), last, cache.storage)
        self._walk.layers(x, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden], before the last norm → [rows, vocab], float32."""
        return self._walk.head(hidden.contiguous())


def open_few_rows(config: ModelConfig, weights: Weights, rope: torch.Tensor, placement: Placement) -> FewRows | str:
    """Opens the walk, or returns why there is none."""
    reason = why_not_few_rows(config, placement)
    if reason is not None or placement.products is None:
        return reason or ""
    walked = WalkedModel(
        layers=tuple(_walked(layer) for layer in weights.layers),
        norm=weights.norm.weight,
        head=weights.head,
        angles=rope,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        dim=config.head_dim,
        inner=config.intermediate_size,
        epsilon=config.norm_eps,
    )
    try:
        return FewRows(Walk(walked, placement.products))
    except Unfit as unfit:
        return str(unfit)


def why_not_few_rows(config: ModelConfig, placement: Placement) -> str | None:
    """Why this walk cannot be had for weights placed so, or None."""
    if placement.device.type != "cpu":
        return "the walk in C is for CPUs"
    if placement.products is None:
        narrow = placement.dtype != torch.float32
        return "there is no C compiler for the walk" if narrow else "weights of 32 bits are multiplied by torch"
    return features.why_not(config)


def _walked(layer: Layer) -> WalkedLayer:
    return WalkedLayer(
        input_norm=layer.input_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        head_norm=None if layer.head_norm is None else layer.head_norm.weight,
        qkv=layer.qkv,
        output=layer.output,
        gate_up=layer.gate_up,
        down=layer.down,
        window=layer.window,
    )


def _table(spans: Sequence[RowSpan], widest: int) -> torch.Tensor:
    """int32 [tokens, widest]: the pages of each token's sequence."""
    table = array("i")
    for span in spans:
        row = array("i", span.pages[:widest])
        row.frombytes(bytes(row.itemsize * (widest - len(row))))
        table.extend(row * span.count)
    return torch.frombuffer(table, dtype=torch.int32).view(-1, widest)
