"""A model that is split over two GPUs computes what one computes, in captured steps and without them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.api import GenerationRequest
from engine.execution.runner import ModelRunner
from engine.settings import EngineSettings
from engine.worker.build import build, make_runner, prepare
from engine.worker.offers import KERNELS_TRIAL
from engine.worker.ranks import Ranks
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors
from tests.engine.conftest import Drive, Request
from tests.engine.execution.graphs.test_gpu_decode import forced
from tests.engine.judged import judge
from tests.engine.quantized import ids_of, nothing
from tests.engine.worker.test_ranks import same_pages

pytestmark = pytest.mark.gpu(2)

VOCABULARY = 320
MANY = 70_004  # tokens, whose head is read in two passes; the second rank has fewer than the first
GAP = 0.3  # in logits: what sums of bfloat16 in another order may change
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FORMS: dict[str, dict[str, Any]] = {"plain": {}, "int8": {}, "awq": {"quantization_config": AWQ}}


def folder(root: Path, form: str, vocabulary: int = VOCABULARY) -> Path:
    config = {**KERNELS_TRIAL, "intermediate_size": 512, "vocab_size": vocabulary, **FORMS[form]}
    (root / "config.json").write_text(json.dumps(config))
    return root


def settings(model: Path, **given: Any) -> EngineSettings:
    chosen: dict[str, Any] = {"max_sequences": 32, "max_context": 512, "kv_bytes": 64 << 20, "seed": 3, **given}
    return EngineSettings(model=str(model), **{"device": "cuda", "load_format": "dummy", **chosen})


def asked(request_of: Request, count: int, *, filtered: bool = True) -> list[GenerationRequest]:
    ids = ids_of(300, VOCABULARY)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.3, "seed": 9, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    ]
    if not filtered:
        kinds[2] = {"temperature": 1.3, "seed": 9, "repetition_penalty": 1.2}
    long = [request_of(ids[:200], 20), request_of([7, 8, 9] * 12, 40)]
    return [*long, *(request_of(ids[at : at + 5 + 3 * at], 24, **kinds[at % 4]) for at in range(count - 2))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decoder", ["graph", "eager"])
def test_two_gpus_choose_what_one_may(
    form: str, decoder: str, tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    model, quantization = folder(tmp_path, form), "int8" if form == "int8" else "auto"
    whole = prepare(settings(model, decoder="eager", quantization=quantization), nothing)
    runner = build(settings(model, decoder=decoder, quantization=quantization, tensor_parallel=2), nothing)
    assert runner.info.decoder == decoder
    for count in (3, 7, 20):
        # The judge widens a filter's border by ranks, not by logits: a token of int8 came from just beyond it.
        requests = asked(request_of, count, filtered=form != "int8")
        driven = drive(runner, requests)
        for request, answer in zip(requests, driven.answers, strict=True):
            assert not answer.failed
            assert len(answer.token_ids) == request.stopping.max_tokens
            judge(whole.parts, request, answer.token_ids, GAP)
    logprobs = request_of(ids_of(9, VOCABULARY), 6, logprobs=2)
    answer = drive(runner, [logprobs]).answers[0]
    judge(whole.parts, logprobs, answer.token_ids, GAP, answer.logprobs)
    runner.close()


def test_pages_of_two_gpus_are_those_of_one(tmp_path: Path) -> None:
    model = folder(tmp_path, "plain")
    one = build(settings(model, decoder="eager"), nothing)
    two = build(settings(model, decoder="eager", tensor_parallel=2), nothing)
    assert two.pages.layout == one.pages.layout
    same_pages(one.pages, two.pages)
    one.close()
    two.close()


@pytest.mark.parametrize("vocabulary", [VOCABULARY, MANY])
def test_launches_without_graphs_and_switches_choose_the_same(
    vocabulary: int, tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    runner = build(settings(folder(tmp_path, "plain", vocabulary), tensor_parallel=2), nothing)
    assert ("two_pass_head" in {one.name for one in runner.info.unused}) == (vocabulary == VOCABULARY)
    requests = asked(request_of, 6)
    expected = ids(runner, requests, drive)
    for name in ("graphs", "two_pass_head"):
        runner.set_optimization(name, False)
        assert ids(runner, requests, drive) == expected
        runner.set_optimization(name, True)
    assert ids(runner, requests, drive) == expected
    runner.close()


@pytest.mark.parametrize("streams", [4, 32])  # by the kernels for few rows, and by those for many
def test_draws_have_the_distribution_of_one_gpu(
    streams: int, tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    model = constant(tmp_path)
    ids = tuple(ids_of(20, VOCABULARY))
    whole = prepare(settings(model, load_format="auto", decoder="eager"), nothing).parts
    chances = forced(whole.model, ids)[-1].double().softmax(0).cpu()
    runner = build(settings(model, load_format="auto", tensor_parallel=2), nothing)
    seen, seeds = torch.zeros(VOCABULARY, dtype=torch.float64), itertools.count(1)
    while seen.sum() < 100_000:
        requests = [request_of(list(ids), 450, temperature=1.0, seed=next(seeds)) for _ in range(streams)]
        for answer in drive(runner, requests).answers:
            seen += torch.bincount(torch.tensor(answer.token_ids), minlength=VOCABULARY)
    runner.close()
    expected = chances * seen.sum()
    often = expected > 20
    counts, wanted = (torch.cat((one[often], one[~often].sum()[None])) for one in (seen, expected))
    distance = float(((counts - wanted) ** 2 / wanted.clamp(min=1)).sum())
    freedom = len(counts) - 1
    assert abs(distance - freedom) < 6 * (2 * freedom) ** 0.5, (distance, freedom)


def constant(root: Path) -> Path:
    """All tokens have one embedding, so whatever came before, the next token has the same chances."""
    config = {**KERNELS_TRIAL, "intermediate_size": 512, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    (root / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(4)
    held = {}
    for name, shape in dense_tensors(parse_config(config, "config.json")).items():
        values = torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3)
        held[name] = (values + float(name.endswith("norm.weight"))).bfloat16()
    table = held["model.embed_tokens.weight"]
    held["model.embed_tokens.weight"] = table[:1].expand_as(table).contiguous()
    save_file(held, root / "model.safetensors")
    return root


def ids(runner: ModelRunner, requests: list[GenerationRequest], drive: Drive) -> list[list[int]]:
    return [answer.token_ids for answer in drive(runner, requests).answers]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_group(
    sent: signal.Signals, tmp_path: Path, drive: Drive, request_of: Request
) -> None:
    lost = threading.Event()
    chosen = settings(folder(tmp_path, "plain"), hang_timeout=8.0, tensor_parallel=2)
    ranks = Ranks(chosen, 2, lambda number: lost.set(), on_gpus=True)
    runner = make_runner(chosen, prepare(chosen, nothing, member=ranks), nothing)
    assert not drive(runner, asked(request_of, 3)).answers[0].failed
    torch.cuda.synchronize()
    os.kill(ranks.pids[0], sent)
    assert lost.wait(60)
    ranks.close()
