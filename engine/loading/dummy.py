"""Makes random weights for a config that has none: `load_format: dummy`, for benchmarks and tests."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import Final

import torch

from engine.linear import Placement
from quant.checkpoint.errors import BadConfig
from quant.checkpoint.forms import CheckpointLinear, Dense, Int4Groups, Int4Minima, Int8Rows, Weight
from quant.checkpoint.gguf.blocks import GROUP
from quant.checkpoint.source import TensorSource
from quant.checkpoint.spec import WHOLE_ROW, AwqSpec, GgufSpec, PackedSpec, QuantSpec

_SPREAD: Final = 2.0  # of a row's product with activations near 1
_INT4_STD: Final = math.sqrt((16**2 - 1) / 12)  # of 0…15, all alike
_INT8_STD: Final = math.sqrt((255**2 - 1) / 12)  # of -127…127


class DummyWeights:
    """Seeded noise, scaled so that activations stay near 1 and logits spread by a few units."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int, placement: Placement) -> None:
        self._shapes = shapes
        self._seed = seed
        self._placement = placement

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._placement.dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The same numbers for the same name, seed, device and type."""
        shape = self._shapes[name]
        if len(shape) == 1 and not name.endswith(".bias"):
            return torch.ones(shape, dtype=self._placement.dtype, device=self._placement.device)
        generator = _generator(name, self._seed, self._placement.device)
        std = 0.02 if len(shape) == 1 else _SPREAD / math.sqrt(shape[1])
        found = torch.empty(shape, dtype=self._placement.dtype, device=self._placement.device)
        return found.normal_(0.0, std, generator=generator)


class DummyLinears:
    """Reads quantized layers that no file holds: packed noise of the same spread."""

    def __init__(self, spec: QuantSpec, seed: int, device: torch.device) -> None:
        self._spec = spec
        self._seed = seed
        self._device = device

    def __call__(self, source: TensorSource, prefix: str, inputs: int, outputs: int) -> CheckpointLinear:
        """Biases, and layers that the config leaves plain, come from `source`."""
        name = f"{prefix}.bias"
        bias = source.tensor(name) if name in source.names() else None
        return CheckpointLinear(self._weight(source, prefix, inputs, outputs), bias)

    def _weight(self, source: TensorSource, prefix: str, inputs: int, outputs: int) -> Weight:
        if not self._spec.covers(prefix):
            return Dense(source.tensor(f"{prefix}.weight"))
        std = _SPREAD / math.sqrt(inputs)
        group = self._group(prefix)
        if group is None:
            return self._int8(prefix, outputs, inputs, std)
        size = inputs if group == WHOLE_ROW else group
        if inputs % size or inputs % 2:
            raise BadConfig("group_size", f"what divides the {inputs} inputs of {prefix}", size)
        found = self._int4(prefix, (outputs, inputs), size, std)
        if isinstance(self._spec, GgufSpec) and self._spec.form(prefix) == "minima":
            return Int4Minima(found.packed, found.scale, found.scale * -7.5, size)
        return found

    def _group(self, prefix: str) -> int | None:
        """Inputs that share a scale; None: eight bits."""
        if isinstance(self._spec, AwqSpec):
            return self._spec.group
        if isinstance(self._spec, GgufSpec):
            return None if self._spec.form(prefix) == "int8" else GROUP
        scheme = self._spec.scheme(prefix) if isinstance(self._spec, PackedSpec) else None
        return None if scheme is None or scheme.bits == 8 else scheme.group

    def _int4(self, prefix: str, shape: tuple[int, int], group: int, std: float) -> Int4Groups:
        (outputs, inputs), device = shape, self._device
        generator = _generator(prefix, self._seed, device)
        groups = (outputs, inputs // group)
        packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device, generator=generator)
        scale = torch.rand(groups, device=device, generator=generator).mul_(0.4).add_(0.8).mul_(std / _INT4_STD)
        # 7 and 8 alike, so that weights are 0 on average
        zero = torch.randint(7, 9, groups, dtype=torch.uint8, device=device, generator=generator)
        return Int4Groups(packed, scale.half(), zero, group)

    def _int8(self, prefix: str, outputs: int, inputs: int, std: float) -> Int8Rows:
        device = self._device
        generator = _generator(prefix, self._seed, device)
        q = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device, generator=generator)
        scale = torch.rand(outputs, device=device, generator=generator).mul_(0.4).add_(0.8).mul_(std / _INT8_STD)
        return Int8Rows(q, scale)


def _generator(name: str, seed: int, device: torch.device) -> torch.Generator | None:
    """None where there are shapes but no numbers."""
    if device.type == "meta":
        return None
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)
