"""Keys and values through Redis: what goes in comes out, or nothing does."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cache.api import (
    Address,
    BlockLayout,
    BlockRun,
    BlockSettings,
    BreakerSettings,
    BreakerState,
    InvalidKeyFile,
    RedisSettings,
)
from cache.kv_blocks.codec import OVERHEAD, RunCodec
from cache.kv_blocks.connection import connect
from cache.kv_blocks.gate import FetchGate
from cache.kv_blocks.policy import SecondUse
from cache.kv_blocks.resp import RespConnection, RespError
from cache.kv_blocks.store import RedisBlocks
from cache.open.blocks import open_blocks
from cache.open.counters import Counters
from cache.seal.keyring import Keyring
from cache.store.redis_replies import ReplyBounds
from tests.cache.hostile import ENDLESS, Reply, answering
from tests.waiting import wait_for

LAYOUT = BlockLayout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", item_bytes=2, page_size=16)
PARTITION = "ab" * 16


def chain(count: int, seed: bytes = b"", tokens: int = 128) -> list[BlockRun]:
    hashes = [sha256(b"%d" % i + seed).digest() for i in range(count + 1)]
    return [BlockRun(hashes[i + 1], hashes[i], tokens) for i in range(count)]


def payload(run: BlockRun, layout: BlockLayout = LAYOUT) -> bytes:
    return random.Random(run.hash).randbytes(layout.token_bytes * run.tokens)


def buffers(runs: list[BlockRun]) -> list[memoryview]:
    return [memoryview(bytearray(LAYOUT.token_bytes * run.tokens)) for run in runs]


Make = Callable[..., RedisBlocks]


@pytest.fixture
def make_blocks(redis_server: Any, keyring: Keyring, counters: Counters) -> Iterator[Make]:
    made: list[RedisBlocks] = []

    def make(url: str = redis_server.url, layout: BlockLayout = LAYOUT, ring: Keyring = keyring, **changes: Any) -> Any:
        redis = RedisSettings(url=url, budget=1.0, breaker=BreakerSettings(cooldown=0.2))  # 20 ms are soon over
        made.append(RedisBlocks(BlockSettings(redis=redis, **changes), layout, ring, counters))
        return made[-1]

    yield make
    for blocks in made:
        blocks.close()


def fill(blocks: RedisBlocks, runs: list[BlockRun], partition: str = PARTITION) -> None:
    for run in runs:
        assert blocks.keep(partition, run, memoryview(payload(run)))
    assert blocks.drained(10)


def fetched(blocks: RedisBlocks, runs: list[BlockRun], partition: str = PARTITION) -> list[bytes]:
    into = buffers(runs)
    count = blocks.fetch(partition, runs, into, 5.0).result(60).runs
    return [bytes(view) for view in into[:count]]


def test_what_one_engine_keeps_another_fetches(make_blocks: Make, counters: Counters) -> None:
    runs = chain(5)
    fill(make_blocks(), runs)
    other = make_blocks()
    assert fetched(other, runs) == [payload(run) for run in runs]
    assert fetched(other, runs[:1]) == [payload(runs[0])]
    assert counters.counts()["block_written", ""] == 5


@pytest.mark.parametrize("missing", range(5))
def test_only_what_is_there_without_a_gap(make_blocks: Make, missing: int) -> None:
    runs = chain(5)
    blocks = make_blocks()
    fill(blocks, runs[:missing] + runs[missing + 1 :])
    for _ in range(2):  # the connection is in order afterwards
        assert fetched(blocks, runs) == [payload(run) for run in runs[:missing]]


def test_another_tenant_model_or_key_never_hits_and_the_same_one_does(make_blocks: Make, keyring: Keyring) -> None:
    runs = chain(2)
    blocks = make_blocks()
    fill(blocks, runs)
    assert fetched(blocks, runs, "cd" * 16) == []
    for change in (
        {"layers": 1, "kv_heads": 4},
        {"dtype": "float16"},
        {"page_size": 32},
        {"variant": "tp=2"},
        {"head_dim": 32, "item_bytes": 1},
    ):
        assert fetched(make_blocks(layout=replace(LAYOUT, **change)), runs) == []
    assert fetched(make_blocks(ring=Keyring.generate()), runs) == []
    assert fetched(make_blocks(ring=replace(keyring, sealing=Keyring.generate().sealing)), runs) == []
    assert len(fetched(make_blocks(), runs)) == 2


def test_a_run_in_another_place_of_the_chain_does_not_open(make_blocks: Make) -> None:
    (run,) = chain(1)
    blocks = make_blocks()
    fill(blocks, [run])
    assert fetched(blocks, [replace(run, parent=bytes(32))]) == []
    assert fetched(blocks, [replace(run, tokens=run.tokens // 2)]) == []
    assert len(fetched(blocks, [run])) == 1


def test_mutations_open_to_nothing(keyring: Keyring, counters: Counters) -> None:
    codec = RunCodec(keyring, LAYOUT, counters)
    run, other = chain(2, tokens=16)
    key = codec.key(PARTITION, run)
    sealed = codec.seal(key, run, payload(run))
    foreign = codec.seal(codec.key(PARTITION, other), other, payload(other))
    assert len(sealed) == len(payload(run)) + OVERHEAD
    into = memoryview(bytearray(len(payload(run))))
    chance = random.Random(7)
    for number in range(20_000):
        place = chance.randrange(len(sealed))
        if number % 4 == 0:
            mutated = sealed[:place] + foreign[place:]
        elif number % 4 == 1:
            mutated = sealed[:place]
        elif number % 4 == 2:
            head = chance.randrange(OVERHEAD)
            mutated = sealed[:head] + bytes([sealed[head] ^ 1 << chance.randrange(8)]) + sealed[head + 1 :]
        else:
            mutated = sealed[:place] + bytes([sealed[place] ^ 1 << chance.randrange(8)]) + sealed[place + 1 :]
        if mutated == sealed:  # two seals may end in the same byte
            mutated = sealed[:-1]
        assert not codec.open(key, run, memoryview(mutated), into)
    assert codec.open(key, run, memoryview(sealed), into)
    assert bytes(into) == payload(run)
    labels = {label for event, label in counters.counts() if event == "block_rejected"}
    assert labels == {"length", "header", "key", "forged"}


def test_a_payload_of_another_length_is_not_written(make_blocks: Make, counters: Counters) -> None:
    (run,) = chain(1)
    blocks = make_blocks()
    assert blocks.keep(PARTITION, run, memoryview(bytes(10)))
    assert blocks.drained(5)
    assert counters.counts()["block_write_failed", "ValueError"] == 1
    assert fetched(blocks, [run]) == []


def test_buffers_that_do_not_fit_are_refused(make_blocks: Make, counters: Counters) -> None:
    (run,) = chain(1)
    blocks = make_blocks()
    fill(blocks, [run])
    size = len(payload(run))
    for into in ([], [memoryview(bytearray(size - 1))], [memoryview(bytes(size))]):
        assert blocks.fetch(PARTITION, [run], into, 1.0).result(60).runs == 0
    assert counters.counts()["block_fault", "buffers"] == 3


def test_kept_on_the_second_use_and_again_once_lost(make_blocks: Make, redis_server: Any) -> None:
    (run,) = chain(1)
    blocks = make_blocks()
    assert [blocks.used(PARTITION, run) for _ in range(3)] == [False, True, True]
    fill(blocks, [run])
    assert not blocks.used(PARTITION, run)
    assert not blocks.used("cd" * 16, run)
    redis_server.command("FLUSHALL")
    assert fetched(blocks, [run]) == []
    assert blocks.used(PARTITION, run)


def test_the_memory_of_uses_is_bounded() -> None:
    policy = SecondUse(3)
    for name in "abcd":
        assert not policy.used(name)
    assert not policy.used("a")  # forgotten when d came
    assert policy.used("d")


def test_refused_is_a_miss_at_once(make_blocks: Make, make_redis: Callable[..., Any]) -> None:
    server = make_redis(started=False)
    blocks = make_blocks(server.url)
    runs = chain(2)
    begun = time.monotonic()
    for _ in range(20):
        assert fetched(blocks, runs) == []
    assert time.monotonic() - begun < 5  # what one of them might take
    assert blocks.worth(10_000) is None
    assert blocks.states["block_reads"] is BreakerState.OPEN
    server.start()
    wait_for(lambda: blocks.worth(10_000) is not None)
    assert fetched(blocks, runs) == []
    assert blocks.states["block_reads"] is BreakerState.CLOSED
    fill(blocks, runs)
    assert len(fetched(blocks, runs)) == 2


def test_stalled_costs_the_deadline(make_blocks: Make, make_redis: Callable[..., Any]) -> None:
    server = make_redis()
    blocks = make_blocks(server.url)
    runs = chain(2)
    fill(blocks, runs)
    server.pause()
    plain = []
    for _ in range(3):
        begun = time.monotonic()
        threading.Event().wait(0.1)
        plain.append(time.monotonic() - begun)
    begun = time.monotonic()
    assert blocks.fetch(PARTITION, runs, buffers(runs), 0.1).result(60).runs == 0
    assert time.monotonic() - begun < max(3 * max(plain), 0.9)  # a second is what Redis may take
    server.resume()
    assert len(fetched(blocks, runs)) == 2


async def test_cut_in_the_middle_of_a_value(make_blocks: Make, make_proxy: Any, redis_server: Any) -> None:
    proxy = await make_proxy(redis_server.port)
    blocks = make_blocks(proxy.url)
    runs = chain(3)
    await asyncio.to_thread(fill, blocks, runs)
    proxy.cut_after = 5000
    found = await asyncio.to_thread(fetched, blocks, runs)
    assert found == []
    proxy.cut_after = None
    assert await asyncio.to_thread(fetched, blocks, runs) == [payload(run) for run in runs]


def test_writes_are_dropped_under_pressure(
    make_blocks: Make, make_redis: Callable[..., Any], counters: Counters
) -> None:
    server = make_redis()
    runs = chain(4)
    size = len(payload(runs[0]))
    blocks = make_blocks(server.url, queue_bytes=2 * size, timeout=60)
    server.pause()
    assert [blocks.keep(PARTITION, run, memoryview(payload(run))) for run in runs] == [True, True, False, False]
    assert "block_write_failed" not in {event for event, _ in counters.counts()}  # as after a wait for this server
    assert counters.counts()["block_write_dropped", ""] == 2
    server.resume()


def test_a_full_redis_fails_writes_quietly(
    make_blocks: Make, make_redis: Callable[..., Any], counters: Counters
) -> None:
    server = make_redis("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    blocks = make_blocks(server.url)
    runs = chain(30, tokens=1024)
    for run in runs:
        blocks.keep(PARTITION, run, memoryview(payload(run)))
    assert blocks.drained(10)
    assert counters.counts()["block_write_failed", "RespError"] > 0


def test_password_and_database(make_redis: Callable[..., Any], make_blocks: Make, tmp_path: Path) -> None:
    server = make_redis("--requirepass", "se cret/")
    runs = chain(1)
    url = f"redis://:se%20cret%2F@127.0.0.1:{server.port}/3"
    fill(make_blocks(url), runs)
    assert len(fetched(make_blocks(url), runs)) == 1
    assert fetched(make_blocks(url[:-1] + "4"), runs) == []
    assert fetched(make_blocks(server.url), runs) == []


def test_a_key_file_is_needed(redis_server: Any, counters: Counters, tmp_path: Path) -> None:
    settings = BlockSettings(redis=RedisSettings(url=redis_server.url))
    with pytest.raises(InvalidKeyFile, match="needs a key file"):
        open_blocks(settings, LAYOUT, counters)
    keys = tmp_path / "keys"
    keys.write_text("names " + "1" * 64 + "\na " + "2" * 64 + "\n")
    blocks = open_blocks(replace(settings, key_file=keys), LAYOUT, counters)
    assert blocks.run_tokens == settings.chunk_bytes // LAYOUT.token_bytes == 2**20 // LAYOUT.token_bytes
    blocks.close()


def test_runs_are_whole_pages(make_blocks: Make) -> None:
    for layers, expected in ((2, 8192), (80, 192), (40_000, 16)):
        assert make_blocks(layout=replace(LAYOUT, layers=layers), chunk_bytes=2 * 2**20).run_tokens == expected


def test_the_raw_client_against_the_server(redis_server: Any) -> None:
    settings = RedisSettings(url=redis_server.url)
    link = connect(settings, time.monotonic() + 5)
    deadline = time.monotonic() + 5
    assert link.command(b"PING", deadline=deadline) == b"PONG"
    assert link.command(b"INCR", b"n", deadline=deadline) == 1
    assert link.command(b"GET", b"none", deadline=deadline) is None
    for size in (0, 1, 4093, 4094, 4095, 4096, 4097, 1 << 20):
        value = os.urandom(size)
        assert link.command(b"SET", b"v", memoryview(value), deadline=deadline) == b"OK"
        link.send(b"GET", b"v", deadline=deadline)
        link.send(b"PING", deadline=deadline)
        into = memoryview(bytearray(size + 5))
        assert link.bulk(into, deadline) == size
        assert bytes(into[:size]) == value
        assert link.answer(deadline) == b"PONG"
    with pytest.raises(RespError, match="ERR"):
        link.command(b"NONSENSE", deadline=deadline)
    link.send(b"GET", b"v", deadline=deadline)
    with pytest.raises(RespError, match="larger than its buffer"):
        link.bulk(memoryview(bytearray(10)), deadline)
    link.close()


@pytest.mark.product
@pytest.mark.parametrize("reply", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("greets", [True, False])
def test_what_was_not_asked_for_is_never_taken_in(
    keyring: Keyring, counters: Counters, reply: Reply, greets: bool
) -> None:
    """Nothing is fetched, and whoever sends it is hung up on once the system's own buffers are full."""
    with answering(reply, greets) as hostile:
        redis = RedisSettings(url=hostile.url, budget=0.2, breaker=BreakerSettings(failures=1000))
        blocks = RedisBlocks(BlockSettings(redis=redis, timeout=0.2), LAYOUT, keyring, counters)
        runs = chain(2)
        blocks.keep(PARTITION, runs[0], memoryview(payload(runs[0])))
        assert blocks.fetch(PARTITION, runs, buffers(runs), 0.2).result(60).runs == 0
        assert blocks.drained(60)
        assert counters.counts().get(("block_written", ""), 0) == 0
        blocks.close()
        assert hostile.used_up == 0
        assert hostile.sent < 16 * 2**20


@pytest.mark.product
@pytest.mark.parametrize("name", ["a list of small numbers", "a value in a list", "an error without an end"])
def test_a_short_answer_is_short(name: str) -> None:
    with answering(ENDLESS[name]) as hostile:
        link = RespConnection(Address("127.0.0.1", hostile.port), None, time.monotonic() + 60)
        for shape in (ReplyBounds(), ReplyBounds(100, 10_000)):
            with pytest.raises(RespError), closing(link):
                link.command(b"GET", b"x", deadline=time.monotonic() + 60, shape=shape)
            link = RespConnection(Address("127.0.0.1", hostile.port), None, time.monotonic() + 60)
        link.close()
        assert hostile.used_up == 0


BIG = 131_072  # bytes a token: an 8-billion model in bf16


@pytest.mark.parametrize(
    ("prefill", "link", "fetch"),
    [(200.0, 1.4e9, True), (25_000.0, 1.4e9, False), (25_000.0, 3.1e9, False), (5_000.0, 3.1e9, True)],
)
def test_the_gate_takes_whichever_is_faster(prefill: float, link: float, fetch: bool) -> None:
    gate = FetchGate(BIG, 128)
    gate.answered(0.0002)
    gate.computed(1000, 1000 / prefill)
    gate.fetched(int(link), 1.0)
    decision = gate.decide(2048)
    assert decision.fetch is fetch
    assert decision.computing == pytest.approx(2048 / prefill)
    assert decision.fetching == pytest.approx(0.0002 + 2048 * BIG / link, rel=0.01)
    assert not gate.decide(127).fetch


def test_the_gate_follows_what_it_measures() -> None:
    gate = FetchGate(BIG, 128)
    assert gate.decide(1000).reason == "prefill_unmeasured"
    gate.computed(1000, 1.0)
    assert gate.decide(1000).reason == "link_unmeasured"
    gate.fetched(10**9, 1.0)
    assert gate.decide(1000).fetch
    for _ in range(30):
        gate.fetched(10**7, 1.0)
    assert not gate.decide(1000).fetch
    for _ in range(30):
        gate.fetched(10**9, 1.0)
    assert gate.decide(1000).fetch
    gate.computed(0, 1.0)
    gate.computed(5, 0.0)
    assert gate.rates.tokens_per_second == pytest.approx(1000)


def test_the_store_measures_its_link_and_declines_for_a_fast_prefill(make_blocks: Make) -> None:
    blocks = make_blocks(layout=replace(LAYOUT, layers=64, kv_heads=8, head_dim=128))
    wait_for(lambda: blocks.gate.rates.bytes_per_second is not None)
    blocks.computed(100, 1.0)
    allowed = blocks.worth(1000)
    assert allowed is not None
    assert allowed == pytest.approx(2.0)  # bounded by the timeout, not by 10 s of computing
    for _ in range(60):
        blocks.computed(10_000_000, 1.0)
    assert blocks.worth(1000) is None


def test_a_redis_that_does_not_begin_to_answer_is_a_miss_after_its_budget(make_redis: Callable[..., Any]) -> None:
    """However long a fetch was predicted to be worth."""
    server = make_redis()
    redis = RedisSettings(url=server.url, budget=0.05)
    blocks = RedisBlocks(BlockSettings(redis=redis), LAYOUT, Keyring.generate(), Counters())
    try:
        fill(blocks, chain(3))
        wait_for(lambda: len(fetched(blocks, chain(3))) == 3)
        server.pause()
        begun = time.monotonic()
        assert blocks.fetch(PARTITION, chain(3), buffers(chain(3)), 30.0).result(60).runs == 0
        assert time.monotonic() - begun < 15
    finally:
        server.resume()
        blocks.close()


@pytest.mark.parametrize(
    "damage",
    [
        ("RPUSH", "x"),
        ("HSET", "a", "b"),
        ("ZADD", "1", "x"),
        ("SET", ""),
        ("SET", "x" * 50),
        ("SET", "x" * 200_000),  # longer than any buffer
    ],
    ids=["list", "hash", "sorted set", "empty", "short", "long"],
)
def test_what_is_no_run_under_its_name_harms_no_other(
    damage: tuple[str, ...], make_blocks: Make, redis_server: Any, keyring: Keyring, counters: Counters
) -> None:
    """Were each of them taken for a sick server, the breaker would keep everybody's runs away."""
    runs, others = chain(4), chain(4, b"others")
    blocks = make_blocks()
    fill(blocks, runs + others)
    verb, *words = damage
    for run in runs[1:]:
        name = RunCodec(keyring, LAYOUT, counters).key(PARTITION, run).name
        redis_server.command("DEL", name)
        redis_server.command(verb, name, *words)
    for _ in range(5):
        assert fetched(blocks, runs) == [payload(runs[0])]
        assert fetched(blocks, runs[2:]) == []
        assert blocks.states["block_reads"] is BreakerState.CLOSED
    assert fetched(blocks, others) == [payload(run) for run in others]
    told = counters.counts()
    assert sum(count for (event, _), count in told.items() if event in ("block_rejected", "block_fault")) == 10
