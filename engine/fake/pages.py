"""Pages as bytes, for runners whose plans are checked."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Items

from cache.api import BlockLayout
from engine.fake.checker import FOREIGN, PlanChecker
from engine.scheduling.plan import PageAccess
from engine.settings import PAGE_SIZE


class FakePages:
    """A page's bytes are sixteen times its digest."""

    def __init__(self, checker: PlanChecker) -> None:
        self._checker = checker

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(layers=1, kv_heads=1, head_dim=4, dtype="digest", item_bytes=1, page_size=PAGE_SIZE)

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def read(self, pages: Items[int], into: memoryview) -> None:
        digests = [self._checker.full[page] or 0 for page in pages]
        into[:] = b"".join(struct.pack("<Q", digest) * PAGE_SIZE for digest in digests)

    def write(self, pages: Items[int], source: memoryview) -> None:
        size = len(source) // len(pages)
        for at, page in enumerate(pages):
            held = set(struct.unpack(f"<{PAGE_SIZE}Q", source[at * size : (at + 1) * size]))
            self._checker.filled(page, held.pop() if len(held) == 1 else None)


class TrustedPages:
    def __init__(self, inner: PageAccess, checker: PlanChecker) -> None:
        self._inner = inner
        self._checker = checker

    @property
    def layout(self) -> BlockLayout:
        return self._inner.layout

    def buffer(self, size: int) -> memoryview:
        return self._inner.buffer(size)

    def read(self, pages: Items[int], into: memoryview) -> None:
        self._inner.read(pages, into)

    def write(self, pages: Items[int], source: memoryview) -> None:
        self._inner.write(pages, source)
        for page in pages:
            self._checker.filled(page, FOREIGN)
