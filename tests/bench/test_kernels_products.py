"""What a bench of products measures; that needs a GPU itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.kernels import cases, divisions
from engine.kernels.gpu import GpuShape
from engine.kernels.plain_product import divide

H100 = GpuShape(132, 227 << 10, warpgroups=True, overlap=True)
MODELS = Path(__file__).parents[2] / "bench" / "models"


@pytest.mark.parametrize(("name", "folder"), [("qwen3-0.6b", "qwen3-0.6b"), ("mistral-7b", "mistral-7b-awq")])
def test_a_layer_has_the_products_of_its_model(name: str, folder: str) -> None:
    config = json.loads((MODELS / folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    found = {(case.rows, case.columns) for case in cases(name)}
    assert found == {(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)}


@pytest.mark.parametrize("tokens", [16, 128])
def test_what_is_chosen_is_among_what_is_tried(tokens: int) -> None:
    for case in cases("qwen3-0.6b"):
        tried = list(divisions(case, tokens, H100))
        assert divide(tokens, case.rows, case.columns, H100, gated=case.gated) in tried
        assert len(set(tried)) == len(tried)
