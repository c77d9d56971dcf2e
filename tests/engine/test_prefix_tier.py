"""Keys and values that outlive an engine: through a store made of a dict, and through a real Redis that misbehaves."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cache.api import BlockChunk, BlockLayout, Fetched
from engine.blocks_link import open_store
from engine.client import EngineClient
from engine.errors import Unsupported
from engine.events import Event, Failure
from engine.fake import FakeRunner, plain_request
from engine.pages import PagePool
from engine.prefix import PrefixIndex
from engine.prefix_tier import BlockTier
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence as Live
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings, PrefixSettings

CHUNK = 128  # tokens
STEP = 0.1  # seconds that a step is said to take: slow enough for the gate to fetch whenever it may
TEXT = tuple(1 + at * at % 251 for at in range(700))


class DictStore:
    """A BlockStore that does as the test says. What it holds is shared with others made from the same dict."""

    def __init__(self, held: dict[tuple[str, bytes], bytes], layout: BlockLayout) -> None:
        self.held = held
        self.layout = layout
        self.waits: float | None = 5.0  # what `worth` says
        self.slow = False  # fetches stay open until `deliver`
        self.open: list[Callable[[], None]] = []
        self.asked: list[tuple[str, tuple[BlockChunk, ...]]] = []
        self.uses: dict[tuple[str, bytes], int] = {}
        self.rates: list[tuple[int, float]] = []
        self.worth_asked: list[int] = []

    @property
    def chunk_tokens(self) -> int:
        return CHUNK

    def worth(self, tokens: int) -> float | None:
        self.worth_asked.append(tokens)
        return self.waits

    def fetch(
        self, partition: str, chunks: Sequence[BlockChunk], into: Sequence[memoryview], within: float
    ) -> Future[Fetched]:
        self.asked.append((partition, tuple(chunks)))
        done: Future[Fetched] = Future()

        def deliver() -> None:
            count = 0
            for chunk, buffer in zip(chunks, into, strict=True):
                value = self.held.get((partition, chunk.hash))
                if value is None:
                    break
                buffer[:] = value
                count += 1
            done.set_result(Fetched(count, 0.0))

        self.open.append(deliver)
        if not self.slow:
            self.deliver()
        return done

    def deliver(self) -> None:
        while self.open:
            self.open.pop(0)()

    def used(self, partition: str, chunk: BlockChunk) -> bool:
        name = (partition, chunk.hash)
        self.uses[name] = self.uses.get(name, 0) + 1
        return self.uses[name] == 2

    def keep(self, partition: str, chunk: BlockChunk, payload: memoryview) -> bool:
        assert len(payload) == chunk.tokens * self.layout.token_bytes
        self.held[partition, chunk.hash] = bytes(payload)
        return True

    def computed(self, tokens: int, seconds: float) -> None:
        self.rates.append((tokens, seconds))

    def close(self) -> None:
        pass


class Engine:
    """Scheduler, fake runner and tier. `longest` is the most that anything but the runner took, in seconds."""

    def __init__(self, make: Callable[[BlockLayout], object], pages: int = 128, identity: bytes = b"model") -> None:
        fake = FakeSettings(max_context=pages * PAGE_SIZE, total_pages=pages)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=4, fake=fake))
        pool = PagePool(pages)
        self.index = PrefixIndex(pool, identity)
        self.store = make(self.runner.pages.layout)
        self.tier = BlockTier(self.store, self.runner.pages, self.index)  # type: ignore[arg-type]
        limits = Limits(max_sequences=4, max_batch_tokens=512, max_context=pages * PAGE_SIZE)
        self.scheduler = Scheduler(limits, pool, prefixes=self.index, tier=self.tier)
        self.events: dict[int, list[Event]] = {}
        self.longest = 0.0
        self.fed = 0

    def submit(self, ids: tuple[int, ...], output: int = 4, **changes: object) -> int:
        key = len(self.events) + 1
        self.events[key] = []
        request = plain_request(ids, output, **changes)
        self.timed(lambda: self.scheduler.admit(Live(request, list(ids), key=key)))
        return key

    def step(self) -> bool:
        now = time.monotonic()
        self.timed(self.scheduler.collect)
        for event in self.scheduler.expire(now):
            self.events[event.key].append(event)
        plan = self.scheduler.plan(now)
        if plan is not None:
            self.fed += sum(row.count for row in plan.rows)
            result = self.runner.run(plan)
            self.timed(
                lambda: [
                    self.events[event.key].append(event) for event in self.scheduler.commit(plan, result, now + STEP)
                ]
            )
        self.timed(self.tier.spare)
        return plan is not None

    def timed(self, act: Callable[[], object]) -> None:
        begun = time.monotonic()
        act()
        self.longest = max(self.longest, time.monotonic() - begun)

    def run(self, within: float = 20.0) -> None:
        deadline = time.monotonic() + within
        while self.scheduler.live:
            assert time.monotonic() < deadline, "a request never ended"
            if not self.step():
                time.sleep(0.001)
        while self.tier.spare():
            pass

    def ask(self, ids: tuple[int, ...] = TEXT, output: int = 4, **changes: object) -> tuple[int, tuple[int, ...]]:
        """cached tokens and answer."""
        key = self.submit(ids, output, **changes)
        self.run()
        return self.cached(key), self.output(key)

    def cached(self, key: int) -> int:
        finish = self.events[key][-1].finish
        assert finish is not None, self.events[key]
        return finish.cached_tokens

    def output(self, key: int) -> tuple[int, ...]:
        return tuple(token_id for event in self.events[key] for token_id in event.token_ids)


def alone(ids: tuple[int, ...] = TEXT, output: int = 4) -> tuple[int, ...]:
    return Engine(lambda layout: DictStore({}, layout)).ask(ids, output)[1]


Held = dict[tuple[str, bytes], bytes]


@pytest.fixture
def held() -> Held:
    """What an engine left that was asked for TEXT twice."""
    held: Held = {}
    engine = fresh(held)
    engine.ask()
    assert held == {}, "it is written on its second use"
    engine.ask()
    assert len(held) == len(TEXT) // CHUNK
    return held


def fresh(held: Held, **changes: object) -> Engine:
    return Engine(lambda layout: DictStore(held, layout), **changes)  # type: ignore[arg-type]


def store(engine: Engine) -> DictStore:
    assert isinstance(engine.store, DictStore)
    return engine.store


def test_a_new_engine_begins_where_the_old_one_left_off(held: Held) -> None:
    engine = fresh(held)
    whole = len(TEXT) // CHUNK * CHUNK
    assert engine.ask() == (whole, alone())
    assert engine.fed == len(TEXT) - whole + 3
    assert engine.ask() == ((len(TEXT) - 1) // PAGE_SIZE * PAGE_SIZE, alone())
    assert len(store(engine).asked) == 1, "what is on the device is not fetched"
    assert store(engine).rates == []  # too little was computed to tell a rate


@pytest.mark.parametrize("other", ["tenant", "model", "bypass"])
def test_another_tenant_or_model_gets_nothing(held: Held, other: str) -> None:
    engine = fresh(held, identity=b"another" if other == "model" else b"model")
    changes: dict[str, object] = {"tenant": {"prefix_root": b"b"}, "bypass": {"bypass_prefix": True}}.get(other, {})
    assert engine.ask(TEXT, **changes) == (0, alone())
    assert fresh(held).ask()[0] > 0


def test_only_what_lies_beyond_the_device_is_fetched(held: Held) -> None:
    engine = fresh(held)
    engine.ask((*TEXT[:300], 9))
    del store(engine).asked[:]
    assert engine.ask()[0] == len(TEXT) // CHUNK * CHUNK
    ((_, chunks),) = store(engine).asked
    assert len(chunks) == len(TEXT) // CHUNK - 256 // CHUNK  # the third chunk is on the device in part
    assert store(engine).worth_asked[-2] == len(TEXT) // CHUNK * CHUNK - 288


def test_a_gap_ends_what_is_used(held: Held) -> None:
    third = list(held)[2]
    del held[third]
    assert fresh(held).ask() == (2 * CHUNK, alone())


def test_the_gate_decides_and_nothing_is_written_that_nobody_would_fetch(held: Held) -> None:
    engine = fresh(held)
    store(engine).waits = None
    assert engine.ask() == (0, alone())
    assert engine.ask()[0] > 0
    assert store(engine).asked == []
    assert store(engine).uses == {}


def test_who_waits_holds_up_nobody_and_not_for_ever(held: Held) -> None:
    engine = fresh(held)
    store(engine).slow, store(engine).waits = True, 0.1
    waiting = engine.submit(TEXT)
    other = engine.submit((7, 7, 7))
    while not engine.events[other]:
        assert engine.step()
    assert engine.events[waiting] == []
    load = engine.scheduler.load
    assert (load.running, load.waiting, load.paused) == (1, 1, 0)
    engine.run()
    assert (engine.cached(waiting), engine.output(waiting)) == (0, alone())
    store(engine).deliver()  # too late for the one, not for the next: both are the same pages
    engine.step()
    store(engine).slow = False
    assert engine.ask((*TEXT[:640], 1))[0] == 640


def test_those_with_the_same_head_wait_for_one_fetch(held: Held) -> None:
    engine = fresh(held)
    store(engine).slow = True
    keys = [engine.submit((*TEXT, key)) for key in range(3)]
    elsewhere = engine.submit(TEXT[::-1])
    for _ in range(3):
        assert not engine.step()
    assert len(store(engine).asked) == 1
    store(engine).deliver()
    for _ in range(10):
        engine.step()
    store(engine).deliver()  # the queued one had begun
    engine.run()
    assert len(store(engine).asked) == 2
    assert [engine.cached(key) for key in (*keys, elsewhere)] == [640, 640, 640, 0]
    assert engine.output(elsewhere) == alone(TEXT[::-1])


@pytest.mark.parametrize("deed", ["cancel", "deadline", "budget", "pause"])
def test_what_may_happen_to_one_that_waits(held: Held, deed: str) -> None:
    engine = fresh(held)
    store(engine).slow = True
    soon = time.monotonic() + 0.05
    changes = {"deadline": {"deadline": soon}, "budget": {"expires_at": soon}}.get(deed, {})
    key = engine.submit(TEXT, **changes)
    match deed:
        case "cancel":
            engine.scheduler.cancel(key)
        case "pause":
            engine.scheduler.pause(key)
            load = engine.scheduler.load
            assert (load.running, load.waiting, load.paused) == (0, 0, 1)
        case _:
            time.sleep(0.06)
    engine.step()
    store(engine).deliver()
    for _ in range(10):
        engine.step()
    if deed == "pause":
        assert engine.events[key] == []
        engine.scheduler.resume(key)
        engine.run()
        assert engine.output(key) == alone()
    elif deed == "deadline":
        assert engine.events[key] == [Event(key, failure=Failure.DEADLINE)]
    elif deed == "budget":
        assert engine.events[key][-1].finish is not None
    assert engine.scheduler.live == engine.scheduler.fetching == engine.scheduler.load.used_pages == 0
    assert engine.ask()[1] == alone()


def test_a_resumed_one_still_waits_for_its_fetch(held: Held) -> None:
    engine = fresh(held)
    store(engine).slow = True
    key = engine.submit(TEXT)
    engine.scheduler.pause(key)
    engine.scheduler.resume(key)
    assert not engine.step()
    store(engine).deliver()
    engine.run()
    assert (engine.cached(key), engine.output(key)) == (640, alone())


def test_a_pool_without_room_takes_what_it_can(held: Held) -> None:
    engine = fresh(held, pages=50)
    running = engine.submit((5,) * 500, 200)  # 32 pages of 50, and growing
    engine.step()
    key = engine.submit(TEXT[:400], 3)
    engine.run()
    assert engine.output(running) == alone((5,) * 500, 200)
    assert engine.output(key) == alone(TEXT[:400], 3)


def test_the_switch_stops_reading_and_writing(held: Held) -> None:
    engine = fresh(held)
    engine.tier.set_enabled(False)
    assert engine.ask()[0] == 0
    assert store(engine).asked == []
    assert store(engine).uses == {}
    assert store(engine).rates == [(len(TEXT), pytest.approx(0.0, abs=1.0))]
    engine.tier.set_enabled(True)
    assert engine.ask((*TEXT[:640], 1))[0] == 640


# A real Redis


@dataclass
class Server:
    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Server:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("the tests need redis-server: apt-get install redis-server")
        words = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        self.process = subprocess.Popen(
            [binary, *words, "--dir", str(self.folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            time.sleep(0.01)
        pytest.fail("redis-server did not start within 10 s")

    def signal(self, what: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, what)

    def stop(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def command(self, *words: str | bytes) -> bytes:
        raw = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)
        with socket.create_connection(("127.0.0.1", self.port), 5) as link:
            link.sendall(request)
            answer = link.recv(1 << 20)
            while not answer.endswith(b"\r\n"):
                answer += link.recv(1 << 20)
            return answer

    def keys(self) -> list[str]:
        return [line.decode() for line in self.command("KEYS", "k:*").split(b"\r\n") if line.startswith(b"k:")]

    def get(self, key: str) -> bytes:
        return self.command("GET", key).split(b"\r\n", 1)[1][:-2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = Server(tmp_path, port).start()
    yield server
    server.stop()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"names {secrets.token_hex(32)}\nfirst {secrets.token_hex(32)}\n")
    return path


Connect = Callable[..., Engine]


@pytest.fixture
def connect(server: Server, keys: Path) -> Iterator[Connect]:
    made: list[Engine] = []

    def make(**changes: object) -> Engine:
        chosen: dict[str, object] = {"redis_url": server.url, "key_file": str(keys), "chunk_bytes": 1024, **changes}
        prefix = PrefixSettings(**chosen)  # type: ignore[arg-type]
        made.append(Engine(lambda layout: open_store(prefix, layout)))
        return made[-1]

    yield make
    for engine in made:
        engine.tier.close()


@pytest.fixture
def written(connect: Connect, server: Server) -> list[str]:
    """The names of what an engine wrote that was asked twice."""
    engine = connect()
    engine.ask()
    assert server.keys() == []
    engine.ask()
    deadline = time.monotonic() + 10
    while len(server.keys()) < len(TEXT) // CHUNK:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return server.keys()


def test_through_redis_after_a_restart(written: list[str], connect: Connect) -> None:
    engine = connect()
    assert engine.ask() == (640, alone())
    assert connect().ask(TEXT, prefix_root=b"another") == (0, alone())
    assert connect(chunk_bytes=2048).ask() == (0, alone())  # cut otherwise: other chunks
    assert connect().ask() == (640, alone())


def test_another_key_file_opens_nothing(written: list[str], connect: Connect, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(f"names {secrets.token_hex(32)}\nfirst {secrets.token_hex(32)}\n")
    assert connect(key_file=str(other)).ask() == (0, alone())


def test_values_that_were_tampered_with_are_misses(written: list[str], connect: Connect, server: Server) -> None:
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


def test_a_flush_is_a_miss(written: list[str], connect: Connect, server: Server) -> None:
    server.command("FLUSHALL")
    engine = connect()
    assert engine.ask() == (0, alone())


@pytest.mark.parametrize("fault", ["refused", "stalled", "readonly", "killed midway"])
def test_a_faulty_redis_costs_the_loop_nothing_and_no_request(
    written: list[str], connect: Connect, server: Server, fault: str
) -> None:
    engine = connect()
    if fault == "killed midway":
        assert engine.ask()[0] == 640
    match fault:
        case "refused" | "killed midway":
            server.stop()
        case "stalled":
            server.signal(signal.SIGSTOP)
        case "readonly":
            server.command("REPLICAOF", "127.0.0.1", "1")
            server.command("FLUSHALL")
    engine.longest = 0.0
    begun = time.monotonic()
    for turn in range(6):
        prompt = (turn + 1, *TEXT)
        assert engine.ask(prompt)[1] == alone(prompt)
        assert engine.ask((*prompt, 3))[1] == alone((*prompt, 3))
    assert engine.longest < 0.1, "the loop waited for Redis"  # of 20 ms, on a machine that others use as well
    assert time.monotonic() - begun < 10
    if fault == "stalled":
        server.signal(signal.SIGCONT)


# The process


def configured(server: Server, keys: Path) -> EngineSettings:
    prefix = PrefixSettings(redis_url=server.url, key_file=str(keys), chunk_bytes=1024)
    return EngineSettings(model="", kind="fake", prefix=prefix, fake=FakeSettings(step_time=0.02))


async def generate(client: EngineClient, ids: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    output: tuple[int, ...] = ()
    async for events in client.submit(plain_request(ids, 4, request_id=secrets.token_hex(4))):
        output += events.token_ids
        if events.finish is not None:
            return output, events.finish.cached_tokens
    raise AssertionError("no end")


async def test_two_lives_of_the_process(server: Server, keys: Path) -> None:
    found = []
    for _ in range(2):
        client = EngineClient(configured(server, keys))
        await client.start()
        found += [await generate(client, TEXT) for _ in range(2)]
        deadline = time.monotonic() + 10
        while len(server.keys()) < 5 and time.monotonic() < deadline:
            await generate(client, (1, 2))
        await client.set_optimization("prefix_redis", False)
        await client.set_optimization("prefix_cache", False)
        found.append(await generate(client, TEXT))
        await client.set_optimization("prefix_cache", True)
        assert client.load.total_pages > 0
        await client.close()
    assert [cached for _, cached in found] == [0, 688, 0, 640, 688, 0]
    assert {output for output, _ in found} == {alone()}


@pytest.mark.parametrize("key_file", [None, "/nonexistent/keys"])
async def test_a_key_file_is_needed(server: Server, key_file: str | None) -> None:
    prefix = PrefixSettings(redis_url=server.url, key_file=key_file)
    client = EngineClient(EngineSettings(model="", kind="fake", prefix=prefix))
    with pytest.raises(Unsupported, match="key"):
        await client.start()
    await client.close()
