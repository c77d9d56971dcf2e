"""Defines what each target format makes of a layer, of the tensors outside layers, and of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import torch

from quant.checkpoint.awq import write_gemm
from quant.checkpoint.bnb import write_int8
from quant.checkpoint.forms import Int4Groups, Int8Rows
from quant.checkpoint.packed import write_packed
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.source import TensorSource
from quant.checkpoint.tensors import HEAD, layer_norms, layer_prefix
from quant.decoder import Decoder, batches
from quant.errors import CannotQuantize
from quant.layer import LayerCalibration, LayerResult
from quant.sensitivity import BitPlan

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
    """Packed linears, everything else float16: in AutoAWQ's GEMM layout, or in that of compressed-tensors where some
    linears have eight bits. hidden: [S, T, hidden], changed in place. weights: how much each token counts,
    [layers, folds, S, T]."""

    def __init__(self, decoder: Decoder, plan: BitPlan, hidden: torch.Tensor, weights: torch.Tensor) -> None:
        self._decoder = decoder
        self._plan = plan
        self._hidden = hidden
        self._weights = weights

    def layer(self, index: int) -> LayerOutcome:
        hidden = self._hidden
        block, weights = self._decoder.block(index, hidden.shape[1]), self._decoder.layer(index)
        eight = self._plan.eight.get(index, ())
        counts = self._weights[index].to(hidden.device)
        calibration = LayerCalibration(block, self._plan.group, eight, self._decoder.device, counts)
        before = hidden[:_ERROR_SEQUENCES].clone()
        for rows in batches(*hidden.shape[:2]):
            hidden[rows] = block.forward(weights, hidden[rows], None, calibration.observing(rows))
        after = hidden[:_ERROR_SEQUENCES]
        result = calibration.quantize(weights)
        lost = (block.forward(result.weights(), before) - after).norm() / (after - before).norm().clamp(min=1e-30)
        record = {"error": float(lost), "linears": [asdict(loss) for loss in result.losses]}
        return LayerOutcome(self._packed(index, result), hidden, record)

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _half(name, tensor)

    def config(self, config: Config) -> dict[str, object]:
        section = _mixed(self._plan) if self._plan.mixed else _gemm(self._plan.group)
        types = {field: "float16" for field in ("torch_dtype", "dtype") if field in config}
        return {**config, **(types or {"torch_dtype": "float16"}), "quantization_config": section}

    def _packed(self, index: int, result: LayerResult) -> dict[str, torch.Tensor]:
        prefix, config = f"{layer_prefix(index)}.", self._decoder.config
        offsets = {f"{name}.weight": config.norm_offset for name in layer_norms(config)}
        stored = {name: tensor - offsets.get(name, 0.0) for name, tensor in result.dense.items()}
        tensors = {prefix + name: _half(prefix + name, tensor) for name, tensor in stored.items()}
        for name, weight in result.quantized.items():
            written = self._write(weight)
            tensors |= {f"{prefix}{name}.{stem}": tensor for stem, tensor in written.items()}
        return tensors

    def _write(self, weight: Int4Groups | Int8Rows) -> Mapping[str, torch.Tensor]:
        return write_packed(weight) if isinstance(weight, Int8Rows) or self._plan.mixed else write_gemm(weight)


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


def _gemm(group: int) -> Config:
    return {
        "bits": 4,
        "group_size": group,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }


def _mixed(plan: BitPlan) -> Config:
    """Linears in eight bits by name; a name goes before the class that all others are of."""
    names = [f"{layer_prefix(index)}.{name}" for index, linears in plan.eight.items() for name in linears]
    return {
        "config_groups": {
            "group_0": _scheme(["Linear"], {"num_bits": 4, "symmetric": False, "strategy": "group"}, plan.group),
            "group_1": _scheme(names, {"num_bits": 8, "symmetric": True, "strategy": "channel"}, None),
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": [HEAD],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _scheme(targets: list[str], weights: Config, group: int | None) -> Config:
    kind = {"dynamic": False, "group_size": group, "observer": "minmax", "type": "int"}
    return {"input_activations": None, "output_activations": None, "targets": targets, "weights": {**weights, **kind}}


def _half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    half = tensor.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise CannotQuantize(f"tensor {name} does not fit float16, which the AWQ layout wants: use 8 bits")
    return half


def _relative(rounded: Int8Rows, dense: torch.Tensor) -> float:
    return float((rounded.dequantize(torch.float32) - dense).norm() / dense.norm().clamp(min=1e-30))
