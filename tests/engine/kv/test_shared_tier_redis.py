"""Keys and values that outlive an engine, through a real Redis that misbehaves and in two lives of the process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.redis_server import RedisServer, write_keys
from cache.api import BlockSettings, RedisSettings
from engine.client import EngineClient
from engine.errors import Unsupported
from engine.fake import plain_request
from engine.kv.open_tier import open_tier
from engine.settings import EngineSettings, FakeSettings
from tests.engine.tiered import CHUNK, TEXT, Engine, alone

pytestmark = pytest.mark.product


@pytest.fixture
def server(make_redis: Callable[..., RedisServer]) -> RedisServer:
    """One that a test may ruin."""
    return make_redis()


Connect = Callable[..., Engine]


@pytest.fixture
def connect(server: RedisServer, key_file: Path) -> Iterator[Connect]:
    made: list[Engine] = []

    def make(**changes: object) -> Engine:
        chosen: dict[str, object] = {"key_file": key_file, "chunk_bytes": 1024, **changes}
        redis = RedisSettings(url=server.url, budget=0.5)  # seconds; on a slow machine 20 ms are soon over
        tier = BlockSettings(redis=redis, **chosen)  # type: ignore[arg-type]
        made.append(Engine(lambda layout: open_tier(tier, layout)[0]))
        return made[-1]

    yield make
    for engine in made:
        engine.tier.close()


@pytest.fixture
def written(connect: Connect, server: RedisServer) -> list[str]:
    """The names of what an engine wrote that was asked twice."""
    engine = connect()
    engine.ask()
    assert server.keys("k:*") == []
    engine.ask()
    deadline = time.monotonic() + 60
    while len(server.keys("k:*")) < len(TEXT) // CHUNK:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return server.keys("k:*")


def test_through_redis_after_a_restart(written: list[str], connect: Connect) -> None:
    engine = connect()
    assert engine.ask() == (640, alone())
    assert connect().ask(TEXT, prefix_root=b"another") == (0, alone())
    assert connect(chunk_bytes=2048).ask() == (0, alone())  # cut otherwise: other runs
    assert connect().ask() == (640, alone())


def test_another_key_file_opens_nothing(written: list[str], connect: Connect, tmp_path: Path) -> None:
    assert connect(key_file=write_keys(tmp_path / "other")).ask() == (0, alone())


def test_values_that_were_tampered_with_are_misses(written: list[str], connect: Connect, server: RedisServer) -> None:
    values = {name: server.get(name) for name in written}
    assert len({len(value) for value in values.values()}) == 1
    for name, value in values.items():
        flipped = bytearray(value)
        flipped[secrets.randbelow(len(value))] ^= 1 << secrets.randbelow(8)
        following = values[written[(written.index(name) + 1) % len(written)]]
        for bad in (bytes(flipped), value[:-1], value[: len(value) // 2], b"", value + b"x", following, b"\0" * 2000):
            server.command("SET", name, bad)
            cached, answer = connect().ask()
            assert answer == alone()
            assert cached < 640
            assert cached % CHUNK == 0
        server.command("SET", name, value)
    assert connect().ask()[0] == 640


def test_a_flush_is_a_miss(written: list[str], connect: Connect, server: RedisServer) -> None:
    server.command("FLUSHALL")
    engine = connect()
    assert engine.ask() == (0, alone())


@pytest.mark.parametrize("fault", ["refused", "stalled", "readonly", "killed midway"])
def test_a_faulty_redis_costs_no_request(written: list[str], connect: Connect, server: RedisServer, fault: str) -> None:
    engine = connect()
    if fault == "killed midway":
        assert engine.ask()[0] == 640
    match fault:
        case "refused" | "killed midway":
            server.stop()
        case "stalled":
            server.pause()
        case "readonly":
            server.command("REPLICAOF", "127.0.0.1", "1")
            server.command("FLUSHALL")
    for turn in range(6):
        prompt = (turn + 1, *TEXT)
        assert engine.ask(prompt)[1] == alone(prompt)
        assert engine.ask((*prompt, 3))[1] == alone((*prompt, 3))
    if fault == "stalled":
        server.resume()


def configured(server: RedisServer, key_file: Path) -> EngineSettings:
    tier = BlockSettings(redis=RedisSettings(url=server.url, budget=1.0), key_file=key_file, chunk_bytes=1024)
    return EngineSettings(model="", kind="fake", shared_tier=tier, fake=FakeSettings(step_time=0.1))


async def generate(client: EngineClient, ids: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    output: tuple[int, ...] = ()
    async for events in client.submit(plain_request(ids, 4, request_id=secrets.token_hex(4))):
        output += events.token_ids
        if events.finish is not None:
            return output, events.finish.cached_tokens
    raise AssertionError("no end")


@pytest.mark.proof
async def test_two_lives_of_the_process(server: RedisServer, key_file: Path) -> None:
    found = []
    for _ in range(2):
        client = EngineClient(configured(server, key_file))
        await client.start()
        found += [await generate(client, TEXT) for _ in range(2)]
        deadline = time.monotonic() + 60
        while len(server.keys("k:*")) < 5 and time.monotonic() < deadline:
            await generate(client, (1, 2))
        await client.set_optimization("prefix_redis", False)
        await client.set_optimization("prefix_cache", False)
        found.append(await generate(client, TEXT))
        await client.set_optimization("prefix_cache", True)
        assert client.load.total_pages > 0
        await client.close()
    assert [cached for _, cached in found] == [0, 688, 0, 640, 688, 0]
    assert {output for output, _ in found} == {alone()}


@pytest.mark.parametrize("key_file", [None, Path("/nonexistent/keys")])
async def test_a_key_file_is_needed(server: RedisServer, key_file: Path | None) -> None:
    tier = BlockSettings(redis=RedisSettings(url=server.url), key_file=key_file)
    client = EngineClient(EngineSettings(model="", kind="fake", shared_tier=tier))
    with pytest.raises(Unsupported, match="key"):
        await client.start()
    await client.close()
