"""Log-probabilities of prompts on a real model, position for position beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from engine.execution import eager
from engine.settings import EngineSettings
from engine.worker.build import build
from tests.engine.conftest import Drive, Request
from tests.engine.quantized import nothing

pytestmark = pytest.mark.product

MODELS = Path(__file__).resolve().parents[3] / "models"
TOP = 5
CLOSE = 1e-3


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    text = (MODELS / "train" / "heldout.txt").read_text()[:1200]
    return Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json")).encode(text).ids[:150]


@pytest.fixture(scope="module")
def expected(prompt: list[int]) -> torch.Tensor:
    """[places, vocab]: of what comes after each token but the last."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODELS / "demo", dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize(("budget", "most"), [(512, 1 << 24), (37, 10_000)], ids=["whole", "in chunks and slices"])
def test_they_are_those_of_transformers(
    budget: int,
    most: int,
    prompt: list[int],
    expected: torch.Tensor,
    request_of: Request,
    drive: Drive,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eager, "SCORED_LOGITS", most)
    settings = EngineSettings(model=str(MODELS / "demo"), device="cpu", dtype="float32", threads=1, max_sequences=4)
    runner = build(settings, nothing)
    asked = [request_of(prompt, 4, prompt_logprobs=TOP), request_of(prompt[:50], 4), request_of(prompt, 4)]
    scored, _, plain = drive(runner, asked, budget=budget).answers
    runner.close()
    assert scored.token_ids == plain.token_ids
    assert len(scored.prompt_logprobs) == len(prompt) - 1
    for place, one in enumerate(scored.prompt_logprobs):
        here = expected[place]
        assert one.logprob == pytest.approx(float(here[prompt[place + 1]]), abs=CLOSE)
        assert [value for _, value in one.top] == pytest.approx(here.topk(TOP).values.tolist(), abs=CLOSE)
        assert [value for _, value in one.top] == pytest.approx([float(here[i]) for i, _ in one.top], abs=CLOSE)
