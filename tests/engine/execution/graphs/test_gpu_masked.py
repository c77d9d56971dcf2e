"""Rows with a constraint in captured steps, judged token by token with eager's logits within the same masks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import Constraint, GenerationRequest
from engine.execution.runner import ModelRunner
from engine.ipc.events import Event, Failure
from engine.kv.page_pool import PagePool
from engine.sampling.sampler import Sampler
from engine.scheduling.limits import Limits
from engine.scheduling.plan import RowResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.sequence_state import SequenceState
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from tests.engine.execution.counting import FORCED, allowed, counting
from tests.engine.execution.sampled_kinds import CONFIG, GAP, VOCABULARY, nobody, one_of_each
from tests.engine.judged import judge

pytestmark = pytest.mark.gpu
TOKENS = 32


def requests(share: int) -> list[GenerationRequest]:
    """One of each kind; every `share`-th has a constraint."""
    return [
        replace(one, constraint=Constraint("") if key % share == 0 else None)
        for key, one in enumerate(one_of_each(TOKENS))
    ]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return prepare(settings_of(folder), nobody, counting(VOCABULARY))


@pytest.fixture(scope="module")
def runner(prepared: PreparedModel) -> Iterator[ModelRunner]:
    made = make_runner(settings_of(), prepared, nobody)
    yield made
    made.close()


def settings_of(folder: Path | str = "") -> EngineSettings:
    return EngineSettings(
        model=str(folder),
        load_format="dummy",
        device="cuda",
        decoder="graph",
        max_sequences=12,
        kv_bytes=64 << 20,
    )


def generate(
    runner: ModelRunner, asked: Items[GenerationRequest], pages: int = 200
) -> tuple[dict[str, list[int]], list[Event]]:
    limits = Limits(max_sequences=12, max_batch_tokens=64, max_context=400, lookahead_tokens=15, max_tokens_per_row=16)
    scheduler = Scheduler(limits, PagePool(pages))
    for key, request in enumerate(asked):
        scheduler.admit(Sequence(request, list(request.token_ids), key=key))
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    ended = []
    while (plan := scheduler.plan(0.0)) is not None:
        for event in scheduler.commit(plan, runner.run(plan), 0.0):
            found[asked[event.key].request_id] += event.token_ids
            if event.finish or event.failure:
                ended.append(event)
    return found, ended


def check(prepared: PreparedModel, request: GenerationRequest, ids: Items[int]) -> None:
    assert len(ids) == TOKENS or ids[-1] == 4999
    within = partial(allowed, vocabulary=VOCABULARY, stops=(4999,)) if request.constraint is not None else None
    if within is not None:
        assert all(bool(within(at)[token]) for at, token in enumerate(ids))
        assert all(token == at * 13 for at, token in enumerate(ids) if at % 11 in FORCED)
    judge(prepared.parts, request, ids, GAP, within=within)


@pytest.mark.parametrize("share", [1, 2, 8])
@pytest.mark.parametrize("off", ["", "two_pass_head", "graphs"])
def test_every_row_draws_within_its_own_mask(
    runner: ModelRunner, prepared: PreparedModel, share: int, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if off:
        runner.set_optimization(off, False)
    sampled, sample = 0, Sampler.sample

    def counted(self: Sampler, rows: Items[SequenceState], *more: Any) -> list[RowResult]:
        nonlocal sampled
        sampled += len(rows)
        return sample(self, rows, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", counted)
        asked = requests(share)
        together, _ = generate(runner, asked)
        cramped, _ = generate(runner, asked[::-1], 26)  # rows lose their pages and come back
        alone = {request.request_id: generate(runner, [request])[0][request.request_id] for request in asked[:3]}
    assert sampled == 0  # not after forced tokens either
    for request in asked:
        check(prepared, request, together[request.request_id])
        check(prepared, request, cramped[request.request_id])
    for request in asked[:3]:
        check(prepared, request, alone[request.request_id])
    if off:
        runner.set_optimization(off, True)


def test_more_rows_than_a_step_has_halves_for(runner: ModelRunner, prepared: PreparedModel) -> None:
    asked = [replace(one, request_id=f"{n} {one.request_id}") for n in range(2) for one in requests(3)][:12]
    found, _ = generate(runner, asked, 400)
    for request in asked:
        check(prepared, request, found[request.request_id])


@pytest.mark.parametrize("mates", [0, 3])
def test_a_sequence_ends_where_no_token_is_left(runner: ModelRunner, mates: int) -> None:
    plain = requests(1)[1]
    asked = [
        replace(plain, request_id=kind, constraint=Constraint(kind))
        for kind in ("16 whole", "16 torn", "3 whole", "0 torn")
    ]
    asked += [replace(plain, request_id=f"mate {n}", constraint=None) for n in range(mates)]
    found, ended = generate(runner, asked)
    how = {asked[event.key].request_id: event for event in ended}
    assert [len(found[one.request_id]) for one in asked] == [16, 16, 3, 0] + [TOKENS] * mates
    for kind in ("16 whole", "3 whole"):
        finish = how[kind].finish
        assert finish is not None
        assert finish.reason == "stop"
    assert how["16 torn"].failure is how["0 torn"].failure is Failure.CONSTRAINT
