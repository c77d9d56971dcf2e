"""The shipped folders, seen through transformers: what they hold, that they load, that their cards tell the truth."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from models.train.chat import END, END_OF_TEXT
from models.train.corpus import held_out_names
from models.train.export import read_network
from models.train.network import SHAPES

pytestmark = pytest.mark.product

MODELS = Path(__file__).parents[2] / "models"
EXCERPT = Path(__file__).parent / "data" / "graphlib.txt"
NAMES = ("demo", "demo-draft")
PARAMETERS = {"demo": range(6_000_000, 8_000_001), "demo-draft": range(1_000_000, 1_500_001)}
ALL_MODELS_BYTES = 28_000_000
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@cache
def oracle(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    problems = {what: keys for what, keys in loading.items() if keys}
    assert not problems
    return model.eval()


@cache
def words(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODELS / name, local_files_only=True)


def card_cell(name: str, row: str, column: int) -> float:
    card = (MODELS / name / "README.md").read_text("utf-8")
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {row} |")]
    return float(line.split("|")[column + 1].replace("%", "").replace(",", ""))


def excerpt_ids(name: str) -> list[int]:
    text = EXCERPT.read_text("utf-8") + END_OF_TEXT
    ids: list[int] = words(name)(text)["input_ids"]
    return ids


def excerpt_windows(name: str) -> list[torch.Tensor]:
    ids = torch.tensor(excerpt_ids(name))
    return [ids[at : at + 1024] for at in range(0, len(ids), 1024)]


@pytest.mark.parametrize("name", NAMES)
def test_holds_what_hugging_face_writes_and_nothing_else(name: str) -> None:
    assert {path.name for path in (MODELS / name).iterdir()} == FILES


def test_all_models_fit_their_budget() -> None:
    sizes = [path.stat().st_size for path in MODELS.rglob("*") if path.is_file() and "train" not in path.parts]
    assert sum(sizes) <= ALL_MODELS_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_finite_bf16_of_the_promised_number(name: str) -> None:
    numbers = 0
    with safe_open(MODELS / name / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            tensor = tensors.get_tensor(key)
            assert tensor.dtype == torch.bfloat16
            assert tensor.isfinite().all(), key
            assert tensor.float().std() > 0, key
            numbers += tensor.numel()
    assert numbers in PARAMETERS[name]
    assert f"| {numbers:,} (bf16" in (MODELS / name / "README.md").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_dimensions_suit_groups_of_64(name: str) -> None:
    config = json.loads((MODELS / name / "config.json").read_text("utf-8"))
    assert config["hidden_size"] % 64 == 0
    assert config["intermediate_size"] % 64 == 0
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_what_was_trained(name: str) -> None:
    trained = read_network(MODELS / name / "model.safetensors", SHAPES[name], torch.device("cpu"))
    ids = torch.randint(0, 8192, (2, 257), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want, got = oracle(name)(ids).logits, trained(ids)
    assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_generation_stops_at_both_ends(name: str) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig.from_pretrained(MODELS / name, local_files_only=True)
    ends = [words(name).convert_tokens_to_ids(token) for token in (END, END_OF_TEXT)]
    assert config.eos_token_id == ends
    assert config.pad_token_id == ends[1]
    assert oracle(name).config.eos_token_id == ends[0]
    assert words(name).eos_token == END


@pytest.mark.parametrize("name", NAMES)
def test_card_gives_the_perplexity_of_a_held_out_file(name: str) -> None:
    nats, places = 0.0, 0
    for window in excerpt_windows(name):
        with torch.no_grad():
            scores = oracle(name)(window[None]).logits[0, :-1].log_softmax(-1)
        nats -= float(scores.gather(1, window[1:, None]).sum())
        places += len(window) - 1
    assert places == card_cell(name, "graphlib.py", 1)
    assert nats / places == pytest.approx(card_cell(name, "graphlib.py", 2), abs=2e-3)
    assert math.exp(nats / places) == pytest.approx(card_cell(name, "graphlib.py", 3), rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_card_sums_its_own_table(name: str) -> None:
    card = (MODELS / name / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\S+\.py) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE)
    held = {file for file, split in held_out_names().items() if split == "heldout"}
    assert {row[0] for row in rows} == held
    loss = sum(int(count) * float(nats) for _, count, nats, _ in rows) / sum(int(row[1]) for row in rows)
    assert loss == pytest.approx(card_cell(name, "loss, nats a token", 1), abs=2e-3)
    assert math.exp(loss) == pytest.approx(card_cell(name, "perplexity a token", 1), rel=2e-3)


@pytest.mark.proof
def test_draft_guesses_the_target() -> None:
    hits, places = 0, 0
    for window in excerpt_windows("demo"):
        with torch.no_grad():
            target, draft = (oracle(name)(window[None]).logits.argmax(-1) for name in NAMES)
        same = target == draft
        hits, places = hits + int(same.sum()), places + same.numel()
    row = "first choice is also the target's first choice, both given the true text"
    assert 100 * hits / places == pytest.approx(card_cell("demo-draft", row, 1), abs=8)  # one file against all


def test_both_speak_the_same_tokens() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "demo" / file).read_bytes() == (MODELS / "demo-draft" / file).read_bytes()


def test_context_of_a_thousand_tokens_helps() -> None:
    """Held-out text with a long past is predicted better than the same text with a short one."""
    ids = torch.tensor(excerpt_ids("demo"))[:2048]

    def loss(past: int) -> float:
        piece = ids[1536 - past : 1536 + 256]
        with torch.no_grad():
            scores = oracle("demo")(piece[None]).logits[0, :-1].log_softmax(-1)
        return -float(scores.gather(1, piece[1:, None])[-255:].mean())

    assert loss(1536) < loss(32) - 0.1
