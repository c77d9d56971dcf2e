"""Keys and values that outlive an engine, through a store made of a dict."""

from __future__ import annotations

import time

import pytest

from engine.fake import plain_request
from engine.ipc.events import Event, Failure
from engine.scheduling.sequence import Sequence as Live
from engine.settings import PAGE_SIZE
from tests.engine.tiered import CHUNK, STEP, TEXT, DictStore, Engine, alone

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
    ((_, runs),) = store(engine).asked
    assert len(runs) == len(TEXT) // CHUNK - 256 // CHUNK  # the third run is on the device in part
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
    assert store(engine).rates == [(len(TEXT), pytest.approx(STEP, abs=20.0))]
    engine.tier.set_enabled(True)
    assert engine.ask((*TEXT[:640], 1))[0] == 640


def test_what_arrives_behind_something_that_is_gone_is_of_no_use(held: Held) -> None:
    engine = fresh(held)
    store(engine).waits = None
    engine.ask(TEXT[: CHUNK + 1])  # the device has the first run
    store(engine).waits, store(engine).slow = 5.0, True
    key = engine.submit(TEXT)
    ((_, runs),) = store(engine).asked
    assert len(runs) == len(TEXT) // CHUNK - 1
    engine.scheduler.set_prefix_cache(False)
    engine.scheduler.set_prefix_cache(True)
    store(engine).deliver()
    engine.run()
    assert (engine.cached(key), engine.output(key)) == (0, alone())


def test_a_run_that_lost_a_page_before_it_was_read_is_not_written() -> None:
    held: Held = {}
    engine = fresh(held)
    engine.ask()
    key = engine.submit(TEXT)
    while not engine.events[key]:
        engine.step()
    engine.scheduler.cancel(key)
    written = len(held)
    index = engine.index
    chain = index.chain(Live(plain_request(TEXT), list(TEXT)))
    whole = len(TEXT) // CHUNK
    inside = (whole - 1) * CHUNK // PAGE_SIZE + 4  # pages that stay: the last run keeps half of its own
    index.allocate(index.room - inside)
    assert [index.known(digest) is not None for digest in chain] == [True] * inside + [False] * (len(chain) - inside)
    while engine.tier.spare():
        pass
    assert written < len(held) == whole - 1


def test_of_a_long_prompt_only_the_head_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv.shared_tier.MOST_RUNS", 2)
    held: Held = {}
    engine = fresh(held)
    for _ in range(3):
        engine.ask()
    assert len(held) == 2
    assert fresh(held).ask() == (2 * CHUNK, alone())
