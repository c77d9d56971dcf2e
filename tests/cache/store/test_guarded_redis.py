"""Redis with certificates, users of few rights and sentinels; and what is no Redis that entries can be kept in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from bench.redis_server import free_port
from cache.answers.lease import Leases
from cache.api import (
    BlockLayout,
    BlockRun,
    BlockSettings,
    BucketSize,
    CacheKey,
    EntryKind,
    RedisSettings,
    SingleFlightSettings,
    StoreFault,
)
from cache.kv_blocks.store import RedisBlocks
from cache.open.counters import Counters
from cache.seal.keyring import Keyring
from cache.store.redis_buckets import RedisBuckets
from cache.store.redis_link import RedisLink
from cache.store.redis_store import RedisStore
from cache.store.redis_tls import TlsFiles
from tests.cache.waiting import until
from tests.redis_guarded import GuardedRedis, guarded_redis, ours, rules, users

PARTITION = "ab" * 16
LAYOUT = BlockLayout(layers=2, kv_heads=2, head_dim=16, dtype="bfloat16", item_bytes=2, page_size=16)
ROOMY = {"budget": 2.0, "write_budget": 2.0}


def key(number: int, kind: EntryKind = EntryKind.RESPONSE) -> CacheKey:
    return CacheKey(kind, PARTITION, f"{number:064x}")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedRedis]:
    with guarded_redis(tmp_path_factory.mktemp("guarded")) as group:
        yield group


@asynccontextmanager
async def front(settings: RedisSettings, counters: Counters) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings, counters)
    try:
        yield store
    finally:
        await store.aclose()


@contextlib.contextmanager
def engine(settings: RedisSettings, counters: Counters) -> Iterator[RedisBlocks]:
    blocks = RedisBlocks(BlockSettings(redis=settings), LAYOUT, Keyring.generate(), counters)
    try:
        yield blocks
    finally:
        blocks.close()


async def everything(store: RedisStore, settings: RedisSettings, counters: Counters) -> None:
    """Every command that the front ever sends."""
    await store.set(key(1), b"one", 60)
    assert await store.get_many([key(1), key(2)]) == (b"one", None)
    assert await store.set_if_absent(key(3, EntryKind.EPOCH), b"epoch", 60) == b"epoch"
    assert await store.swap(key(4, EntryKind.EVIDENCE), None, b"seen", 60)
    for number in range(3):
        store.offer(key(10 + number, EntryKind.SEMANTIC), b"x", 60, key(5, EntryKind.DIRECTORY))
    await store.drained()
    assert (await store.members(key(5, EntryKind.DIRECTORY), 0.0, 10)).total == 3
    buckets = RedisBuckets(settings, b"", counters)
    assert (await buckets.settle("a", BucketSize(1.0, 9.0), 0, 5)).tokens == 5
    await buckets.aclose()
    assert [one async for one in store.scan(EntryKind.RESPONSE, PARTITION)] == [key(1)]
    patient = RedisLink(store.server, settings.write_budget, "flight", counters)
    leases = Leases(store.link, patient, SingleFlightSettings())
    lease, taken = await leases.take(key(6))
    assert taken
    assert await leases.extend(lease)
    assert await leases.holds(lease)
    await leases.append(lease, [b"part"])
    assert [list(parts) for _, parts in [await leases.read(lease, "0", 0.1)]] == [[b"part"]]
    await leases.release(lease)
    await patient.aclose()
    buckets = RedisBuckets(settings, b"names", counters)
    assert (await buckets.settle("acme", BucketSize(per_second=1.0, most=60.0), 0.0, 10.0)).tokens == 10.0
    await buckets.aclose()
    assert await store.delete_many([key(1)]) == 1


def kept(blocks: RedisBlocks, number: int) -> bool:
    """Whether the engine's tier brings back what it was given."""
    run = BlockRun(sha256(b"%d" % number).digest(), bytes(32), 32)
    payload = random.Random(number).randbytes(LAYOUT.token_bytes * run.tokens)
    into = memoryview(bytearray(len(payload)))
    blocks.keep(PARTITION, run, memoryview(payload))
    blocks.drained(5)
    return blocks.fetch(PARTITION, [run], [into], 2.0).result(60).runs == 1 and bytes(into) == payload


async def answered(store: RedisStore) -> bool:
    """Whether it can be written and read."""
    with contextlib.suppress(StoreFault):
        await store.set(key(9, EntryKind.LEASE), b"x", 60)
        return await store.get_many([key(9, EntryKind.LEASE)]) == (b"x",)
    return False


def called(guarded: GuardedRedis) -> set[str]:
    """Commands that were ever called there."""
    link = guarded.root_link(guarded.master().port)
    with contextlib.closing(link):
        text = link.command(b"INFO", b"commandstats", deadline=guarded.soon())
    assert isinstance(text, bytes)
    return {line.partition(":")[0].removeprefix("cmdstat_") for line in text.decode().split() if "cmdstat_" in line}


@pytest.mark.product
async def test_documented_rules_are_enough_and_no_more_than_that(guarded: GuardedRedis, counters: Counters) -> None:
    settings = guarded.settings(**ROOMY, url=guarded.settings().url + "/0")
    async with front(settings, counters) as store:
        await until(lambda: answered(store))
        quiet = counters.counts()
        await everything(store, settings, counters)
        with engine(settings, counters) as blocks:
            await asyncio.to_thread(kept, blocks, 1)
            assert await asyncio.to_thread(kept, blocks, 2)
        told = counters.counts()
    faults = {event for event in told if event[0] == "cache_fault" and told[event] != quiet.get(event)}
    assert not faults
    allowed = {word.removeprefix("+") for word in rules().split() if word.startswith("+")}
    assert allowed <= called(guarded) | {"select"}  # that one where the URL has another database than 0


@pytest.mark.product
async def test_the_link_survives_a_lookup_budget_shorter_than_connecting(guarded: GuardedRedis) -> None:
    """TLS, a sentinel and a new connection take longer than 20 ms on a slow machine: they come about beside."""
    counters = Counters()
    with engine(guarded.settings(budget=0.001), counters) as blocks:
        run = BlockRun(bytes(32), bytes(32), 32)
        into = memoryview(bytearray(LAYOUT.token_bytes * run.tokens))

        async def reached() -> bool:
            blocks.fetch(PARTITION, [run], [into], 0.001).result(60)
            return vars(blocks)["_reader"]._link is not None or bool(vars(blocks)["_reader"]._coming)

        await until(reached)
        coming = vars(blocks)["_reader"]._coming
        assert coming is None or (await asyncio.wrap_future(coming)) is not None


@pytest.mark.product
async def test_no_certificate_no_entry(guarded: GuardedRedis, counters: Counters) -> None:
    bare = guarded.settings(**ROOMY, cert_file=None, key_file=None)
    async with front(bare, counters) as store:
        assert not await answered(store)
    with engine(bare, counters) as blocks:
        assert not await asyncio.to_thread(kept, blocks, 3)


@pytest.mark.product
async def test_a_failover_is_a_gap_and_no_more(guarded: GuardedRedis, counters: Counters) -> None:
    """The master dies, with the sentinel that is asked first silent: another one is used as soon as it is named."""
    settings, before = guarded.settings(**ROOMY), guarded.master()
    async with front(settings, counters) as store:
        with engine(settings, counters) as blocks:
            await until(lambda: answered(store))
            await until(lambda: asyncio.to_thread(kept, blocks, 4))
            guarded.sentinels[0].pause()
            try:
                before.stop()
                await until(lambda: answered(store))
                await until(lambda: asyncio.to_thread(kept, blocks, 5))
            finally:
                guarded.sentinels[0].resume()
    assert guarded.master() is not before
    before.start()


@pytest.mark.product
async def test_a_master_that_has_become_a_replica_is_left(guarded: GuardedRedis, counters: Counters) -> None:
    """As when an operator asks for a failover: both servers live on."""
    settings = guarded.settings(**ROOMY)
    await asyncio.to_thread(guarded.whole)
    async with front(settings, counters) as store:
        await until(lambda: answered(store))
        before = guarded.master()
        await until(lambda: asyncio.to_thread(guarded.fail_over))
        await until(lambda: asyncio.to_thread(lambda: guarded.masters() not in ([], [before])))
        await until(lambda: answered(store))


Refuse = Callable[[RedisSettings], Any]


@pytest.fixture
def refused(caplog: pytest.LogCaptureFixture) -> Callable[[RedisSettings], Any]:
    """What the log says of a Redis that both kinds of connection have tried for a while."""

    async def refuse(settings: RedisSettings) -> list[str]:
        counters = Counters()
        with caplog.at_level(logging.WARNING):
            async with front(settings, counters) as store:
                for _ in range(2):
                    assert not await answered(store)
            ours = [record.getMessage() for record in caplog.records]
            with engine(settings, counters) as blocks:
                for number in range(2):
                    assert not await asyncio.to_thread(kept, blocks, number)
        theirs = [record.getMessage() for record in caplog.records][len(ours) :]
        assert ours == theirs
        return ours

    return refuse


async def test_a_cluster_is_refused_by_name_and_once(
    make_redis: Callable[..., Any], refused: Any, tmp_path: Path
) -> None:
    bus = ("--cluster-port", str(free_port()), "--cluster-config-file", str(tmp_path / "nodes.conf"))
    server = make_redis("--cluster-enabled", "yes", *bus)
    (said,) = await refused(RedisSettings(url=server.url, **ROOMY))
    assert "Redis Cluster, which is not supported" in said


async def test_what_knows_no_hello_is_too_old(make_redis: Callable[..., Any], refused: Any) -> None:
    (said,) = await refused(RedisSettings(url=make_redis("--rename-command", "HELLO", "").url, **ROOMY))
    assert "Redis 7 is needed" in said


@pytest.mark.product
async def test_a_sentinel_is_no_store(refused: Any, guarded: GuardedRedis) -> None:
    url = f"rediss://root:of-the-operator@127.0.0.1:{guarded.sentinels[1].port}"
    plain = {"sentinels": None, "sentinel_password_file": None, "password_file": None}
    (said,) = await refused(guarded.settings(url=url, **plain, **ROOMY))
    assert "names a sentinel" in said


@pytest.mark.product
async def test_a_wrong_password_is_said_once_and_not_repeated(
    guarded: GuardedRedis, refused: Any, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("of-nobody-at-all")
    (said,) = await refused(guarded.settings(password_file=tmp_path / "wrong", **ROOMY))
    assert "does not take our user name and password" in said
    assert "nobody" not in said


async def test_what_the_rules_forbid_is_said_once(make_redis: Callable[..., Any], refused: Any, tmp_path: Path) -> None:
    acl = users(tmp_path, ours("~r:* -@all +ping"))
    server = make_redis("--aclfile", str(acl))
    (said,) = await refused(RedisSettings(url=f"redis://whippet:of_whippet@127.0.0.1:{server.port}", **ROOMY))
    assert "forbids our user a command" in said


@pytest.mark.product
def test_only_the_named_authority_is_trusted_and_files_are_read_when_they_change(guarded: GuardedRedis) -> None:
    """By both kinds of connection: redis-py's own context would trust the system's authorities as well."""
    files = TlsFiles(guarded.settings())
    first = files.context()
    assert first is not None
    assert first.cert_store_stats()["x509_ca"] == 1
    assert files.context() is first
    os.utime(guarded.folder / "client.pem", (1, 1))
    assert files.context() is not first


def test_a_password_is_read_anew_for_each_connection(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    settings = RedisSettings(url="redis://us@h", password_file=secret)
    for word in ("first", "second"):
        secret.write_text(word + "\n")
        assert (settings.login().user, settings.login().password) == ("us", word)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"url": "redis://h?db=1"}, "nothing behind"),
        ({"url": "redis://secret:x"}, "no port"),
        ({"url": "redis://h/first"}, "number of a database"),
        ({"url": "redis://u:secret/word@h"}, "number of a"),
        ({"sentinels": "a:1,,b"}, "host:port"),
        ({"sentinels": "a:1/2"}, "host:port"),
        ({"sentinels": "a:x"}, "no port"),
        ({"url": "rediss://h", "cert_file": Path("c")}, "go together"),
        ({"cert_file": Path("c"), "key_file": Path("k")}, "rediss://"),
        ({"sentinel_password_file": Path("p")}, "needs redis-sentinels"),
    ],
)
def test_addresses_are_refused_without_being_repeated(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        RedisSettings(**{"url": "redis://h", **changes})
    assert "secret" not in str(raised.value)


def test_addresses_are_read_as_they_are_written() -> None:
    where = RedisSettings(url="rediss://me:a%2Fb@[::1]:7/3").where
    assert (where.tls, tuple(where.address), where.database) == (True, ("::1", 7), 3)
    assert (where.login.user, where.login.password) == ("me", "a/b")
    assert RedisSettings(url="redis://MyMaster").where.address == ("MyMaster", 6379)
    sentinel_servers = RedisSettings(url="redis://m", sentinels="who@A:1, [::2]:3,b").sentinel_servers
    assert sentinel_servers is not None
    assert (sentinel_servers.user, sentinel_servers.addresses) == ("who", (("A", 1), ("::2", 3), ("b", 26379)))
