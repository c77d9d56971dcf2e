"""What constraints may take: time of a processor, memory, and processes. docs/security.md states these numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20
KEPT: Final = 64  # compiled grammars of a process
MOST_DEATHS: Final = 2  # of processes by one grammar of one caller, after which it is refused without a try
REFUSED_FOR: Final = 600.0  # seconds since the last of them
DISTRUST: Final = 5.0  # seconds in which no step waits for a caller's masks, after one that came late
PARKED: Final = 10.0  # seconds that the grammar of a preempted sequence is kept at its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bounds of one engine process."""

    compiling: float = 4.0  # seconds of processor time, for a grammar and its first mask
    masking: float = 1.0  # likewise, for one mask
    stalled: float = 60.0  # seconds on the clock without an answer to one command
    of_constraint: int = 64 * MIB  # bytes that one grammar may grow to, with all sequences that follow it
    of_caller: int = 256 * MIB
    of_all: int = 1024 * MIB
    callers: int = 16  # that have processes of their own; beyond that they share
    shares: int = 1  # processes of one caller, where there are cores
    idle: float = 20.0  # seconds without a sequence after which a process ends, which gives all its memory back
    step_wait: float = 0.02  # seconds that one step may wait for masks, of callers whose masks have come in time
