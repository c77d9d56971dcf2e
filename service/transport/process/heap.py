"""Returns freed memory to the system. The C library keeps it, in up to eight heaps a core: a process would stay as
large as a flood made it. Threads keep small pieces that no trimming reaches; only the process's environment prevents
that."""

from __future__ import annotations

import asyncio
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.tcache_max=128"}  # a thread keeps pieces of up to so many bytes

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of mallopt
_LARGE = 128 * 1024  # bytes; what is larger has pages of its own, which end with it
_ARENAS = 2  # fewer than there are by now, the loop's own and some of gRPC's threads: no more are made
_EVERY = 1.0  # seconds between two looks
_LONGEST = 8.0  # seconds, where trimming has brought nothing
_GROWN = 32 * 1024 * 1024  # bytes above the least that there was
_STATM = Path("/proc/self/statm")


class Heap:
    """Does nothing where the C library is not glibc."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._known = hasattr(self._libc, "malloc_trim")
        if self._known:
            self._libc.mallopt(_MMAP_THRESHOLD, _LARGE)
            self._libc.mallopt(_ARENA_MAX, _ARENAS)

    async def run(self) -> None:
        """Trims the heap after it has grown, less and less often where all of it is in use."""
        if not self._known:
            await asyncio.get_running_loop().create_future()
        least, wait = resident(), _EVERY
        with ThreadPoolExecutor(1, "heap") as executor:
            while True:
                await asyncio.sleep(wait)
                before = resident()
                if before > least + _GROWN:
                    await asyncio.get_running_loop().run_in_executor(executor, self._libc.malloc_trim, 0)
                    after = resident()
                    wait = _EVERY if after < before - before // 20 else min(2 * wait, _LONGEST)
                    before = after
                else:
                    wait = _EVERY
                least = min(least, before)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
