"""Prompts through captured graphs against eager, on small models of every family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from engine.api import GREEDY, GenerationRequest, SamplingParams, Stopping
from engine.errors import EngineFailed
from engine.execution.eager import Eager
from engine.execution.graphs.prefill import GraphPrefill
from engine.execution.router import ALL_OPTIONS, StepOptions
from engine.execution.step_state import Parts
from engine.kernels import gated_product
from engine.linear import DenseLinear
from engine.model.layers.many_tokens import why_not
from engine.scheduling.plan import RowResult, Share
from engine.scheduling.sequence import Sequence
from engine.settings import EngineSettings
from engine.worker.build import PreparedModel, prepare
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors
from tests.engine.stepped import holding, known, put

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 21, "head_dim": 128},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 6.0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
SIZES = (16, 64, 128)
ONE_BY_ONE = StepOptions(graphs=False)


def watch(stage: str, done: int, total: int) -> None:
    """Nobody watches."""


def prepared(folder: Path, family: str, dtype: Any = "bfloat16", **changes: Any) -> PreparedModel:
    config = {**BASE, **FAMILIES[family], **changes}
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(2)
        held = {
            name: (torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3))
            .add_(1.0 if name.endswith("norm.weight") else 0.0)
            .bfloat16()
            for name, shape in dense_tensors(parse_config(config, "config.json")).items()
        }
        save_file(held, folder / "model.safetensors")
    settings = EngineSettings(model=str(folder), device="cuda", dtype=dtype, max_sequences=4, kv_bytes=16 << 20)
    return prepare(settings, watch)


def sequence(ids: list[int], pages: list[int], slot: int = 0) -> Sequence:
    return of_request(ids, pages, slot, GREEDY, logprobs=320)


def of_request(
    ids: list[int], pages: list[int], slot: int, sampling: SamplingParams, logprobs: int | None = None
) -> Sequence:
    request = GenerationRequest(
        request_id="a",
        token_ids=tuple(ids),
        sampling=sampling,
        stopping=Stopping(max_tokens=8),
        arrived_at=0.0,
        logprobs=logprobs,
    )
    return holding(request, pages, slot)


def run(
    executor: Any, parts: Parts, *fed: tuple[Sequence, int, int, bool], options: StepOptions = ALL_OPTIONS
) -> Mapping[int, RowResult]:
    """A step of (sequence, start, count, sample), each in its slot."""
    for one, _, _, _ in fed:
        put(parts.sequences, one)
    with torch.inference_mode():
        return executor.run(Share("", tuple(known(*row) for row in fed)), options)  # type: ignore[no-any-return]


def told(
    executor: Any, parts: Parts, one: Sequence, cuts: list[int], options: StepOptions = ALL_OPTIONS
) -> torch.Tensor:
    """Feeds a sequence in parts; log-probabilities of what may follow, by token."""
    start, result = 0, None
    for cut in [*cuts, len(one.token_ids)]:
        fed = one, start, cut - start, cut == len(one.token_ids)
        result = run(executor, parts, fed, options=options).get(one.key)
        start = cut
    assert result is not None
    found = torch.zeros(320)
    for token, logprob in result.logprobs[0].top:
        found[token] = logprob
    return found


def kept(parts: Any, one: Sequence) -> torch.Tensor:
    """Keys and values of a sequence, all layers."""
    count = len(one.token_ids)
    layers = [parts.pool.layer(index)[:, one.pages] for index in range(parts.model.config.layers)]
    return torch.stack([layer.transpose(2, 3).flatten(1, 2)[:, :count] for layer in layers]).float().cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_in_graphs_are_as_right_as_eager(family: str, tmp_path: Path) -> None:
    exact_parts = prepared(tmp_path, family, "float32").parts
    parts = prepared(tmp_path, family).parts
    assert why_not(parts) is None
    stage, eager, exact = GraphPrefill(parts, SIZES), Eager(parts), Eager(exact_parts)
    stage.warmup(watch)
    generator = torch.Generator().manual_seed(3)
    pages = torch.randperm(60, generator=generator).tolist()
    for size, cuts in (
        (2, []),
        (16, []),
        (17, []),
        (100, []),
        (128, []),
        (100, [16, 40, 90]),
        (300, []),
        (500, [129, 300]),
    ):
        ids = torch.randint(0, 320, (size,), generator=generator).tolist()
        held = pages[: size // 16 + 1]
        truth = told(exact, exact_parts, sequence(ids, held), cuts)
        theirs = told(eager, parts, sequence(ids, held), cuts)
        their_cache = kept(parts, sequence(ids, held))
        with torch.inference_mode():
            for index in range(parts.model.config.layers):
                parts.pool.layer(index).fill_(float("nan"))  # what an earlier owner left may be anything
        one = sequence(ids, held)
        ours = told(stage, parts, one, cuts)
        cache = kept(parts, one)
        assert float((cache - their_cache).norm() / their_cache.norm()) < 0.02
        assert float((ours - truth).norm()) < 1.5 * float((theirs - truth).norm()) + 0.05
        # and a step of decoding reads what the graphs left
        one.token_ids.append(7)
        assert len(run(eager, parts, (one, size, 1, True))[one.key].token_ids) == 1


def test_products_that_gate_their_results_are_as_right_as_eager(tmp_path: Path) -> None:
    wide = {"intermediate_size": 1024, "max_position_embeddings": 4096}
    exact_parts = prepared(tmp_path, "qwen3", "float32", **wide).parts
    parts = prepared(tmp_path, "qwen3", **wide).parts
    stage, eager, exact = GraphPrefill(parts, (64, 2048)), Eager(parts), Eager(exact_parts)
    linear = parts.model.weights.layers[0].gate_up
    assert isinstance(linear, DenseLinear)
    assert gated_product.why_not(linear.weight, 2048, parts.kernels.gpu) is None
    stage.warmup(watch)
    generator = torch.Generator().manual_seed(4)
    for size, cuts in ((2048, []), (1900, []), (2100, [2048]), (2400, [1200])):
        ids = torch.randint(0, 320, (size,), generator=generator).tolist()
        held = torch.randperm(160, generator=generator).tolist()[: size // 16 + 1]
        truth = told(exact, exact_parts, sequence(ids, held), cuts)
        theirs = told(eager, parts, sequence(ids, held), cuts)
        their_cache = kept(parts, sequence(ids, held))
        ours = told(stage, parts, sequence(ids, held), cuts)
        cache = kept(parts, sequence(ids, held))
        assert float((cache - their_cache).norm() / their_cache.norm()) < 0.02
        assert float((ours - truth).norm()) < 1.5 * float((theirs - truth).norm()) + 0.05


def test_what_passes_cost_is_known_after_a_start(tmp_path: Path) -> None:
    stage = GraphPrefill(prepared(tmp_path, "qwen3").parts, SIZES)
    stage.warmup(watch)
    costs = stage.passes.costs
    assert tuple(costs) == SIZES
    assert all(0 < seconds < 1 for seconds in costs.values())


def test_rows_of_a_plan_do_not_meet(tmp_path: Path) -> None:
    parts = prepared(tmp_path, "qwen3").parts
    stage = GraphPrefill(parts, SIZES)
    stage.warmup(watch)
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 320, (size,), generator=generator).tolist() for size in (30, 200, 9)]
    held = [[0, 1], list(range(2, 15)), [15]]
    alone = [told(stage, parts, sequence(ids, pages), []) for ids, pages in zip(texts, held, strict=True)]
    fed = [
        (sequence(ids, pages, slot), 0, len(ids), slot != 1)
        for slot, (ids, pages) in enumerate(zip(texts, held, strict=True))
    ]
    found = run(stage, parts, *fed)
    assert found.keys() == {0, 2}
    for index, row in found.items():
        for token, logprob in row.logprobs[0].top:
            assert logprob == pytest.approx(float(alone[index][token]), abs=0.1)


def test_tokens_after_prompts_of_one_plan(tmp_path: Path) -> None:
    """Drawn by the kernels or, with log-probabilities, by the sampler: each as it is alone, in its own place."""
    parts = prepared(tmp_path, "qwen3").parts
    stage = GraphPrefill(parts, SIZES)
    stage.warmup(watch)
    generator = torch.Generator().manual_seed(7)
    kinds = [
        (GREEDY, None),
        (replace(GREEDY, temperature=1.5, seed=5), None),
        (GREEDY, 320),
        (replace(GREEDY, temperature=1.5, top_k=40, top_p=0.9, seed=6), None),
    ]
    rows: list[tuple[Sequence, int, int, bool]] = []
    for slot, (kind, logprobs) in enumerate(kinds):
        ids = torch.randint(0, 320, (20 + 50 * slot,), generator=generator).tolist()
        one = of_request(ids, list(range(15 * slot, 15 * slot + 15)), slot, kind, logprobs)
        rows.append((one, 0, len(ids), True))
    together = run(stage, parts, *rows)
    again = run(stage, parts, *rows)
    alone = {row[0].key: run(stage, parts, row, options=ONE_BY_ONE)[row[0].key] for row in reversed(rows)}
    assert together == again == alone
    assert {key: len(found.token_ids) for key, found in together.items()} == dict.fromkeys(range(4), 1)
    equal = 0  # drawn by the sampler over the same states: all but a few at the border of a filter
    for seed in range(100):
        asked = replace(rows[3][0].request, sampling=replace(kinds[3][0], seed=seed))
        ours, theirs = (
            run(stage, parts, (holding(replace(asked, logprobs=logprobs), rows[3][0].pages, 3), 0, 170, True))[3]
            for logprobs in (None, 0)
        )
        equal += ours.token_ids == theirs.token_ids
    assert equal > 90


@pytest.mark.parametrize("prompts", [1, 4])
def test_other_work_is_done_while_first_tokens_are_waited_for(prompts: int, tmp_path: Path) -> None:
    parts = prepared(tmp_path, "qwen3").parts
    stage = GraphPrefill(parts, SIZES)
    stage.warmup(watch)
    fed = [
        (of_request([1 + slot, 2, 3] * 5, [slot], slot, GREEDY), 0, 15, True) for slot in range(prompts)
    ]  # one first token is drawn by itself, several together
    alone = run(stage, parts, *fed)
    pieces = iter([True, True, False])
    done: list[bool] = []

    def piece() -> bool:
        done.append(next(pieces, False))
        return done[-1]

    parts.idle_work.piece = piece
    torch.cuda._sleep(20_000_000)  # cycles
    assert run(stage, parts, *fed) == alone
    assert done[:3] == [True, True, False]


def test_a_prompt_without_numbers_has_no_token(tmp_path: Path) -> None:
    parts = prepared(tmp_path, "qwen3").parts
    with torch.inference_mode():
        parts.model.weights.embedding[7] = float("nan")
    stage = GraphPrefill(parts, SIZES)
    stage.warmup(watch)
    rows = [
        (of_request(ids, pages, slot, kind), 0, 3, True)
        for slot, (ids, pages, kind) in enumerate(
            (([1, 7, 3], [0], GREEDY), ([1, 2, 3], [1], replace(GREEDY, temperature=1.0)))
        )
    ]
    found = run(stage, parts, *rows)
    assert found.keys() == {0, 1}
    assert found[0].token_ids == ()
    assert len(found[1].token_ids) == 1


def test_launches_one_by_one_choose_the_same(tmp_path: Path) -> None:
    parts = prepared(tmp_path, "qwen3").parts
    stage = GraphPrefill(parts, SIZES)
    stage.warmup(watch)
    one = sequence(torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(6)).tolist(), list(range(6)))
    captured = told(stage, parts, one, [40])
    assert torch.equal(told(stage, parts, one, [40], ONE_BY_ONE), captured)
    assert torch.equal(told(stage, parts, one, [40]), captured)


def test_a_token_outside_the_vocabulary_is_no_step(tmp_path: Path) -> None:
    parts = prepared(tmp_path, "qwen2").parts
    stage = GraphPrefill(parts, SIZES)
    stage.warmup(watch)
    with pytest.raises(EngineFailed, match="vocabulary"):
        run(stage, parts, (sequence([1, 320], [0]), 0, 2, True))
