"""Attention of one step over the paged KV cache, for decoding rows and prefill chunks in the same batch. Decoding rows
read their keys in place, run by run of adjacent pages (CPU), or gathered and padded into one batch (GPU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

from engine.kv.kv_cache import KvCache
from engine.settings import PAGE_SIZE

Window = int | None
MOST_RUNS = 4  # with more runs of pages than this, gathering costs no more


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A row's tokens [first, first + count) of the flat batch."""

    first: int
    count: int
    start: int  # position of the first of them
    pages: list[int]

    @property
    def end(self) -> int:
        """Positions in the cache after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys that a row sees under one window: positions [low, end)."""

    length: int
    slot: int  # of the first key, where all pages are adjacent
    pages: torch.Tensor | None  # to gather, where they are not
    offset: int  # of the first key, in what was gathered
    runs: tuple[tuple[int, int], ...] = ()  # instead of pages: first slot and count of each run of adjacent ones

    def read(self, cache: KvCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, length, head_dim]."""
        if self.pages is None:
            return cache.run(layer, self.slot, self.length)
        keys, values = cache.gather(layer, self.pages)
        return keys.narrow(2, self.offset, self.length), values.narrow(2, self.offset, self.length)

    def attend(self, cache: KvCache, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [1, kv_heads, rows, head_dim] → the same shape."""
        if not self.runs:
            keys, values = self.read(cache, layer)
            return functional.scaled_dot_product_attention(query, keys, values)
        output, weight = _attend(query, *cache.run(layer, *self.runs[0]))
        for run in self.runs[1:]:
            further, its_weight = _attend(query, *cache.run(layer, *run))
            part = torch.sigmoid(its_weight - weight).unsqueeze(-1).to(output.dtype)
            output = torch.lerp(output, further, part)
            if run != self.runs[-1]:
                weight = torch.logaddexp(weight, its_weight)
        return output


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of the softmax's denominator, [1, heads, rows]."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values
    )
    return found


def key_range(span: RowSpan, window: Window, cache: KvCache, device: torch.device, whole: bool = True) -> KeyRange:
    """Keys from the oldest that a row's first token sees. Not `whole`: they may be read run by run."""
    low = 0 if window is None else max(0, span.start - window + 1)
    first, last = low // PAGE_SIZE, (span.end - 1) // PAGE_SIZE
    pages = span.pages[first : last + 1]
    offset = low - first * PAGE_SIZE
    if cache.heads_outside and pages == list(range(pages[0], pages[0] + len(pages))):
        return KeyRange(span.end - low, pages[0] * PAGE_SIZE + offset, None, 0)
    if not whole:
        runs = _runs(pages, offset, span.end - low)
        if len(runs) <= MOST_RUNS:
            return KeyRange(span.end - low, 0, None, 0, runs)
    return KeyRange(span.end - low, 0, torch.tensor(pages, device=device), offset)


def _runs(pages: list[int], offset: int, length: int) -> tuple[tuple[int, int], ...]:
    """Adjacent slots that hold `length` positions, from `offset` in the first page on."""
    borders = [0, *(at for at in range(1, len(pages)) if pages[at] != pages[at - 1] + 1), len(pages)]
    found = []
    for first, last in pairwise(borders):
        start = max(first * PAGE_SIZE, offset)
        end = min(last * PAGE_SIZE, offset + length)
        found.append((pages[first] * PAGE_SIZE + start - first * PAGE_SIZE, end - start))
    return tuple(found)


class PrefillChunk:
    def __init__(self, span: RowSpan, windows: Sequence[Window], cache: KvCache, device: torch.device) -> None:
        self.span = span
        self._cache = cache
        self._ranges = {window: key_range(span, window, cache, device) for window in windows}
        self._mask = {window: self._visible(window, device) for window in windows}

    def _visible(self, window: Window, device: torch.device) -> torch.Tensor | None:
        """[count, keys], or None where it is the plain causal mask."""
        span, keys = self.span, self._ranges[window].length
        if span.start == 0 and (window is None or span.count <= window):
            return None
        here = torch.arange(span.start, span.end, device=device).unsqueeze(1)
        there = torch.arange(span.end - keys, span.end, device=device)
        seen = there <= here
        return seen if window is None else seen & (there > here - window)

    def attend(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [count, heads, head_dim] → [count, heads, head_dim]."""
        keys, values = self._ranges[window].read(self._cache, layer)
        mask = self._mask[window]
        found = functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return found.squeeze(0).transpose(0, 1)


class ReadInPlace:
    """Rows of one token, each over its own keys."""

    def __init__(
        self, spans: Sequence[RowSpan], windows: Sequence[Window], cache: KvCache, device: torch.device
    ) -> None:
        self._cache = cache
        self._ranges = {window: [key_range(span, window, cache, device, False) for span in spans] for window in windows}

    def attend(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, head_dim] → [rows, heads, head_dim]."""
        rows, heads, dim = queries.shape
        kv_heads = self._cache.shape.kv_heads
        # Heads that share keys stand as rows of one query.
        grouped = queries.view(rows, 1, kv_heads, heads // kv_heads, dim).unbind(0)
        found = []
        for query, keys_of in zip(grouped, self._ranges[window], strict=True):
            found.append(keys_of.attend(self._cache, layer, query))
        return (found[0] if rows == 1 else torch.cat(found)).reshape(rows, heads, dim)


class ReadGathered:
    """Rows of one token as one padded batch."""

    def __init__(
        self, spans: Sequence[RowSpan], windows: Sequence[Window], cache: KvCache, device: torch.device
    ) -> None:
        self._cache = cache
        widest = max((span.end - 1) // PAGE_SIZE for span in spans) + 1
        table = [(span.pages[:widest] + [0] * widest)[:widest] for span in spans]
        self._pages = torch.tensor(table, device=device).flatten()
        ends = torch.tensor([span.end for span in spans], device=device).unsqueeze(1)
        positions = torch.arange(widest * PAGE_SIZE, device=device)
        filled = positions < ends
        # [rows, 1, keys]; what lies in a page from an earlier owner must not get into a product, not even times zero.
        self._stale = ~filled.view(len(spans), 1, -1, 1)
        self._masks = {
            window: (filled if window is None else filled & (positions >= ends - window)).view(len(spans), 1, 1, -1)
            for window in windows
        }

    def attend(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, head_dim] → [rows, heads, head_dim]."""
        rows, heads, dim = queries.shape
        kv_heads = self._cache.shape.kv_heads
        keys, values = (
            part.view(kv_heads, rows, -1, dim).transpose(0, 1).masked_fill(self._stale, 0.0)
            for part in self._cache.gather(layer, self._pages)
        )
        grouped = queries.view(rows, kv_heads, heads // kv_heads, dim)
        found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._masks[window])
        return found.reshape(rows, heads, dim)


class StepAttention:
    """Key ranges and masks of a step, made once for all layers when the first of them attends: a walk in C makes its
    own. Rows of one token come first in the flat batch."""

    def __init__(
        self, spans: Sequence[RowSpan], windows: Sequence[Window], cache: KvCache, device: torch.device
    ) -> None:
        self._count = sum(span.count == 1 for span in spans)
        if any(span.count != 1 for span in spans[: self._count]):
            raise ValueError("rows of one token must come first")
        self.spans = spans
        self._windows, self._cache, self._device = windows, cache, device
        self._singles: ReadInPlace | ReadGathered | None = None
        self._chunks: list[PrefillChunk] = []
        self._made = False

    def _make(self) -> None:
        self._made = True
        singles, chunks = self.spans[: self._count], self.spans[self._count :]
        read = ReadInPlace if self._cache.heads_outside else ReadGathered
        self._singles = read(singles, self._windows, self._cache, self._device) if singles else None
        self._chunks = [PrefillChunk(span, self._windows, self._cache, self._device) for span in chunks]

    def __call__(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [tokens, heads, head_dim] → the same shape; keys and values of the step are already in the cache."""
        if not self._made:
            self._make()
        if self._singles is not None and not self._chunks:
            return self._singles.attend(layer, window, queries)
        found = [] if self._singles is None else [self._singles.attend(layer, window, queries[: self._count])]
        for chunk in self._chunks:
            span = chunk.span
            found.append(chunk.attend(layer, window, queries[span.first : span.first + span.count]))
        return torch.cat(found) if len(found) > 1 else found[0]
