"""The training loop, on streams small enough to learn in a second."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models.train import run
from models.train.export import read_network, write_weights
from models.train.fit import Recipe, borrow_embedding, distillation_loss, fit, next_token_loss, rate_at
from models.train.measure import mean_loss
from models.train.network import Qwen3, Shape
from models.train.prepare import TOKENS_FILE
from models.train.tokens import SPLITS, Stream, save

SHAPE = Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, head_dim=16, vocabulary=16, max_positions=64)
RECIPE = Recipe(
    steps=60,
    seconds=60.0,
    rate=1e-2,
    dropout=0.0,
    batch_tokens=128,
    length=16,
    long_length=32,
    warmup=5,
    evaluations=4,
)


def counting(tokens: int, period: int = 8) -> Stream:
    return Stream((np.arange(tokens) % period).astype(np.uint16), np.arange(0, tokens, period, dtype=np.int64), tokens)


def noise(tokens: int) -> Stream:
    ids = np.random.default_rng(5).integers(0, 16, tokens).astype(np.uint16)
    return Stream(ids, np.zeros(1, np.int64), tokens)


def fresh(shape: Shape = SHAPE) -> Qwen3:
    torch.manual_seed(0)
    return Qwen3(shape)


def test_learns_what_can_be_learned() -> None:
    net = fresh()
    outcome = fit(net, counting(3000), counting(300), RECIPE, next_token_loss)
    assert outcome.steps == 60
    assert outcome.tokens == 60 * 128
    assert mean_loss(net, counting(300), 16) < 0.2
    assert len(outcome.valid_losses) == RECIPE.evaluations


def test_keeps_the_best_step_not_the_last() -> None:
    """Validation text of another kind gets worse while training succeeds."""
    net = fresh()
    outcome = fit(net, counting(3000), noise(300), replace(RECIPE, evaluations=10), next_token_loss)
    losses = dict(outcome.valid_losses)
    assert losses[outcome.best_step] == min(losses.values())
    assert outcome.best_step < outcome.steps
    assert mean_loss(net, noise(300), RECIPE.length) == pytest.approx(losses[outcome.best_step], rel=1e-5)


def test_seconds_end_it_too() -> None:
    outcome = fit(fresh(), counting(3000), counting(300), replace(RECIPE, steps=10**6, seconds=0.5), next_token_loss)
    assert 0 < outcome.steps < 10**6
    assert outcome.seconds < 30


@pytest.mark.proof
def test_is_repeatable() -> None:
    outcomes = [fit(fresh(), counting(3000), counting(300), RECIPE, next_token_loss) for _ in range(2)]
    assert outcomes[0].valid_losses == outcomes[1].valid_losses


def test_rate_rises_then_falls_to_nothing() -> None:
    rates = [rate_at(step / 60, step, RECIPE) for step in range(61)]
    assert rates[0] == pytest.approx(1 / RECIPE.warmup)
    assert max(rates) == rates[4]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[60] == 0.0


def test_next_token_loss_of_an_even_guess() -> None:
    windows = torch.randint(0, 16, (2, 9))
    assert float(next_token_loss(windows, torch.zeros(2, 8, 16))) == pytest.approx(math.log(16))


def test_distillation_loss_is_lowest_at_the_mixture() -> None:
    target = fresh()
    windows = torch.randint(0, 16, (2, 9))
    with torch.no_grad():
        wanted = target(windows[:, :-1]).softmax(-1)
    mixture = 0.9 * wanted + 0.1 * F.one_hot(windows[:, 1:], 16)
    loss = distillation_loss(target)
    entropy = -(mixture * mixture.log()).sum(-1).mean()
    assert float(loss(windows, mixture.log())) == pytest.approx(float(entropy), rel=1e-5)
    assert loss(windows, wanted.log()) > entropy
    assert loss(windows, torch.zeros(2, 8, 16)) > entropy


@pytest.mark.parametrize("kept", [4, 8, 16])
@torch.no_grad()
def test_borrowed_embedding_keeps_inner_products(kept: int) -> None:
    """Off by no more than the dimensions that were dropped: the best that so few can do."""
    wide, narrow = fresh(), fresh(replace(SHAPE, hidden=kept))
    wide.model.embed_tokens.weight.normal_()
    borrow_embedding(narrow, wide)
    want = wide.model.embed_tokens.weight @ wide.model.embed_tokens.weight.T
    got = narrow.model.embed_tokens.weight @ narrow.model.embed_tokens.weight.T
    dropped = torch.linalg.eigvalsh(want).flip(0)[kept:]
    assert float((got - want).norm()) == pytest.approx(float(dropped.norm()), rel=1e-3, abs=1e-3)


def test_weights_survive_a_file_as_bf16(tmp_path: Path) -> None:
    net = fresh()
    write_weights(net, tmp_path / "a" / "model.safetensors")
    back = read_network(tmp_path / "a" / "model.safetensors", SHAPE, torch.device("cpu")).state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(back[name], value.bfloat16().float())


def test_run_trains_target_then_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {name: replace(SHAPE, vocabulary=16, hidden=size) for name, size in (("demo", 32), ("demo-draft", 16))}
    monkeypatch.setattr(run, "SHAPES", small)
    save(tmp_path / TOKENS_FILE, {split: counting(3000) for split in SPLITS})
    for name, shape in small.items():
        run.run(name, run.tiny(run.RECIPES[name]), tmp_path, tmp_path / "fitted")
        read_network(tmp_path / "fitted" / f"{name}.safetensors", shape, torch.device("cpu"))
        report = json.loads((tmp_path / "fitted" / f"fit_{name}.json").read_text("utf-8"))
        assert report["outcome"]["steps"] == 6
        assert report["device"] == ("CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name())


def test_draft_without_its_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SHAPES", {"demo": SHAPE, "demo-draft": SHAPE})
    save(tmp_path / TOKENS_FILE, {split: counting(3000) for split in SPLITS})
    with pytest.raises(FileNotFoundError, match=r"demo\.safetensors"):
        run.run("demo-draft", run.tiny(run.RECIPES["demo-draft"]), tmp_path, tmp_path / "fitted")
