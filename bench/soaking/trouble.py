"""Causes faults of a soaked server: its Redis stalls, dies and forgets, its engine dies, its files and switches
change."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench.redis_server import RedisServer
from bench.soaking.callers import Metadata
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1.admin_pb2_grpc import AdminServiceStub

SHORT, LONG = 0.2, 3.0  # seconds that something is away
SWITCHES = ("response_cache", "semantic_cache", "prefix_cache", "prefix_redis", "batching")


def write_tokens(path: Path, tenants: tuple[str, ...]) -> None:
    """Replaces the tokens file at once. Every tenant's token is its name."""
    lines = [
        f'- {{tenant: {name}, sha256: "{hashlib.sha256(name.encode()).hexdigest()}", rights: [generate, admin]}}\n'
        for name in tenants
    ]
    replace(path, "".join(lines))


def write_quotas(path: Path, guest: str, tokens: int) -> None:
    """Replaces the tenants file at once. The guest has few tokens a minute; no other tenant is limited."""
    replace(path, f"{guest}: {{tokens-per-minute: {tokens}, requests: 2, priority: normal}}\n")


def replace(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


class Trouble:
    """Causes one fault after the other, in random order; the engine's deaths only while `deadly`."""

    def __init__(
        self,
        pid: int,
        redis: RedisServer,
        admin: AdminServiceStub,
        folder: Path,
        tenants: tuple[str, ...],
        who: Metadata,
    ) -> None:
        self.happened: Counter[str] = Counter()
        self.deadly = True
        self._pid = pid
        self._redis = redis
        self._admin = admin
        self._tokens, self._quotas = folder / "tokens.yaml", folder / "tenants.yaml"
        self._tenants = tenants  # the last of them is a guest
        self._who = who
        self._chance = random.Random(14)

    async def run(self, pause: float) -> None:
        """Runs until it is cancelled, then restores what is away. `pause`: seconds between two, on average."""
        kinds: Mapping[str, Callable[[], Awaitable[None]]] = {
            "redis forgets": self._forget,
            "hangup": self._hang_up,
            "drain and back": self._drain,
            "quotas change": self._change_quotas,
            "flush": self._flush,
            "redis stalls": self._stall,
            "switch": self._switch,
            "redis dies": self._die,
            "tokens change": self._change_tokens,
            "engine dies": self._kill,
        }
        deck = list(kinds)  # each kind once, then all again in another order
        try:
            while True:
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) * pause)
                if not deck:
                    deck = self._chance.sample(list(kinds), len(kinds))
                name = deck.pop()
                if name == "engine dies" and not self.deadly:
                    continue
                await kinds[name]()
                self.happened[name] += 1
        finally:
            if self._redis.process is None:
                self._redis.start()
            self._redis.resume()

    async def settle(self) -> None:
        """Restores the state of the start."""
        write_tokens(self._tokens, self._tenants)
        await self._undrain()
        for name in SWITCHES:
            await self._set(name, True)

    async def _away(self) -> None:
        await asyncio.sleep(self._chance.uniform(SHORT, LONG))

    async def _stall(self) -> None:
        self._redis.pause()
        await self._away()
        self._redis.resume()

    async def _die(self) -> None:
        await asyncio.to_thread(self._redis.stop)
        await self._away()
        await asyncio.to_thread(self._redis.start)

    async def _forget(self) -> None:
        await asyncio.to_thread(self._redis.command, "FLUSHALL")

    async def _kill(self) -> None:
        engine = engine_of(self._pid)
        if engine is not None:
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    async def _hang_up(self) -> None:
        os.kill(self._pid, signal.SIGHUP)

    async def _change_tokens(self) -> None:
        if self._chance.random() < 0.25:
            self._tokens.write_text("no list of tenants")  # the old ones stay in force
        else:
            write_tokens(self._tokens, self._tenants[: len(self._tenants) - self._chance.randrange(2)])

    async def _change_quotas(self) -> None:
        write_quotas(self._quotas, self._tenants[-1], self._chance.choice((60, 6000)))

    async def _drain(self) -> None:
        asked = admin_pb2.DrainRequest()
        asked.timeout.FromMilliseconds(100)
        with suppress(grpc.aio.AioRpcError):
            await self._admin.Drain(asked, metadata=self._who, timeout=20)
        await asyncio.sleep(SHORT)
        await self._undrain()

    async def _undrain(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            await self._admin.Undrain(admin_pb2.UndrainRequest(), metadata=self._who, timeout=20)

    async def _switch(self) -> None:
        name = self._chance.choice(SWITCHES)
        await self._set(name, self._chance.random() < 0.5)

    async def _flush(self) -> None:
        with suppress(grpc.aio.AioRpcError):  # Redis may be away
            asked = admin_pb2.FlushCacheRequest(tenant=self._tenants[0])
            await self._admin.FlushCache(asked, metadata=self._who, timeout=20)

    async def _set(self, name: str, enabled: bool) -> None:
        asked = admin_pb2.SetOptimizationRequest(name=name, enabled=enabled)
        with suppress(grpc.aio.AioRpcError):  # the engine may be away
            await self._admin.SetOptimization(asked, metadata=self._who, timeout=20)


PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # seconds
    front: int  # bytes resident
    engine: int  # bytes resident; 0 where there is none
    descriptors: int  # of the front
    threads: int  # of the front


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Fits a straight line through (time, size) by least squares; returns how much larger its end is than its
    beginning."""
    if len({at for at, _ in points}) < 2:
        return 0.0
    slope, _ = statistics.linear_regression([at for at, _ in points], [size for _, size in points])
    return slope * (points[-1][0] - points[0][0])


def resident(pid: int) -> int:
    """Bytes; 0 where the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def engine_of(pid: int) -> int | None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            if b"engine.worker.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        except OSError:
            continue
    return None


@dataclass(slots=True)
class MemoryWatch:
    """Looks once in a while."""

    pid: int
    every: float = 1.0  # seconds
    samples: list[Sample] = field(default_factory=list)

    def look(self) -> Sample:
        engine = engine_of(self.pid)
        return Sample(
            time.monotonic(),
            resident(self.pid),
            0 if engine is None else resident(engine),
            len(os.listdir(f"/proc/{self.pid}/fd")),
            len(os.listdir(f"/proc/{self.pid}/task")),
        )

    async def run(self) -> None:
        """Takes samples until the task is cancelled."""
        while True:
            self.samples.append(self.look())
            await asyncio.sleep(self.every)

    def grown(self, since: float, until: float) -> tuple[float, float]:
        """Returns the bytes by which front and engine have grown between two moments."""
        seen = [one for one in self.samples if since <= one.at <= until]
        return growth([(one.at, one.front) for one in seen]), growth(
            [(one.at, one.engine) for one in seen if one.engine]
        )
