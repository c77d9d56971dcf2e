"""Random weights for a config that has none: `load_format: dummy`, for benchmarks and tests."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection

import torch

from engine.linear import Place


class DummyWeights:
    """A `TensorSource` of seeded noise, scaled so that activations stay near 1 and logits spread by a few units."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int, place: Place) -> None:
        self._shapes = shapes
        self._seed = seed
        self._place = place

    def names(self) -> Collection[str]:
        """Every tensor of the model."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """The type it is made in."""
        return self._place.dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The same numbers for the same name, seed, device and type."""
        shape = self._shapes[name]
        if len(shape) == 1 and not name.endswith(".bias"):
            return torch.ones(shape, dtype=self._place.dtype, device=self._place.device)
        generator = torch.Generator(self._place.device).manual_seed(zlib.crc32(name.encode()) ^ self._seed)
        std = 0.02 if len(shape) == 1 else 2.0 / math.sqrt(shape[1])
        found = torch.empty(shape, dtype=self._place.dtype, device=self._place.device)
        return found.normal_(0.0, std, generator=generator)
