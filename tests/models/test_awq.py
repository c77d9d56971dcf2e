"""The four-bit folder as shipped: what it holds, and that its card tells the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from models.train.awq import AWQ, GROUP, card, generation_defaults
from quant.calibration import text_windows
from quant.checkpoint.formats import read_spec
from quant.checkpoint.spec import AwqSpec
from quant.evaluate import Comparison, evaluate
from quant.metrics import PERPLEXITY_BAR, Interval

MODELS = Path(__file__).parents[2] / "models"
EXCERPT = Path(__file__).parent / "data" / "graphlib.txt"
FOLDER, BASE = MODELS / AWQ, MODELS / "demo"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "quantization.json",
    "quantization.md",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_holds_what_the_quantizer_and_the_card_write() -> None:
    assert {path.name for path in FOLDER.iterdir()} == FILES
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / name).read_bytes() == (BASE / name).read_bytes()
    given = json.loads((FOLDER / "generation_config.json").read_text())
    assert given == generation_defaults(BASE)
    assert (given["repetition_penalty"], given["max_new_tokens"]) == (1.1, 256)


def test_every_linear_has_four_bits() -> None:
    spec = read_spec(FOLDER)
    assert isinstance(spec, AwqSpec)
    assert spec.group == GROUP
    with safe_open(FOLDER / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert not {name for name in names if name.endswith("_proj.weight")}
        assert len({name for name in names if name.endswith(".qweight")}) == 6 * 7
        for name in names:
            assert tensors.get_tensor(name).dtype in (torch.int32, torch.float16), name


@pytest.mark.proof
def test_perplexity_stays_within_the_bar_on_a_held_out_file() -> None:
    windows = text_windows(BASE, EXCERPT, 256)
    found = evaluate(FOLDER, windows, BASE, lambda *_: None, torch.device("cpu"))
    assert found.comparison is not None
    assert abs(found.comparison.perplexity_change.value) <= PERPLEXITY_BAR
    assert found.comparison.kl < 0.03


def test_the_card_is_made_of_its_figures() -> None:
    written = (FOLDER / "README.md").read_text("utf-8")
    comparison = Comparison(11.5, Interval(0.0123, 0.01, 0.014), 0.0234, 0.91, 12.5, 32)
    again = card(FOLDER, 1024, 11.6, comparison)
    assert "11.500 → 11.600, +1.23% (+1.00% to +1.40%)" in again
    assert again.splitlines()[:12] == written.splitlines()[:12]
    options = json.loads((FOLDER / "quantization.json").read_text("utf-8"))["options"]
    assert options["group"] == GROUP
    assert options["text"] in written
