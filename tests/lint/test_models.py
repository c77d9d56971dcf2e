"""docs/models.md says what the engine would do: whatever widens or narrows its kernels has to update the page."""

from __future__ import annotations

import torch

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
