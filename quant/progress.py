"""Prints the progress of a command on stderr: one line that is rewritten on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, Never

from tqdm import tqdm

Progress = Callable[[str, int, int], None]  # phase, done, of how many

_PAUSE: Final = 15.0  # seconds between two lines, where they are kept


class Bars:
    """One bar a phase, with the time left. What was done before, such as resumed layers, is done, but not fast."""

    def __init__(self) -> None:
        self._phase = ""
        self._bar: tqdm[Never] = tqdm(disable=True)

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._phase != phase:
            self._bar.close()
            self._phase = phase
            self._bar = tqdm(total=total, desc=phase, initial=done, file=sys.stderr)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class Lines:
    """Prints for logs and pipes: the beginning and the end of a phase, and occasional lines between them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = ""
        self._since = self._reported = 0.0
        self._first = self._done = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        if self._phase != phase:
            self._phase, self._since, self._first = phase, now, done
        elif done == self._done or (done < total and now - self._reported < _PAUSE):
            return
        self._reported, self._done = now, done
        sys.stderr.write(f"{phase} {done:,} of {total:,}{self._left(now, done, total)}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing is left open."""

    def _left(self, now: float, done: int, total: int) -> str:
        fresh = done - self._first
        if fresh <= 0 or done >= total:
            return ""
        left = round((now - self._since) / fresh * (total - done))
        return f", {left // 60}:{left % 60:02} left"


def progress_display() -> Bars | Lines:
    """Chooses bars or lines by whether stderr is a terminal."""
    return Bars() if sys.stderr.isatty() else Lines()
