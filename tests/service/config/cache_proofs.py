"""Proofs for the caches of the front and for the engine's shared tier."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
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
    EntryKind,
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
from tests.redis_guarded import certify, tls_flags
from tests.service.config.proofs import FAKE, Proof, Tools, becomes
from tests.service.conftest import PATIENCE

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
    end = time.monotonic() + (0.0 if settings.cache.redis_url is None else PATIENCE)
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
        directory = CacheKey(EntryKind.DIRECTORY, PARTITION, "0" * 64)
        for number in range(4):
            store.offer(CacheKey(EntryKind.SEMANTIC, PARTITION, f"{number:064x}"), b"x", 60, directory)
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
    with patch("cache.open.caches.Exporter.exported", side_effect=ValueError) as exported:
        caches.load_semantic()
        await caches.loaded()
    await caches.aclose()
    return [call.args[0] for call in exported.call_args_list]


def run_of(tokens: int) -> tuple[BlockRun, bytes]:
    run = BlockRun(hashlib.sha256(b"run").digest(), hashlib.sha256(b"parent").digest(), tokens)
    return run, bytes(LAYOUT.token_bytes * tokens)


async def fetched(options: CacheOptions, wait: float) -> bool:
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


async def both_reach(url: str, options: CacheOptions, hopeful: bool) -> tuple[bool, bool]:
    """Whether front and engine can work with a Redis; looked for long where it should be so."""
    options = replace(options, redis_url=url, redis_budget=1.0)
    wait = PATIENCE if hopeful else 0.5  # seconds to try
    return await front_reaches(options, wait), await fetched(options, wait)


async def reaches_secured(settings: Settings, tools: Tools) -> tuple[bool, bool]:
    """A Redis with a password, where the URL has another one."""
    (tools.folder / "password").write_text("right\n")
    server = RedisServer(tools.folder, arguments=("--requirepass", "right")).start()
    url = f"redis://:wrong@127.0.0.1:{server.port}/0"
    try:
        return await both_reach(url, settings.cache, settings.cache.redis_password_file is not None)
    finally:
        server.stop()


async def reaches_certified(settings: Settings, tools: Tools) -> tuple[bool, bool]:
    """A Redis whose certificate the system does not trust; it wants one of ours where we name any."""
    options = settings.cache
    if not (tools.folder / "ca.pem").exists():
        certify(tools.folder)
    cert, key = options.redis_cert_file, options.redis_key_file
    matching = cert is None or key is None or cert.stem == key.stem
    port = free_port()
    server = RedisServer(tools.folder, port, tls_flags(tools.folder, port, "yes" if cert else "no")).start()
    try:
        return await both_reach(f"rediss://127.0.0.1:{port}", options, matching and options.redis_ca_file is not None)
    finally:
        server.stop()


async def reaches_watched(settings: Settings, tools: Tools) -> tuple[bool, bool]:
    """A master whose port only a sentinel knows; that one wants a password where we have any."""
    options, folder, port = settings.cache, tools.folder, free_port()
    secret = options.redis_sentinel_password_file
    for name in ("right", "wrong"):
        (folder / name).write_text(f"{name}\n")
    lines = [f"port {port}", f"sentinel monitor main 127.0.0.1 {tools.redis.port} 1"]
    lines += [] if secret is None else ["requirepass right"]
    (folder / "sentinel.conf").write_text("\n".join(lines))
    sentinel = RedisServer(folder, port, (str(folder / "sentinel.conf"), "--sentinel")).start()
    try:
        if options.redis_sentinels is not None:
            options = replace(options, redis_sentinels=f"{options.redis_sentinels}:{port}")
        right = secret is None or secret.name == "right"
        return await both_reach("redis://main:1", options, right and options.redis_sentinels is not None)
    finally:
        sentinel.stop()


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
    assert await fetched(settings.cache, PATIENCE)
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
TLS = (
    *FAKE,
    "--cache.redis-url=rediss://127.0.0.1",
    "--cache.key-file={keys}",
    "--cache.redis-ca-file={folder}/ca.pem",
)
PAIR = (*TLS, "--cache.redis-cert-file={folder}/redis.pem", "--cache.redis-key-file={folder}/client.key")
OURS = (*TLS, "--cache.redis-cert-file={folder}/client.pem", "--cache.redis-key-file={folder}/client.key")
WATCHED = (*SHARED, "--cache.redis-sentinels=127.0.0.1", "--cache.redis-sentinel-password-file={folder}/wrong")
NEITHER, BOTH = (False, False), (True, True)

PROOFS = {
    "cache.redis-url": Proof("{redis}", in_redis, becomes(False, True), (*FAKE, "--cache.key-file={keys}")),
    "cache.redis-password-file": Proof("{folder}/password", reaches_secured, becomes(NEITHER, BOTH), SHARED),
    "cache.redis-ca-file": Proof("{folder}/ca.pem", reaches_certified, becomes(NEITHER, BOTH), SHARED),
    "cache.redis-cert-file": Proof("{folder}/client.pem", reaches_certified, becomes(NEITHER, BOTH), PAIR),
    "cache.redis-key-file": Proof("{folder}/redis.key", reaches_certified, becomes(BOTH, NEITHER), OURS),
    "cache.redis-sentinels": Proof("127.0.0.1", reaches_watched, becomes(NEITHER, BOTH), SHARED),
    "cache.redis-sentinel-password-file": Proof("{folder}/right", reaches_watched, becomes(NEITHER, BOTH), WATCHED),
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
