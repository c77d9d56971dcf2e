"""Rows that sample by every parameter in captured decode steps, judged token by token with eager's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.api import GenerationRequest
from engine.execution.eager import Eager
from engine.execution.router import StepOptions
from engine.execution.runner import ModelRunner
from engine.kernels.capture import Graphs
from engine.kv.page_pool import PagePool
from engine.sampling.sampler import Sampler
from engine.scheduling.limits import Limits
from engine.scheduling.plan import RowResult, Share
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceState
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare
from tests.engine.execution.sampled_kinds import CONFIG, GAP, nobody, one_of_each
from tests.engine.judged import judge

pytestmark = pytest.mark.gpu
TOKENS = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def settings_of(folder: Path) -> EngineSettings:
    return EngineSettings(
        model=str(folder), load_format="dummy", device="cuda", decoder="graph", max_sequences=8, kv_bytes=64 << 20
    )


def generate(runner: ModelRunner, asked: list[GenerationRequest], pages: int) -> dict[str, list[int]]:
    limits = Limits(max_sequences=8, max_batch_tokens=64, max_context=400, lookahead_tokens=15, max_tokens_per_row=16)
    scheduler = Scheduler(limits, PagePool(pages))
    for key, request in enumerate(asked):
        scheduler.admit(Sequence(request, list(request.token_ids), key=key))
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while (plan := scheduler.plan(0.0)) is not None:
        for event in scheduler.commit(plan, runner.run(plan), 0.0):
            assert event.failure is None
            found[asked[event.key].request_id] += event.token_ids
    return found


def test_every_row_draws_by_its_own_parameters(folder: Path) -> None:
    prepared = prepare(settings_of(folder), nobody)
    runner = make_runner(settings_of(folder), prepared, nobody)
    assert runner.info.decoder == "graph"
    asked = one_of_each(TOKENS)
    together = generate(runner, asked, 200)
    cramped = generate(runner, asked[::-1], 26)  # rows lose their pages and come back
    for request in asked:
        alone = generate(runner, [request], 200)[request.request_id]
        for ids in (alone, together[request.request_id], cramped[request.request_id]):
            assert len(ids) == TOKENS or ids[-1] == 4999
        judge(prepared.parts, request, together[request.request_id], GAP)
        judge(prepared.parts, request, cramped[request.request_id], GAP)
        # Alone a prompt is computed in other company than among others, but its draws are the same but for rounding.
        judge(prepared.parts, request, alone, GAP)
    runner.close()


def test_no_such_row_is_left_to_eager(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(settings_of(folder), nobody)
    runner = make_runner(settings_of(folder), prepared, nobody)
    eager_rows = sampled_rows = 0

    def counted(self: Eager, share: Share, options: StepOptions, inner: Any = Eager.run) -> dict[int, RowResult]:
        nonlocal eager_rows
        of = prepared.parts.sequences.of
        eager_rows += sum(row.count == 1 and row.start >= of(row).prompt_length for row in share.rows)
        return inner(self, share, options)  # type: ignore[no-any-return]

    def drawn(
        self: Sampler, sequences: list[SequenceState], logits: torch.Tensor, inner: Any = Sampler.sample
    ) -> list[RowResult]:
        nonlocal sampled_rows
        sampled_rows += len(sequences)
        return inner(self, sequences, logits)  # type: ignore[no-any-return]

    monkeypatch.setattr(Eager, "run", counted)
    monkeypatch.setattr(Sampler, "sample", drawn)
    asked = one_of_each(TOKENS)
    generate(runner, asked, 200)
    assert eager_rows == 0
    assert sampled_rows == 0  # not after a prompt either
    told = generate(runner, [replace(asked[1], logprobs=3)], 200)
    assert sampled_rows == len(told[asked[1].request_id])
    runner.close()


def test_nothing_is_left_to_be_captured_by_a_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(settings_of(folder), prepare(settings_of(folder), nobody), nobody)

    def never(self: Graphs, *given: Any, **named: Any) -> Any:
        raise AssertionError("a graph was captured for a request")

    monkeypatch.setattr(Graphs, "record", never)
    generate(runner, one_of_each(TOKENS), 200)
    runner.close()
