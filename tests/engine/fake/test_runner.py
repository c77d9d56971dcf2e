"""The fake keeps its promises, and notices when it is fed wrongly."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import GREEDY, GenerationRequest, SamplingParams, Stopping
from engine.errors import EngineFailed, Unsupported
from engine.fake.checker import BrokenPlan
from engine.fake.runner import AcceleratorError, FakeRunner, Fault, plain_request
from engine.scheduling.plan import Released, Row, RowResult, Runner, StepPlan
from engine.scheduling.rows import row_of
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings, FakeSettings
from tests.engine.stepped import holding, step, whole
from tests.properties import example_count


def runner(**fake: object) -> FakeRunner:
    return FakeRunner(EngineSettings(model="", kind="fake", fake=FakeSettings(**fake)))  # type: ignore[arg-type]


def sequence(request: GenerationRequest, slot: int = 0, pages: range = range(20), key: int | None = None) -> Sequence:
    return holding(request, pages, slot, key)


def feed(fake: Runner, *rows: Row, admitted: tuple[Sequence, ...] = ()) -> list[RowResult | None]:
    found = fake.run(step(*rows, admitted=admitted)).rows
    return [found.get(row.key) for row in rows]


def generate(fake: FakeRunner, request: GenerationRequest, count: int, chunk: int = 1000) -> list[int]:
    one = sequence(request)
    admitted: tuple[Sequence, ...] = (one,)
    while one.output_length < count:
        end = min(one.computed + chunk, len(one.token_ids))
        row = row_of(one, one.computed, end - one.computed, end == len(one.token_ids))
        (result,) = feed(fake, row, admitted=admitted)
        admitted, one.computed = (), end
        if result is not None:
            one.computed += len(result.token_ids) - 1
            one.token_ids += result.token_ids
    return one.token_ids[one.prompt_length :][:count]


def sampled(seed: int) -> SamplingParams:
    return replace(GREEDY, temperature=1.0, seed=seed)


@settings(max_examples=example_count(30), deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=60).map(tuple), st.integers(1, 20), st.integers(1, 4))
def test_ids_depend_on_the_tokens_so_far_alone(prompt: tuple[int, ...], chunk: int, ids: int) -> None:
    request = plain_request(prompt)
    output = generate(runner(), request, 30)
    assert generate(runner(tokens_per_step=ids), request, 30, chunk) == output
    continued = plain_request((*prompt, *output[:10]))
    assert generate(runner(), continued, 20) == output[10:]
    assert generate(runner(), plain_request((*prompt, 1)), 30) != output


def test_bytes_are_printable_and_other_vocabularies_are_used_whole() -> None:
    assert set(generate(runner(), plain_request((1, 2)), 200)) <= set(range(32, 127))
    ids = generate(runner(vocab_size=8000), plain_request((1, 2)), 200)
    assert all(3 <= token_id < 8000 for token_id in ids)
    assert len(set(ids)) > 150
    assert max(ids) > 7000
    with pytest.raises(Unsupported, match="vocabulary"):
        runner(vocab_size=100)


def test_seeds_matter_unless_greedy() -> None:
    fake = runner()
    first, again, other = (generate(fake, plain_request((1, 2), sampling=sampled(seed)), 20) for seed in (5, 5, 6))
    assert first == again != other


def test_stop_tokens_come_but_not_before_min_tokens() -> None:
    fake = runner()
    request = plain_request((1, 2), stopping=Stopping(max_tokens=1, stop_token_ids=(2, 50)))
    assert 2 in generate(fake, request, 300)
    request = plain_request((1, 2), stopping=Stopping(max_tokens=1, min_tokens=290, stop_token_ids=(2, 50)))
    assert not {2, 50} & set(generate(fake, request, 290))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_logprobs_are_one_an_id_and_sorted(count: int) -> None:
    one = sequence(plain_request((1, 2), logprobs=count))
    (result,) = feed(runner(tokens_per_step=3), whole(one), admitted=(one,))
    assert result is not None
    assert len(result.logprobs) == 3
    for token_id, logprob in zip(result.token_ids, result.logprobs, strict=True):
        values = [value for _, value in logprob.top]
        assert len({other for other, _ in logprob.top}) == len(values) == count
        assert values == sorted(values, reverse=True)
        assert count == 0 or logprob.top[0] == (token_id, logprob.logprob)
        assert logprob.logprob < 0


def test_a_step_takes_its_time() -> None:
    one = sequence(plain_request((1,)))
    started = time.monotonic()
    feed(runner(step_time=0.05), whole(one), admitted=(one,))
    assert time.monotonic() - started >= 0.05


def test_it_never_writes_past_its_pages() -> None:
    one = sequence(plain_request(tuple(range(1, 15))), pages=range(1))
    (result,) = feed(runner(tokens_per_step=30), whole(one), admitted=(one,))
    assert result is not None
    assert len(result.token_ids) == PAGE_SIZE - 14 + 1


class TestBrokenPlans:
    """Each mistake that a scheduler can make."""

    def broken(self, fake: Runner, *rows: Row, admitted: tuple[Sequence, ...] = (), match: str) -> None:
        with pytest.raises(BrokenPlan, match=match):
            feed(fake, *rows, admitted=admitted)

    def started(self, fake: FakeRunner, slot: int = 0, pages: range = range(4)) -> Sequence:
        one = sequence(plain_request(tuple(range(1, 21))), slot, pages)
        (result,) = feed(fake, whole(one), admitted=(one,))
        assert result is not None
        one.token_ids += result.token_ids
        return one

    def test_a_slot_of_nobody(self) -> None:
        self.broken(runner(), whole(sequence(plain_request((1,)))), match="no sequence was admitted")
        one = sequence(plain_request((1,)), 64)
        self.broken(runner(), whole(one), admitted=(one,), match="no slot 64")

    def test_a_slot_that_changed_hands(self) -> None:
        fake = runner()
        one = self.started(fake)
        other = sequence(plain_request((1,)), key=5)
        self.broken(fake, whole(other), match="held by sequence 0, not by 5")
        self.broken(fake, whole(other), admitted=(other,), match="hands before sequence 0 was released")
        other.planned_pages = 0
        fake.run(StepPlan((whole(other),), step(admitted=[other]).admitted, (Released(one.key, 0),)))

    def test_a_release_of_what_another_holds_changes_nothing(self) -> None:
        fake = runner()
        one = self.started(fake)
        fake.run(StepPlan((whole(one, 20),), released=(Released(5, 0), Released(one.key, 3))))

    def test_a_sequence_with_two_slots(self) -> None:
        fake = runner()
        one = self.started(fake)
        one.slot = 1
        self.broken(fake, admitted=(one,), match="a slot already")

    def test_a_slot_used_twice(self) -> None:
        one = sequence(plain_request((1,)))
        rows = (whole(one), whole(one))
        self.broken(runner(), *rows, admitted=(one,), match="share")

    def test_a_gap_before_the_row(self) -> None:
        fake = runner()
        one = self.started(fake)
        self.broken(fake, whole(one, 19), match="begins at 19")
        self.broken(fake, whole(one, 21), match="begins at 21")
        self.broken(fake, whole(one, 0), match="begins at 0")

    def test_nothing_computed_after_a_new_admission(self) -> None:
        fake = runner()
        one = self.started(fake)
        one.planned_pages = 0
        self.broken(fake, whole(one, 20), admitted=(one,), match="0 tokens were computed")

    def test_exchanged_pages(self) -> None:
        fake = runner()
        one = self.started(fake)
        self.broken(fake, Row(0, 0, 20, 1, True, 0, (1, 0, 2, 3)), match="exchanged")
        one = self.started(fake := runner())
        self.broken(fake, Row(0, 0, 20, 1, True, 1, (5, 2, 3)), match="exchanged")
        one = self.started(fake := runner())
        feed(fake, Row(one.key, 0, 20, 1, True, 2, (7, 8)))  # no row has reached these

    def test_pages_that_cannot_be(self) -> None:
        for first, pages, match in ((6, (9,), "before page"), (4, (4096,), "no such"), (4, (2,), "twice")):
            fake = runner()
            self.started(fake)
            self.broken(fake, Row(0, 0, 20, 1, True, first, pages), match=match)

    def test_a_page_with_two_owners(self) -> None:
        fake = runner()
        one = self.started(fake)
        self.started(fake, 1, range(1, 5))
        self.broken(fake, whole(one, 20), match="another sequence")

    def test_too_few_pages_or_tokens(self) -> None:
        one = sequence(plain_request(tuple(range(1, 21))), pages=range(1))
        self.broken(runner(), whole(one), admitted=(one,), match="no pages")
        one = sequence(plain_request((1,)))
        self.broken(runner(), row_of(one, 0, 0, False), admitted=(one,), match="no tokens")

    def test_sampling_in_the_wrong_place(self) -> None:
        for count, sample in ((2, True), (3, False)):
            one = sequence(plain_request((1, 2, 3)))
            self.broken(runner(), row_of(one, 0, count, sample), admitted=(one,), match="last token")

    def test_a_prompt_that_is_no_part_of_its_tokens(self) -> None:
        admitted = step(admitted=[sequence(plain_request((1, 2)))]).admitted[0]
        for length in (0, 3):
            with pytest.raises(BrokenPlan, match="cannot be the prompt"):
                runner().run(StepPlan((), (msgspec.structs.replace(admitted, prompt_length=length),)))


def test_faults_come_where_they_are_asked_for_and_nowhere_else() -> None:
    errors = {Fault.RAISE: EngineFailed, Fault.DEVICE: AcceleratorError}
    for fault, error in errors.items():
        with pytest.raises(error):
            generate(runner(faults=True), plain_request((0, fault, 3)), 4)
        assert len(generate(runner(faults=True), plain_request((0, fault, 3)), 3)) == 3
        assert len(generate(runner(), plain_request((0, fault, 3)), 9)) == 9
    one = sequence(plain_request((0, Fault.SICK_ROW)))
    assert feed(runner(faults=True), whole(one), admitted=(one,)) == [RowResult(())]
    assert len(generate(runner(faults=True), plain_request((0,)), 9)) == 9
    switched = runner(faults=True)
    switched.set_optimization("graphs", False)
    assert len(generate(switched, plain_request((0, Fault.GRAPHS)), 9)) == 9
    with pytest.raises(EngineFailed):
        generate(runner(faults=True), plain_request((0, Fault.GRAPHS)), 1)


def test_context_is_what_settings_and_pages_allow() -> None:
    settings = EngineSettings(model="", kind="fake", max_context=100, fake=FakeSettings(total_pages=9))
    assert FakeRunner(settings).info.max_context == 100
    assert runner(total_pages=9).info.max_context == 144
    with pytest.raises(Unsupported, match="warp"):
        runner().set_optimization("warp", False)
