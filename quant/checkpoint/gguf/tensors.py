"""Reads the tensors of a memory-mapped GGUF file under the names that they have in a model folder.

A linear in blocks is named after its block type, such as `LAYER.q4_1`, and is uint8 [rows, bytes], which `blocks`
converts. All other tensors are returned as plain numbers: an embedding in blocks is widened when it is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from quant.checkpoint.gguf.blocks import StorageCosts, widened
from quant.checkpoint.gguf.file import FileTensor, gguf_file
from quant.checkpoint.header import TensorEntry
from quant.checkpoint.mapped import MappedTensors, Progress
from quant.checkpoint.tensors import EMBEDDING

_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors(MappedTensors):
    """Reads a file's tensors; a `TensorSource`. Widens to `dtype`. `costs` sums up the rounding error of widening; the
    readers of linears add theirs."""

    def __init__(self, file: Path, progress: Progress | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Reads the header. Raises BadFile."""
        places = gguf_file(file).places
        self.costs = StorageCosts()
        self._widened_to = dtype
        self._places = {_served(name, place): place for name, place in places.items()}
        entries = {name: _entry(file, place) for name, place in self._places.items()}
        super().__init__(file, (file,), entries, progress)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].tensor.shape if self._widens(name) else super().shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._widened_to if self._widens(name) else super().dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of the file, which is valid until the next call, or a copy if numbers are reordered or
        changed."""
        found, place = super().tensor(name), self._places[name]
        if place.heads is not None:
            found = found[_by_halves(len(found), place.heads)]
        if place.offset:
            found = found - place.offset
        if not self._widens(name):
            return found
        kind, shape = self._places[name].tensor.kind, self._places[name].tensor.shape
        return widened(kind.name, found, shape[-1], self._widened_to, self.costs)

    def _widens(self, name: str) -> bool:
        return name in self._places and not self._places[name].tensor.kind.plain and name.endswith(".weight")


def _served(name: str, place: FileTensor) -> str:
    """Returns the name under which a tensor is served: a linear in blocks carries the name of its block type."""
    if place.tensor.kind.plain or name == EMBEDDING:
        return name
    return f"{name.removesuffix('.weight')}.{place.tensor.kind.name.lower()}"


def _entry(file: Path, place: FileTensor) -> TensorEntry:
    tensor = place.tensor
    if tensor.kind.plain:
        return TensorEntry(file, _PLAIN[tensor.kind.name], tensor.shape, tensor.start, tensor.size)
    rows = tensor.shape[0]
    return TensorEntry(file, torch.uint8, (rows, tensor.size // rows), tensor.start, tensor.size)


def _by_halves(rows: int, heads: int) -> torch.Tensor:
    """Returns the index in the file of each row in a folder's order, since llama.cpp alternates the rows of a head's
    two halves."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
