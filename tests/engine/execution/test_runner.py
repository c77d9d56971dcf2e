"""The runner as the loop sees it: what it tells, what it refuses, and both ways of reading the page pool."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineFailed, Unsupported
from engine.execution.eager import Eager
from engine.execution.step_state import Parts
from engine.kv.kv_cache import KvCache
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Released, Row, StepPlan
from engine.scheduling.rows import row_of
from engine.settings import EngineSettings
from engine.worker.build import build, make_runner, prepare
from tests.engine.stepped import holding, known, put, step, whole

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


def test_rows_come_back_by_their_keys(settings: EngineSettings, request_of: Any) -> None:
    runner = build(settings, progress)
    first, second, third = (
        holding(request_of(ids(size, size)), [at, at + 1], at // 2, key=7 * at)
        for at, size in ((0, 20), (2, 1), (4, 9))
    )
    rows = (row_of(first, 0, 12, False), whole(second), whole(third))
    result = runner.run(step(*rows, admitted=(first, second, third)))
    assert result.rows.keys() == {14, 28}
    for one, row in ((second, rows[1]), (third, rows[2])):
        assert runner.run(step(row, admitted=[one])).rows == {one.key: result.rows[one.key]}


def test_the_loop_says_what_is_done_while_a_step_is_waited_for(settings: EngineSettings) -> None:
    held = prepare(settings, progress)
    runner = make_runner(settings, held, progress)
    assert not held.parts.idle_work(), "nothing, until it does"
    runner.meanwhile(lambda: True)
    assert held.parts.idle_work()
    runner.close()


def test_a_row_of_nobody_is_refused(settings: EngineSettings, request_of: Any) -> None:
    runner = build(settings, progress)
    one, other = holding(request_of(ids(5)), [0], 0), holding(request_of(ids(5)), [0], 0, key=9)
    row = whole(one)
    with pytest.raises(EngineFailed, match="not held"):
        runner.run(step(row))
    runner.run(step(row, admitted=[one]))
    with pytest.raises(EngineFailed, match="not held by sequence 9"):
        runner.run(step(whole(other)))
    with pytest.raises(EngineFailed, match="cannot follow"):
        runner.run(step(Row(0, 0, 5, 1, True, first_page=3, pages=(4,))))
    released = StepPlan((Row(0, 0, 5, 1, True),), released=(Released(0, 0),))
    with pytest.raises(EngineFailed, match="not held"):
        runner.run(released)
    runner.close()


def test_a_step_that_samples_nothing(settings: EngineSettings, request_of: Any) -> None:
    runner = build(settings, progress)
    one = holding(request_of(ids(30)), [0, 1])
    assert runner.run(step(row_of(one, 0, 16, False), admitted=[one])).rows == {}
    assert runner.run(step(row_of(one, 16, 1, False))).rows == {}


@pytest.mark.parametrize("bad", [200, -1, 1 << 40])
def test_ids_outside_the_vocabulary_never_reach_the_device(settings: EngineSettings, request_of: Any, bad: int) -> None:
    runner = build(settings, progress)
    one = holding(request_of([1, bad, 2]), [0])
    with pytest.raises(EngineFailed):
        runner.run(step(whole(one), admitted=[one]))


def test_switches_that_do_nothing_on_a_cpu_say_so_and_may_be_set(settings: EngineSettings) -> None:
    runner = build(replace(settings, graphs=False), progress)
    reasons = {one.name: one.reason for one in runner.info.unused}
    assert reasons.keys() == {"fused_kernels", "graphs", "two_pass_head"}
    assert reasons.pop("fused_kernels") == "weights of 32 bits are multiplied by torch"
    assert all("the eager decoder" in reason and "needs a CUDA device" in reason for reason in reasons.values())
    runner.set_optimization("graphs", True)
    with pytest.raises(Unsupported, match="warp"):
        runner.set_optimization("warp", False)
    runner.close()


def test_a_row_of_nan_fails_alone(tmp_path: Path, settings: EngineSettings, request_of: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    prepared = prepare(settings, progress)
    runner = make_runner(settings, prepared, progress)
    good, poisoned = holding(request_of(ids(5)), [0], 0), holding(request_of([3, 77]), [1], 1)
    assert 77 not in good.token_ids
    row = whole(good)
    alone = runner.run(step(row, admitted=[good])).rows[0]
    with torch.inference_mode():
        prepared.parts.model.weights.embedding[77] = float("nan")
    found = runner.run(step(whole(poisoned), row, admitted=[good, poisoned])).rows
    assert found[1].token_ids == ()
    assert found[0] == alone


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
    exact = _parts_with(prepared.parts, True)
    truth = []
    for end in (30, 31, 64, 100):
        put(exact.sequences, holding(request_of(text[:end]), range(40, 48)))
        truth.append(Eager(exact).logits([Row(0, 0, 0, end, True)]))
    parts = _parts_with(prepared.parts, heads_outside)
    # What an earlier owner left must not be seen, not even a NaN.
    for layer in range(3):
        parts.pool.layer(layer).fill_(float("nan"))
    executor = Eager(parts)
    one, other = holding(request_of(text), pages), holding(request_of(ids(17, 6)), [30, 29], 1)
    put(parts.sequences, one)
    put(parts.sequences, other)
    executor.logits([known(other, 0, 16, False)])
    found = []
    for start, end in ((0, 30), (30, 31), (31, 64), (64, 100)):
        rows = [known(one, start, end - start), known(other, 16, 1)]
        rows.sort(key=lambda row: row.count > 1)
        logits = executor.logits(rows)
        assert logits is not None
        found.append(logits[[row.key for row in rows].index(one.key)].unsqueeze(0))
    for seen, expected in zip(found, truth, strict=True):
        assert expected is not None
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
