"""Pages that sequences share. The fake runner refuses a sequence that begins with anything but its own tokens' work."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import GenerationRequest
from engine.fake import FakeRunner, plain_request
from engine.fake.checker import BrokenPlan
from engine.kv.prefix_index import chain_root, kv_identity, page_hash
from engine.scheduling.plan import RowResult, StepResult
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings
from tests.engine.prefixed import Engine, alone, text
from tests.engine.stepped import holding, step, whole
from tests.properties import example_count


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
    engine.take(engine.scheduler.commit(plan, StepResult({sick: RowResult(())}), engine.now))
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
    engine.runner.checker.full[page.number] = 5
    engine.submit(text(50))
    with pytest.raises(BrokenPlan, match="begins with"):
        engine.step()
    one = holding(plain_request(text(50)), [0, 1, 2, 3])
    with pytest.raises(BrokenPlan, match="begins with"):
        FakeRunner(EngineSettings(model="", kind="fake")).run(step(whole(one, 32), admitted=[one]))


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


@settings(max_examples=example_count(60), deadline=None)
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


def test_a_chain_that_was_cut_by_the_switch_grows_no_more() -> None:
    """What it computes from then on stands behind pages that nobody can find."""
    engine = Engine()
    running = engine.submit(text(50), 60)
    engine.step()
    engine.scheduler.set_prefix_cache(False)
    engine.scheduler.set_prefix_cache(True)
    engine.run()
    assert engine.output(running) == alone(text(50), 60)
    assert engine.scheduler.load.kept_pages == engine.pool.used == 0


def test_who_gave_up_equal_pages_does_not_take_them_again() -> None:
    engine = Engine(pages=8, batch=100)
    engine.submit(text(33), 1)
    long = engine.submit(text(33), 200)
    engine.step()
    while engine.sequences[long].prefix.pages:
        engine.step()
    assert engine.scheduler.load.kept_pages == 1, "of two, one had to go"
    engine.step()
    assert engine.sequences[long].prefix.pages == []
    engine.run()
    assert engine.output(long) == alone(text(33), 200)[: 8 * PAGE_SIZE - 33]
