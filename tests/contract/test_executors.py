"""Every executor of the registry against eager, on the model that its entry names; how rows are shared out; and why a
better decoder was passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

import pytest
import torch

from engine.api import GREEDY, Constraint, GenerationRequest, Objection, Stopping, TokenLogprob
from engine.errors import Unsupported
from engine.execution import eager
from engine.execution.registry import EXECUTORS, Executor, ExecutorEntry, choose, leaders
from engine.execution.speculation.captured.executor import CapturedSpeculation
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.executor import Speculation
from engine.execution.step_state import Parts, Unfit
from engine.fake.checked import CheckedRunner
from engine.kv.page_pool import PagePool
from engine.scheduling.plan import Row, RowResult, Runner
from engine.scheduling.scheduler import Limits, Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceState
from engine.settings import EngineSettings, KvDtype
from engine.worker.build import Prepared, make_runner, prepare
from tests.engine.execution.constrained.counting import allowed, counting
from tests.engine.judged import judge

EAGER = EXECUTORS[-1]
# In logits, which reach 8: what rounding may change. Of fp8, that some keys and values round the other way.
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float8_e4m3fn: 0.6}
FREE = Costs({1: 1.0, 512: 1.0})  # a wider step costs nothing, so that whatever is guessed is verified
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=2),
    replace(GREEDY, temperature=1.2, top_k=20, min_p=0.05, seed=3),
    replace(GREEDY, repetition_penalty=1.3),
    replace(GREEDY, temperature=0.9, presence_penalty=0.6, frequency_penalty=0.3, seed=2**64 - 1),
    replace(GREEDY, temperature=1.0, seed=5, logit_bias=((7, 3.0), (9, -50.0))),
    GREEDY,
)
SIZES = (1, 5, 15, 16, 17, 40, 64, 100)  # tokens of prompts


def progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


class Counted:
    """An executor, and how many rows it did that sampled, and that did not."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.rows = self.sampled = self.widest = 0
        self.lookahead_tokens = inner.lookahead_tokens
        self.max_tokens_per_row = inner.max_tokens_per_row
        self.switches = inner.switches
        self.warmup, self.claims, self.switch, self.close = inner.warmup, inner.claims, inner.switch, inner.close

    def run(self, rows: tuple[Row, ...]) -> Mapping[int, RowResult]:
        self.rows += len(rows)
        self.sampled += sum(row.sample for row in rows)
        self.widest = max(self.widest, len(rows))
        return self.inner.run(rows)


@dataclass
class Trial:
    """An entry on its own model: in use, or the reason why it cannot be."""

    entry: ExecutorEntry
    settings: EngineSettings
    prepared: Prepared
    reason: str | None
    made: list[Counted] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Of logits that count as equal."""
        parts = self.prepared.parts
        exact = self.settings.device == "cpu"  # whoever computes it, a key is the same there
        return GAPS[parts.model.placement.dtype if exact else parts.pool.stored]

    def asked(self, requests: list[GenerationRequest]) -> list[GenerationRequest]:
        """As the entry does them: every other one with a constraint, where that is what it is for."""
        if self.entry.name != "constrained":
            return requests
        return [replace(one, constraint=None if at % 2 else Constraint("")) for at, one in enumerate(requests)]

    def runner(self) -> Runner:
        """Of this entry and eager."""

        def make(parts: Parts) -> Counted:
            forced = {"speculation": Speculation, "captured_speculation": CapturedSpeculation}.get(self.entry.name)
            made = self.entry.make(parts) if forced is None else forced(parts, known=FREE)
            self.made.append(Counted(made))
            return self.made[-1]

        own = replace(self.entry, make=make, optional=self.entry.name == "speculation")
        return make_runner(self.settings, self.prepared, progress, (own,) if self.entry is EAGER else (own, EAGER))


TRIALS = [
    pytest.param(
        (entry, device, kept),
        marks=[pytest.mark.gpu] if device == "cuda" else [],
        id=f"{entry.name}-{device}" + "-fp8" * (kept == "fp8"),
    )
    for device in ("cpu", "cuda")
    for entry in EXECUTORS
    for kept in get_args(KvDtype)
]


@pytest.fixture(scope="module", params=TRIALS)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    entry, device, kept = request.param
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(entry.trial)))
    settings = EngineSettings(
        model=str(folder),
        load_format="dummy",
        device=device,
        dtype=entry.trial["dtype"],  # type: ignore[arg-type]
        max_sequences=16,
        kv_bytes=16 << 20,
        kv_dtype=kept,
    )
    prepared = prepare(settings, progress, counting(320))
    return Trial(entry, settings, prepared, entry.why_not(prepared.parts))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineSettings, Prepared]:
    """Eager's own model on the CPU."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(EAGER.trial)))
    settings = EngineSettings(
        model=str(folder), load_format="dummy", device="cpu", dtype="float32", max_sequences=8, kv_bytes=4 << 20
    )
    return settings, prepare(settings, progress)


def within(request: GenerationRequest) -> Callable[[int], torch.Tensor] | None:
    """What a request with a constraint may say, by how much it has said."""
    if request.constraint is None:
        return None
    return partial(allowed, vocabulary=320, stops=request.stopping.stop_token_ids)


def requests(count: int = 8, logprobs: int | None = None, tokens: int = 40) -> list[GenerationRequest]:
    """Greedy and seeded, plain and filtered, with and without penalties, of many lengths."""
    generator = torch.Generator().manual_seed(4)
    return [
        GenerationRequest(
            request_id=str(key),
            token_ids=tuple(torch.randint(0, 320, (SIZES[key % 8],), generator=generator).tolist()),
            sampling=KINDS[key % 8],
            stopping=Stopping(max_tokens=tokens + 7 * (key // 8), min_tokens=20, stop_token_ids=(3, 5)),
            arrived_at=0.0,
            logprobs=logprobs,
        )
        for key in range(count)
    ]


def alone() -> list[GenerationRequest]:
    """A text long enough to repeat itself, for executors of a row that decodes alone."""
    return [replace(requests(1)[0], stopping=Stopping(max_tokens=150))]


@dataclass
class Answer:
    """Of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


def generate(
    runner: Runner, asked: list[GenerationRequest], pages: int, budget: int, apart: int = 0
) -> dict[str, Answer]:
    """The answers; each request comes `apart` steps after the one before it."""
    checked, info = CheckedRunner(runner), runner.info
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=budget,
        max_context=min(256, pages * 16),
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    scheduler, found, steps = Scheduler(limits, PagePool(pages)), [Answer() for _ in asked], 0
    waiting = list(enumerate(asked))
    while waiting or scheduler.live:
        while waiting and steps >= apart * waiting[0][0]:
            key, request = waiting.pop(0)
            scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        steps += 1
        plan = scheduler.plan(steps * 0.01)
        if plan is None:
            continue
        for event in scheduler.commit(plan, checked.run(plan), steps * 0.01):
            assert event.failure is None
            found[event.key].ids += event.token_ids
            found[event.key].logprobs += event.logprobs
    return {request.request_id: answer for request, answer in zip(asked, found, strict=True)}


def test_each_executor_agrees_with_eager(trial: Trial) -> None:
    """Judged token by token, and where nothing is rounded equal to what eager brings each request alone."""
    if trial.reason is not None:
        assert len(trial.reason.splitlines()) == 1
        pytest.skip(trial.reason)
    parts, gap = trial.prepared.parts, trial.gap
    truth = make_runner(trial.settings, trial.prepared, progress, (EAGER,))
    asked, long = trial.asked(requests(16)), trial.asked(alone())
    expected = {request: generate(truth, [request], 128, 512)[request.request_id].ids for request in (*asked, *long)}
    assert all(len(ids) >= 20 for ids in expected.values())
    runner = trial.runner()
    for batch, pages, budget, apart in (
        (long, 128, 512, 0),
        (asked[:1], 128, 512, 0),
        (asked[:8], 128, 512, 0),
        (asked[:8][::-1], 128, 512, 0),
        (asked[:8], 128, 7, 0),  # prompts in chunks
        (asked[:8][::-1], 128, 7, 0),
        (asked[:8], 17, 32, 0),  # rows lose their pages and come back
        (asked[:8][::-1], 17, 32, 0),
        (asked, 256, 512, 0),
        (asked[::-1], 256, 64, 3),  # they come and go
    ):
        found = generate(runner, batch, pages, budget, apart)
        for request in batch:
            ids = found[request.request_id].ids
            assert len(ids) == request.stopping.max_tokens or ids[-1] in request.stopping.stop_token_ids
            if trial.settings.device == "cpu":
                assert ids == expected[request]
        for request in batch[:: max(1, len(batch) // 8)]:
            judge(parts, request, found[request.request_id].ids, gap, within=within(request))
    runner.close()
    assert trial.made[-1].sampled > 8
    assert trial.made[-1].widest > 4 or trial.entry.name == "captured_speculation"  # one row alone


def test_log_probabilities_are_eagers(trial: Trial) -> None:
    if trial.reason is not None:
        pytest.skip(trial.reason)
    parts, runner, gap = trial.prepared.parts, trial.runner(), trial.gap
    asked = trial.asked(requests(logprobs=3, tokens=24))
    found = generate(runner, asked, 128, 64)
    for request in asked:
        answer = found[request.request_id]
        assert [len(one.top) for one in answer.logprobs] == [3] * len(answer.ids)
        judge(parts, request, answer.ids, gap, answer.logprobs, within(request))
    runner.close()


def test_every_entry_is_compared_or_says_why_not(trial: Trial) -> None:
    if trial.reason is None:
        runner = trial.runner()
        for asked in (trial.asked(requests(4)), trial.asked(alone())):
            generate(runner, asked, 128, 64)
        runner.close()
        assert trial.made[-1].sampled > 0, "its claims leave nothing to compare"
        return
    assert len(trial.reason.splitlines()) == 1
    assert trial.settings.device == "cpu", "on a GPU all are compared"
    with pytest.raises(Unsupported, match=trial.entry.decoder):
        choose(trial.entry.decoder, trial.prepared.parts)


def test_the_last_executor_has_no_objection(plain: tuple[EngineSettings, Prepared]) -> None:
    parts = plain[1].parts
    assert EAGER.name == "eager"
    assert EAGER.why_not(parts) is None
    assert len({entry.name for entry in EXECUTORS}) == len(EXECUTORS)
    assert [entry.decoder for entry in leaders()] == ["graph", "eager"]
    rows = (Row(0, 0, 0, 3, True), Row(1, 1, 4, 1, True), Row(2, 2, 0, 9, False))
    assert EAGER.make(parts).claims(rows) == rows


class Even:
    """Does every second step alone. Remembers which sequences it could read."""

    lookahead_tokens = 2
    max_tokens_per_row = 3
    switches: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self, parts: Parts) -> None:
        self._inner, self._sequences = eager.Eager(parts), parts.sequences
        self.seen: dict[int, list[SequenceState]] = {}  # by slot
        self.steps = 0
        self.warm = self.closed = False

    def warmup(self, progress: Any) -> None:
        self.warm = True

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        self.steps += 1
        for state in self._sequences.states():
            of_slot = self.seen.setdefault(state.slot, [])
            if state not in of_slot:
                of_slot.append(state)
        return rows if self.steps % 2 == 0 else ()

    def switch(self, name: str, enabled: bool) -> None:
        self._inner.switch(name, enabled)

    def run(self, rows: tuple[Row, ...]) -> Mapping[int, RowResult]:
        assert self.steps % 2 == 0
        return self._inner.run(rows)

    def close(self) -> None:
        self.closed = True


class Narrow(Even):
    """Does the rows of one token, one at a time even so."""

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        return tuple(row for row in rows if row.count == 1)[:1]

    def run(self, rows: tuple[Row, ...]) -> Mapping[int, RowResult]:
        assert [row.count for row in rows] == [1]
        self.steps += 1
        return self._inner.run(rows)


def registry_of(name: str, make: Any, why_not: Any = lambda parts: None) -> tuple[ExecutorEntry, ...]:
    return (ExecutorEntry(name, name, why_not, make, EAGER.trial), EAGER)


def test_an_optional_neighbour_is_taken_along_and_may_be_missing(plain: tuple[EngineSettings, Prepared]) -> None:
    leader, last = registry_of("graph", Even)
    beside = replace(leader, name="beside", make=Narrow, optional=True)
    assert [name for name, _ in choose("auto", plain[1].parts, (beside, leader, last)).executors] == [
        "beside",
        "graph",
        "eager",
    ]
    refused = replace(beside, why_not=lambda parts: "not today")
    found = choose("graph", plain[1].parts, (refused, leader, last))
    assert [name for name, _ in found.executors] == ["graph", "eager"]
    assert found.missing == (Objection(decoder="beside", reason="not today"),)
    assert any(one.name == "captured_speculation" and one.decoder == "graph" for one in EXECUTORS)


def test_eager_does_what_the_chosen_executor_declines(plain: tuple[EngineSettings, Prepared]) -> None:
    made: list[Even] = []

    def make(parts: Parts) -> Even:
        made.append(Even(parts))
        return made[-1]

    runner = make_runner(*plain, progress, registry_of("even", make))
    expected = generate(make_runner(*plain, progress), requests()[:3], 128, 512)
    assert generate(runner, requests()[:3], 128, 512) == expected
    runner.close()
    assert runner.info.decoder == "even"
    assert (made[0].warm, made[0].closed) == (True, True)
    assert made[0].steps > 10
    assert made[0].seen.keys() == {0, 1, 2}
    assert [state.key for slot in sorted(made[0].seen) for state in made[0].seen[slot]] == [0, 1, 2]
    assert (runner.info.lookahead_tokens, runner.info.max_tokens_per_row) == (2, 3)


def test_a_step_is_shared_between_the_chosen_executor_and_eager(plain: tuple[EngineSettings, Prepared]) -> None:
    made: list[Narrow] = []

    def make(parts: Parts) -> Narrow:
        made.append(Narrow(parts))
        return made[-1]

    runner = make_runner(*plain, progress, registry_of("narrow", make))
    expected = generate(make_runner(*plain, progress), requests(), 128, 512)
    assert generate(runner, requests(), 128, 7) == expected
    assert made[0].steps > 40


def test_neighbours_of_one_word_are_used_together_or_missed(plain: tuple[EngineSettings, Prepared]) -> None:
    _, prepared = plain
    first, last = registry_of("fast", eager.Eager)
    for reason in (None, "no room"):
        beside = ExecutorEntry("fast_prompts", "fast", lambda _, reason=reason: reason, Even, EAGER.trial)  # type: ignore[misc]
        choice = choose("auto", prepared.parts, (first, beside, last))
        assert choice.decoder == "fast"
        names = [name for name, _ in choice.executors]
        assert names == (["fast", "fast_prompts", "eager"] if reason is None else ["fast", "eager"])
        assert choice.missing == (() if reason is None else (Objection(decoder="fast_prompts", reason="no room"),))
        assert choice.objections == ()
        alone = choose("eager", prepared.parts, (first, beside, last))
        assert [name for name, _ in alone.executors] == ["eager"]
    refused = replace(first, why_not=lambda parts: "too old")
    choice = choose("auto", prepared.parts, (refused, replace(beside, why_not=lambda parts: None), last))
    assert [name for name, _ in choice.executors] == ["eager"]  # neighbours stand and fall with the first


def test_auto_passes_over_objections_and_names_them(plain: tuple[EngineSettings, Prepared]) -> None:
    def never(parts: Parts) -> eager.Eager:
        raise AssertionError("made in spite of its objection")

    def unfit(parts: Parts) -> eager.Eager:
        raise Unfit("no compiler")

    parts = plain[1].parts
    for reason, make, said in (("no CUDA device", never, "no CUDA device"), (None, unfit, "no compiler")):
        registry = registry_of("graph", make, lambda parts, reason=reason: reason)
        info = make_runner(*plain, progress, registry).info
        assert info.decoder == "eager"
        assert info.objections == (Objection(decoder="graph", reason=said),)
    registry = registry_of("graph", never, lambda parts: "no CUDA device")
    with pytest.raises(Unsupported, match="no CUDA device"):
        choose("graph", parts, registry)
    assert choose("eager", parts, registry).objections == ()
    with pytest.raises(Unsupported, match="not in this build"):
        choose("warp", parts, registry)
