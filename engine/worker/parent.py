"""Binds the life of a process to the one that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_OOM_SCORE = 300  # above the front's


def bound_to_parent(parent: int | None) -> bool:
    """Makes this process end with its parent. Returns whether `parent`, where it is known, still is that."""
    _die_with_parent()
    _die_before_parent()
    return parent is None or os.getppid() == parent


def _die_with_parent() -> None:
    """Makes the kernel kill this process with the front, so that no orphan holds the device. The front handles a
    terminal's ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_before_parent() -> None:
    """Makes the kernel prefer this process to the front where memory runs out, since it can be replaced, and a text
    process, which has 500, to this one."""
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/oom_score_adj")
        own.write_text(str(min(1000, int(own.read_text()) + _OOM_SCORE)))
