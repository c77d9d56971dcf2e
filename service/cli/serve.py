"""Passes the flags of `whippet serve` to the server. Handles signals before anything large is imported."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType

_STOPPED = 0  # the exit code of a server that a signal stopped before it had anything to lose


def run(argv: Sequence[str]) -> int:
    """Until the server has its own handlers, SIGTERM and SIGINT end the process at once, also as PID 1, for which the
    kernel ignores signals without a handler."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from service.main import serve

    return serve(argv)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_STOPPED)
