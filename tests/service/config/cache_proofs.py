"""Proofs for the caches of the front and for the engine's shared tier."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.redis_server import RedisServer, free_port
from cache.answers.exact import ExactCache
from cache.api import (
    Allowance,
    AnswerEnding,
    AnswerPart,
    BlockLayout,
    BlockRun,
    CachedCompletion,
    CacheKey,
    CacheOptions,
    Kind,
    ModelIdentity,
    Question,
)
from cache.open.caches import Caches, open_caches
from cache.open.counters import Counters
from cache.seal.context import CacheContext
from cache.seal.envelope import Envelope
from cache.seal.keyring import Keyring
from cache.seal.partition import Epochs, Partitions
from cache.store.memory import MemoryStore
from engine.kv.open_tier import open_tier
from service.config.settings import Settings
from tests.service.config.proofs import FAKE, Proof, Tools, becomes

MODEL = ModelIdentity(weights="w" * 64, tokenizer="t" * 64)
QUESTION = Question(
    tenant="acme", token_ids=(1, 2, 3), parameters=(("temperature", 0.0),), max_tokens=50, deterministic=True
)
LAYOUT = BlockLayout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", item_bytes=2, page_size=16)
PARTITION = "ab" * 16
SHARED = (*FAKE, "--cache.redis-url={redis}", "--cache.key-file={keys}")


def answer(size: int = 1) -> CachedCompletion:
    parts = (
        AnswerPart((5, 6), "x" * size),
        AnswerPart((), "", AnswerEnding(reason="stop", prompt_tokens=3, completion_tokens=2)),
    )
    return CachedCompletion(parts=parts, max_tokens=50, provenance="p", created_at=time.time())


def opened(options: CacheOptions) -> Caches:
    return open_caches(options.front(), MODEL, Counters())


def context(store: MemoryStore) -> CacheContext:
    counters, keyring = Counters(), Keyring.generate()
    partitions = Partitions(keyring, MODEL)
    return CacheContext(store, partitions, Epochs(store, partitions), Envelope(keyring, 1 << 20, counters), counters)


async def in_redis(settings: Settings, tools: Tools) -> bool:
    """Whether an answer that was put lies there, within some tries."""
    caches = opened(settings.cache)
    end = time.monotonic() + (0.0 if settings.cache.redis_url is None else 10.0)
    while True:
        await caches.responses.put(QUESTION, answer())
        await asyncio.sleep(0.05)  # it is written beside
        if tools.redis.keys("*") or time.monotonic() > end:
            break
    await caches.aclose()
    return bool(tools.redis.keys("*"))


async def another_finds_it(settings: Settings, tools: Tools) -> bool:
    """Whether a second process finds what a first one stored."""
    for _ in range(2):
        caches = opened(settings.cache)
        found = await caches.responses.get(QUESTION, Allowance(5.0))
        await caches.responses.put(QUESTION, answer())
        await caches.aclose()
    return found is not None


async def held(settings: Settings, tools: Tools) -> int:
    """Bytes in memory, after four large answers."""
    caches = opened(settings.cache)
    for number in range(4):
        await caches.responses.put(replace(QUESTION, token_ids=(number,)), answer(600_000))
    return caches.held["memory"]


async def keeps_4k(settings: Settings, tools: Tools) -> bool:
    return await opened(settings.cache).responses.put(QUESTION, answer(4096))


async def there_after_a_minute(settings: Settings, tools: Tools) -> bool:
    now = [0.0]
    cache = ExactCache(context(MemoryStore(1 << 20, lambda: now[0])), settings.cache.response)
    await cache.put(QUESTION, answer())
    now[0] = 60.0
    return await cache.get(QUESTION, Allowance(5.0)) is not None


async def listed(settings: Settings, tools: Tools) -> list[int]:
    """Members of a directory, in memory and in Redis, after four were added."""
    counts = []
    for options in (replace(settings.cache, redis_url=None), settings.cache):
        store = opened(options)._context.store
        directory = CacheKey(Kind.DIRECTORY, PARTITION, "0" * 64)
        for number in range(4):
            store.offer(CacheKey(Kind.SEMANTIC, PARTITION, f"{number:064x}"), b"x", 60, directory)
        for _ in range(500):
            if (await store.members(directory, 0.0, 100, 5.0)).total >= min(4, settings.cache.semantic.max_entries):
                break
            await asyncio.sleep(0.01)
        counts.append((await store.members(directory, 0.0, 100, 5.0)).total)
        await store.aclose()
    return counts


async def embedder(settings: Settings, tools: Tools) -> list[Path | None]:
    """The folders that an embedder is made of."""
    caches = opened(settings.cache)
    with patch("cache.open.caches.exported", side_effect=ValueError) as exported:
        caches.load_semantic()
        await caches.loaded()
    await caches.aclose()
    return [call.args[0] for call in exported.call_args_list]


def run_of(tokens: int) -> tuple[BlockRun, bytes]:
    run = BlockRun(hashlib.sha256(b"run").digest(), hashlib.sha256(b"parent").digest(), tokens)
    return run, bytes(LAYOUT.token_bytes * tokens)


async def fetched(options: CacheOptions, wait: float = 1.0) -> bool:
    """Whether the engine's tier brings back what it has written, within some tries."""
    blocks = options.blocks()
    assert blocks is not None
    store, _ = open_tier(blocks, LAYOUT)
    run, payload = run_of(32)
    try:
        store.keep(PARTITION, run, memoryview(payload))
        end = time.monotonic() + wait
        while time.monotonic() < end:
            into = [memoryview(bytearray(len(payload)))]
            if (await asyncio.wrap_future(store.fetch(PARTITION, [run], into, 1.0))).runs:
                return True
            await asyncio.sleep(0.05)
        return False
    finally:
        await asyncio.to_thread(store.close)


async def front_reaches(options: CacheOptions, wait: float) -> bool:
    """Whether a lookup of the front is answered, be it with nothing, within some tries."""
    counters = Counters()
    caches = open_caches(options.front(), MODEL, counters)
    end = time.monotonic() + wait
    while time.monotonic() < end and not counters.counts().get(("response_lookup", "miss")):
        await caches.responses.get(QUESTION, Allowance(5.0))
        await asyncio.sleep(0.05)
    await caches.aclose()
    return ("response_lookup", "miss") in counters.counts()


async def both_reach(server: RedisServer, options: CacheOptions, scheme: str) -> tuple[bool, bool]:
    """Whether front and engine can work with a Redis."""
    options = replace(options, redis_url=f"{scheme}:{server.port}/0", redis_budget=1.0)
    given = options.redis_password_file or options.redis_ca_file
    wait = 0.5 if given is None else 10.0  # seconds to try
    return await front_reaches(options, wait), await fetched(options, wait)


async def reaches_secured(settings: Settings, tools: Tools) -> tuple[bool, bool]:
    """A Redis with a password, where the URL has another one."""
    (tools.folder / "password").write_text("right\n")
    server = RedisServer(tools.folder, arguments=("--requirepass", "right")).start()
    try:
        return await both_reach(server, settings.cache, "redis://:wrong@127.0.0.1")
    finally:
        server.stop()


def certify(folder: Path) -> None:
    """An authority and the server's certificate."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *curve, "-subj", "/CN=localhost", "-keyout", "redis.key", "-out", "redis.csr")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    sign = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "redis.csr", *sign, "-out", "redis.pem")


async def reaches_certified(settings: Settings, tools: Tools) -> tuple[bool, bool]:
    """A Redis whose certificate the system does not trust."""
    folder = tools.folder
    if not (folder / "ca.pem").exists():
        certify(folder)
    files = {"cert": "redis.pem", "key": "redis.key", "ca-cert": "ca.pem"}
    words: Sequence[str] = [word for kind, file in files.items() for word in (f"--tls-{kind}-file", f"{folder}/{file}")]
    port = free_port()
    listen = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no")
    server = RedisServer(folder, port, (*listen, *words)).start()
    try:
        return await both_reach(server, settings.cache, "rediss://127.0.0.1")
    finally:
        server.stop()


async def waits(settings: Settings, tools: Tools) -> tuple[float, float]:
    """Seconds that the front allows for lookups, and that the engine's tier waits for a Redis that has stalled."""
    blocks = settings.cache.blocks()
    assert blocks is not None
    store, _ = open_tier(blocks, LAYOUT)
    run, payload = run_of(32)
    tools.redis.pause()
    try:
        begun = time.monotonic()
        await asyncio.wrap_future(store.fetch(PARTITION, [run], [memoryview(bytearray(len(payload)))], 5.0))
        return opened(settings.cache).allowance().left, time.monotonic() - begun
    finally:
        tools.redis.resume()
        await asyncio.to_thread(store.close)


async def block_lives(settings: Settings, tools: Tools) -> int:
    """Milliseconds that a run has left in Redis."""
    assert await fetched(settings.cache, 10.0)
    (name,) = tools.redis.keys("k:*")
    return int(tools.redis.command("PTTL", name)[1:])


def tier(look: Callable[[Any], Any]) -> Callable[[Settings, Tools], Any]:
    def effect(settings: Settings, tools: Tools) -> Any:
        blocks = settings.cache.blocks()
        assert blocks is not None
        store, _ = open_tier(blocks, LAYOUT)
        try:
            return look(store)
        finally:
            store.close()

    return effect


def longer(before: tuple[float, float], after: tuple[float, float]) -> bool:
    return (before[0], after[0]) == (0.02, 0.8) and before[1] < after[1] and after[1] >= 0.8


KEYLESS = (*FAKE, "--cache.redis-url={redis}", "--cache.redis-budget=1")
PATIENT = (*SHARED, "--cache.redis-budget=1")
NEITHER, BOTH = (False, False), (True, True)

PROOFS = {
    "cache.redis-url": Proof("{redis}", in_redis, becomes(False, True), (*FAKE, "--cache.key-file={keys}")),
    "cache.redis-password-file": Proof("{folder}/password", reaches_secured, becomes(NEITHER, BOTH), SHARED),
    "cache.redis-ca-file": Proof("{folder}/ca.pem", reaches_certified, becomes(NEITHER, BOTH), SHARED),
    "cache.redis-budget": Proof("0.8", waits, longer, SHARED),
    "cache.key-file": Proof("{keys}", another_finds_it, becomes(False, True), KEYLESS),
    "cache.memory-bytes": Proof("1048576", held, lambda before, after: before > 2_400_000 > 1_048_576 >= after),
    "cache.response.ttl": Proof("10", there_after_a_minute, becomes(True, False)),
    "cache.response.max-bytes": Proof("1024", keeps_4k, becomes(True, False)),
    "cache.semantic.model": Proof("{folder}", embedder, lambda before, after: before == [None] != after),
    "cache.semantic.max-entries": Proof("2", listed, becomes([4, 4], [2, 2]), PATIENT),
    "cache.prefix.ttl": Proof("10", block_lives, lambda before, after: before > 3_000_000 > 11_000 >= after, SHARED),
    "cache.prefix.chunk-bytes": Proof(
        "65536",
        tier(lambda store: store.run_tokens * LAYOUT.token_bytes),
        becomes(1 << 20, 65536),
        SHARED,
    ),
    "cache.prefix.min-tokens": Proof("32", tier(lambda s: s.worth(64) is not None), becomes(False, True), SHARED),
}
