"""Holds plans to what they must be, without a device: a shadow of the page pool, and of what was fed of each sequence.

A plan that reads what was not computed, or was overwritten, is refused. A full page holds a digest of all tokens up to
its end, so that a sequence which begins with the work of others is held to it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence as Items

from cache.api import BlockLayout
from engine.scheduling.plan import Row, StepPlan
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE

PRIME = 2**31 - 1
FACTOR = 48271  # of a well-known generator with this modulus


class BrokenPlan(Exception):
    """The scheduler asked for what cannot be computed right."""


class Fed:
    """What was fed of the sequence that owns a slot."""

    __slots__ = ("computed", "digest", "digested", "overwritten", "pages", "sequence", "stamp", "written")

    def __init__(self, sequence: Sequence, stamp: int) -> None:
        self.stamp = stamp  # no two have the same
        self.sequence = sequence
        self.computed = 0
        self.pages: list[int] = []  # as of the last row
        self.overwritten = False  # one of them by another sequence
        self.written = 1  # digest of token_ids[:computed]
        self.digest = 1  # of token_ids[:digested]
        self.digested = 0


class ShadowPool:
    """Who has written which page, and whether the next row may follow."""

    def __init__(self, total_pages: int, slots: int) -> None:
        self.pages = ShadowPages(total_pages)
        self._slots = slots
        self._owners: dict[int, Fed | None] = {}  # slot → what was fed of its owner; None: nothing yet
        self._stamps = itertools.count(1)
        self._stamped: dict[int, Fed] = {}
        self._writers = [0] * total_pages  # stamps
        self._readers: dict[int, list[Fed]] = {}  # page → who begins with it without having written it

    def begin(self, plan: StepPlan) -> None:
        """Forgets the former owners of fresh slots. Raises BrokenPlan."""
        for slot in plan.fresh_slots:
            old = self._owners.get(slot)
            if old is not None:
                self._drop(old)
            self._owners[slot] = None
        if len({row.sequence.slot for row in plan.rows}) < len(plan.rows):
            raise BrokenPlan("two rows share a slot")

    def feed(self, row: Row) -> Fed:
        """The row's tokens are computed. Raises BrokenPlan where they cannot be."""
        sequence, end = row.sequence, row.start + row.count
        fed = self._owners.get(sequence.slot)
        if fed is None:
            fed = self._taken(sequence)
        self._check(row, fed, end)
        digest = fed.digest
        for token_id in sequence.token_ids[fed.digested : end]:
            digest = (digest * FACTOR + token_id) % PRIME
        fed.digest, fed.digested = digest, end
        self.write(fed, sequence.token_ids[fed.computed : end])
        return fed

    def write(self, fed: Fed, token_ids: Items[int]) -> None:
        """Puts these tokens, from the first that was not computed on, into the sequence's pages."""
        pages, writers, full = fed.pages, self._writers, self.pages.full
        position, digest = fed.computed, fed.written
        for token_id in token_ids:
            digest = (digest * FACTOR + token_id) % PRIME
            page = pages[position // PAGE_SIZE]
            stamp = writers[page]
            if stamp != fed.stamp:
                if stamp in self._stamped:
                    self._stamped[stamp].overwritten = True
                writers[page] = fed.stamp
            for reader in self._readers.pop(page, ()):
                reader.overwritten = True
            position += 1
            full[page] = None if position % PAGE_SIZE else digest
        fed.computed, fed.written = position, digest

    def _drop(self, fed: Fed) -> None:
        del self._stamped[fed.stamp]
        for page in fed.pages:
            readers = self._readers.get(page, [])
            if fed in readers:
                readers.remove(fed)

    def _taken(self, sequence: Sequence) -> Fed:
        if sequence.slot not in self._owners or sequence.slot >= self._slots:
            raise BrokenPlan(f"slot {sequence.slot} was never announced")
        fed = Fed(sequence, next(self._stamps))
        self._owners[sequence.slot] = self._stamped[fed.stamp] = fed
        return fed

    def _check(self, row: Row, fed: Fed, end: int) -> None:
        sequence = row.sequence
        pages = sequence.pages
        if fed.sequence is not sequence:
            raise BrokenPlan("a slot changed hands unannounced")
        if row.start > fed.computed:
            self._adopt(row, fed)
        if row.start != fed.computed:
            raise BrokenPlan(f"{fed.computed} tokens were computed, the row begins at {row.start}")
        if pages != fed.pages:
            written = -(-fed.computed // PAGE_SIZE)
            if pages[:written] != fed.pages[:written]:
                raise BrokenPlan("computed pages were exchanged")
            fed.pages = pages.copy()
        if fed.overwritten:
            raise BrokenPlan("another sequence wrote into computed pages")
        if end == row.start or end > len(pages) * PAGE_SIZE:
            raise BrokenPlan(f"no pages or no tokens for {row.start}…{end}")
        if row.sample != (end == len(sequence.token_ids)):
            raise BrokenPlan("a row samples behind the last token, and only there")

    def _adopt(self, row: Row, fed: Fed) -> None:
        """Begins, or goes on, with full pages that others computed, as far as they are what they must be."""
        if fed.computed % PAGE_SIZE or row.start % PAGE_SIZE:
            return
        sequence = row.sequence
        for place in range(fed.computed // PAGE_SIZE, min(row.start // PAGE_SIZE, len(sequence.pages))):
            digest, page = fed.written, sequence.pages[place]
            for token_id in sequence.token_ids[place * PAGE_SIZE : (place + 1) * PAGE_SIZE]:
                digest = (digest * FACTOR + token_id) % PRIME
            if self.pages.full[page] != digest:
                raise BrokenPlan(f"page {page} does not hold what the sequence begins with")
            fed.written = digest
            fed.computed += PAGE_SIZE
            fed.pages[place:] = [page]
            self._readers.setdefault(page, []).append(fed)


class ShadowPages:
    """Implements engine.scheduling.plan.PageAccess: sixteen times a full page's digest."""

    def __init__(self, total: int) -> None:
        self.full: list[int | None] = [None] * total  # digest of all tokens up to a full page's end

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(layers=1, kv_heads=1, head_dim=4, dtype="digest", item_bytes=1, page_size=PAGE_SIZE)

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def read(self, pages: Items[int], into: memoryview) -> None:
        digests = [self.full[page] or 0 for page in pages]
        into[:] = b"".join(struct.pack("<Q", digest) * PAGE_SIZE for digest in digests)

    def write(self, pages: Items[int], source: memoryview) -> None:
        size = len(source) // len(pages)
        for at, page in enumerate(pages):
            held = set(struct.unpack(f"<{PAGE_SIZE}Q", source[at * size : (at + 1) * size]))
            self.full[page] = held.pop() if len(held) == 1 else None
