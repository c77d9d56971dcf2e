"""Declares the sources of tensors, and checks a tensor before it is read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from quant.checkpoint.errors import BadTensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class TensorSource(Protocol):
    """A checkpoint by tensor name. Shape and dtype come from its header; `tensor` alone reads data.

    A tensor may be a view of the file that is good until the next call, so readers copy before they ask again.
    """

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def tensor(self, name: str) -> torch.Tensor: ...


def fetch(source: TensorSource, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """Returns the tensor, once its header has this shape and one of these types."""
    check(source, name, shape, dtypes)
    tensor = source.tensor(name)
    if tuple(tensor.shape) != shape:  # a source whose header and data disagree
        raise BadTensor(name, describe(shape, dtypes), describe(tuple(tensor.shape), (tensor.dtype,)))
    return tensor


def check(source: TensorSource, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if name not in source.names():
        raise BadTensor(name, describe(shape, dtypes), "no such tensor")
    found = source.shape(name), source.dtype(name)
    if tuple(found[0]) != shape or found[1] not in dtypes:
        raise BadTensor(name, describe(shape, dtypes), describe(tuple(found[0]), (found[1],)))


def fetch_floats(source: TensorSource, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A float tensor without NaN or infinity: scales, biases."""
    return finite(fetch(source, name, shape, FLOATS), name)


def finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the tensor. Raises BadTensor for NaN and infinity; makes no copy."""
    if tensor.device.type != "meta" and tensor.numel():
        ends = torch.stack(torch.aminmax(tensor))  # either is NaN where any number is
        if not bool(torch.isfinite(ends).all()):
            raise BadTensor(name, "finite numbers", "NaN or infinity")
    return tensor


def describe(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{kinds} {list(shape)}"
