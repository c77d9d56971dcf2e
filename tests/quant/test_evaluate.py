"""Whole models compared: with themselves, with a damaged copy, and with transformers' own loss."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.evaluate import Comparison, evaluate
from quant.metrics import Interval

CPU = torch.device("cpu")


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(scope="module")
def windows(reference):
    return reference["eval_ids"][: 6 * 48].view(6, 48).long()


def test_a_model_against_itself(stored, windows):
    model = stored / "bnb-int8-tiny"
    found = evaluate(model, windows, model, quiet, CPU)
    assert (found.windows, found.tokens) == (6, 6 * 47)
    against = found.comparison
    assert against is not None
    assert against.perplexity_change == Interval(0.0, 0.0, 0.0)
    assert against.kl == 0
    assert against.agreement == 1
    assert against.greedy == against.greedy_of == 32
    assert against.misses() == ()
    assert against.base_perplexity == found.perplexity


def test_perplexity_is_that_of_a_plain_forward(stored, windows):
    found = evaluate(stored / "awq-tiny", windows, None, quiet, CPU)
    assert found.comparison is None
    decoder = Decoder.open(stored / "awq-tiny")
    logits = decoder.logits(decoder.hidden(windows))[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert found.perplexity == pytest.approx(math.exp(float(losses)), rel=1e-5)


def test_four_bits_against_eight(stored, windows):
    """Both come from one source: they differ a little, and the same way round by round."""
    found = evaluate(stored / "awq-tiny", windows, stored / "bnb-int8-tiny", quiet, CPU).comparison
    assert found is not None
    assert 0.0003 < found.kl < 0.01  # 0.0016 over the whole text, by the script that made the fixture
    assert 0.9 < found.agreement < 1
    assert abs(found.perplexity_change.value) < 0.02
    assert 0 < found.greedy <= 32


@pytest.mark.product
def test_texts_read_in_turns_are_judged_the_same(stored, windows, monkeypatch):
    model, base = stored / "awq-tiny", stored / "bnb-int8-tiny"
    whole = evaluate(model, windows, base, quiet, CPU)
    monkeypatch.setattr("quant.evaluate._HIDDEN_BYTES", 4 * 48 * 256 * 4)
    monkeypatch.setattr("quant.evaluate._LOGITS_AT_ONCE", 2048 * 10)
    heard: list[tuple[str, int, int]] = []
    turns = evaluate(model, windows, base, lambda *news: heard.append(news), CPU)
    assert turns.perplexity == pytest.approx(whole.perplexity, rel=1e-6)
    assert turns.comparison is not None
    assert whole.comparison is not None
    assert turns.comparison.kl == pytest.approx(whole.comparison.kl, rel=1e-4)
    assert turns.comparison.agreement == whole.comparison.agreement
    assert turns.comparison.greedy == whole.comparison.greedy
    assert [news for news in heard if news[0] == "model"] == [("model", i, 8) for i in range(1, 9)]


@pytest.mark.product
def test_greedy_length_is_that_of_two_generations(stored, windows):
    model, base = stored / "awq-tiny", stored / "bnb-int8-tiny"
    found = evaluate(model, windows, base, quiet, CPU).comparison
    assert found is not None

    def best(logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(1)

    theirs = Decoder.open(base).generate(windows[:, :32], 32, best)[:, 32:].tolist()
    ours = Decoder.open(model).generate(windows[:, :32], 32, best)[:, 32:].tolist()
    lengths = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 32)
        for x, y in zip(ours, theirs, strict=True)
    ]
    assert found.greedy == pytest.approx(sum(lengths) / len(lengths))


def test_a_damaged_model_misses_its_bars(stored, windows, tmp_path):
    shutil.copytree(stored / "bnb-int8-tiny", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.SCB"] *= 6
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    found = evaluate(tmp_path / "m", windows, stored / "bnb-int8-tiny", quiet, CPU).comparison
    assert found is not None
    assert len(found.misses()) == 3
    assert found.perplexity_change.low > 0.02


def test_misses_name_each_bar():
    good = Comparison(10.0, Interval(0.02, 0, 0.03), 0.02, 0.97, 5.0, 32)
    assert good.misses() == ()
    bad = Comparison(10.0, Interval(0.021, 0, 0.03), 0.021, 0.969, 5.0, 32)
    assert [miss.split()[0] for miss in bad.misses()] == ["perplexity", "KL", "agreement"]
    better = Comparison(10.0, Interval(-0.5, -0.6, -0.4), 0.0, 1.0, 5.0, 32)
    assert better.misses() == ()


def test_models_of_different_vocabularies_are_refused(stored, windows, tmp_path):
    shutil.copytree(stored / "bnb-int8-tiny", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:2000].clone()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "vocab_size": 2000}))
    with pytest.raises(CannotQuantize, match="vocabularies"):
        evaluate(tmp_path / "m", windows, stored / "bnb-int8-tiny", quiet, CPU)
    with pytest.raises(CannotQuantize, match="more tokens"):
        evaluate(tmp_path / "m", windows + 1000, None, quiet, CPU)


def test_a_window_of_one_token_is_refused(stored, windows):
    with pytest.raises(CannotQuantize, match="two tokens"):
        evaluate(stored / "awq-tiny", windows[:, :1], None, quiet, CPU)


def test_windows_beyond_what_dynamic_scaling_serves_are_refused(stored, windows, tmp_path):
    """There its angles change with the length of the text, which is not computed."""
    config = json.loads((stored / "awq-tiny" / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to((stored / "awq-tiny" / "model.safetensors").resolve())

    def judge(positions):
        dynamic = {**config, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": positions}
        (tmp_path / "config.json").write_text(json.dumps({**dynamic, "rope_parameters": None}))
        return evaluate(tmp_path, windows[:1], None, quiet, CPU)

    assert judge(windows.shape[1]).perplexity > 1
    with pytest.raises(CannotQuantize, match="dynamic rope scaling"):
        judge(windows.shape[1] - 1)
