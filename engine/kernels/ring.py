"""Entries that steps write into a ring in pinned memory: number << 32 | flags << 24 | token."""

from __future__ import annotations

from typing import Any, Final

import torch

RING: Final = 64  # entries of a row; more than can be in flight


def words(ring: torch.Tensor) -> memoryview:
    """Returns the ring's own memory, not a copy."""
    held: Any = ring.view(-1).numpy()
    return memoryview(held).cast("B").cast("q")


def entry_of(ring: memoryview, row: int, number: int, size: int = RING) -> int | None:
    """Returns None while the entry is missing. `size`: entries of a row."""
    entry = ring[row * size + (number - 1) % size]
    return entry & 0xFFFFFFFF if entry >> 32 == number else None


def all_entries(entries: torch.Tensor, number: int) -> list[int] | None:
    """Returns flags << 24 | token of each entry, once all have this number."""
    if not ((entries >> 32) & 0xFFFFFFFF == number & 0xFFFFFFFF).all():
        return None
    found: list[int] = (entries & 0xFFFFFFFF).tolist()
    return found
