"""The page pool: keys and values of every running sequence, in pages of 16 tokens.

Logically [layers, 2, pages, kv_heads, 16, head_dim]. On a CPU heads lie outside pages, so that a run of neighbouring
pages is one matrix a head, read in place; on a GPU pages lie outside heads, as kernels and page transfers want them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear import Placement
from engine.settings import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a page holds."""

    layers: int
    kv_heads: int
    head_dim: int

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return 2 * self.layers * self.kv_heads * PAGE_SIZE * self.head_dim * dtype.itemsize


class KvCache:
    """Where keys and values lie. Who owns which page is the scheduler's business."""

    def __init__(self, shape: KvShape, pages: int, placement: Placement, heads_outside: bool) -> None:
        self.shape = shape
        self.pages = pages
        self.heads_outside = heads_outside
        heads, dim = shape.kv_heads, shape.head_dim
        if heads_outside:
            # Read only where written, hence not cleared.
            size = (shape.layers, 2, heads, pages, PAGE_SIZE, dim)
            self._storage = torch.empty(size, dtype=placement.dtype, device=placement.device)
            paged = self._storage.transpose(2, 3)
        else:
            size = (shape.layers, 2, pages, heads, PAGE_SIZE, dim)
            self._storage = torch.zeros(size, dtype=placement.dtype, device=placement.device)
            paged = self._storage
        self._paged = tuple(paged.unbind(0))
        self._by_token = tuple(layer.permute(1, 3, 0, 2, 4) for layer in self._paged)  # [pages, 16, 2, heads, dim]
        # With heads outside alone: [2 · heads, slots, dim], and keys and values [1, heads, slots, dim].
        flat = self._storage.view(shape.layers, 2, heads, -1, dim) if heads_outside else self._storage[:0]
        self._flat = tuple(layer.flatten(0, 1) for layer in flat.unbind(0))
        self._keys = tuple(layer[:1] for layer in flat.unbind(0))
        self._values = tuple(layer[1:] for layer in flat.unbind(0))

    def layer(self, index: int) -> torch.Tensor:
        """[2, pages, kv_heads, 16, head_dim]: keys, then values."""
        return self._paged[index]

    def write(self, index: int, slots: torch.Tensor, fresh: torch.Tensor) -> None:
        """Puts fresh [tokens, 2 · kv_heads, head_dim] at slots [tokens]; slot = page · 16 + offset."""
        if self.heads_outside:
            self._flat[index].index_copy_(1, slots, fresh.transpose(0, 1))
            return
        values = fresh.view(-1, 2, self.shape.kv_heads, self.shape.head_dim)
        self._by_token[index].index_put_((slots // PAGE_SIZE, slots % PAGE_SIZE), values)

    def run(self, index: int, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, count, head_dim] of neighbouring slots: views, with heads outside alone."""
        return self._keys[index].narrow(2, first, count), self._values[index].narrow(2, first, count)

    def gather(self, index: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, pages · 16, head_dim] of any pages: copies."""
        if self.heads_outside:
            # In the order of the memory: index_select would copy all of a transposed pool first.
            found = self._storage[index].index_select(2, pages)
        else:
            found = self._storage[index].index_select(1, pages).transpose(1, 2)
        keys, values = found.flatten(2, 3).unsqueeze(1).unbind(0)
        return keys, values

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Copies of these pages: [pages, layers, 2, kv_heads, 16, head_dim]."""
        if self.heads_outside:
            return self._storage.index_select(3, pages).permute(3, 0, 1, 2, 4, 5)
        return self._storage.index_select(2, pages).permute(2, 0, 1, 3, 4, 5)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """The reverse."""
        if self.heads_outside:
            self._storage.index_copy_(3, pages, content.permute(1, 2, 3, 0, 4, 5))
        else:
            self._storage.index_copy_(2, pages, content.permute(1, 2, 0, 3, 4, 5))

    @property
    def placement(self) -> Placement:
        """Where and in what it lies."""
        return Placement(self._storage.dtype, self._storage.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self._storage.nbytes
