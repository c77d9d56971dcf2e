"""A walk refuses a feature that it does not compute by the feature's name, whatever else the model has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

import pytest
import torch

from engine.execution.step_state import Parts
from engine.kv.kv_cache import KvCache
from engine.linear import Placement
from engine.linear.products import CpuProducts
from engine.loading.formats import FolderFormat
from engine.model.features import FUSED, Feature, features, why_not
from engine.model.layers import few_rows_weights, many_tokens, portable
from engine.model.layers.cpu_walk import why_no_cpu_walk
from engine.model.rope import RopeTables
from engine.model.transformer import Transformer, kv_shape
from engine.sampling.sampler import Sampler
from engine.worker.shapes import shape_weights
from quant.checkpoint.config import ModelConfig, parse_config
from tests.engine.execution.test_oracle import CASES, SMALL

pytestmark = [pytest.mark.product, pytest.mark.filterwarnings("ignore")]  # transformers' own


def config_of(case: str) -> ModelConfig:
    """The config of a model that the engine is compared with transformers on."""
    import transformers

    kind, options = CASES[case]
    stated = json.loads(getattr(transformers, kind)(**{**SMALL, **options}).to_json_string())
    family = kind.removesuffix("Config").removesuffix("Text")
    return parse_config({**stated, "architectures": [f"{family}ForCausalLM"]}, "config.json")


@pytest.fixture(scope="module")
def configs() -> dict[str, ModelConfig]:
    return {case: config_of(case) for case in CASES}


def parts_of(config: ModelConfig) -> Parts:
    """A model of shapes alone, as for a GPU."""
    nowhere = Placement(torch.bfloat16, torch.device("meta"))
    made = shape_weights(config, FolderFormat(None), torch.bfloat16)
    model = Transformer(config, made, RopeTables(torch.empty(16, 2, config.head_dim, device="meta")), nowhere)
    pool = KvCache(kv_shape(config), 1, nowhere, heads_outside=False)
    return Parts(model, pool, Sampler(config.vocab_size, 1, torch.device("cpu")), 16, 16)


def test_some_case_of_the_oracle_needs_each_feature(configs: dict[str, ModelConfig]) -> None:
    assert frozenset().union(*map(features, configs.values())) == set(Feature)
    assert features(configs["llama-mha"]) == frozenset()


@pytest.mark.parametrize("case", CASES)
def test_a_walk_refuses_by_name_what_it_does_not_compute(case: str, configs: dict[str, ModelConfig]) -> None:
    config = replace(configs[case], hidden_size=64, head_dim=64)
    needed = features(config)
    parts, cpu = parts_of(config), Placement(torch.bfloat16, torch.device("cpu"), cast(CpuProducts, object()))
    for reason, computed in (
        (many_tokens.why_not(parts), FUSED),
        (few_rows_weights.why_not(parts), FUSED),
        (why_no_cpu_walk(config, cpu), FUSED),
        (why_not(config, needed), needed),
        (portable.why_not(parts), portable.COMPUTED),
    ):
        lacking = sorted(needed - computed)
        assert reason == (f"the model has {lacking[0]}, which the kernels do not compute" if lacking else None)
