"""The runner as the loop sees it: what it tells, what it refuses, and both ways of reading the page pool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import GenerationRequest
from engine.errors import EngineFailed, Unsupported
from engine.execution.eager import Eager
from engine.execution.step_state import Parts
from engine.kv.kv_cache import KvCache
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Row, StepPlan
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import build, make_runner, prepare

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "dtype": "float32",
}


def progress(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return EngineSettings(
        model=str(tmp_path), load_format="dummy", device="cpu", max_sequences=4, threads=1, kv_bytes=2 << 20
    )


def ids(size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 200, (size,), generator=torch.Generator().manual_seed(seed)).tolist()


def live(request: GenerationRequest, pages: list[int], slot: int = 0) -> Sequence:
    return Sequence(request, list(request.token_ids), slot=slot, pages=pages)


def test_rows_come_back_in_the_order_of_the_plan(settings: EngineSettings, request_of: Any) -> None:
    runner = build(settings, progress)
    first, second, third = (
        live(request_of(ids(size, size)), [at, at + 1], at // 2) for at, size in ((0, 20), (2, 1), (4, 9))
    )
    result = runner.run(
        StepPlan((Row(first, 0, 12, False), Row(second, 0, 1, True), Row(third, 0, 9, True)), (0, 1, 2))
    )
    assert result.rows[0] is None
    alone = [runner.run(StepPlan((Row(one, 0, len(one.token_ids), True),), ())).rows[0] for one in (second, third)]
    assert list(result.rows[1:]) == alone


def test_a_step_that_samples_nothing(settings: EngineSettings, request_of: Any) -> None:
    runner = build(settings, progress)
    one = live(request_of(ids(30)), [0, 1])
    assert runner.run(StepPlan((Row(one, 0, 16, False),), (0,))).rows == (None,)
    assert runner.run(StepPlan((Row(one, 16, 1, False),), ())).rows == (None,)


@pytest.mark.parametrize("bad", [200, -1, 1 << 40])
def test_ids_outside_the_vocabulary_never_reach_the_device(settings: EngineSettings, request_of: Any, bad: int) -> None:
    runner = build(settings, progress)
    with pytest.raises(EngineFailed):
        runner.run(StepPlan((Row(live(request_of([1, bad, 2]), [0]), 0, 3, True),), (0,)))


def test_no_optimization_of_its_own_yet(settings: EngineSettings) -> None:
    runner = build(settings, progress)
    with pytest.raises(Unsupported, match="graphs"):
        runner.set_optimization("graphs", False)
    runner.close()


def test_a_row_of_nan_fails_alone(tmp_path: Path, settings: EngineSettings, request_of: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    prepared = prepare(settings, progress)
    runner = make_runner(settings, prepared, progress)
    good, poisoned = live(request_of(ids(5)), [0], 0), live(request_of([3, 77]), [1], 1)
    assert 77 not in good.token_ids
    alone = runner.run(StepPlan((Row(good, 0, 5, True),), (0,))).rows[0]
    with torch.inference_mode():
        prepared.parts.model.weights.embedding[77] = float("nan")
    found = runner.run(StepPlan((Row(poisoned, 0, 2, True), Row(good, 0, 5, True)), (0, 1))).rows
    assert found[0] is not None
    assert found[0].token_ids == ()
    assert alone is not None
    assert found[1] == alone


def _parts_with(parts: Parts, heads_outside: bool) -> Parts:
    pool = KvCache(parts.pool.shape, parts.pool.pages, parts.model.placement, heads_outside)
    sampler = Sampler(parts.model.config.vocab_size, parts.max_sequences, parts.model.placement.device)
    return Parts(parts.model, pool, sampler, parts.max_sequences, parts.max_context)


@pytest.mark.parametrize("heads_outside", [True, False])
@pytest.mark.parametrize("pages", [list(range(8)), [9, 3, 4, 5, 11, 2, 8, 0], list(range(20, 12, -1))])
def test_pages_in_any_order_and_layout(
    heads_outside: bool, pages: list[int], settings: EngineSettings, request_of: Any
) -> None:
    prepared = prepare(settings, progress)
    text = ids(100, 5)
    whole = Eager(_parts_with(prepared.parts, True))
    truth = [
        whole.logits([Row(live(request_of(text[:end]), list(range(40, 48))), 0, end, True)])
        for end in (30, 31, 64, 100)
    ]
    parts = _parts_with(prepared.parts, heads_outside)
    # What an earlier owner left must not be seen, not even a NaN.
    for layer in range(3):
        parts.pool.layer(layer).fill_(float("nan"))
    decoder = Eager(parts)
    sequence = live(request_of(text), pages)
    other = live(request_of(ids(17, 6)), [30, 29], 1)
    decoder.logits([Row(other, 0, 16, False)])
    found = []
    for start, end in ((0, 30), (30, 31), (31, 64), (64, 100)):
        rows = [Row(sequence, start, end - start, True), Row(other, 16, 1, True)]
        rows.sort(key=lambda row: row.count > 1)
        logits = decoder.logits(rows)
        assert logits is not None
        found.append(logits[[row.sequence for row in rows].index(sequence)].unsqueeze(0))
    for one, expected in zip(found, truth, strict=True):
        assert expected is not None
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)
