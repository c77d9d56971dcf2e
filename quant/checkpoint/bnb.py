"""bitsandbytes LLM.int8() weights: `weight` int8 [N, K] row-major, `SCB` float32 [N], the largest magnitude a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Int8Rows
from quant.checkpoint.source import TensorSource, check, fetch, fetch_floats

_STEPS = 127.0  # int8 steps from zero to a row's largest magnitude


def read_int8(source: TensorSource, layer: str, in_features: int, out_features: int) -> Int8Rows:
    layout = f"{layer}.weight_format"
    if layout in source.names() and int(fetch(source, layout, (), (torch.uint8,))) != 0:
        raise BadTensor(layout, "0 (row-major)", "a GPU tile layout")
    check(source, f"{layer}.weight", (out_features, in_features), (torch.int8,))
    scale = fetch_floats(source, f"{layer}.SCB", (out_features,)).float() / _STEPS
    return Int8Rows(fetch(source, f"{layer}.weight", (out_features, in_features), (torch.int8,)).clone(), scale)


def write_int8(weight: Int8Rows) -> Mapping[str, torch.Tensor]:
    """weight, SCB and weight_format of one layer, as bitsandbytes names them."""
    return {
        "weight": weight.q,
        "SCB": weight.scale * _STEPS,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
