"""Full pages of keys and values as plain bytes: how they leave the page pool and how they come back."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from cache.api import BlockLayout
from engine.model.kv import KvPool
from engine.settings import PAGE_SIZE


class PoolPages:
    """Implements engine.plan.PageAccess. A page's bytes: [layers, 2, kv_heads, 16, head_dim], in the pool's dtype."""

    def __init__(self, pool: KvPool) -> None:
        self._whole = pool.whole  # [layers, 2, pages, kv_heads, 16, head_dim]
        shape, device = pool.shape, self._whole.device
        self._page = (shape.layers, 2, shape.kv_heads, PAGE_SIZE, shape.head_dim)
        self._pinned = device.type == "cuda"
        self._layout = BlockLayout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=str(self._whole.dtype).removeprefix("torch."),
            item_bytes=self._whole.dtype.itemsize,
            page_size=PAGE_SIZE,
            variant=f"page layer kind head token, of {device.type}",
        )

    @property
    def layout(self) -> BlockLayout:
        """What the bytes mean."""
        return self._layout

    def buffer(self, size: int) -> memoryview:
        """Host memory; for a GPU such as it can copy from by itself."""
        if self._pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
        return memoryview(bytearray(size))

    def read(self, pages: Items[int], into: memoryview) -> None:
        """Fills `into` with these pages."""
        with torch.inference_mode():
            found = self._whole.index_select(2, self._indices(pages))
            self._host(into, len(pages)).copy_(found.permute(2, 0, 1, 3, 4, 5))

    def write(self, pages: Items[int], source: memoryview) -> None:
        """Fills these pages from `source`, which may be used again once this returns."""
        with torch.inference_mode():
            given = self._host(source, len(pages)).to(self._whole.device)
            self._whole.index_copy_(2, self._indices(pages), given.permute(1, 2, 0, 3, 4, 5))

    def _indices(self, pages: Items[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self._whole.device)

    def _host(self, data: memoryview, pages: int) -> torch.Tensor:
        """The bytes as pages."""
        return torch.frombuffer(data, dtype=self._whole.dtype).view(pages, *self._page)
