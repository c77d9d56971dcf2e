"""Coalesces identical requests across replicas: the holder of a lease generates, the others read its stream.

Every fault ends in generating locally: a fault of the store, a leader that is silent too long, a stream that does not
open. Delivered parts are never delivered twice (`resume`).
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cache.answers.codec import pack_part, unpack_part
from cache.answers.lease import Lease, Leases
from cache.answers.pump import Pump, parts_of
from cache.answers.resume import resume
from cache.api import BEGUN, AnswerPart, CacheKey, Counter, Generate, Generation, SingleFlightSettings, StoreFault
from cache.seal.envelope import Envelope

BLOCK = 0.05  # seconds a read waits for news; bounds how late a dead Redis is noticed
INDEX = struct.Struct("<I")  # place of a message in its stream, so that none can be left out or moved


class _LeaderLostError(Exception):
    pass


class CrossProcess:
    def __init__(self, leases: Leases, envelope: Envelope, settings: SingleFlightSettings, counter: Counter) -> None:
        self._leases = leases
        self._envelope = envelope
        self._settings = settings
        self._counter = counter
        self._pumps: set[asyncio.Task[None]] = set()
        self._publishing: set[asyncio.Task[None]] = set()

    def generation(self, answer: CacheKey, generate: Generate, within: float | None = None) -> Generation:
        """Goes at its own pace: other replicas' readers do not wait for this one's."""
        return Pump(self.around(answer, generate, within), self._pumps)

    async def around(
        self, answer: CacheKey, generate: Generate, within: float | None = None
    ) -> AsyncGenerator[AnswerPart, None]:
        """Raises what `generate` raises. `within`: seconds that asking for the lease may take."""
        delivered: list[AnswerPart] = []
        alone = False
        while True:
            source = parts_of(generate()) if alone else self._source(answer, generate, within)
            async with aclosing(source), aclosing(resume(delivered, source)) as rest:
                try:
                    async for part in rest:
                        if part is not BEGUN:
                            delivered.append(part)
                        yield part
                    return
                except _LeaderLostError:
                    self._counter.count("flight_shared", "leader_lost")
                except StoreFault:
                    self._counter.count("flight_shared", "alone")
                    alone = True

    async def aclose(self) -> None:
        for tasks in (self._pumps, self._publishing):
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        await self._leases.aclose()

    async def _source(
        self, answer: CacheKey, generate: Generate, within: float | None
    ) -> AsyncGenerator[AnswerPart, None]:
        lease, taken = await self._leases.take(answer, within)
        self._counter.count("flight_shared", "lead" if taken else "follow")
        async with aclosing(self._lead(lease, generate) if taken else self._follow(lease)) as parts:
            async for part in parts:
                yield part

    async def _lead(self, lease: Lease, generate: Generate) -> AsyncGenerator[AnswerPart, None]:
        publisher = Publisher(self._leases, lease, self._settings.heartbeat, self._counter)
        task = asyncio.get_running_loop().create_task(publisher.run(), name="publisher of a generation")
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)
        place, whole = 0, False
        try:
            async with aclosing(parts_of(generate())) as parts:
                async for part in parts:
                    if part is BEGUN:
                        yield part
                        continue
                    whole = part.ending is not None
                    publisher.put(self._envelope.seal(lease.stream, INDEX.pack(place) + pack_part(part)))
                    place += 1
                    yield part
        finally:
            publisher.finish(whole)

    async def _follow(self, lease: Lease) -> AsyncGenerator[AnswerPart, None]:
        """Raises _LeaderLostError, or StoreFault where it is better to generate."""
        yield BEGUN
        after, place, heard = "0", 0, time.monotonic()
        while True:
            after, items = await self._leases.read(lease, after, BLOCK)
            if not items and not await self._leases.holds(lease):
                # The ending may have come between the two questions.
                after, items = await self._leases.read(lease, after, BLOCK)
                if not items:
                    raise _LeaderLostError
            for item in items:
                yield (part := self._open(lease, place, item))
                if part.ending is not None:
                    return
                place, heard = place + 1, time.monotonic()
            if time.monotonic() - heard > self._settings.patience:
                raise StoreFault("a silent leader")

    def _open(self, lease: Lease, place: int, item: bytes) -> AnswerPart:
        data = self._envelope.open(lease.stream, item)
        if data is None or data[: INDEX.size] != INDEX.pack(place):
            raise StoreFault("a message that is not the next one")
        part = unpack_part(data[INDEX.size :])
        if part is None:
            raise StoreFault("a message that is not one")
        return part


class Publisher:
    """Keeps a leader's lease and writes its messages, off the leader's path. Gives up at the first fault: followers
    take over."""

    def __init__(self, leases: Leases, lease: Lease, heartbeat: float, counter: Counter) -> None:
        self._leases = leases
        self._lease = lease
        self._heartbeat = heartbeat
        self._counter = counter
        self._items: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._finished = False
        self._broken = False  # something is missing from the stream: it must never look whole

    def put(self, item: bytes | None) -> None:
        """None stands for one that was too large to seal."""
        self._broken = self._broken or item is None
        if item is not None and not self._broken:
            self._items.append(item)
        self._news.set()

    def finish(self, whole: bool) -> None:
        self._finished = True
        self._broken = self._broken or not whole
        self._news.set()

    async def run(self) -> None:
        """A whole stream keeps its lease until that runs out, so that latecomers read it."""
        try:
            if await self._publish():
                return
            await self._leases.release(self._lease)
        except StoreFault:
            self._counter.count("flight_shared", "unpublished")

    async def _publish(self) -> bool:
        beat = time.monotonic() + self._heartbeat
        try:
            while not self._broken:
                if self._items:
                    items = list(self._items)
                    self._items.clear()
                    await self._leases.append(self._lease, items)
                elif self._finished:
                    return True
                if time.monotonic() >= beat:
                    if not await self._leases.extend(self._lease):
                        return False
                    beat = time.monotonic() + self._heartbeat
                await self._wait(beat)
        except StoreFault:
            self._counter.count("flight_shared", "unpublished")
        return False

    async def _wait(self, until: float) -> None:
        if self._items or self._finished or self._broken:
            return
        self._news.clear()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._news.wait()
        except TimeoutError:
            return
