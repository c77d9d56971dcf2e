"""Where an accepted run ends: at a stop token, at the last token wished, at a page, at the context's end; and who may
end it meanwhile."""

from __future__ import annotations

import json

import pytest

from bench.speculation import Forced
from engine.api import FinishReason, GenerationRequest, Stopping
from engine.execution.registry import EXECUTORS
from engine.execution.runner import ModelRunner
from engine.fake import plain_request
from engine.fake.checked import CheckedRunner
from engine.ipc.events import Event
from engine.kv.page_pool import PagePool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.limits import Limits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from engine.worker.offers import PLAIN_TRIAL
from tests.contract.answers import progress
from tests.contract.test_speculation import speculating

pytestmark = pytest.mark.product

PROMPT = tuple(range(40, 51))  # 11 tokens: the first page's border lies within the first run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineSettings, PreparedModel]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(PLAIN_TRIAL)))
    settings = EngineSettings(
        model=str(folder), load_format="dummy", device="cpu", dtype="float32", max_sequences=8, kv_bytes=4 << 20
    )
    return settings, prepare(settings, progress)


class Engine:
    """A runner with a scheduler over it, whose plans and results are held to their rules."""

    def __init__(self, runner: ModelRunner, context: int = 256, pages: int = 32) -> None:
        info = runner.info
        self.runner = CheckedRunner(runner)
        limits = Limits(
            max_sequences=8,
            max_batch_tokens=512,
            max_context=context,
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        pool = PagePool(pages)
        self.scheduler = Scheduler(limits, pool, prefixes=PrefixIndex(pool, b"model"))
        self.events: dict[int, list[Event]] = {}

    def admit(self, request: GenerationRequest) -> int:
        key = len(self.events) + 1
        self.events[key] = []
        self.scheduler.admit(Sequence(request, list(request.token_ids), key=key))
        return key

    def step(self, now: float = 0.0) -> None:
        for event in self.scheduler.expire(now):
            self.events[event.key].append(event)
        plan = self.scheduler.plan(now)
        if plan is not None:
            for event in self.scheduler.commit(plan, self.runner.run(plan), now):
                self.events[event.key].append(event)

    def ids(self, key: int) -> list[int]:
        return [token_id for event in self.events[key] for token_id in event.token_ids]

    def ask(self, request: GenerationRequest) -> int:
        key = self.admit(request)
        while self.scheduler.live:
            self.step()
        return key


@pytest.fixture(scope="module")
def truth(model: tuple[EngineSettings, PreparedModel]) -> list[int]:
    """What the model says to PROMPT, to the end of its context."""
    engine = Engine(make_runner(*model, progress, EXECUTORS[-1:]))
    return engine.ids(engine.ask(plain_request(PROMPT, 245)))


@pytest.fixture(scope="module")
def prophet(model: tuple[EngineSettings, PreparedModel], truth: list[int]) -> ModelRunner:
    """Eight ids a step."""
    return speculating(*model, Forced({PROMPT: truth}, 1.0))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 10, 16, 17, 33])
def test_max_tokens(prophet: ModelRunner, truth: list[int], tokens: int) -> None:
    engine = Engine(prophet)
    key = engine.ask(plain_request(PROMPT, tokens))
    assert engine.ids(key) == truth[:tokens]
    finish = engine.events[key][-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    assert sum(event.draft_accepted for event in engine.events[key]) == tokens - len(engine.events[key])
    assert len(engine.events[key]) == 1 + -(-(tokens - 1) // 8), "eight ids a step behind the prompt's"


@pytest.mark.parametrize("context", [17, 18, 19, 25, 32, 33])
def test_the_end_of_the_context(prophet: ModelRunner, truth: list[int], context: int) -> None:
    engine = Engine(prophet, context)
    assert engine.ids(engine.ask(plain_request(PROMPT, 240))) == truth[: context - len(PROMPT)]


def test_a_stop_token_at_each_place_of_a_run(prophet: ModelRunner, truth: list[int]) -> None:
    firsts = {token_id: at for at, token_id in reversed(list(enumerate(truth[:40])))}
    assert len(firsts) > 3
    for token_id, at in firsts.items():
        for least in (0, at, at + 1):
            engine = Engine(prophet)
            stopping = Stopping(max_tokens=60, min_tokens=least, stop_token_ids=(token_id,))
            key = engine.ask(plain_request(PROMPT, stopping=stopping))
            if least <= at:
                assert engine.ids(key) == truth[: at + 1]
            else:
                assert engine.ids(key)[: at + 1] != truth[: at + 1], "it is barred until then"


def test_cancelled_and_timed_out_between_two_runs(prophet: ModelRunner, truth: list[int]) -> None:
    engine = Engine(prophet)
    gone = engine.admit(plain_request(PROMPT, 200))
    late = engine.admit(plain_request(PROMPT, 200, expires_at=5.0))
    stays = engine.admit(plain_request(PROMPT, 100))
    for now in range(3):
        engine.step(float(now))
    engine.scheduler.cancel(gone)
    engine.step(6.0)
    while engine.scheduler.live:
        engine.step(7.0)
    finish = engine.events[late][-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.TIME_BUDGET
    assert engine.ids(gone) == truth[: len(engine.ids(gone))]
    assert 8 < len(engine.ids(gone)) < 30
    assert engine.ids(late) == truth[: len(engine.ids(late))]
    assert engine.ids(stays) == truth[:100]


def test_pages_of_an_accepted_run_are_found_by_the_next_request(prophet: ModelRunner, truth: list[int]) -> None:
    """A page is shared once all its tokens are accepted, and holds what they are."""
    for tokens in range(20, 40):
        engine = Engine(prophet)
        engine.ask(plain_request(PROMPT, tokens))
        longer = (*PROMPT, *truth[:tokens])
        key = engine.ask(plain_request((*longer, truth[tokens]), 20))
        start = engine.events[key][0].start
        assert start is not None
        assert start.cached_tokens == (len(longer) - 1) // 16 * 16
        assert engine.ids(key) == truth[tokens + 1 : tokens + 21]


def test_a_request_may_limit_it(prophet: ModelRunner, truth: list[int]) -> None:
    for limit, steps in ((None, 6), (0, 41), (1, 21), (3, 11)):
        engine = Engine(prophet)
        key = engine.ask(plain_request(PROMPT, 41, draft_limit=limit))
        assert engine.ids(key) == truth[:41]
        assert len(engine.events[key]) == steps


def test_one_of_eight(prophet: ModelRunner, truth: list[int]) -> None:
    """It alone gets more than an id a step, and is gone early; the others lose no step to it."""
    engine = Engine(prophet, pages=96)
    one = engine.admit(plain_request(PROMPT, 80))
    others = [engine.admit(plain_request(PROMPT, 80, draft_limit=0)) for _ in range(7)]
    steps = 0
    while engine.scheduler.live:
        engine.step()
        steps += 1
    assert [engine.ids(key) for key in (one, *others)] == [truth[:80]] * 8
    assert len(engine.events[one]) == 1 + -(-79 // 8)
    assert steps == 80
    for key in others:
        assert [len(event.token_ids) for event in engine.events[key]] == [1] * 80
        assert not any(event.draft_proposed for event in engine.events[key])


@pytest.mark.parametrize("pages", [9, 10, 11, 12, 13])
def test_pages_taken_away_between_two_runs(prophet: ModelRunner, truth: list[int], pages: int) -> None:
    """Each needs nine pages in the end, and loses them at another place of a run."""
    engine = Engine(prophet, context=144, pages=pages)
    keys = [engine.admit(plain_request(PROMPT, 120, draft_limit=limit)) for limit in (None, 3)]
    while engine.scheduler.live:
        engine.step()
    assert engine.scheduler.load.preemptions > 0
    assert [engine.ids(key) for key in keys] == [truth[:120]] * 2


def test_cancelled_at_every_place_of_a_page(prophet: ModelRunner, truth: list[int]) -> None:
    """What was accepted until then stays shared, and what was not is nobody's."""
    for limit in range(8):
        for steps in (1, 2, 3):
            engine = Engine(prophet)
            gone = engine.admit(plain_request(PROMPT, 200, draft_limit=limit))
            for _ in range(steps):
                engine.step()
            engine.scheduler.cancel(gone)
            engine.step()
            said = engine.ids(gone)
            assert said == truth[: 1 + (steps - 1) * (limit + 1)]
            key = engine.ask(plain_request((*PROMPT, *said), 20))
            assert engine.ids(key) == truth[len(said) : len(said) + 20]


def test_switched_fifty_times(prophet: ModelRunner, truth: list[int]) -> None:
    engine = Engine(prophet, pages=64)
    keys = [engine.admit(plain_request(PROMPT, 200)) for _ in range(4)]
    for turn in range(50):
        prophet.set_optimization("speculation", turn % 2 == 1)
        engine.step()
    prophet.set_optimization("speculation", True)
    while engine.scheduler.live:
        engine.step()
    assert [engine.ids(key) for key in keys] == [truth[:200]] * 4
    assert any(len(event.token_ids) > 1 for event in engine.events[keys[0]])
    assert sum(len(event.token_ids) == 1 for event in engine.events[keys[0]]) > 15
