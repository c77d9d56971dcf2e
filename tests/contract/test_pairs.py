"""Every two features of requests in one step, on every executor: each answer is what the request gets alone.

On a GPU: python -m pytest -m gpu tests/contract/test_pairs.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as some
from msgspec import structs

from bench.speculation import Forced
from engine.api import GenerationRequest, Stopping
from engine.execution.registry import EXECUTORS, ExecutorEntry
from engine.execution.router import Role
from engine.execution.runner import ModelRunner
from engine.execution.speculation import verify_executor as captured
from engine.execution.speculation.eager_executor import Speculation
from engine.execution.speculation.proposer import PromptLookup, Proposer
from engine.execution.speculation.verify_executor import CapturedSpeculation
from engine.execution.speculation.verifying import SeveralPolicy
from engine.execution.step_state import Parts
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from engine.worker.offers import KERNELS_TRIAL, PLAIN_TRIAL
from tests.contract.answers import FREE, progress
from tests.contract.pairs import (
    FEATURES,
    PREEMPTED_AT,
    VOCABULARY,
    Answer,
    Arrival,
    Mixed,
    asking,
    close,
    plain,
    together,
)
from tests.contract.test_executors import GAPS
from tests.engine.execution.counting import allowed, counting
from tests.engine.judged import judge
from tests.properties import example_count

pytestmark = pytest.mark.product

EAGER = EXECUTORS[-1]
ENTRIES = {entry.name: entry for entry in EXECUTORS if entry.decoder != "portable"}
ON_CPU = ("eager", "lookup", "draft model", "forced")
CAPTURED_ONES = ("constrained", Role.VERIFY, "graph_decode", "graph_prefill", "batched")
ON_GPU = ("eager", "lookup", *CAPTURED_ONES, "all", "all with a draft model")
CROWD = 9  # rows that make a step too wide for one pipeline of `graph_decode`


@dataclass
class Path:
    """A way in which steps are done, and what each request gets alone by `eager`."""

    name: str
    settings: EngineSettings
    prepared: PreparedModel
    runner: ModelRunner
    truth: ModelRunner
    alone: dict[GenerationRequest, Answer] = field(default_factory=dict)
    told: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # what a proposer knows, by prompt

    @property
    def gap(self) -> float:
        """Of logits that count as equal."""
        return GAPS[self.prepared.parts.model.placement.dtype]

    def expected(self, request: GenerationRequest) -> Answer:
        """What it gets alone."""
        if request not in self.alone:
            single = structs.replace(request, siblings=1)
            found = self.alone[request] = together(self.truth, [Arrival(single)]).answers[request.request_id]
            assert found.failure is None
            self.told[request.token_ids] = found.ids
        return self.alone[request]

    def run(self, arrivals: Items[Arrival], features: Items[str] = (), **how: int) -> Mixed:
        """Requests that share steps; each answer is held to the one that it gets alone."""
        for one in arrivals:
            self.expected(one.request)
        found = together(
            self.runner,
            arrivals,
            preempted_at=PREEMPTED_AT if "preemption" in features else (),
            warm="prefix" in features,
            **how,
        )
        for one in arrivals:
            self.check(one.request, found.answers[one.request.request_id])
        return found

    def check(self, request: GenerationRequest, got: Answer) -> None:
        wanted = self.expected(request)
        assert (got.failure, got.reason) == (None, wanted.reason) or got.ids != wanted.ids, request
        assert len(got.prompt_logprobs) == len(wanted.prompt_logprobs)
        assert close(got.prompt_logprobs, wanted.prompt_logprobs, self.gap), request
        if got.ids == wanted.ids:
            assert close(got.logprobs, wanted.logprobs, self.gap), request
            return
        assert self.settings.device == "cuda", (request, got.ids, wanted.ids)  # nothing is rounded otherwise on a CPU
        assert got.failure is None
        within = None
        if request.constraint is not None:
            within = partial(allowed, vocabulary=VOCABULARY, stops=request.stopping.stop_token_ids)
        judge(self.prepared.parts, request, got.ids, self.gap, got.logprobs, within)


def proposers(name: str, parts: Parts, told: dict[tuple[int, ...], list[int]]) -> tuple[Proposer, ...]:
    """Those of a path on a CPU."""
    if name == "draft model":
        assert parts.draft is not None
        return (parts.draft,)
    return (PromptLookup(),) if name == "lookup" else (Forced(told, 0.6),)


def entries(name: str, told: dict[tuple[int, ...], list[int]]) -> tuple[ExecutorEntry, ...]:
    """The registry of a path."""
    makers: dict[str, Callable[[Parts], CapturedSpeculation]] = {
        Role.VERIFY: partial(CapturedSpeculation, known=FREE),
    }
    if name == "eager":
        return (EAGER,)
    if name in ON_CPU:
        made = replace(
            ENTRIES["speculation"], make=lambda parts: Speculation(parts, proposers(name, parts, told), FREE)
        )
        return made, EAGER
    if name in ENTRIES:
        return replace(ENTRIES[name], make=makers.get(name, ENTRIES[name].make), optional=False), EAGER
    return tuple(replace(one, make=makers.get(one.name, one.make)) for one in EXECUTORS)


@pytest.fixture(scope="module")
def eager_to() -> Iterator[None]:
    """Drafts are always verified."""
    with pytest.MonkeyPatch.context() as patch:
        for doubt in ("_may_pay", "_pays", "_won_back"):
            patch.setattr(SeveralPolicy, doubt, lambda *_: True)
        patch.setattr(captured, "_TURN", 0.0)
        yield


PATHS = [
    pytest.param(
        (name, device),
        marks=pytest.mark.gpu if device == "cuda" else () if name == "lookup" else pytest.mark.proof,
        id=f"{device}-{name}",
    )
    for device, names in (("cpu", ON_CPU), ("cuda", ON_GPU))
    for name in names
]


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, eager_to: None) -> Iterator[Path]:
    name, device = request.param
    folder = tmp_path_factory.mktemp("model")
    trial = {**PLAIN_TRIAL, "num_hidden_layers": 1} if device == "cpu" else KERNELS_TRIAL
    (folder / "config.json").write_text(json.dumps(dict(trial)))
    drafting = name in ("draft model", "all with a draft model")
    settings = EngineSettings(
        model=str(folder),
        draft_model=str(folder) if drafting else "",
        load_format="dummy",
        device=device,
        decoder="eager" if name == "eager" or name in ON_CPU else "graph",
        dtype=trial["dtype"],  # type: ignore[arg-type]
        max_sequences=16,
        kv_bytes=16 << 20,
    )
    prepared, told = prepare(settings, progress, counting(VOCABULARY)), {}
    truth = make_runner(replace(settings, decoder="eager"), prepared, progress, (EAGER,))
    made = Path(name, settings, prepared, make_runner(settings, prepared, progress, entries(name, told)), truth)
    made.told = told
    yield made
    made.runner.close()


def meeting(first: str, second: str) -> list[GenerationRequest]:
    """One that speculates, one with both features, one with each, and one with neither."""
    asked = [
        structs.replace(request, stopping=structs.replace(request.stopping, max_tokens=40))
        for request in asking(("speculation",), 90)
    ]
    for seed, features in ((91, (first, second)), (92, (first,)), (93, (second,))):
        asked += asking(tuple(dict.fromkeys(features)), seed)
    return [*asked, plain(94)]


PAIRS = [(first, second) for at, first in enumerate(FEATURES) for second in list(FEATURES)[at:]]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{first}, {second}" for first, second in PAIRS])
def test_two_features_in_one_step(path: Path, first: str, second: str) -> None:
    """The stream comes first and the others join it; then all come at once, the other way round."""
    asked, pair = meeting(first, second), (first, second)
    joining = [Arrival(request, 2 * at) for at, request in enumerate(asked)]
    found = path.run(joining, pair)
    assert found.widest >= 2
    assert (found.preemptions > 0) <= ("preemption" in pair)
    if path.settings.device == "cpu":  # a GPU's steps may have brought all by then
        assert found.preemptions > 0 or "preemption" not in pair
    if "prefix" in pair:
        cached = [found.answers[one.request_id].cached_tokens for one in asked if one.prompt_logprobs is None]
        assert max(cached) >= 32 or {"prompt logprobs", "scoring alone", "one token"} & set(pair)
    path.run([Arrival(request) for request in reversed(asked)], pair, budget=64)
    if path.name.startswith("all"):
        crowd = [Arrival(plain(200 + at)) for at in range(CROWD)]
        path.run([*crowd, *joining], pair)


MIXES = some.lists(
    some.tuples(
        some.lists(some.sampled_from([name for name in FEATURES if name != "preemption"]), max_size=4, unique=True),
        some.integers(0, 12),
    ),
    min_size=2,
    max_size=6,
)


@given(
    mix=MIXES,
    budget=some.sampled_from((3, 16, 24, 512)),
    pages=some.sampled_from((20, 40, 160)),
    preempted=some.booleans(),
)
@examples(max_examples=example_count(25))
def test_any_mix_of_requests(
    path: Path, mix: list[tuple[list[str], int]], budget: int, pages: int, preempted: bool
) -> None:
    arrivals = [
        Arrival(request, step) for seed, (features, step) in enumerate(mix) for request in asking(tuple(features), seed)
    ]
    features = [name for names, _ in mix for name in names]
    path.run(arrivals, [*features, *(["preemption"] if preempted else [])], budget=budget, pages=pages)


def test_drafts_were_verified(path: Path) -> None:
    """Else the paths that speculate would prove nothing."""
    request = asking(("speculation",), 90)[0]
    request = structs.replace(request, stopping=Stopping(max_tokens=100))
    found = path.run([Arrival(request)])
    proposed = found.answers[request.request_id].proposed
    if not path.name.startswith("all"):  # those draft only where drafts pay, and a tiny model's steps are too short
        assert (proposed > 0) == (path.name in ("lookup", "draft model", "forced", Role.VERIFY))
