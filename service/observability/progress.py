"""Prints the progress of loading on stderr: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from tqdm import tqdm

_LINE_INTERVAL = 1.0  # seconds
_IN_BYTES = {"weights"}  # phases that count bytes
_UNSEEN = {"imports"}  # phases that say nothing to a reader
_log = logging.getLogger(__name__)


class ProgressReporter:
    """The last report of each phase has done == total."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.phases: dict[str, float] = {}  # of this load, and how far each is, from 0 to 1
        self._clock = clock
        self._bar: tqdm[NoReturn] | None = None
        self._phase = ""
        self._logged_at = 0.0
        self._long = False  # this phase has a line in the log

    def __call__(self, phase: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        if share < self.phases.get(phase, 0.0):
            self.phases.clear()  # another load
        self.phases[phase] = share
        if phase in _UNSEEN:
            return
        if sys.stderr.isatty():
            self._draw(phase, done, total)
        else:
            self._write(phase, done, total)

    def _write(self, phase: str, done: int, total: int) -> None:
        """Writes a line a second for a longer phase, and one at its end."""
        now = self._clock()
        if self._phase != phase:
            self._phase, self._logged_at, self._long = phase, now, False
        if (done >= total and self._long) or now - self._logged_at >= _LINE_INTERVAL:
            self._logged_at, self._long = now, True
            _log.info("%s: %s of %s", phase, _amount(phase, done), _amount(phase, total))

    def _draw(self, phase: str, done: int, total: int) -> None:
        bar = self._bar
        if bar is None or self._phase != phase:
            bar = self._open(phase, total)
        bar.update(done - bar.n)
        if done >= total:
            self._close()

    def _open(self, phase: str, total: int) -> tqdm[NoReturn]:
        self._close()
        in_bytes = phase in _IN_BYTES
        self._phase = phase
        self._bar = tqdm(
            desc=phase,
            total=total,
            file=sys.stderr,
            unit="B" if in_bytes else " pieces",
            unit_scale=in_bytes,
            unit_divisor=1024,
        )
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _amount(phase: str, count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if phase in _IN_BYTES else str(count)
