"""Cards and folders, from figures made up here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from models.train.card import Figures, card
from models.train.export import write_folder, write_weights
from models.train.network import SHAPES, Qwen3, Shape
from models.train.prepare import Corpus

SHIPPED = Path(__file__).parents[2] / "models" / "demo"
COUNTS = {"train": 30, "valid": 20, "heldout": 10}
CORPUS = Corpus(
    "3.11.7", "d1ge57", COUNTS, {split: 4 * count for split, count in COUNTS.items()}, COUNTS, 0.125, ["a.py"]
)
FIGURES = Figures(1234567, 2_500_000, (("a.py", 8.0, 4), ("b.py", 16.0, 4)), 0.625)
FIT: dict[str, Any] = {
    "device": "Abacus",
    "torch": "9.9",
    "outcome": {
        "steps": 77,
        "tokens": 5_000_000,
        "seconds": 12.3,
        "train_loss": 1.25,
        "valid_losses": [[40, 2.5], [70, 2.25], [77, 2.75]],
        "best_step": 70,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_card_states_the_figures(name: str) -> None:
    text = card(name, FIGURES, CORPUS, FIT)
    assert "1,234,567 (bf16, 2.5 MB)" in text
    assert "| loss, nats a token | 3.000 |" in text
    assert f"| perplexity a token | {math.exp(3):.2f} |" in text
    assert f"| bits a byte | {3 / math.log(2) / 4:.3f} |" in text
    assert f"| a.py | 4 | 2.000 | {math.exp(2):.2f} |" in text
    assert "One Abacus, torch 9.9" in text
    assert "2.250" in text
    assert "`d1ge57`" in text
    assert "12.5 %" in text
    assert ("| 62.5 % |" in text) == (name == "demo-draft")
    assert "$" not in text


def test_folder_of_random_weights_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape: Shape = replace(SHAPES["demo-draft"], layers=1)
    net = Qwen3(shape).eval()
    write_weights(net, tmp_path / "weights.safetensors")
    write_folder(tmp_path / "model", tmp_path / "weights.safetensors", SHIPPED, shape)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto", local_files_only=True)
    assert oracle.dtype == torch.bfloat16
    ids = torch.randint(0, 8192, (1, 20))
    with torch.no_grad():
        want, got = oracle.float()(ids).logits, net.bfloat16().float()(ids)
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_folder_with_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    shape = SHAPES["demo-draft"]
    (tmp_path / "words").mkdir()
    Tokenizer.from_str('{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}').save(
        str(tmp_path / "words" / "tokenizer.json")
    )
    (tmp_path / "words" / "tokenizer_config.json").write_text("{}")
    write_weights(Qwen3(shape), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="lacks"):
        write_folder(tmp_path / "model", tmp_path / "weights.safetensors", tmp_path / "words", shape)
