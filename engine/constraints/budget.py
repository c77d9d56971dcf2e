"""Processor time, memory and number of processes that constraints may take, as stated in docs/security.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20
KEPT: Final = 64  # compiled grammars that a process keeps although no sequence follows them
MOST_DEATHS: Final = 2  # times that a grammar of one caller may be too costly before it is refused without a try
REFUSED_FOR: Final = 600.0  # seconds since the last such time, after which the grammar is tried again
DISTRUST: Final = 5.0  # seconds after a late mask in which no step waits for that caller's masks
PARKED: Final = 10.0  # seconds that a preempted sequence's position in its grammar is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    compiling: float = 4.0  # seconds of processor time, for a grammar and its first mask
    masking: float = 1.0  # likewise, for one mask
    stalled: float = 60.0  # wall-clock seconds without an answer to a command, after which its process is killed
    of_constraint: int = 64 * MIB  # bytes that one grammar may grow to, with all sequences that follow it
    of_caller: int = 256 * MIB
    of_all: int = 1024 * MIB
    callers: int = 16  # callers that have processes of their own; further callers share them
    shares: int = 1  # processes of one caller, where there are cores
    idle: float = 20.0  # seconds without a sequence after which a process ends, which gives all its memory back
    step_wait: float = 0.02  # seconds that one step may wait for masks, of callers whose masks have come in time
