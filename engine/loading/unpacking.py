"""Memory while weights are unpacked: what is freed goes back at once, so that no more is held than stays."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

import torch

# Of glibc's malloc.h. Its threshold grows with what is freed, up to 32 MiB; from then on what is freed stays between
# what is kept.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_WHILE_UNPACKING: Final = 2 << 20  # bytes; what is copied on the way takes less, and its memory is used again
_LARGEST: Final = 32 << 20


@contextlib.contextmanager
def returning(device: torch.device) -> Iterator[None]:
    """While weights are loaded to a device."""
    if device.type == "cuda":
        yield
        torch.cuda.empty_cache()
        return
    _set(_WHILE_UNPACKING)
    try:
        yield
    finally:
        _set(_LARGEST)


def _set(threshold: int) -> None:
    """Allocations of so many bytes and more are the system's own business, one by one."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, threshold)
        library.mallopt(_TRIM_THRESHOLD, 2 * threshold)
        library.malloc_trim(0)
