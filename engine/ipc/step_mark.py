"""Marks in memory that outlives the engine process which sequences a step runs for: after a death the front reads the
suspects there. A step costs two stores."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_SLOTS = 1024  # the most there ever are
_SIZE = 8 * (1 + _SLOTS)  # bytes
_NONE, _SEVERAL = 0, -1  # in the place of the key that a step is run for; keys begin at 1


@dataclass(frozen=True, slots=True)
class MarkedStep:
    keys: tuple[int, ...] = ()  # that may have been part of it; empty where no step was being run
    alone: bool = False  # it was run for this sequence alone


class StepMark:
    """Layout: [the key that the step is run for, none or several; then by slot the key that holds it], 64 bits each."""

    def __init__(self, fd: int) -> None:
        """`fd` as `create` made it; the caller closes it."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._memory).cast("q")

    @staticmethod
    def create() -> int:
        fd = os.memfd_create("step-mark")
        os.ftruncate(fd, _SIZE)
        return fd

    def holder(self, slot: int) -> int:
        return self._words[1 + slot]

    def hold(self, slot: int, key: int) -> None:
        """Key 0 stands for none."""
        self._words[1 + slot] = key

    def begin(self, only: int | None) -> None:
        self._words[0] = _SEVERAL if only is None else only

    def end(self) -> None:
        self._words[0] = _NONE

    def read(self) -> MarkedStep:
        """What the last step ran for, if it has not returned."""
        only = self._words[0]
        if only == _NONE:
            return MarkedStep()
        if only != _SEVERAL:
            return MarkedStep((only,), alone=True)
        return MarkedStep(tuple(key for key in self._words[1:] if key))
