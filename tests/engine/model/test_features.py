"""A walk refuses a feature that it does not compute by the feature's name, whatever else the model has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.execution.graph_decode import weights
from engine.execution.step_state import Parts
from engine.kv.kv_cache import KvCache
from engine.linear import Placement
from engine.linear.products import CpuProducts
from engine.loading.formats import Format
from engine.model.features import FUSED, Feature, features, why_not
from engine.model.layers import many_tokens
from engine.model.layers.few_rows_cpu import COMPUTED, why_not_few_rows
from engine.model.rope import RopeTables
from engine.model.transformer import Transformer, kv_shape
from engine.sampling.sampler import Sampler
from engine.worker.shapes import shape_weights
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.reading import load_config

QWEN3 = Path(__file__).resolve().parents[3] / "models" / "demo"
LACKING: dict[Feature, dict[str, Any]] = {
    Feature.GELU: {"activation": "gelu"},
    Feature.OUTPUT_NORMS: {"output_norms": True},
    Feature.SCALED_EMBEDDING: {"embedding_scale": 16.0},
    Feature.WINDOW_ROPE: {"window_rope": load_config(QWEN3).rope},
}


def parts_of(config: ModelConfig) -> Parts:
    """A model of shapes alone, as for a GPU."""
    nowhere = Placement(torch.bfloat16, torch.device("meta"))
    made = shape_weights(config, Format(None), torch.bfloat16)
    model = Transformer(config, made, RopeTables(torch.empty(16, 2, config.head_dim, device="meta")), nowhere)
    pool = KvCache(kv_shape(config), 1, nowhere, heads_outside=False)
    return Parts(model, pool, Sampler(config.vocab_size, 1, torch.device("cpu")), 16, 16)


def test_kernels_compute_the_features_of_the_first_families() -> None:
    config = replace(load_config(QWEN3), qkv_bias=True, windows=(8, None))
    assert features(config) == FUSED
    assert features(replace(config, qkv_bias=False, qk_norm=False, windows=(None,))) == frozenset()
    assert many_tokens.why_not(parts_of(config)) is None
    assert weights.why_not(parts_of(config)) is None


def test_every_feature_is_computed_or_refused() -> None:
    assert FUSED | set(LACKING) == set(Feature)


@pytest.mark.parametrize("feature", LACKING)
def test_kernels_refuse_each_feature_by_name(feature: Feature) -> None:
    config = replace(load_config(QWEN3), **LACKING[feature])
    assert features(config) == {Feature.HEAD_NORMS, feature}
    reason = f"the model has {feature}, which the kernels do not compute"
    assert many_tokens.why_not(parts_of(config)) == reason
    assert weights.why_not(parts_of(config)) == reason
    assert why_not(config, computed=FUSED | {feature}) is None


@pytest.mark.parametrize("feature", LACKING)
def test_the_walk_in_c_refuses_by_name_what_it_does_not_compute(feature: Feature) -> None:
    config = replace(load_config(QWEN3), **LACKING[feature])
    placement = Placement(torch.bfloat16, torch.device("cpu"), cast(CpuProducts, object()))
    refused = f"the model has {feature}, which the kernels do not compute"
    assert why_not_few_rows(config, placement) == (None if feature in COMPUTED else refused)
    assert why_not_few_rows(load_config(QWEN3), placement) is None
