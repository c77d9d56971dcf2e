"""Attention of one step over the page pool: rows of one token, and chunks of a prompt, side by side.

Rows of one token read their keys in place, stretch by stretch of neighbouring pages (CPU), or gathered and padded into
one batch (GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

from engine.kv.kv_cache import KvCache
from engine.settings import PAGE_SIZE

Window = int | None
MOST_STRETCHES = 4  # of more, gathering is no dearer


@dataclass(frozen=True, slots=True)
class Share:
    """One row's part of a step: tokens [first, first + count) of the flat batch."""

    first: int
    count: int
    start: int  # position of the first of them
    pages: list[int]

    @property
    def end(self) -> int:
        """Positions known once the row is fed."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Reach:
    """Which keys a row sees under one window: positions [low, end)."""

    length: int
    slot: int  # of the first, where pages neighbour
    pages: torch.Tensor | None  # to gather, where they do not
    offset: int  # of the first, in the gathered
    stretches: tuple[tuple[int, int], ...] = ()  # first slot and count of each, instead of pages

    def read(self, pool: KvCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, length, head_dim]."""
        if self.pages is None:
            return pool.run(layer, self.slot, self.length)
        keys, values = pool.gather(layer, self.pages)
        return keys.narrow(2, self.offset, self.length), values.narrow(2, self.offset, self.length)

    def attend(self, pool: KvCache, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [1, kv_heads, rows, head_dim] over all of these keys → the same shape."""
        if not self.stretches:
            keys, values = self.read(pool, layer)
            return functional.scaled_dot_product_attention(query, keys, values)
        output, weight = _attend(query, *pool.run(layer, *self.stretches[0]))
        for stretch in self.stretches[1:]:
            further, its_weight = _attend(query, *pool.run(layer, *stretch))
            part = torch.sigmoid(its_weight - weight).unsqueeze(-1).to(output.dtype)
            output = torch.lerp(output, further, part)
            if stretch != self.stretches[-1]:
                weight = torch.logaddexp(weight, its_weight)
        return output


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of the softmax's denominator, [1, heads, rows]."""
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values
    )
    return found


def reach(share: Share, window: Window, pool: KvCache, device: torch.device, whole: bool = True) -> Reach:
    """The keys of a row, from the oldest that its first token sees. Not `whole`: they may be seen piece by piece."""
    low = 0 if window is None else max(0, share.start - window + 1)
    first, last = low // PAGE_SIZE, (share.end - 1) // PAGE_SIZE
    pages = share.pages[first : last + 1]
    offset = low - first * PAGE_SIZE
    if pool.heads_outside and pages == list(range(pages[0], pages[0] + len(pages))):
        return Reach(share.end - low, pages[0] * PAGE_SIZE + offset, None, 0)
    if not whole:
        stretches = _stretches(pages, offset, share.end - low)
        if len(stretches) <= MOST_STRETCHES:
            return Reach(share.end - low, 0, None, 0, stretches)
    return Reach(share.end - low, 0, torch.tensor(pages, device=device), offset)


def _stretches(pages: list[int], offset: int, length: int) -> tuple[tuple[int, int], ...]:
    """Neighbouring slots of `length` positions, from `offset` in the first page on."""
    borders = [0, *(at for at in range(1, len(pages)) if pages[at] != pages[at - 1] + 1), len(pages)]
    found = []
    for first, last in pairwise(borders):
        start = max(first * PAGE_SIZE, offset)
        end = min(last * PAGE_SIZE, offset + length)
        found.append((pages[first] * PAGE_SIZE + start - first * PAGE_SIZE, end - start))
    return tuple(found)


class Chunk:
    """A row of several tokens."""

    def __init__(self, share: Share, windows: Sequence[Window], pool: KvCache, device: torch.device) -> None:
        self.share = share
        self._pool = pool
        self._reach = {window: reach(share, window, pool, device) for window in windows}
        self._mask = {window: self._visible(window, device) for window in windows}

    def _visible(self, window: Window, device: torch.device) -> torch.Tensor | None:
        """[count, keys], or None where it is the plain triangle."""
        share, keys = self.share, self._reach[window].length
        if share.start == 0 and (window is None or share.count <= window):
            return None
        here = torch.arange(share.start, share.end, device=device).unsqueeze(1)
        there = torch.arange(share.end - keys, share.end, device=device)
        seen = there <= here
        return seen if window is None else seen & (there > here - window)

    def attend(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [count, heads, head_dim] → [count, heads, head_dim]."""
        keys, values = self._reach[window].read(self._pool, layer)
        mask = self._mask[window]
        found = functional.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return found.squeeze(0).transpose(0, 1)


class ReadInPlace:
    """Rows of one token, each over its own keys."""

    def __init__(self, shares: Sequence[Share], windows: Sequence[Window], pool: KvCache, device: torch.device) -> None:
        self._pool = pool
        self._reach = {window: [reach(share, window, pool, device, False) for share in shares] for window in windows}

    def attend(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, head_dim] → [rows, heads, head_dim]."""
        rows, heads, dim = queries.shape
        kv_heads = self._pool.shape.kv_heads
        # Heads that share keys stand as rows of one query.
        grouped = queries.view(rows, 1, kv_heads, heads // kv_heads, dim).unbind(0)
        found = []
        for query, keys_of in zip(grouped, self._reach[window], strict=True):
            found.append(keys_of.attend(self._pool, layer, query))
        return (found[0] if rows == 1 else torch.cat(found)).reshape(rows, heads, dim)


class ReadGathered:
    """Rows of one token as one padded batch."""

    def __init__(self, shares: Sequence[Share], windows: Sequence[Window], pool: KvCache, device: torch.device) -> None:
        self._pool = pool
        widest = max((share.end - 1) // PAGE_SIZE for share in shares) + 1
        table = [(share.pages[:widest] + [0] * widest)[:widest] for share in shares]
        self._pages = torch.tensor(table, device=device).flatten()
        ends = torch.tensor([share.end for share in shares], device=device).unsqueeze(1)
        positions = torch.arange(widest * PAGE_SIZE, device=device)
        filled = positions < ends
        # [rows, 1, keys]; what lies in a page from an earlier owner must not reach a product, not even times zero.
        self._stale = ~filled.view(len(shares), 1, -1, 1)
        self._masks = {
            window: (filled if window is None else filled & (positions >= ends - window)).view(len(shares), 1, 1, -1)
            for window in windows
        }

    def attend(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [rows, heads, head_dim] → [rows, heads, head_dim]."""
        rows, heads, dim = queries.shape
        kv_heads = self._pool.shape.kv_heads
        keys, values = (
            part.view(kv_heads, rows, -1, dim).transpose(0, 1).masked_fill(self._stale, 0.0)
            for part in self._pool.gather(layer, self._pages)
        )
        grouped = queries.view(rows, kv_heads, heads // kv_heads, dim)
        found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._masks[window])
        return found.reshape(rows, heads, dim)


class StepAttention:
    """What is known of a step's rows before its first layer. Rows of one token come first in the flat batch."""

    def __init__(self, shares: Sequence[Share], windows: Sequence[Window], pool: KvCache, device: torch.device) -> None:
        singles = [share for share in shares if share.count == 1]
        if [share.count for share in shares[: len(singles)]] != [1] * len(singles):
            raise ValueError("rows of one token must come first")
        read = ReadInPlace if pool.heads_outside else ReadGathered
        self._singles = read(singles, windows, pool, device) if singles else None
        self._count = len(singles)
        self._chunks = [Chunk(share, windows, pool, device) for share in shares[len(singles) :]]

    def __call__(self, layer: int, window: Window, queries: torch.Tensor) -> torch.Tensor:
        """queries [tokens, heads, head_dim], keys and values of the step already in the pool → the same shape."""
        if self._singles is not None and not self._chunks:
            return self._singles.attend(layer, window, queries)
        found = [] if self._singles is None else [self._singles.attend(layer, window, queries[: self._count])]
        for chunk in self._chunks:
            share = chunk.share
            found.append(chunk.attend(layer, window, queries[share.first : share.first + share.count]))
        return torch.cat(found) if len(found) > 1 else found[0]
