"""Pages that sequences share. The fake runner refuses a sequence that begins with anything but its own tokens' work."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.prefix import DevicePages
from cache.replay import LruBlocks, read_blocks, replay_prefix
from engine.api import GenerationRequest
from engine.events import Event
from engine.fake import FakeRunner, plain_request
from engine.pages import PagePool
from engine.plan import Row, RowResult, StepPlan, StepResult
from engine.prefix import PrefixIndex, chain_root, kv_identity, page_hash
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings
from engine.shadow import BrokenPlan

TRACE = Path(__file__).parents[1] / "cache" / "data" / "mooncake_600.jsonl.gz"


def text(length: int, seed: object = 0) -> tuple[int, ...]:
    rng = random.Random(str(seed))
    return tuple(rng.randrange(1, 256) for _ in range(length))


class Engine:
    """Scheduler and fake runner; counts the tokens that were fed."""

    def __init__(
        self, pages: int = 64, batch: int = 512, sequences: int = 4, ids: int = 1, prefix: bool = True
    ) -> None:
        context = pages * PAGE_SIZE
        fake = FakeSettings(max_context=context, total_pages=pages, tokens_per_step=ids)
        self.runner = FakeRunner(EngineSettings(model="", kind="fake", max_sequences=sequences, fake=fake))
        self.pool = PagePool(pages)
        self.index = PrefixIndex(self.pool, b"model", prefix)
        limits = Limits(max_sequences=sequences, max_batch_tokens=batch, max_context=context, tokens_per_step=ids)
        self.scheduler = Scheduler(limits, self.pool, prefixes=self.index)
        self.fed = 0
        self.now = 0.0
        self.key = 0
        self.events: dict[int, list[Event]] = {}
        self.sequences: dict[int, Sequence] = {}

    def submit(self, ids: tuple[int, ...], output: int = 8, **changes: object) -> int:
        self.key += 1
        request = plain_request(ids, output, **{"arrived_at": self.now, **changes})
        self.sequences[self.key] = Sequence(request, list(ids), key=self.key)
        self.scheduler.admit(self.sequences[self.key])
        self.events[self.key] = []
        return self.key

    def step(self) -> StepPlan | None:
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.fed += sum(row.count for row in plan.rows)
            self.take(self.scheduler.commit(plan, self.runner.run(plan), self.now))
        return plan

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.events[event.key].append(event)

    def run(self) -> None:
        while self.step() is not None:
            pass
        assert self.scheduler.live == 0

    def output(self, key: int) -> tuple[int, ...]:
        return tuple(token_id for event in self.events[key] for token_id in event.token_ids)

    def cached(self, key: int) -> int:
        finish = self.events[key][-1].finish
        starts = [event.start for event in self.events[key] if event.start is not None]
        assert finish is not None
        assert [start.cached_tokens for start in starts] == [finish.cached_tokens]
        return finish.cached_tokens

    def ask(self, ids: tuple[int, ...], output: int = 8, **changes: object) -> tuple[int, tuple[int, ...]]:
        """cached tokens and answer of one request by itself."""
        key = self.submit(ids, output, **changes)
        self.run()
        return self.cached(key), self.output(key)


def alone(ids: tuple[int, ...], output: int = 8, **changes: object) -> tuple[int, ...]:
    return Engine(prefix=False).ask(ids, output, **changes)[1]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_all_full_pages_but_the_last_token_are_used_again(length: int) -> None:
    engine = Engine()
    assert engine.ask(text(length)) == (0, alone(text(length)))
    fed = engine.fed
    cached = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert engine.ask(text(length)) == (cached, alone(text(length)))
    assert engine.fed - fed == length - cached + 7, "what is said to be cached was computed"


def test_the_next_turn_begins_with_the_answer_before_it() -> None:
    engine = Engine()
    prompt = text(20)
    _, answer = engine.ask(prompt, 50)
    following = (*prompt, *answer, *text(5, "more"))
    cached, second = engine.ask(following)
    assert cached == (20 + 49) // PAGE_SIZE * PAGE_SIZE  # the last token's keys and values were never computed
    assert second == alone(following)


def test_a_fork_shares_up_to_where_it_differs() -> None:
    engine = Engine()
    engine.ask(text(64))
    for place in (0, 15, 16, 40, 63):
        ids = list(text(64))
        ids[place] ^= 1
        ids[place] = ids[place] or 2
        cached, answer = engine.ask(tuple(ids))
        assert cached == min(place, 63) // PAGE_SIZE * PAGE_SIZE
        assert answer == alone(tuple(ids))
    moved = (*text(16, "x"), *text(64))  # the same tokens in other places are no hit
    assert engine.ask(moved)[0] == 0


@pytest.mark.parametrize("first", [b"", b"a", b"b", b"ab"])
def test_tenants_share_with_themselves_and_with_nobody_else(first: bytes) -> None:
    for second in (b"", b"a", b"b", b"ab"):
        engine = Engine()
        engine.ask(text(50), prefix_root=first)
        assert engine.ask(text(50), prefix_root=second) == (48 if first == second else 0, alone(text(50)))


def test_who_bypasses_neither_takes_nor_leaves() -> None:
    engine = Engine()
    engine.ask(text(50), bypass_prefix=True)
    assert engine.scheduler.load.kept_pages == 0
    assert engine.ask(text(50))[0] == 0
    assert engine.ask(text(50), bypass_prefix=True) == (0, alone(text(50)))
    assert engine.ask(text(50))[0] == 48


def test_live_sequences_share_without_copies() -> None:
    engine = Engine(pages=14, sequences=4)
    first = engine.submit(text(97), 12)
    engine.step()
    others = [engine.submit((*text(97), key), 12) for key in range(1, 4)]  # 4 × 7 pages would never fit
    engine.step()
    assert engine.scheduler.load.running == 4
    assert engine.scheduler.load.used_pages == 6 + 4
    engine.run()
    assert engine.scheduler.load.preemptions == 0
    assert [engine.cached(key) for key in (first, *others)] == [0, 96, 96, 96]
    for key in (first, *others):
        assert engine.output(key) == alone(engine.sequences[key].request.token_ids, 12)


@pytest.mark.parametrize("batch", [40, 64, 512])
def test_those_that_arrive_together_compute_a_shared_head_once(batch: int) -> None:
    engine = Engine(pages=256, batch=batch, sequences=8)
    keys = [engine.submit((*text(600), key)) for key in range(1, 9)]
    engine.run()
    whole = sum(601 + 7 for _ in keys)
    assert engine.fed < whole * (0.25 if batch < 512 else 0.35)
    for key in keys:
        assert engine.output(key) == alone((*text(600), key))


def test_pages_of_generated_tokens_are_kept_only_when_all_are_computed() -> None:
    engine = Engine(ids=5)
    prompt = text(13)
    _, answer = engine.ask(prompt, 40)
    for length in range(1, 53):
        ids = (*prompt, *answer)[:length]
        cached, found = engine.ask(ids, 3)
        assert cached <= (min(length, 52) - 1) // PAGE_SIZE * PAGE_SIZE
        assert found == alone(ids, 3)


def test_a_preempted_sequence_finds_its_own_pages_and_counts_them_as_no_gain() -> None:
    engine = Engine(pages=8, sequences=2)
    old = engine.submit(text(30, 1), 60)
    engine.step()
    young = engine.submit(text(30, 2), 60)
    while not engine.scheduler.load.preemptions:
        engine.step()
    engine.run()
    assert [engine.cached(key) for key in (old, young)] == [0, 0]
    assert engine.output(young) == alone(text(30, 2), 60)
    assert engine.fed < 2 * (30 + 59) + 60, "it was computed anew from its first token"


def test_the_switch_drops_what_is_kept_and_takes_up_again() -> None:
    engine = Engine()
    engine.ask(text(50))
    assert engine.scheduler.load.kept_pages > 0
    running = engine.submit(text(50), 30)
    engine.step()
    engine.scheduler.set_prefix_cache(False)
    load = engine.scheduler.load
    assert load.kept_pages == 0
    assert engine.ask(text(50))[0] == 0  # runs the other to its end as well
    assert engine.output(running) == alone(text(50), 30)
    assert engine.scheduler.load.kept_pages == engine.pool.used == 0
    engine.scheduler.set_prefix_cache(True)
    assert [engine.ask(text(50))[0] for _ in range(2)] == [0, 48]


def test_what_a_sick_row_computed_is_used_by_nobody() -> None:
    engine = Engine(batch=32)
    engine.ask(text(16))
    sick = engine.submit(text(100))
    for _ in range(2):
        engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None
    engine.runner.run(plan)
    engine.take(engine.scheduler.commit(plan, StepResult((RowResult(()),)), engine.now))
    assert engine.events[sick][-1].failure is not None
    assert engine.scheduler.load.used_pages == 0
    assert engine.ask(text(100)) == (16, alone(text(100)))
    # As after a step that broke.
    broken = engine.submit(text(200, 5))
    for _ in range(3):
        engine.step()
    plan = engine.scheduler.plan(engine.now)
    assert plan is not None
    engine.runner.run(plan)
    engine.take(engine.scheduler.fail(plan))
    assert engine.events[broken][-1].failure is not None
    assert engine.ask(text(200, 5)) == (0, alone(text(200, 5)))


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 70])
def test_what_is_no_token_id_is_the_runners_to_refuse(bad: int) -> None:
    engine = Engine()
    ids = (*text(20), bad, *text(20))
    engine.submit(ids)
    while engine.step() is not None:
        pass
    assert engine.scheduler.load.used_pages == 0


def test_a_page_that_holds_something_else_is_noticed_by_the_fake() -> None:
    """The oracle of this file must be able to fail."""
    engine = Engine()
    engine.ask(text(50))
    page = engine.index.known(engine.index.chain(Sequence(plain_request(text(50)), [*text(50)]))[1])
    assert page is not None
    engine.runner.pages.full[page.number] = 5
    engine.submit(text(50))
    with pytest.raises(BrokenPlan, match="begins with"):
        engine.step()
    one = Sequence(plain_request(text(50)), [*text(50)], slot=0, pages=[0, 1, 2, 3])
    with pytest.raises(BrokenPlan, match="begins with"):
        FakeRunner(EngineSettings(model="", kind="fake")).run(StepPlan((Row(one, 32, 18, True),), (0,)))


def test_a_root_is_of_everything_that_shapes_keys_and_values() -> None:
    runner = FakeRunner(EngineSettings(model="", kind="fake"))
    info, layout = runner.info, runner.pages.layout
    identities = {kv_identity(info, layout)}
    for changed in (
        dataclasses.replace(info, weights_digest="0"),
        dataclasses.replace(info, weight_format="awq"),
        dataclasses.replace(info, dtype="float16"),
    ):
        identities.add(kv_identity(changed, layout))
    for field, value in (("layers", 2), ("dtype", "x"), ("variant", "tp"), ("page_size", 32), ("kv_heads", 2)):
        identities.add(kv_identity(info, dataclasses.replace(layout, **{field: value})))
    assert len(identities) == 9
    roots = {chain_root(identity, tenant) for identity in identities for tenant in (b"", b"a", b"b")}
    assert len(roots) == 27
    assert chain_root(b"ab", b"c") != chain_root(b"a", b"bc")
    hashes = {page_hash(root, text(16, seed)) for root in roots for seed in range(3)}
    assert len(hashes) == 81


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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_conversations_in_any_order_bring_what_each_brings_alone(data: st.DataObject) -> None:
    ids = data.draw(st.sampled_from([1, 1, 4]))
    engine = Engine(pages=data.draw(st.integers(8, 24)), batch=data.draw(st.sampled_from([16, 50, 512])), ids=ids)
    heads = [text(data.draw(st.integers(1, 60)), head) for head in range(2)]
    talks: list[tuple[int, ...]] = [*heads, heads[0], heads[0]]
    requests: dict[int, GenerationRequest] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(talks) - 1))
        prompt = (*talks[at], data.draw(st.integers(1, 3)))[: 8 * PAGE_SIZE - 30]
        key = engine.submit(prompt, data.draw(st.integers(1, 25)))
        requests[key] = engine.sequences[key].request
        for _ in range(data.draw(st.integers(0, 30))):
            engine.step()
        if engine.events[key] and engine.events[key][-1].finish is not None:
            talks[at] = (*prompt, *engine.output(key))[: 8 * PAGE_SIZE - 31]
    engine.run()
    for key, request in requests.items():
        assert engine.output(key) == alone(request.token_ids, request.stopping.max_tokens)
        assert 0 <= engine.cached(key) < len(request.token_ids)
