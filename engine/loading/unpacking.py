"""Returns freed memory to the system at once while weights are unpacked, so that the peak stays low."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

import torch

# Of glibc's malloc.h. Its mmap threshold grows with the sizes that are freed, up to 32 MiB; smaller blocks then come
# from the heap and leave holes between the weights.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_WHILE_UNPACKING: Final = 2 << 20  # bytes; temporary copies are smaller, and the heap reuses their memory
_LARGEST: Final = 32 << 20


@contextlib.contextmanager
def returning(device: torch.device) -> Iterator[None]:
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
    """Allocations of this many bytes and more get a mapping of their own, returned when freed."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, threshold)
        library.mallopt(_TRIM_THRESHOLD, 2 * threshold)
        library.malloc_trim(0)
