"""The portable decoder on a GPU: every family, format and 16-bit dtype against eager on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import GREEDY, GenerationRequest, Stopping
from engine.execution.eager import Eager
from engine.execution.graphs.batch import Batched
from engine.execution.runner import ModelRunner
from engine.scheduling.plan import RowResult, Share
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare
from tests.contract.answers import generate, progress, requests
from tests.engine.execution.test_oracle import make
from tests.engine.judged import judge

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # transformers' own
GAPS = {"bfloat16": 0.3, "float16": 0.06}  # logits: what rounding in every layer may change
CASES = [
    "llama-mqa-tied",
    "llama-biases",
    "mistral-window",
    "qwen2-tied",
    "qwen3-layer-types",
    "qwen3-yarn",
    "gemma3",
    "gemma3-wide-heads",
    "gemma3-linear",
    "olmo2",
    "olmo2-biases",
    "granite",
    "granite-biases",
]
SMOL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 323,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "awq": {"dtype": "bfloat16", "quantization_config": AWQ},
    "awq-read": {"dtype": "bfloat16", "quantization_config": AWQ, "hidden_size": 640, "head_dim": 64},
}


def served(folder: Path, **settings: Any) -> tuple[ModelRunner, Any]:
    asked = EngineSettings(
        model=str(folder), device="cuda", decoder="portable", max_sequences=8, max_context=256, **settings
    )
    prepared = prepare(asked, progress)
    return make_runner(asked, prepared, progress), prepared.parts


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows that sample, by who computes them; for eager those that decode alone."""
    by = {"portable": 0, "eager": 0}

    def count(kind: str, inner: Any) -> Any:
        def run(self: Any, share: Share, *more: Any) -> dict[int, RowResult]:
            by[kind] += sum(row.count == 1 and row.start > 0 for row in share.rows)
            return inner(self, share, *more)  # type: ignore[no-any-return]

        return run

    monkeypatch.setattr(Batched, "run", count("portable", Batched.run))
    monkeypatch.setattr(Eager, "run", count("eager", Eager.run))
    return by


def agree(runner: ModelRunner, parts: Any, gap: float, counted: dict[str, int]) -> None:
    """Eight rows of every kind of sampling, in a pool in which they lose their pages; then one row alone."""
    asked = requests(8, tokens=24)
    for batch, pages, budget in ((asked, 17, 64), (asked[:1], 64, 512)):
        found = generate(runner, batch, pages, budget)
        for request in batch[::2]:
            ids = found[request.request_id].ids
            assert len(ids) == request.stopping.max_tokens or ids[-1] in request.stopping.stop_token_ids
            judge(parts, request, ids, gap)
    runner.close()
    assert counted["portable"] > 100
    assert counted["eager"] < 20  # beginnings that are computed again


@pytest.mark.parametrize("dtype", GAPS)
@pytest.mark.parametrize("case", CASES)
def test_each_family_agrees_with_eager(case: str, dtype: str, tmp_path: Path, counted: dict[str, int]) -> None:
    make(case, tmp_path)
    runner, parts = served(tmp_path, dtype=dtype)
    assert runner.info.decoder == "portable"
    agree(runner, parts, GAPS[dtype], counted)


@pytest.mark.parametrize("kept", ["auto", "fp8"])
@pytest.mark.parametrize("form", FORMS)
def test_each_format_agrees_with_eager(form: str, kept: str, tmp_path: Path, counted: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOL, **FORMS[form]}))
    runner, parts = served(tmp_path, load_format="dummy", kv_dtype=kept)
    gap = 0.6 if kept == "fp8" else 0.3
    agree(runner, parts, gap, counted)


def test_idle_rows_write_nowhere(tmp_path: Path) -> None:
    """Rows that come and go for long leave the pages of a sequence that is not fed as they are."""
    (tmp_path / "config.json").write_text(json.dumps({**SMOL, **FORMS["bf16"]}))
    runner, parts = served(tmp_path, load_format="dummy")
    kept = [parts.pool.layer(at)[:, 96:].clone() for at in range(3)]
    for turn in range(6):
        asked = [
            GenerationRequest(
                request_id=f"{turn}-{key}",
                token_ids=(turn + 1, key + 2, 7),
                sampling=GREEDY,
                stopping=Stopping(max_tokens=3 + 5 * key),
                arrived_at=0.0,
            )
            for key in range(7)
        ]
        generate(runner, asked, 96, 64, apart=turn % 3)
    torch.cuda.synchronize()
    assert all(torch.equal(parts.pool.layer(at)[:, 96:], before) for at, before in enumerate(kept))
    runner.close()


def test_what_is_not_the_kernels_goes_to_eager(tmp_path: Path, counted: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMOL, **FORMS["bf16"]}))
    runner, _ = served(tmp_path, load_format="dummy")
    asked = requests(4, logprobs=2, tokens=8)
    found = generate(runner, asked, 64, 64)
    for request in asked:
        answer = found[request.request_id]
        assert [len(one.top) for one in answer.logprobs] == [2] * len(answer.ids)
    assert counted["portable"] == 0
    assert {one.name for one in runner.info.unused} == {"speculation", "two_pass_head"}
    assert [one.name for one in runner.info.proposers if not one.why_not] == []
    runner.close()
