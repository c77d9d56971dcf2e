"""docs/models.md says what the engine would do: whatever widens or narrows its kernels has to update the page.
Estimates for other GPUs follow from what was measured on one."""

from __future__ import annotations

import json

import torch

from engine.worker.gpu_plan import step_seconds
from engine.worker.known_gpus import KNOWN
from quant.checkpoint.tensors import dense_tensors
from scripts.figures import ROOT
from scripts.reference_models import public_models, stale


def test_the_models_are_those_that_were_published() -> None:
    """The number of parameters shows a wrong size."""
    models = public_models(ROOT)
    assert len(models) == len({one.name for one in models}) == 40
    for one in models:
        counted = sum(torch.Size(shape).numel() for shape in dense_tensors(one.config).values())
        assert abs(counted / 1e9 / one.parameters - 1) < 0.006, one.name


def test_the_pages_say_what_the_engine_would_do() -> None:
    assert stale(ROOT) == [], "`make docs` writes them"


def test_estimates_are_near_what_was_measured() -> None:
    """The speeds of all models and contexts that were measured greedily, on the GPU that the estimates come from."""
    results = json.loads((ROOT / "bench" / "results" / "decode-h100.json").read_text())
    seen = set()
    for result in results:
        if result["settings"]["temperature"] > 0:
            continue
        model = ROOT / result["settings"]["model"]
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        four_bits = result["engine"]["weights"].startswith("awq-int4")
        for context, row in result["engine"]["contexts"].items():
            estimated = 1 / step_seconds(row["bytes"], layers, four_bits, KNOWN["h100"].bandwidth)
            assert abs(estimated / row["tokens_per_second"] - 1) < 0.07, (model.name, context)
        seen.add(model.name)
    assert len(seen) == 4
