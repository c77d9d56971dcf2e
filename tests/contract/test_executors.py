"""Every executor of the registry against eager, on the model that its entry names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import pytest
import torch
from msgspec import structs

from engine.api import Constraint, GenerationRequest
from engine.errors import Unsupported
from engine.execution.registry import EXECUTORS, Executor, ExecutorEntry, choose
from engine.execution.router import Capacity, StepOptions
from engine.execution.speculation.eager_executor import Speculation
from engine.execution.speculation.verify_executor import CapturedSpeculation
from engine.execution.step_state import Parts
from engine.scheduling.plan import RowResult, Runner, Share
from engine.settings import EngineSettings, KvDtype
from engine.worker.build import PreparedModel, make_runner, prepare
from engine.worker.offers import trial_of
from tests.contract.answers import FREE, alone, generate, progress, requests
from tests.engine.execution.counting import allowed, counting
from tests.engine.judged import judge

pytestmark = pytest.mark.product

EAGER = EXECUTORS[-1]
# In logits, which reach 8: what rounding may change. Of fp8, that some keys and values round the other way.
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float8_e4m3fn: 0.6}


class Counted:
    """An executor, and how many rows it did that sampled, and that did not."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.rows = self.sampled = self.widest = 0
        self.switches = inner.switches
        self.warmup, self.close = inner.warmup, inner.close
        for name in ("in_flight", "drafts"):  # what the router asks it
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    @property
    def capacity(self) -> Capacity:
        return self.inner.capacity

    @property
    def lookahead_tokens(self) -> int:
        """Some know it once they are warm."""
        return self.inner.lookahead_tokens

    @property
    def max_tokens_per_row(self) -> int:
        return self.inner.max_tokens_per_row

    def run(self, share: Share, options: StepOptions) -> Mapping[int, RowResult]:
        self.rows += len(share.rows)
        self.sampled += sum(row.sample for row in share.rows)
        self.widest = max(self.widest, len(share.rows))
        return self.inner.run(share, options)


@dataclass
class Trial:
    """An entry on its own model: in use, or the reason why it cannot be."""

    entry: ExecutorEntry
    settings: EngineSettings
    prepared: PreparedModel
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
        return [structs.replace(one, constraint=None if at % 2 else Constraint("")) for at, one in enumerate(requests)]

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
        marks=pytest.mark.gpu if device == "cuda" else pytest.mark.proof if kept == "fp8" else (),
        id="portable-" * (entry.decoder == "portable") + f"{entry.name}-{device}" + "-fp8" * (kept == "fp8"),
    )
    for device in ("cpu", "cuda")
    for entry in EXECUTORS
    for kept in get_args(KvDtype)
]


@pytest.fixture(scope="module", params=TRIALS)
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    entry, device, kept = request.param
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(dict(trial_of(entry))))
    settings = EngineSettings(
        model=str(folder),
        load_format="dummy",
        device=device,
        dtype=trial_of(entry)["dtype"],  # type: ignore[arg-type]
        max_sequences=16,
        kv_bytes=16 << 20,
        kv_dtype=kept,
    )
    prepared = prepare(settings, progress, counting(320))
    return Trial(entry, settings, prepared, entry.why_not(prepared.parts))


def within(request: GenerationRequest) -> Callable[[int], torch.Tensor] | None:
    """What a request with a constraint may say, by how much it has said."""
    if request.constraint is None:
        return None
    return partial(allowed, vocabulary=320, stops=request.stopping.stop_token_ids)


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
        (asked[:8][::-1], 128, 7, 0),  # prompts in chunks
        (asked[:8], 17, 32, 0),  # rows lose their pages and come back
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
