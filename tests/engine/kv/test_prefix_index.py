"""Which pages are kept and which go first, by hand and beside a simulation; pages that come from elsewhere."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.prefix import DevicePages
from bench.replay import LruBlocks, replay_prefix
from bench.workloads import read_blocks
from engine.fake import plain_request
from engine.scheduling.sequence import Sequence
from tests.engine.prefixed import Engine, text
from tests.properties import example_count

TRACE = Path(__file__).parents[2] / "bench" / "data" / "mooncake_600.jsonl.gz"


def test_leaves_go_first_and_of_them_the_longest_unused() -> None:
    engine = Engine(pages=12)
    engine.ask(text(65, "a"), 1)  # 4 pages
    engine.ask((*text(32, "a"), *text(33, "b")), 1)  # shares two of them, and 2 of its own
    engine.ask(text(65, "c"), 1)
    assert engine.scheduler.load.kept_pages == 10
    engine.ask(text(50, "d"), 1)  # 4 pages of which 3 can be kept: 2 were free
    assert engine.ask(text(65, "a"), 1)[0] == 32, "the longest unused leaves had to go, and only they"
    engine = Engine(pages=12)
    engine.ask(text(65, "a"), 1)
    engine.ask(text(65, "c"), 1)
    engine.ask(text(65, "a"), 1)
    engine.ask(text(90, "d"), 1)
    assert engine.ask(text(65, "a"), 1)[0] == 64, "it was used last"


class Simulated:
    """Blocks with times of use, written without a look at the index: the leaf unused for longest goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self.now = 0

    def match(self, blocks: tuple[int, ...]) -> int:
        count = 0
        while count < len(blocks) and blocks[: count + 1] in self.used:
            count += 1
        return count

    def insert(self, blocks: tuple[int, ...]) -> None:
        self.now += 1
        for end in range(1, min(len(blocks), self.capacity) + 1):
            self.used[blocks[:end]] = self.now
        while len(self.used) > self.capacity:
            oldest = min(self.used.values())
            gone = max((chain for chain, used in self.used.items() if used == oldest), key=len)
            del self.used[gone]


@settings(max_examples=example_count(40), deadline=None)
@given(st.integers(3, 12), st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=60))
def test_the_index_hits_what_a_simulation_hits(capacity: int, requests: list[tuple[int, ...]]) -> None:
    device, simulated = DevicePages(capacity), Simulated(capacity)
    for blocks in requests:
        blocks = blocks[:capacity]
        assert device.match(blocks) == simulated.match(blocks)
        device.insert(blocks)
        simulated.insert(blocks)


@pytest.mark.parametrize("capacity", [200, 1000, 5000])
def test_a_trace_hits_as_often_as_in_another_simulation(capacity: int) -> None:
    requests = read_blocks(TRACE)
    found, expected = (replay_prefix(requests, index) for index in (DevicePages(capacity), LruBlocks(capacity)))
    assert found.blocks == expected.blocks
    assert found.rate == pytest.approx(expected.rate, abs=0.005)
    assert found.hits > found.shared_head - 2  # every request begins with the same block


def digests(engine: Engine, ids: tuple[int, ...]) -> list[bytes]:
    return engine.index.chain(Sequence(plain_request(ids), [*ids]))


def filled(engine: Engine, chain: list[bytes], places: list[int]) -> int:
    """Adopts a chain, and checks which of its pages had to be filled."""
    asked: list[int] = []
    added = engine.index.adopt(chain, lambda wanted, _: asked.extend(wanted))
    assert asked == places
    return added


def known(engine: Engine, chain: list[bytes]) -> list[bool]:
    return [engine.index.known(digest) is not None for digest in chain]


def test_pages_that_were_adopted_go_from_the_end_of_their_chain() -> None:
    engine = Engine(pages=4)
    chain = digests(engine, text(65))
    assert filled(engine, chain, [0, 1, 2, 3]) == 4
    for count in range(1, 5):
        engine.index.allocate(1)
        assert known(engine, chain) == [True] * (4 - count) + [False] * count


def test_a_chain_is_adopted_as_far_as_there_is_room_beside_it() -> None:
    engine = Engine(pages=6)
    chain = digests(engine, text(91))
    assert len(chain) == 5
    engine.index.adopt(chain[:2], lambda *_: None)
    taken = engine.index.allocate(2)
    assert taken is not None
    assert filled(engine, chain, [2, 3]) == 2
    assert known(engine, chain) == [True] * 4 + [False]
    assert engine.index.room == 4
    assert filled(engine, chain, []) == 0, "there is no room but its own"


def test_a_fill_that_fails_leaves_nothing_behind() -> None:
    engine = Engine(pages=6)
    chain = digests(engine, text(65))

    def fail(places: list[int], pages: list[int]) -> None:
        raise OSError("the store is gone")

    with pytest.raises(OSError, match="gone"):
        engine.index.adopt(chain, fail)
    assert engine.pool.free == engine.index.room == 6
    assert known(engine, chain) == [False] * 4
