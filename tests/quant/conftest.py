"""A checkpoint made of a dict, and the stored checkpoints and layers that AutoAWQ and others wrote."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

STORED = Path(__file__).parent / "fixtures"


class DictSource:
    """A TensorSource over plain tensors. It counts what is read, so that a test can prove a header was checked.

    Each tensor is good until the next call: then it is overwritten.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], headers: Mapping[str, torch.Tensor] | None = None) -> None:
        self._tensors = dict(tensors)
        self._headers = {**self._tensors, **(headers or {})}
        self.read: list[str] = []
        self._lent = torch.empty(0)

    def names(self) -> Collection[str]:
        return self._headers.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._headers[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._headers[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        self.read.append(name)
        self._lent.fill_(77)
        self._lent = self._tensors[name].clone()
        return self._lent


@pytest.fixture(scope="session")
def stored() -> Path:
    return STORED


@pytest.fixture(scope="session")
def reference() -> dict[str, torch.Tensor]:
    return load_file(STORED / "reference.safetensors")


@pytest.fixture(scope="session")
def make_source() -> type[DictSource]:
    return DictSource


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(11)
