"""A model that is split over ranks computes what one process computes: every family and format, with every field of
sampling. The ranks are threads here; `test_ranks.py` has processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.worker.build import build
from tests.engine.conftest import Drive, Driven, Request
from tests.engine.quantized import FAMILIES, ids_of, make, nothing, settings
from tests.engine.worker.split_threads import split_runner

CLOSE = 2e-3  # of log-probabilities: sums in another order, behind weights of few bits


def asked(request_of: Request, vocabulary: int) -> list[Any]:
    ids = ids_of(60, vocabulary)
    return [
        request_of(ids[:21], 12, logprobs=2, prompt_logprobs=1),
        request_of(ids[5:9], 12, logprobs=1, temperature=0.9, seed=3),
        request_of(ids[10:40], 12, temperature=1.3, seed=9, top_k=7, top_p=0.9, repetition_penalty=1.2),
        request_of([7, 8, 9] * 6, 12, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=4, stop=(5,)),
    ]


def same(one: Driven, split: Driven) -> None:
    assert not any(answer.failed for answer in (*one.answers, *split.answers))
    for ours, theirs in zip(split.answers, one.answers, strict=True):
        assert ours.token_ids == theirs.token_ids
        for mine, yours in (
            *zip(ours.logprobs, theirs.logprobs, strict=True),
            *zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True),
        ):
            assert mine.logprob == pytest.approx(yours.logprob, abs=CLOSE)


def compare(folder: Path, ranks: int, drive: Drive, request_of: Request, vocabulary: int, **given: Any) -> None:
    requests = asked(request_of, vocabulary)
    whole = build(settings(folder, max_sequences=4, **given), nothing)
    expected = drive(whole, requests)
    whole.close()
    runner, threads = split_runner(folder, ranks, max_sequences=4, **given)
    same(expected, drive(runner, requests))
    runner.close()
    assert not threads.failures


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_ids_of_one_process(
    family: str, tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    make(tmp_path, family, vocab_size=101)
    compare(tmp_path / "plain", 2, drive, request_of, 101, dtype="float32")


@pytest.mark.parametrize(
    ("kept", "given"),
    [
        ("plain", {"dtype": "bfloat16"}),
        ("plain", {"dtype": "float32", "kv_dtype": "fp8"}),
        ("plain", {"quantization": "int8", "dtype": "float32"}),
        ("awq", {}),
    ],
)
def test_every_format_has_the_ids_of_one_process(
    kept: str, given: dict[str, Any], tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    make(tmp_path, "llama-biases", vocab_size=101)
    compare(tmp_path / kept, 2, drive, request_of, 101, **given)


@pytest.mark.parametrize("ranks", [3, 4])
def test_heads_of_keys_are_held_by_several_ranks(ranks: int, tmp_path: Path, drive: Drive, request_of: Request) -> None:
    make(tmp_path, "qwen3", num_attention_heads=12, num_key_value_heads=1, intermediate_size=192, vocab_size=51)
    compare(tmp_path / "plain", ranks, drive, request_of, 51, dtype="float32")
