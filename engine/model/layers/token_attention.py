"""Attention of the walk of many tokens: of rows of one token, and of chunks of prompts; and that walk over rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels import batch_attention
from engine.kernels import prefill as ops
from engine.kernels import rows as states
from engine.kernels.attention import LayerAttention
from engine.kernels.batch_attention import BatchAttention, BatchRows, Workspace
from engine.kernels.build import Kernels
from engine.kernels.launch import Enqueues, Launch, Launches
from engine.kernels.weights import Format
from engine.model.layers.many_tokens import ForwardPass, Loaded


class RowAttention:
    """A `TokenAttention` of rows of one token."""

    def __init__(self, run: ForwardPass, rows: states.RowStates, spaces: Mapping[int | None, Workspace]) -> None:
        self._run = run
        self._places = ops.TokenPlaces(rows.position, rows.pages)
        held = BatchRows(rows.length, rows.pages)
        grid = batch_attention.grid(run.layout, run.gpu)
        self._of_window = {
            window: BatchAttention(run.library, run.layout, held, grid, space, window)
            for window, space in spaces.items()
        }

    def plans(self) -> list[Launch]:
        """Returns what must be enqueued before the pass."""
        return [one.plan() for one in self._of_window.values()]

    def heads(self, layer: LayerAttention, product: ops.ProductParts, queries: torch.Tensor) -> Launch:
        run = self._run
        return ops.row_heads(run.library, run.layout, layer, self._places, run.embedding, product, queries)

    def attend(self, layer: LayerAttention, queries: torch.Tensor, out: torch.Tensor, order: Format) -> Launch:
        return self._of_window[layer.window].attend(layer, queries, out, order)


class RowWalk(Launches, Protocol):
    """Computes a step of rows whose states lie on the device."""

    def logits(self, own: states.RowStates) -> ops.ProductParts:
        """Enqueues the whole walk. Returns float32 logits [1, rows, vocabulary]. Idle rows write to no page."""


class FusedRows:
    """A `RowWalk` by the kernels of many tokens."""

    def __init__(self, parts: Loaded, sizes: tuple[int, ...]) -> None:
        self._pass = run = ForwardPass(parts, sizes)
        self.library: Kernels = run.library
        self.launcher: Enqueues = run.launcher
        config, device, most = parts.model.config, parts.model.placement.device, sizes[-1]
        self._counts = {rows: torch.tensor([rows, 0], dtype=torch.int32, device=device) for rows in sizes}
        self._logits = torch.zeros(most, config.vocab_size, dtype=torch.float32, device=device)
        grid = batch_attention.grid(run.layout, run.gpu)
        self._spaces = {
            window: batch_attention.workspace(run.layout, most, grid, device)
            for window in dict.fromkeys(config.windows)
        }

    def go(self, launch: Launch) -> None:
        self._pass.go(launch)

    def logits(self, own: states.RowStates) -> ops.ProductParts:
        run, rows = self._pass, own.token.shape[0]
        attention = RowAttention(run, own, self._spaces)
        for plan in attention.plans():
            run.go(plan)
        hidden = run.enqueue(ops.Chunk(place=self._counts[rows], tokens=own.token), attention)
        return run.logits(hidden, self._logits[:rows])


@dataclass(frozen=True, slots=True)
class PassAttention:
    """A `TokenAttention` of chunks, each over its sequence's pages."""

    run: ForwardPass
    places: ops.TokenPlaces
    chunks: ops.Chunks
    splits: ops.Splits

    def heads(self, layer: LayerAttention, product: ops.ProductParts, queries: torch.Tensor) -> Launch:
        run = self.run
        return ops.row_heads(run.library, run.layout, layer, self.places, run.embedding, product, queries)

    def attend(self, layer: LayerAttention, queries: torch.Tensor, out: torch.Tensor, order: Format) -> Launch:
        run = self.run
        return ops.attend_chunks(run.library, run.layout, self.chunks, self.splits, layer, queries, out, order)
