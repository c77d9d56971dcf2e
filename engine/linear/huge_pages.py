"""Places weights of a CPU in the order in which a step reads them, in huge pages.

A processor reads ahead no further than to the end of a page, and in a virtual machine each small page costs two walks
through page tables: one thread reads weights half again as fast from huge ones (docs/adr/0064-a-step-in-c.md).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable

import torch

from engine.linear import DenseLinear, Linear
from engine.linear.cpu import Int4Cpu, Int8Cpu
from engine.linear.joined import JoinedLinear

_LINE = 64  # bytes
_HUGE = 2 << 20


def lay_in_order(linears: Iterable[Linear]) -> None:
    """Moves the weights; the tensors stay the same objects."""
    distinct = {id(one): one for linear in linears for one in _weights(linear)}
    tensors = [one for one in distinct.values() if one.untyped_storage().nbytes() == one.nbytes]
    total = sum(_whole(one.nbytes) for one in tensors)
    if total < _HUGE:
        return
    memory = mmap.mmap(-1, total + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(memory, dtype=torch.uint8)
    at = -held.data_ptr() % _HUGE
    with torch.inference_mode():
        for one in tensors:
            flat = held[at : at + one.nbytes].view(one.dtype)
            one.set_(flat.as_strided(one.size(), one.stride()).copy_(one))  # type: ignore[call-overload]
            at += _whole(one.nbytes)


def _whole(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _weights(linear: Linear) -> list[torch.Tensor]:
    if isinstance(linear, JoinedLinear):
        return [one for part in linear.parts for one in _weights(part)]
    if isinstance(linear, DenseLinear):
        return [linear.weight]
    if isinstance(linear, Int4Cpu):
        return [linear.q, linear.scale, linear.zero]
    return [linear.q, linear.scale] if isinstance(linear, Int8Cpu) else []
