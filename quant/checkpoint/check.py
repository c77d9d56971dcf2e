"""Checks by their headers that a folder's tensors are those of its config and its format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch

from quant.checkpoint.config import ModelConfig
from quant.checkpoint.errors import BadFile
from quant.checkpoint.header import printable
from quant.checkpoint.linear import tensor_names
from quant.checkpoint.spec import QuantSpec
from quant.checkpoint.tensors import HEAD, Shapes, dense_tensors, linears, plain_tensors

BELONGING = "use the config.json that belongs to the weights"


class Listing(Protocol):
    folder: Path

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def file(self, name: str) -> Path: ...


def check_folder(checkpoint: Listing, config: ModelConfig, spec: QuantSpec | None) -> None:
    """Raises BadFile. Of packed tensors only the names are compared here; their readers check shapes and types."""
    tied = {f"{HEAD}.weight"} if config.tied_head else set()
    if spec is None:
        _check_tensors(checkpoint, dense_tensors(config), ignored=tied)
        return
    expected = plain_tensors(config)
    packed: set[str] = set()
    names = checkpoint.names()
    for name, (_, outputs), bias in linears(config):
        possible = tensor_names(name, spec)
        if not any(one in names for one in possible):
            raise _missing(checkpoint, possible[1])
        packed.update(possible)
        if bias:
            expected[f"{name}.bias"] = (outputs,)
    _check_tensors(checkpoint, expected, ignored=packed | tied)


def _check_tensors(checkpoint: Listing, expected: Shapes, ignored: Collection[str]) -> None:
    """Whether exactly these tensors are there, as plain numbers of these shapes."""
    names = set(checkpoint.names())
    for name, shape in expected.items():
        if name not in names:
            raise _missing(checkpoint, name)
        found, dtype, file = checkpoint.shape(name), checkpoint.dtype(name), checkpoint.file(name)
        if found != shape:
            raise BadFile(file, f"{name} has shape {list(found)}, config.json asks for {list(shape)}", BELONGING)
        if not dtype.is_floating_point:
            remedy = "config.json lacks its quantization_config"
            raise BadFile(file, f"{name} holds {dtype}, not plain numbers", remedy)
    surplus = sorted(name for name in names - expected.keys() if not _harmless(name, ignored))
    if surplus:
        file = checkpoint.file(surplus[0])
        raise BadFile(file, f"{printable(surplus[0])} has no place in the model of config.json", BELONGING)


def _missing(checkpoint: Listing, tensor: str) -> BadFile:
    return BadFile(checkpoint.folder, f"tensor {tensor} is missing", "download all shards of the model")


def _harmless(name: str, ignored: Collection[str]) -> bool:
    """Old checkpoints carry the frequencies of positions, which follow from the config."""
    return name in ignored or name.endswith("rotary_emb.inv_freq")
