"""Reads the weights of a GGUF file as plain numbers, under the names that they have in a model folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch

from quant.checkpoint.gguf.blocks import widened
from quant.checkpoint.gguf.file import gguf_file
from quant.checkpoint.gguf.tensors import GgufTensors
from quant.checkpoint.reading import load_config

_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class GgufWeights:
    """Reads weights by name. Widens weights in blocks to the type that the file's config names, usually bfloat16, and
    returns plain numbers in their own type."""

    def __init__(self, file: Path) -> None:
        """Opens the file. Raises BadFile."""
        self._to = _DTYPES[load_config(file).dtype or "bfloat16"]
        self._places = gguf_file(file).places
        self._file = file
        self._tensors = GgufTensors(file, dtype=self._to)
        self.costs = self._tensors.costs

    def names(self) -> Collection[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].tensor.shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name) if name in self._tensors.names() else self._to

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of the file, or a copy. The result is valid until the next call."""
        if name in self._tensors.names():
            return self._tensors.tensor(name)
        kind = self._places[name].tensor.kind.name
        raw = self._tensors.tensor(f"{name.removesuffix('.weight')}.{kind.lower()}")
        return widened(kind, raw, self.shape(name)[-1], self._to, self.costs)

    def forget(self) -> None:
        """Does nothing, because the next call of `tensor` releases the pages of the last tensor."""
