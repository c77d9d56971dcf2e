"""Captured decode steps on a GPU: every token must be the one that float32 would choose, or as good as that."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.api import GenerationRequest
from engine.execution.eager import Eager
from engine.execution.router import Role
from engine.execution.runner import ModelRunner
from engine.execution.step_state import Parts
from engine.kv.kv_cache import KvCache
from engine.kv.page_pool import PagePool
from engine.linear import DenseLinear, Placement
from engine.model.attention import RowSpan, StepAttention
from engine.model.norm import RmsNorm
from engine.model.transformer import StepInput, Transformer, kv_shape
from engine.model.weights import Layer, Weights
from engine.sampling.noise import gumbel, seed_key
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, EngineSettings
from engine.worker.build import PreparedModel, make_runner, prepare
from quant.checkpoint.config import parse_config
from quant.checkpoint.tensors import dense_tensors

pytestmark = pytest.mark.gpu

BASE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 12000,
    "dtype": "bfloat16",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 200, "head_dim": 128},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "head_dim": None, "hidden_size": 512},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 6.0,
    },
    "qwen3-windows": {
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
GAP = 1e-2  # of the largest logit: nearer than that, bf16 may choose otherwise


def save(folder: Path, family: str) -> Path:
    config = {key: value for key, value in {**BASE, **FAMILIES[family]}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    held = {}
    for name, shape in dense_tensors(parse_config(config, "config.json")).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * values
        else:
            values *= 1.2 / shape[-1] ** 0.5 if len(shape) > 1 else 0.3
        held[name] = values.bfloat16()
    save_file(held, folder / "model.safetensors")
    return folder


def prepared_on_gpu(folder: Path, **changes: Any) -> PreparedModel:
    settings = settings_of(folder, **changes)
    return prepare(settings, nobody)


def settings_of(folder: Path, **changes: Any) -> EngineSettings:
    given: dict[str, Any] = {"device": "cuda", "max_sequences": 8, "kv_bytes": 256 << 20, "max_context": 12000}
    return EngineSettings(model=str(folder), **{**given, **changes})


def nobody(stage: str, done: int, total: int) -> None:
    """Watches."""


def runner_of(prepared: PreparedModel, folder: Path, decoder: Any = "graph") -> ModelRunner:
    return make_runner(settings_of(folder, decoder=decoder), prepared, nobody)


def exact(parts: Parts) -> Transformer:
    """The same weights in float32."""
    held, model = parts.model.weights, parts.model

    def wide(linear: Any) -> DenseLinear:
        return DenseLinear(linear.weight.float(), None if linear.bias is None else linear.bias.float())

    def layer(one: Layer) -> Layer:
        return replace(one, qkv=wide(one.qkv), output=wide(one.output), gate_up=wide(one.gate_up), down=wide(one.down))

    weights = Weights(held.embedding.float(), tuple(map(layer, held.layers)), held.norm, wide(held.head))
    assert isinstance(held.norm, RmsNorm)
    return Transformer(model.config, weights, model.ropes, Placement(torch.float32, model.placement.device))


def forced(model: Transformer, tokens: Items[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of a text, by the plain forward pass."""
    count, device = len(tokens), model.placement.device
    pages = -(-count // PAGE_SIZE)
    config = model.config

    shape = kv_shape(config)
    pool = KvCache(shape, pages, model.placement, heads_outside=False)
    places = torch.arange(count, device=device)
    share = [RowSpan(0, count, 0, list(range(pages)))]
    attention = StepAttention(share, tuple(dict.fromkeys(config.windows)), pool, device)
    with torch.inference_mode():
        ids = torch.tensor(tokens, device=device)
        return model.logits(model.forward(StepInput(ids, places, places, attention, None), pool))


def check(parts: Parts, truth: Transformer, request: GenerationRequest, ids: Items[int]) -> None:
    """No chosen token's score may lie further below the best than bf16 accounts for."""
    prompt = list(request.token_ids)
    logits, rounded = (forced(model, [*prompt, *ids])[len(prompt) - 1 : -1].double() for model in (truth, parts.model))
    # Of a plain pass in bf16 over the same text: two scores may change places when they are twice that apart.
    allowed = max(GAP * float(logits.abs().max()), 2 * float((logits - rounded).abs().max()))
    assert allowed < 0.1 * float(logits.abs().max()), "the model is too wild to judge by"
    heat = request.sampling.temperature
    scores = logits
    if heat:
        positions = torch.arange(len(prompt), len(prompt) + len(ids), device=logits.device)
        keys = torch.full_like(positions, seed_key(request.sampling.seed))
        noise = gumbel(keys, positions, torch.arange(logits.shape[1], device=logits.device).unsqueeze(0))
        scores = logits + heat * noise
    chosen = scores.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1)).squeeze(1)
    worst = float((scores.amax(-1) - chosen).max())
    assert worst <= allowed, f"{worst} below the best, {allowed} allowed"


def texts(sizes: Items[int], vocab: int = 1000) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (size,), generator=generator).tolist() for size in sizes]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_as_good_as_the_best(family: str, tmp_path: Path, request_of: Any, drive: Any) -> None:
    folder = save(tmp_path, family)
    prepared = prepared_on_gpu(folder)
    runner = runner_of(prepared, folder)
    assert runner.info.decoder == "graph"
    asked = [
        request_of(text, 150, **({"temperature": 0.8, "seed": at} if at % 2 else {}))
        for at, text in enumerate(texts((1, 5, 16, 17, 100, 239, 250, 500)))
    ]
    truth = exact(prepared.parts)
    together = drive(runner, asked)
    for request, answer in zip(asked, together.answers, strict=True):
        alone = drive(runner, [request]).answers[0].token_ids
        assert len(alone) == len(answer.token_ids) == 150
        check(prepared.parts, truth, request, answer.token_ids)
        check(prepared.parts, truth, request, alone)
    runner.close()


def test_sixteen_rows_are_two_pipelines(tmp_path: Path, request_of: Any, drive: Any, monkeypatch: Any) -> None:
    folder = save(tmp_path, "qwen3")
    prepared = prepared_on_gpu(folder, max_sequences=16)
    runner = make_runner(settings_of(folder, max_sequences=16), prepared, nobody)
    asked = [
        request_of(text, 20 + 15 * (at % 5), **({"temperature": 0.8, "seed": at} if at % 2 else {}))
        for at, text in enumerate(texts([3 + 20 * at for at in range(16)]))
    ]
    eager = 0

    def counted(self: Eager, rows: tuple[Row, ...], inner: Any = Eager.run) -> dict[int, RowResult]:
        nonlocal eager
        eager += len(rows)
        return inner(self, rows)  # type: ignore[no-any-return]

    monkeypatch.setattr(Eager, "run", counted)
    truth = exact(prepared.parts)
    for request, answer in zip(asked, drive(runner, asked).answers, strict=True):
        assert len(answer.token_ids) == request.stopping.max_tokens
        check(prepared.parts, truth, request, answer.token_ids)
    assert eager == 0
    runner.close()


@pytest.mark.parametrize("before", [2047 - 16, 4096 - 16, 8192 - 16, 500, 1010])
def test_long_contexts(before: int, tmp_path: Path, request_of: Any, drive: Any) -> None:
    folder = save(tmp_path, "qwen3")
    prepared = prepared_on_gpu(folder)
    runner = runner_of(prepared, folder)
    request = request_of(texts((before,))[0], 48)
    ids = drive(runner, [request]).answers[0].token_ids
    check(prepared.parts, exact(prepared.parts), request, ids)
    runner.close()


@pytest.mark.parametrize("seed", range(6))
def test_rows_come_go_and_are_thrown_out(seed: int, tmp_path: Path, request_of: Any) -> None:
    folder = save(tmp_path, "qwen3-windows")
    prepared = prepared_on_gpu(folder)
    runner, chance = runner_of(prepared, folder), random.Random(seed)
    pages = chance.choice((24, 60, 200))
    limits = Limits(
        max_sequences=8,
        max_batch_tokens=64,
        max_context=min(600, pages * 16),
        lookahead_tokens=15,
        max_tokens_per_row=16,
    )
    scheduler = Scheduler(limits, PagePool(pages))
    asked: list[GenerationRequest] = []
    got: list[list[int]] = []

    def admit() -> None:
        text = texts((chance.choice((1, 15, 16, 33, 120)),), 1000)[0]
        heat = chance.choice(({}, {"temperature": 1.0, "seed": chance.randrange(99)}, {"repetition_penalty": 1.2}))
        one = request_of([chance.randrange(1000), *text], chance.choice((3, 40, 200)), **heat)
        scheduler.admit(Sequence(one, list(one.token_ids), key=len(asked)))
        asked.append(one)
        got.append([])

    for at in range(400):
        if at < 300 and chance.random() < 0.1:
            admit()
        if asked and chance.random() < 0.1:
            key = chance.randrange(len(asked))
            chance.choice((scheduler.cancel, scheduler.pause, scheduler.resume, scheduler.resume))(key)
        plan = scheduler.plan(at * 0.01)
        if plan is None:
            continue
        for event in scheduler.commit(plan, runner.run(plan), at * 0.01):
            assert event.failure is None
            got[event.key] += event.token_ids
    truth = exact(prepared.parts)
    judged = 0
    for request, ids in zip(asked, got, strict=True):
        if ids and request.sampling.repetition_penalty == 1:
            check(prepared.parts, truth, request, ids)
            judged += 1
    assert judged > 5
    runner.close()


def test_switches_change_no_token(tmp_path: Path, request_of: Any, drive: Any) -> None:
    folder = save(tmp_path, "qwen3")
    prepared = prepared_on_gpu(folder)
    runner = runner_of(prepared, folder)
    asked = [request_of(text, 60) for text in texts((20, 70, 9))]
    before = [one.token_ids for one in drive(runner, asked).answers]
    runner.set_optimization("graphs", False)
    assert [one.token_ids for one in drive(runner, asked).answers] == before
    runner.set_optimization("fused_kernels", False)
    truth = exact(prepared.parts)
    for request, one in zip(asked, drive(runner, asked).answers, strict=True):
        check(prepared.parts, truth, request, one.token_ids)
    runner.set_optimization("fused_kernels", True)
    runner.set_optimization("graphs", True)
    assert [one.token_ids for one in drive(runner, asked).answers] == before
    runner.close()


@pytest.fixture
def large_head(tmp_path: Path) -> Path:
    """A model whose head gains from two passes."""
    config = {**BASE, **FAMILIES["qwen3"], "vocab_size": 70000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_head_in_two_passes_changes_no_token(large_head: Path, request_of: Any, drive: Any) -> None:
    prepared = prepared_on_gpu(large_head, load_format="dummy")
    runner = runner_of(prepared, large_head)
    assert runner.info.unused == ()
    kinds = [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.5, "seed": 2}]
    asked = [request_of(text, 60, **kind) for text, kind in zip(texts((20, 70, 9)), kinds, strict=True)]
    filtered = request_of(texts((30,))[0], 60, temperature=0.8, seed=3, top_k=40)
    # How a prompt's sums are rounded depends on those beside it, so each company is compared with itself.
    companies = [[*asked, filtered], asked, *([one] for one in (*asked, filtered))]
    found = []
    for enabled in (True, False, True, False):
        runner.set_optimization("two_pass_head", enabled)
        found.append([[one.token_ids for one in drive(runner, together).answers] for together in companies])
    assert found[1:] == found[:1] * 3
    runner.close()


def test_where_memory_is_short_the_head_is_read_whole(
    large_head: Path, request_of: Any, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.layers.few_rows_weights.KEPT", 1 << 50)
    runner = runner_of(prepared_on_gpu(large_head, load_format="dummy"), large_head)
    (unused,) = runner.info.unused
    assert unused.name == "two_pass_head"
    assert "must stay free" in unused.reason
    assert len(drive(runner, [request_of(texts((20,))[0], 30)]).answers[0].token_ids) == 30
    runner.close()


def test_a_row_without_numbers_fails_alone(tmp_path: Path, request_of: Any, drive: Any) -> None:
    folder = save(tmp_path, "llama")
    prepared = prepared_on_gpu(folder)
    runner = runner_of(prepared, folder)
    asked = [request_of(text, 60, temperature=1.0, seed=size) for size, text in enumerate(texts((20, 70)))]
    good, bad = drive(runner, asked).answers
    known = {*good.token_ids, *asked[0].token_ids, *asked[1].token_ids}
    poison = next(token for token in bad.token_ids[10:50] if token not in known)
    with torch.inference_mode():
        prepared.parts.model.weights.embedding[poison] = float("nan")
    first, second = drive(runner, asked).answers
    assert first.token_ids == good.token_ids
    assert second.failed
    assert second.token_ids == bad.token_ids[: bad.token_ids.index(poison) + 1]
    runner.close()


def test_the_same_prompt_again_and_again(tmp_path: Path, request_of: Any, drive: Any) -> None:
    folder = save(tmp_path, "qwen3")
    prepared = prepared_on_gpu(folder)
    runner = runner_of(prepared, folder)
    request = request_of(texts((40,))[0], 400)
    first = drive(runner, [request]).answers[0].token_ids
    until = time.monotonic() + 5
    while time.monotonic() < until:
        assert drive(runner, [request]).answers[0].token_ids == first
    runner.close()


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3")
    prepared = prepared_on_gpu(folder, dtype="float16")
    runner = make_runner(settings_of(folder, dtype="float16"), prepared, nobody)
    assert runner.info.decoder == "portable"
    assert "float16" in runner.info.objections[0].reason
    assert isinstance(runner._executors[Role.EAGER], Eager)
