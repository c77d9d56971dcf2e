"""What an answer owes to what runs beside it, on a CPU: nothing, in every format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from engine.api import GenerationRequest
from engine.execution.eager import Eager
from engine.execution.runner import ModelRunner
from engine.scheduling.plan import Row
from engine.settings import EngineSettings
from engine.worker.build import build, prepare
from tests.engine.conftest import Drive, Request
from tests.engine.quantized import nothing
from tests.engine.stepped import holding, known, put

pytestmark = [pytest.mark.product, pytest.mark.isa]

MODELS = Path(__file__).resolve().parents[3] / "models"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"model": "demo", "dtype": "float32"},
    "bfloat16": {"model": "demo", "dtype": "bfloat16"},
    "float16": {"model": "demo", "dtype": "float16"},
    "awq": {"model": "demo-awq"},
    "int8": {"model": "demo", "quantization": "int8"},
}
ASKED = 16  # answers that are compared; among 64 the others are there for the load
TOKENS = 10
CLOSE = 2e-5  # of the largest logit: some steps of float32's last place, grown by six layers


def settings(form: str, **more: Any) -> EngineSettings:
    given = {**FORMATS[form], "device": "cpu", "threads": 1, **more}
    return EngineSettings(**{**given, "model": str(MODELS / given["model"])})


def prompts(count: int) -> list[list[int]]:
    """Pieces of a text, of 4 to 49 tokens."""
    text = (MODELS / "train" / "heldout.txt").read_text()[:40_000]
    ids = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json")).encode(text).ids
    made = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 50, (count,), generator=made).tolist()
    starts = torch.randint(0, len(ids) - 50, (count,), generator=made).tolist()
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


_PROOF = [pytest.param(name, marks=pytest.mark.proof) for name in ("bfloat16", "int8")]


@pytest.fixture(params=["float32", "awq", *_PROOF])
def runner(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    made = build(settings(request.param, max_sequences=64), nothing)
    yield made
    made.close()


def test_greedy_and_seeded_answers_are_the_same_under_any_load(
    runner: ModelRunner, request_of: Request, drive: Drive
) -> None:
    requests: list[GenerationRequest] = []
    for index, prompt in enumerate(prompts(64)):
        sampling = {} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": index}
        requests.append(replace(request_of(prompt, TOKENS, **sampling), request_id=str(index)))
    asked = requests[:ASKED]

    def among(count: int, budget: int = 512) -> list[list[int]]:
        groups = [asked[at : at + count] for at in range(0, ASKED, count)] if count <= ASKED else [requests]
        answers = [one for group in groups for one in drive(runner, group, budget=budget).answers]
        return [one.token_ids for one in answers[:ASKED]]

    alone = among(1)
    for count in (2, 16):
        assert among(count) == alone, f"among {count}"
    assert among(64, budget=37) == alone, "among 64, prompts in other chunks"


@pytest.mark.parametrize("form", FORMATS)
def test_logits_differ_by_float32_rounding_alone(form: str, request_of: Request) -> None:
    """A prompt at once, token by token, and among others: bfloat16 anywhere between would show as 1e-2."""
    parts = prepare(settings(form, max_sequences=20, kv_bytes=16 << 20), nothing).parts
    executor, texts = Eager(parts), prompts(17)
    held = [holding(request_of(text), range(4 * slot, 4 * slot + 4), slot) for slot, text in enumerate(texts)]
    for one in held:
        put(parts.sequences, one)

    def logits(*rows: Row) -> torch.Tensor:
        found = executor.logits(sorted(rows, key=lambda row: row.count > 1))
        assert found is not None
        return found

    with torch.inference_mode():
        for one, text in zip(held[:3], texts[:3], strict=True):
            alone = logits(known(one, 0, len(text)))
            among = logits(known(one, 0, len(text)), *(known(two, 0, len(two.token_ids), False) for two in held[3:]))
            stepped = [logits(known(one, at, 1)) for at in range(len(text))][-1]
            for other in (among, stepped):
                assert float((other - alone).abs().max()) < CLOSE * float(alone.abs().max())


def test_the_walk_in_c_is_a_switch_that_changes_no_answer(request_of: Request, drive: Drive) -> None:
    made = build(settings("awq", max_sequences=4), nothing)
    assert "fused_kernels" not in {one.name for one in made.info.unused}
    requests = [replace(request_of(one, TOKENS), request_id=str(at)) for at, one in enumerate(prompts(4))]
    answers = []
    for fused in (True, False, True):
        made.set_optimization("fused_kernels", fused)
        answers.append([one.token_ids for one in drive(made, requests, budget=512).answers])
    made.close()
    assert answers[0] == answers[1] == answers[2]
