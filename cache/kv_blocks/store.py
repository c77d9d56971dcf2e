"""Implements `BlockStore` in Redis: one thread fetches, one writes, each with its own connection."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from cache.api import BlockLayout, BlockRun, BlockSettings, BreakerState, CacheKey, Counter, Fetched
from cache.kv_blocks.codec import OVERHEAD, RunCodec
from cache.kv_blocks.connection import BlockConnection
from cache.kv_blocks.gate import FetchGate
from cache.kv_blocks.policy import SecondUse
from cache.kv_blocks.resp import OtherTypeError, RespConnection, RespError
from cache.seal.keyring import Keyring
from cache.store.breaker import Breaker
from cache.store.redis_hello import Complaints

PROBE_BYTES = 1 << 18
PROBE_EVERY = 30.0  # seconds without a fetch, after which the link is measured again
CLOSE_WITHIN = 1.0


class RedisBlocks:
    """No method raises, and only `close` waits for Redis on the caller's thread."""

    def __init__(self, settings: BlockSettings, layout: BlockLayout, keyring: Keyring, counter: Counter) -> None:
        self._settings = settings
        self._codec = RunCodec(keyring, layout, counter)
        self._counter = counter
        self._gate = FetchGate(layout.token_bytes, settings.min_tokens)
        self._policy = SecondUse(settings.seen)
        self._run_tokens = max(1, settings.chunk_bytes // (layout.token_bytes * layout.page_size)) * layout.page_size
        complaints = Complaints()
        self._reader, self._writer = (
            BlockConnection(settings.redis, Breaker(settings.redis.breaker), complaints) for _ in range(2)
        )
        self._fetching = ThreadPoolExecutor(1, "block-fetch")
        self._queue: deque[tuple[CacheKey, BlockRun, bytes]] = deque()
        self._queued = 0  # bytes
        self._change = threading.Condition()
        self._closed = False
        self._measured = 0.0  # when the link was last measured
        self._scratch = bytearray()
        self._thread = threading.Thread(target=self._write, name="block-write", daemon=True)
        self._thread.start()

    @property
    def run_tokens(self) -> int:
        return self._run_tokens

    @property
    def gate(self) -> FetchGate:
        return self._gate

    @property
    def states(self) -> dict[str, BreakerState]:
        return {"block_reads": self._reader.breaker.state, "block_writes": self._writer.breaker.state}

    def worth(self, tokens: int) -> float | None:
        if self._reader.breaker.waiting:
            self._counter.count("block_gate", "breaker")
            return None
        prediction = self._gate.decide(tokens)
        self._counter.count("block_gate", prediction.reason)
        if not prediction.fetch:
            return None
        longest = self._settings.timeout
        return longest if prediction.computing is None else min(prediction.computing, longest)

    def fetch(
        self, partition: str, runs: Sequence[BlockRun], into: Sequence[memoryview], within: float
    ) -> Future[Fetched]:
        deadline = time.monotonic() + within
        fit = len(runs) == len(into) and all(map(self._fits, runs, into))
        if self._closed or not fit:
            self._counter.count("block_fault", "buffers" if not fit else "closed")
            nothing: Future[Fetched] = Future()
            nothing.set_result(Fetched(0, 0.0))
            return nothing
        return self._fetching.submit(self._fetch, partition, tuple(runs), tuple(into), deadline)

    def used(self, partition: str, run: BlockRun) -> bool:
        return self._policy.used(self._codec.key(partition, run).name)

    def keep(self, partition: str, run: BlockRun, payload: memoryview) -> bool:
        key = self._codec.key(partition, run)
        with self._change:
            if self._closed or self._queued + len(payload) > self._settings.queue_bytes:
                self._counter.count("block_write_dropped")
                return False
            self._queue.append((key, run, bytes(payload)))
            self._queued += len(payload)
            self._change.notify_all()
        self._policy.kept(key.name)
        return True

    def computed(self, tokens: int, seconds: float) -> None:
        self._gate.computed(tokens, seconds)

    def drained(self, within: float) -> bool:
        with self._change:
            return self._change.wait_for(lambda: self._queued == 0, within)

    def close(self) -> None:
        """Writes what it can in a second, then ends both threads."""
        self.drained(CLOSE_WITHIN)
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._fetching.shutdown(wait=True, cancel_futures=True)
        self._thread.join(self._settings.redis.write_budget + 1)
        self._reader.close()
        self._writer.close()

    def _fits(self, run: BlockRun, buffer: memoryview) -> bool:
        plain = buffer.c_contiguous and buffer.itemsize == 1 and not buffer.readonly
        return plain and buffer.nbytes == self._codec.payload_bytes(run)

    def _fetch(self, partition: str, runs: Sequence[BlockRun], into: Sequence[memoryview], deadline: float) -> Fetched:
        begun = time.monotonic()
        keys = [self._codec.key(partition, run) for run in runs]
        arrived = 0
        # A Redis that does not begin to answer costs the budget of an ordinary lookup, not the whole deadline.
        begin = min(deadline, begun + self._settings.redis.budget)
        try:
            with self._reader.open(begin) as link:
                for place in range(len(runs)):
                    # One GET ahead of the value that is being read, so that round trips overlap with transfers.
                    for ahead in keys[place + bool(place) : place + 2]:
                        link.send(b"GET", ahead.name.encode(), deadline=deadline)
                    begins = deadline if place else begin
                    if not self._take(link, keys[place], runs[place], into[place], (begins, deadline)):
                        if place + 1 < len(runs):
                            _read_past(link, memoryview(self._scratch), deadline)
                        break
                    arrived += 1
        except (OSError, RespError) as error:
            self._counter.count("block_fault", type(error).__name__)
            if isinstance(error, TimeoutError) and not arrived:
                self._gate.fetched(1, time.monotonic() - begun)  # a lower bound of how slow it was: it never arrived
        return self._report(runs, arrived, time.monotonic() - begun)

    def _report(self, runs: Sequence[BlockRun], arrived: int, seconds: float) -> Fetched:
        self._counter.count("block_chunks", "hit", arrived)
        self._counter.count("block_chunks", "miss", len(runs) - arrived)
        if arrived:
            self._measured = time.monotonic()
            size = sum(self._codec.payload_bytes(run) for run in runs[:arrived])
            self._counter.count("block_bytes", "fetched", size)
            self._gate.fetched(size, seconds)
        self._counter.observe("block_fetch", seconds)
        return Fetched(arrived, seconds)

    def _take(
        self, link: RespConnection, key: CacheKey, run: BlockRun, into: memoryview, times: tuple[float, float]
    ) -> bool:
        """`times`: deadline of the first bytes, deadline of all of it."""
        size = self._codec.payload_bytes(run) + OVERHEAD
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        begin, deadline = times
        try:
            length = link.bulk(memoryview(self._scratch), deadline, begin)
        except OtherTypeError:
            self._counter.count("block_rejected", "type")
            length = None
        if length is None or not self._codec.open(key, run, memoryview(self._scratch)[:length], into):
            self._policy.lost(key.name)
            return False
        self._policy.kept(key.name)
        return True

    def _write(self) -> None:
        self._probe()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or bool(self._queue), PROBE_EVERY / 10)
                if self._closed:
                    return
                job = self._queue[0] if self._queue else None
            if job is None:
                self._probe()
                continue
            self._store(*job)
            with self._change:
                self._queue.popleft()
                self._queued -= len(job[2])
                self._change.notify_all()

    def _store(self, key: CacheKey, run: BlockRun, payload: bytes) -> None:
        deadline = time.monotonic() + self._settings.timeout
        ttl = str(round(1000 * self._settings.ttl)).encode()
        try:
            sealed = memoryview(self._codec.seal(key, run, payload))
            with self._writer.open(deadline) as link:
                link.command(b"SET", key.name.encode(), sealed, b"PX", ttl, deadline=deadline)
            self._counter.count("block_written")
            self._counter.count("block_bytes", "written", len(payload))
        except (OSError, RespError, ValueError) as error:
            self._counter.count("block_write_failed", type(error).__name__)
            self._policy.lost(key.name)

    def _probe(self) -> None:
        """Sends an ECHO if no fetch measured the link lately: a gate that declines fetches gets no other figures."""
        if time.monotonic() - self._measured < PROBE_EVERY and self._measured:
            return
        deadline = time.monotonic() + self._settings.timeout
        try:
            with self._writer.open(deadline) as link:
                begun = time.monotonic()
                link.command(b"PING", deadline=deadline)
                self._gate.answered(time.monotonic() - begun)
                begun = time.monotonic()
                link.send(b"ECHO", memoryview(bytes(PROBE_BYTES)), deadline=deadline)
                link.bulk(memoryview(bytearray(PROBE_BYTES)), deadline)
                self._gate.fetched(2 * PROBE_BYTES, time.monotonic() - begun)
        except (OSError, RespError) as error:
            self._counter.count("block_fault", type(error).__name__)
        self._measured = time.monotonic()


def _read_past(link: RespConnection, into: memoryview, deadline: float) -> None:
    with suppress(OtherTypeError):
        link.bulk(into, deadline)
