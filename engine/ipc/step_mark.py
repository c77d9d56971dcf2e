"""Which sequences a step is being run for, in memory that outlives the engine process: after a death the front reads
there who may be to blame. A step costs two stores, and a list of keys only where slots changed hands."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Collection
from dataclasses import dataclass

_MOST_KEYS = 1024  # the most sequences that ever hold a slot
_SIZE = 8 * (2 + _MOST_KEYS)  # bytes
_NONE, _SEVERAL = 0, -1  # in the place of the key that a step is run for


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """What was left of the last step."""

    keys: tuple[int, ...] = ()  # that may have been part of it; empty where no step was being run
    alone: bool = False  # it was run for nobody else


class StepMark:
    """[the step's only key, or none, or several; how many hold a slot; their keys], 64 bits each."""

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

    def held_by(self, keys: Collection[int]) -> None:
        """These sequences hold slots from now on."""
        words = self._words
        words[1] = 0  # a reader finds too few rather than what is half written
        words[2 : 2 + len(keys)] = array("q", keys)
        words[1] = len(keys)

    def begin(self, only: int | None) -> None:
        """A step begins, for this sequence alone or for several."""
        self._words[0] = _SEVERAL if only is None else only

    def end(self) -> None:
        """It has come back."""
        self._words[0] = _NONE

    def read(self) -> MarkedStep:
        """What the last step was run for, if it has not come back."""
        only, count = self._words[0], self._words[1]
        if only == _NONE:
            return MarkedStep()
        if only != _SEVERAL:
            return MarkedStep((only,), alone=True)
        return MarkedStep(tuple(self._words[2 : 2 + max(0, min(count, _MOST_KEYS))]))

    def close(self) -> None:
        """Gives the mapping back."""
        self._words.release()
        self._memory.close()
