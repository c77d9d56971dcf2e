"""The page pool against a model that is a plain list of counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.page_pool import PagePool
from tests.properties import example_count


def runs(pages: list[int]) -> int:
    """How many stretches of neighbours the list is made of."""
    return 1 + sum(second != first + 1 for first, second in itertools.pairwise(pages))


class PoolMachine(RuleBasedStateMachine):
    """Every page's holders are counted by hand; the pool must agree after each operation, mistakes included."""

    def __init__(self) -> None:
        super().__init__()
        self.holdings: list[list[int]] = []
        self.start(1)

    @initialize(total=st.integers(1, 40))
    def start(self, total: int) -> None:
        self.pool = PagePool(total)
        self.counts = [0] * total
        self.holdings = []

    def longest_gap(self) -> int:
        longest = gap = 0
        for count in self.counts:
            gap = 0 if count else gap + 1
            longest = max(longest, gap)
        return longest

    @rule(count=st.integers(0, 45), data=st.data())
    def allocate(self, count: int, data: st.DataObject) -> None:
        ends = [holding[-1] for holding in self.holdings if holding]
        after = data.draw(st.none() | st.sampled_from(ends)) if ends else None
        free = self.counts.count(0)
        longest = self.longest_gap()
        next_is_free = after is not None and after + 1 < len(self.counts) and not self.counts[after + 1]
        pages = self.pool.allocate(count, after)
        if count > free:
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert all(self.counts[page] == 0 for page in pages), "a page was given to two"
        if count and next_is_free:
            assert after is not None
            assert pages[0] == after + 1, "the neighbour was free and not taken"
        elif count and count <= longest:
            assert runs(pages) == 1, "there was a gap that would have held them all"
        for page in pages:
            self.counts[page] += 1
        self.holdings.append(pages)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.holdings))
        self.pool.retain(pages)
        for page in pages:
            self.counts[page] += 1
        self.holdings.append(list(pages))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        kept = data.draw(st.integers(0, len(pages)))
        released = data.draw(st.permutations(pages[kept:]))
        self.pool.release(released)
        for page in released:
            self.counts[page] -= 1
        if kept:
            self.holdings.append(pages[:kept])

    @rule(data=st.data())
    def make_a_mistake(self, data: st.DataObject) -> None:
        free = [page for page, count in enumerate(self.counts) if not count]
        held = [page for page, count in enumerate(self.counts) if count]
        strange = data.draw(st.sampled_from([-1, len(self.counts), *free]))
        pages = data.draw(st.permutations([*held, strange]))
        with pytest.raises(ValueError, match="page"):
            self.pool.release(pages)
        with pytest.raises(ValueError, match="page"):
            self.pool.retain(pages)
        if held:
            with pytest.raises(ValueError, match="page"):
                self.pool.release([held[0], held[0]])

    @invariant()
    def counts_agree(self) -> None:
        assert [self.pool.holders(page) for page in range(self.pool.total)] == self.counts
        assert self.pool.free == self.counts.count(0)
        assert self.pool.used + self.pool.free == self.pool.total

    def teardown(self) -> None:
        for pages in self.holdings:
            self.pool.release(pages)
        assert self.pool.allocate(self.pool.total) == list(range(self.pool.total)), "free runs were not joined"


PoolMachine.TestCase.settings = settings(max_examples=example_count(40), stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_lone_sequence_stays_contiguous_to_the_last_page() -> None:
    pool = PagePool(64)
    pages = pool.allocate(3)
    assert pages is not None
    while len(pages) < 64:
        more = pool.allocate(1, after=pages[-1])
        assert more is not None
        pages += more
    assert pages == list(range(64))


def test_sixteen_that_grow_in_turn_stay_contiguous() -> None:
    pool = PagePool(1024)
    sequences = []
    for _ in range(16):
        pages = pool.allocate(4)
        assert pages is not None
        sequences.append(pages)
    for _ in range(20):
        for pages in sequences:
            more = pool.allocate(1, after=pages[-1])
            assert more is not None
            pages += more
    assert [runs(pages) for pages in sequences] == [1] * 16


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)
    with pytest.raises(ValueError, match="allocate"):
        PagePool(1).allocate(-1)
