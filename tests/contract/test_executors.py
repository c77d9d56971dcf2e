"""Every decoder of the registry against eager, on a tiny model: the same ids, whatever runs together."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.driven import GREEDY
from engine.api import GenerationRequest, Objection, Stopping
from engine.errors import Unsupported
from engine.execution import eager
from engine.execution.registry import EXECUTORS, ExecutorEntry, choose
from engine.execution.step_state import Parts, Unfit
from engine.kv.page_pool import PagePool
from engine.scheduling.plan import Row, Runner, StepPlan, StepResult
from engine.scheduling.scheduler import Limits, Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import Prepared, make_runner, prepare

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
EAGER = EXECUTORS[-1]


def progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineSettings(model=str(folder), load_format="dummy", max_sequences=8, kv_bytes=4 << 20)


@pytest.fixture(scope="module")
def prepared(settings: EngineSettings) -> Prepared:
    return prepare(settings, progress)


def requests() -> list[GenerationRequest]:
    """Greedy and seeded, plain and filtered, with and without penalties, of many lengths."""
    kinds = [
        GREEDY,
        replace(GREEDY, temperature=0.8, seed=1),
        replace(GREEDY, temperature=0.7, top_p=0.9, seed=2),
        replace(GREEDY, temperature=1.2, top_k=20, min_p=0.05, seed=3),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, temperature=0.9, presence_penalty=0.6, frequency_penalty=0.3, seed=2**64 - 1),
        replace(GREEDY, temperature=1.0, seed=5, logit_bias=((7, 3.0), (9, -50.0))),
        GREEDY,
    ]
    generator = torch.Generator().manual_seed(4)
    return [
        GenerationRequest(
            request_id=str(key),
            token_ids=tuple(torch.randint(0, 320, (size,), generator=generator).tolist()),
            sampling=kind,
            stopping=Stopping(max_tokens=40, min_tokens=20, stop_token_ids=(3, 5)),
            arrived_at=0.0,
        )
        for key, (kind, size) in enumerate(zip(kinds, (1, 5, 15, 16, 17, 40, 64, 100), strict=True))
    ]


def generate(runner: Runner, asked: list[GenerationRequest], pages: int, budget: int) -> dict[str, list[int]]:
    limits = Limits(max_sequences=runner.info.max_sequences, max_batch_tokens=budget, max_context=min(256, pages * 16))
    scheduler = Scheduler(limits, PagePool(pages))
    found: dict[int, list[int]] = {}
    for key, request in enumerate(asked):
        scheduler.admit(Sequence(request, list(request.token_ids), key=key))
    now = 0.0
    while (plan := scheduler.plan(now)) is not None:
        for event in scheduler.commit(plan, runner.run(plan), now := now + 0.01):
            assert event.failure is None
            found.setdefault(event.key, []).extend(event.token_ids)
    return {asked[key].request_id: ids for key, ids in found.items()}


@pytest.mark.parametrize("entry", EXECUTORS, ids=lambda entry: entry.name)
def test_each_decoder_agrees_with_eager(entry: ExecutorEntry, settings: EngineSettings, prepared: Prepared) -> None:
    reason = entry.why_not(prepared.parts)
    if reason is not None:
        assert len(reason.splitlines()) == 1
        with pytest.raises(Unsupported, match=entry.name):
            choose(entry.name, prepared.parts)
        return
    truth = make_runner(settings, prepared, progress, (EAGER,))
    expected: dict[str, list[int]] = {}
    for request in requests():
        expected |= generate(truth, [request], pages=128, budget=512)
    assert all(len(ids) >= 20 for ids in expected.values())
    runner = make_runner(settings, prepared, progress, (entry, EAGER))
    for pages, budget in ((128, 512), (128, 7), (16, 32)):
        assert generate(runner, requests(), pages, budget) == expected
        assert generate(runner, requests()[::-1], pages, budget) == expected
    runner.close()


def test_the_last_decoder_has_no_objection(prepared: Prepared) -> None:
    assert EAGER.name == "eager"
    assert EAGER.why_not(prepared.parts) is None
    assert len({entry.name for entry in EXECUTORS}) == len(EXECUTORS)


class Even:
    """Does every second step alone."""

    tokens_per_step = 3

    def __init__(self, parts: Parts) -> None:
        self._inner = eager.Eager(parts)
        self.steps = 0
        self.warm = self.closed = False
        self.forgot: set[int] = set()

    def warmup(self, progress: Any) -> None:
        self.warm = True

    def share(self, plan: StepPlan) -> tuple[Row, ...]:
        self.steps += 1
        return plan.rows if self.steps % 2 == 0 else ()

    def forget(self, slots: Items[int]) -> None:
        self.forgot.update(slots)

    def switch(self, name: str, enabled: bool) -> None:
        self._inner.switch(name, enabled)

    def run(self, plan: StepPlan) -> StepResult:
        assert self.steps % 2 == 0
        return self._inner.run(plan)

    def close(self) -> None:
        self.closed = True


class Narrow(Even):
    """Does the rows of one token, one at a time even so."""

    def share(self, plan: StepPlan) -> tuple[Row, ...]:
        return tuple(row for row in plan.rows if row.count == 1)[:1]

    def run(self, plan: StepPlan) -> StepResult:
        assert [row.count for row in plan.rows] == [1]
        self.steps += 1
        return self._inner.run(plan)


def test_eager_does_what_the_chosen_decoder_declines(settings: EngineSettings, prepared: Prepared) -> None:
    made: list[Even] = []

    def make(parts: Parts) -> Even:
        made.append(Even(parts))
        return made[-1]

    registry = (ExecutorEntry("even", lambda parts: None, make), EAGER)
    runner = make_runner(settings, prepared, progress, registry)
    expected = generate(make_runner(settings, prepared, progress), requests()[:3], 128, 512)
    assert generate(runner, requests()[:3], 128, 512) == expected
    runner.close()
    assert runner.info.decoder == "even"
    assert (made[0].warm, made[0].closed) == (True, True)
    assert made[0].steps > 10
    assert made[0].forgot == {0, 1, 2}
    assert runner.info.tokens_per_step == 3


def test_a_step_is_shared_between_the_chosen_decoder_and_eager(settings: EngineSettings, prepared: Prepared) -> None:
    made: list[Narrow] = []

    def make(parts: Parts) -> Narrow:
        made.append(Narrow(parts))
        return made[-1]

    runner = make_runner(settings, prepared, progress, (ExecutorEntry("narrow", lambda parts: None, make), EAGER))
    expected = generate(make_runner(settings, prepared, progress), requests(), 128, 512)
    assert generate(runner, requests(), 128, 7) == expected
    assert made[0].steps > 40


def test_auto_passes_over_objections_and_tells_them(settings: EngineSettings, prepared: Prepared) -> None:
    def never(parts: Parts) -> eager.Eager:
        raise AssertionError("made in spite of its objection")

    def unfit(parts: Parts) -> eager.Eager:
        raise Unfit("no compiler")

    for reason, make, told in (("no CUDA device", never, "no CUDA device"), (None, unfit, "no compiler")):
        registry = (ExecutorEntry("graph", lambda parts, reason=reason: reason, make), EAGER)  # type: ignore[misc]
        info = make_runner(settings, prepared, progress, registry).info
        assert info.decoder == "eager"
        assert info.objections == (Objection(decoder="graph", reason=told),)
    registry = (ExecutorEntry("graph", lambda parts: "no CUDA device", never), EAGER)
    with pytest.raises(Unsupported, match="no CUDA device"):
        choose("graph", prepared.parts, registry)
    assert choose("eager", prepared.parts, registry).objections == ()
    with pytest.raises(Unsupported, match="not in this build"):
        choose("warp", prepared.parts, registry)
