"""What each target format makes of a layer, of the tensors outside layers, and of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import torch

from quant.checkpoint.awq import write_gemm
from quant.checkpoint.bnb import write_int8
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.forms import Int8Rows
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.source import TensorSource
from quant.checkpoint.tensors import layer_norms
from quant.decoder import Decoder, batches
from quant.errors import CannotQuantize
from quant.layer import LayerCalibration, LayerResult

_ERROR_SEQUENCES: Final = 4  # calibration windows on which a layer's own error is measured

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class LayerOutcome:
    """tensors: full names. hidden: what the next layer reads, where the recipe calibrates. record: what was lost."""

    tensors: Mapping[str, torch.Tensor]
    hidden: torch.Tensor | None
    record: Mapping[str, Any]


class Recipe(Protocol):
    """`layer` is called in the order of layers."""

    def layer(self, index: int) -> LayerOutcome: ...

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor: ...

    def config(self, config: Config) -> dict[str, object]: ...


class AwqRecipe:
    """AutoAWQ's GEMM layout: packed linears, everything else float16. hidden: [S, T, hidden], changed in place."""

    def __init__(self, decoder: Decoder, group: int, hidden: torch.Tensor) -> None:
        self._decoder = decoder
        self._group = group
        self._hidden = hidden

    def layer(self, index: int) -> LayerOutcome:
        hidden = self._hidden
        block, weights = self._decoder.block(index, hidden.shape[1]), self._decoder.layer(index)
        calibration = LayerCalibration(block, self._group, self._decoder.device)
        before = hidden[:_ERROR_SEQUENCES].clone()
        for rows in batches(*hidden.shape[:2]):
            hidden[rows] = block.forward(weights, hidden[rows], None, calibration.observe)
        after = hidden[:_ERROR_SEQUENCES]
        result = calibration.quantize(weights)
        lost = (block.forward(result.weights(), before) - after).norm() / (after - before).norm().clamp(min=1e-30)
        record = {"error": float(lost), "linears": [asdict(loss) for loss in result.losses]}
        return LayerOutcome(_packed(index, result, self._decoder.config), hidden, record)

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _half(name, tensor)

    def config(self, config: Config) -> dict[str, object]:
        section = {
            "bits": 4,
            "group_size": self._group,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }
        types = {field: "float16" for field in ("torch_dtype", "dtype") if field in config}
        return {**config, **(types or {"torch_dtype": "float16"}), "quantization_config": section}


class Int8Recipe:
    """bitsandbytes' layout: int8 linears, everything else as the source has it."""

    def __init__(self, decoder: Decoder, source: TensorSource) -> None:
        self._decoder = decoder
        self._source = source

    def layer(self, index: int) -> LayerOutcome:
        prefix = f"model.layers.{index}."
        linears = dict(self._decoder.linears(index))
        tensors = {
            name: self._source.tensor(name)
            for name in self._source.names()
            if name.startswith(prefix) and name.removeprefix(prefix).removesuffix(".weight") not in linears
        }
        errors: dict[str, float] = {}
        for name, linear in linears.items():
            dense = linear.weight.dequantize(torch.float32)
            rounded = round_rows(dense)
            tensors |= {f"{prefix}{name}.{stem}": tensor for stem, tensor in write_int8(rounded).items()}
            errors[name] = _relative(rounded, dense)
        losses = [{"name": name, "error": error} for name, error in errors.items()]
        return LayerOutcome(tensors, None, {"error": max(errors.values()), "linears": losses})

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def config(self, config: Config) -> dict[str, object]:
        section = {"load_in_4bit": False, "load_in_8bit": True, "quant_method": "bitsandbytes"}
        return {**config, "quantization_config": section}


def _packed(index: int, result: LayerResult, config: ModelConfig) -> dict[str, torch.Tensor]:
    prefix, norms = f"model.layers.{index}.", {f"{name}.weight" for name in layer_norms(config)}
    stored = {name: tensor - config.norm_offset if name in norms else tensor for name, tensor in result.dense.items()}
    tensors = {prefix + name: _half(prefix + name, tensor) for name, tensor in stored.items()}
    for name, weight in result.quantized.items():
        tensors |= {f"{prefix}{name}.{stem}": tensor for stem, tensor in write_gemm(weight).items()}
    return tensors


def _half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise CannotQuantize(f"tensor {name} does not fit float16, which the AWQ layout wants: use 8 bits")
    return half


def _relative(rounded: Int8Rows, dense: torch.Tensor) -> float:
    return float((rounded.dequantize(torch.float32) - dense).norm() / dense.norm().clamp(min=1e-30))
