"""Which sequences a step is being run for, in memory that outlives the engine process: after a death the front reads
there who may be to blame. A step costs two stores, and one more for each slot that changes hands."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

_SLOTS = 1024  # the most there ever are
_SIZE = 8 * (1 + _SLOTS)  # bytes
_NONE, _SEVERAL = 0, -1  # in the place of the key that a step is run for; keys begin at 1


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """What was left of the last step."""

    keys: tuple[int, ...] = ()  # that may have been part of it; empty where no step was being run
    alone: bool = False  # it was run for nobody else


class StepMark:
    """[the key that the step is run for, or none, or several; then by slot the key that holds it], 64 bits each."""

    def __init__(self, fd: int) -> None:
        """`fd` as `create` made it; closing it is the caller's business."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._memory).cast("q")

    @staticmethod
    def create() -> int:
        """Memory for one, to be given to an engine process."""
        fd = os.memfd_create("step-mark")
        os.ftruncate(fd, _SIZE)
        return fd

    def holder(self, slot: int) -> int:
        """The key that holds a slot, or 0."""
        return self._words[1 + slot]

    def hold(self, slot: int, key: int) -> None:
        """From now on; 0: nobody does."""
        self._words[1 + slot] = key

    def begin(self, only: int | None) -> None:
        """A step begins, for this sequence alone or for several: those that hold slots."""
        self._words[0] = _SEVERAL if only is None else only

    def end(self) -> None:
        """It has come back."""
        self._words[0] = _NONE

    def read(self) -> MarkedStep:
        """What the last step was run for, if it has not come back."""
        only = self._words[0]
        if only == _NONE:
            return MarkedStep()
        if only != _SEVERAL:
            return MarkedStep((only,), alone=True)
        return MarkedStep(tuple(key for key in self._words[1:] if key))
