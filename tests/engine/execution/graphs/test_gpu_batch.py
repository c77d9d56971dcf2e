"""Many rows that sample by every parameter in captured steps, judged token by token with eager's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.api import GenerationRequest, Stopping
from engine.execution.eager import Eager
from engine.execution.graphs.batch import Batched
from engine.execution.runner import ModelRunner
from engine.kv.page_pool import PagePool
from engine.sampling.sampler import Sampler
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult, Share
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare
from tests.engine.execution.sampled_kinds import CONFIG, GAP, KINDS, VOCABULARY, nobody
from tests.engine.judged import judge

pytestmark = pytest.mark.gpu
TOKENS = 24


def requests(count: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(7)
    return [
        GenerationRequest(
            request_id=str(key),
            token_ids=tuple(torch.randint(0, VOCABULARY, (key % 30 + 2,), generator=generator).tolist()),
            sampling=replace(KINDS[key % len(KINDS)], seed=key),
            stopping=Stopping(
                max_tokens=TOKENS + 20 * (key < 4), min_tokens=10 if key % 3 else 0, stop_token_ids=(4999,)
            ),
            arrived_at=0.0,
        )
        for key in range(count)
    ]


def generate(runner: ModelRunner, asked: list[GenerationRequest]) -> list[list[int]]:
    info = runner.info
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=512,
        max_context=400,
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    scheduler = Scheduler(limits, PagePool(info.total_pages))
    for key, request in enumerate(asked):
        scheduler.admit(Sequence(request, list(request.token_ids), key=key))
    found: list[list[int]] = [[] for _ in asked]
    while (plan := scheduler.plan(0.0)) is not None:
        for event in scheduler.commit(plan, runner.run(plan), 0.0):
            assert event.failure is None
            found[event.key] += event.token_ids
    return found


@pytest.mark.parametrize(("count", "judged"), [(32, 2), (256, 23)])
def test_every_row_of_many_draws_by_its_own_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, judged: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = EngineSettings(
        model=str(tmp_path),
        load_format="dummy",
        device="cuda",
        decoder="graph",
        max_sequences=count,
        max_context=400,
        kv_bytes=256 << 20,
    )
    prepared = prepare(settings, nobody)
    runner = make_runner(settings, prepared, nobody)
    by: dict[str, int] = {"batched": 0, "eager": 0, "sampler": 0}

    def counted(kind: str, inner: Any) -> Any:
        def run(self: Any, given: Share | tuple[Row, ...], *more: Any) -> dict[int, RowResult]:
            by[kind] += len(given.rows if isinstance(given, Share) else given)
            return inner(self, given, *more)  # type: ignore[no-any-return]

        return run

    monkeypatch.setattr(Batched, "run", counted("batched", Batched.run))
    monkeypatch.setattr(Eager, "run", counted("eager", Eager.run))
    monkeypatch.setattr(Sampler, "sample", counted("sampler", Sampler.sample))
    asked = requests(count)
    found = generate(runner, asked)
    assert by["eager"] == by["sampler"] == 0
    assert by["batched"] > count * (TOKENS // 4)
    for request, ids in list(zip(asked, found, strict=True))[::judged]:
        assert len(ids) == request.stopping.max_tokens or ids[-1] == 4999
        judge(prepared.parts, request, ids, GAP)
    runner.close()
