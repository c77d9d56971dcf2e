"""A model that is split over ranks computes what one process computes: every family and format, with every field of
sampling. The ranks are threads here; `test_ranks.py` has processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.errors import Unsupported
from engine.worker.build import build
from tests.engine.conftest import Drive, Driven, Request
from tests.engine.quantized import FAMILIES, ids_of, make, nothing, settings
from tests.engine.worker.split_threads import split_runner
from tests.quant.gguf_files import write_model

pytestmark = pytest.mark.product

_FURTHER = ("Q4_1", "Q8_0", "Q6_K")  # blocks that take as long, and are cut by the same code
CLOSE = 2e-3  # of log-probabilities: sums in another order, behind weights of few bits


def asked(request_of: Request, vocabulary: int) -> list[Any]:
    ids = ids_of(60, vocabulary)
    return [
        request_of(ids[:21], 8, logprobs=2, prompt_logprobs=1),
        request_of(ids[5:9], 8, logprobs=1, temperature=0.9, seed=3),
        request_of(ids[10:40], 8, temperature=1.3, seed=9, top_k=7, top_p=0.9, repetition_penalty=1.2),
        request_of([7, 8, 9] * 6, 8, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=4, stop=(5,)),
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


@pytest.mark.parametrize("kind", ["Q4_0", *(pytest.param(kind, marks=pytest.mark.proof) for kind in _FURTHER)])
def test_a_gguf_file_is_split(kind: str, tmp_path: Path, drive: Drive, request_of: Request) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", kind)
    compare(path, 2, drive, request_of, 96, dtype="float32")


def test_blocks_of_a_gguf_file_are_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", "Q4_K")
    with pytest.raises(Unsupported, match="o_proj has 128 inputs a rank, and groups of 256"):
        build(settings(path, tensor_parallel=2), nothing)


def test_made_up_weights_are_those_of_one_process(tmp_path: Path, drive: Drive, request_of: Request) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    compare(tmp_path / "awq", 2, drive, request_of, 101, load_format="dummy", seed=4)


def test_a_draft_model_of_the_first_rank_changes_no_id(tmp_path: Path, drive: Drive, request_of: Request) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    requests = asked(request_of, 101)
    whole = build(settings(tmp_path / "plain", max_sequences=4, dtype="float32"), nothing)
    expected = drive(whole, requests)
    whole.close()
    given = {"draft_model": str(tmp_path / "plain"), "max_sequences": 4, "dtype": "float32"}
    runner, threads = split_runner(tmp_path / "plain", 2, **given)
    same(expected, drive(runner, requests))
    assert [one.why_not for one in runner.info.proposers] == ["", ""]
    runner.close()
    assert not threads.failures


def test_a_split_model_says_that_it_goes_without_the_walk_in_c(tmp_path: Path) -> None:
    make(tmp_path, "qwen3", vocab_size=101)
    runner, _ = split_runner(tmp_path / "awq", 2)
    reasons = {one.name: one.reason for one in runner.info.unused}
    runner.close()
    assert "tensor-parallel" in reasons["fused_kernels"]
