"""An engine process in which drafts cost nothing, so that there always are some, and that is killed once: in a
verifying step whose tokens nobody has been told.

    python dies_in_a_round.py FILE STEP ...

FILE is made first, and where it is there already the process lives on. What follows is the engine's own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.execution.speculation import costs, eager_executor
from engine.execution.speculation.proposer import Draft
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState
from engine.worker import process

FREE = costs.Costs({1: 1.0, 512: 1.0})


class Fatal:
    """`verify.accept` that is called so many times for a draft of which something is right."""

    def __init__(self, died: Path, step: int) -> None:
        self._died = died
        self._left = step
        self._accept = eager_executor.accept

    def __call__(self, sequence: SequenceState, draft: Draft, chosen: Sequence[RowResult]) -> RowResult:
        found = self._accept(sequence, draft, chosen)
        self._left -= found.draft_accepted > 0
        if not self._left and not self._died.exists():
            self._died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


if __name__ == "__main__":
    costs.measure = lambda step, most, clock: FREE
    eager_executor.accept = Fatal(Path(sys.argv[1]), int(sys.argv[2]))
    sys.argv[1:] = sys.argv[3:]
    sys.exit(process.main())
