"""Measures the bytes allocated in this process. llguidance allocates by malloc, so in a process that does nothing else,
the growth of the heap is the growth of a grammar."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class HeapGauge:
    """Exact by glibc since 2.33; elsewhere resident memory, which is more."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._mallinfo = getattr(library, "mallinfo2", None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo

    def used(self) -> int:
        if self._mallinfo is None:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * resource.getpagesize()
        found = self._mallinfo()
        return int(found.uordblks + found.hblkhd)

    def give_back(self) -> None:
        if self._trim is not None:
            self._trim(0)
