"""Fetches keys and values from the shared tier, and hands over what is to be kept. Owns the fetches under way, the
sequences that wait for them, and unwritten runs.

A run is several full pages and begins on a multiple of its length, so that all engines cut a prompt alike. Fetched runs
go into the prefix index, where the waiting sequence finds them like any other page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

from cache.api import BlockRun, BlockStore, Fetched
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.plan import PageAccess
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE

MOST_BYTES = 256 << 20  # of one fetch
MOST_RUNS = 64  # of a prompt that are kept: the head is what others share
MOST_PENDING = 256  # runs that wait to be read for writing
TAKE_IN = 0.003  # seconds
MEASURED = 128  # tokens; a shorter prefill says little about the rate of long ones


@dataclass(slots=True, eq=False)
class _Fetch:
    partition: str
    chain: list[bytes]  # page hashes from the first page on to the end of the last run
    runs: list[BlockRun]
    waiting: dict[int, float]  # key → when it waits no longer
    buffers: list[memoryview] = field(default_factory=list)
    coming: Future[Fetched] | None = None
    taken: int = 0  # runs that are in the index

    @property
    def pages_before(self) -> int:
        return len(self.chain) - sum(run.tokens for run in self.runs) // PAGE_SIZE


@dataclass(frozen=True, slots=True)
class _Keep:
    partition: str
    run: BlockRun
    hashes: list[bytes]  # of its pages


class BlockTier:
    """Used by the engine loop alone. Nothing here waits for the store."""

    def __init__(
        self,
        store: BlockStore,
        pages: PageAccess,
        index: PrefixIndex,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pages = pages
        self._index = index
        self._clock = clock
        self._enabled = enabled
        self._per_run = store.run_tokens // PAGE_SIZE  # pages
        self._page_bytes = pages.layout.token_bytes * PAGE_SIZE
        self._fetches: deque[_Fetch] = deque()  # the first one is under way, the others are queued
        self._pending: deque[_Keep] = deque()

    def set_enabled(self, enabled: bool) -> None:
        """Off: nothing is fetched or written. What is under way goes on."""
        self._enabled = enabled
        if not enabled:
            self._pending.clear()

    # Reading

    def ask(self, sequence: Sequence) -> bool:
        """Whether the sequence should wait for a fetch, now under way: `arrived` will name it."""
        if not self._enabled or sequence.prompt_length <= self._store.run_tokens:
            return False
        chain = self._index.chain(sequence)
        whole = len(chain) // self._per_run
        known = next((at for at, digest in enumerate(chain) if self._index.known(digest) is None), len(chain))
        first = known // self._per_run
        last = min(whole, first + max(1, MOST_BYTES // (self._per_run * self._page_bytes)))
        if first >= last:
            return False
        within = self._store.worth((last * self._per_run - known) * PAGE_SIZE)
        if within is None:
            return False
        runs = self._runs(sequence, chain, first, last)
        self._join(sequence, chain[: last * self._per_run], runs, self._clock() + within)
        return True

    def arrived(self) -> list[int]:
        """Keys of sequences that need not wait. Takes in runs for some milliseconds a call, so that no step is held
        up."""
        done: list[int] = []
        now = self._clock()
        while self._fetches and self._clock() < now + TAKE_IN:
            fetch = self._fetches[0]
            if fetch.coming is None or not fetch.coming.done():
                break
            if not self._take_in(fetch, fetch.coming.result()):
                done += fetch.waiting
                self._fetches.popleft()
        for fetch in self._fetches:
            if fetch.coming is None or not fetch.coming.done():
                late = [key for key, until in fetch.waiting.items() if until <= now]
                done += late
                for key in late:
                    del fetch.waiting[key]
        while self._fetches and self._fetches[0].coming is None:
            if self._fetches[0].waiting:
                self._begin(self._fetches[0], now)
            else:
                self._fetches.popleft()
        return done

    def leave(self, key: int) -> None:
        for fetch in self._fetches:
            fetch.waiting.pop(key, None)

    def _join(self, sequence: Sequence, chain: list[bytes], runs: list[BlockRun], until: float) -> None:
        for fetch in self._fetches:
            if fetch.runs[0].hash == runs[0].hash:
                fetch.waiting[sequence.key] = until
                return
        self._fetches.append(_Fetch(self._partition(sequence), chain, runs, {sequence.key: until}))
        if len(self._fetches) == 1:
            self._begin(self._fetches[0], self._clock())

    def _begin(self, fetch: _Fetch, now: float) -> None:
        size = self._per_run * self._page_bytes
        whole = self._pages.buffer(size * len(fetch.runs))
        fetch.buffers = [whole[at * size : (at + 1) * size] for at in range(len(fetch.runs))]
        within = max(fetch.waiting.values()) - now
        fetch.coming = self._store.fetch(fetch.partition, fetch.runs, fetch.buffers, within)

    def _take_in(self, fetch: _Fetch, fetched: Fetched) -> bool:
        if fetch.taken >= fetched.runs:
            return False
        start = fetch.pages_before + fetch.taken * self._per_run
        chain = fetch.chain[: start + self._per_run]
        if any(self._index.known(digest) is None for digest in chain[:start]):
            return False  # what it stands behind was dropped meanwhile
        buffer = fetch.buffers[fetch.taken]
        self._index.adopt(chain, lambda places, pages: self._fill(buffer, start, places, pages))
        fetch.taken += 1
        return fetch.taken < fetched.runs

    def _fill(self, buffer: memoryview, start: int, places: list[int], pages: list[int]) -> None:
        size = self._page_bytes
        if all(second == first + 1 for first, second in pairwise(places)):
            self._pages.write(pages, buffer[(places[0] - start) * size : (places[-1] + 1 - start) * size])
            return
        for place, page in zip(places, pages, strict=True):
            self._pages.write([page], buffer[(place - start) * size : (place + 1 - start) * size])

    # Writing

    def begun(self, sequence: Sequence) -> None:
        self._measure(sequence)
        if not self._enabled or sequence.prompt_length < self._store.run_tokens:
            return
        chain = self._index.chain(sequence)
        last = min(len(chain) // self._per_run, MOST_RUNS)
        # What a fetch would not pay for need not be written.
        if not last or self._store.worth(last * self._per_run * PAGE_SIZE) is None:
            return
        partition = self._partition(sequence)
        for at, run in enumerate(self._runs(sequence, chain, 0, last)):
            if self._store.used(partition, run) and len(self._pending) < MOST_PENDING:
                hashes = chain[at * self._per_run : (at + 1) * self._per_run]
                self._pending.append(_Keep(partition, run, hashes))

    def spare(self) -> bool:
        """Hands over one run, where one is due; whether there are more."""
        if self._pending:
            due = self._pending.popleft()
            pages = [page.number for digest in due.hashes if (page := self._index.known(digest)) is not None]
            if len(pages) == len(due.hashes):
                payload = memoryview(bytearray(len(pages) * self._page_bytes))
                self._pages.read(pages, payload)
                self._store.keep(due.partition, due.run, payload)
        return bool(self._pending)

    def close(self) -> None:
        self._store.close()

    def _measure(self, sequence: Sequence) -> None:
        tokens = sequence.prompt_length - sequence.cached_tokens
        if tokens >= MEASURED and sequence.first_planned_at is not None and sequence.first_token_at is not None:
            self._store.computed(tokens, sequence.first_token_at - sequence.first_planned_at)

    def _runs(self, sequence: Sequence, chain: list[bytes], first: int, last: int) -> list[BlockRun]:
        per = self._per_run
        borders = [self._index.root(sequence), *(chain[at * per - 1] for at in range(1, last + 1))]
        return [BlockRun(borders[at + 1], borders[at], per * PAGE_SIZE) for at in range(first, last)]

    def _partition(self, sequence: Sequence) -> str:
        return self._index.root(sequence).hex()[:32]
