"""Copies full pages of keys and values to and from plain bytes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Protocol, TypeVar

import torch

from cache.api import BlockLayout
from engine.kv.kv_cache import KvCache
from engine.scheduling.plan import PageAccess, Row, RowResult, StepPlan
from engine.settings import PAGE_SIZE

T = TypeVar("T")


class PoolPages:
    """A page's bytes: [layers, 2, kv_heads, 16, head_dim], in the pool's dtype."""

    def __init__(self, pool: KvCache) -> None:
        self._pool = pool
        shape, placement = pool.shape, pool.placement
        self._placement = placement
        self._page = (shape.layers, 2, shape.kv_heads, PAGE_SIZE, shape.head_dim)
        self._layout = BlockLayout(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=str(pool.stored).removeprefix("torch."),
            item_bytes=placement.dtype.itemsize,
            page_size=PAGE_SIZE,
            variant=f"page layer kind head token, of {placement.device.type}",
        )

    @property
    def layout(self) -> BlockLayout:
        return self._layout

    def buffer(self, size: int) -> memoryview:
        if self._placement.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
        return memoryview(bytearray(size))

    def read(self, pages: Items[int], into: memoryview) -> None:
        with torch.inference_mode():
            self._host(into, len(pages)).copy_(self._pool.read_pages(self._indices(pages)))

    def write(self, pages: Items[int], source: memoryview) -> None:
        with torch.inference_mode():
            given = self._host(source, len(pages)).to(self._placement.device)
            self._pool.write_pages(self._indices(pages), given)

    def _indices(self, pages: Items[int]) -> torch.Tensor:
        return torch.tensor(pages, device=self._placement.device)

    def _host(self, data: memoryview, pages: int) -> torch.Tensor:
        return torch.frombuffer(data, dtype=self._placement.dtype).view(pages, *self._page)


class RankGroup(Protocol):
    """The other ranks of a split model."""

    @property
    def why_no_sums(self) -> str:
        """Returns why kernels do not add up over ranks; empty where they do."""

    def led(self, device: T) -> T:
        """Returns the device through which a pipeline drives those of all ranks."""

    def began(self, plan: StepPlan) -> None:
        """Is called before the launches of a step."""

    def followed(self, rows: Items[Row], results: Mapping[int, RowResult]) -> None:
        """Is called with what the step brought."""

    @property
    def pages(self) -> PageAccess:
        """Access to keys and values of all ranks as bytes."""

    def close(self) -> None:
        """Ends the other ranks."""
