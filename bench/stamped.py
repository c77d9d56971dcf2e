"""The fake engine process, with a clock: the first of a token's top logprobs says when the token was made.

Stands in for `engine.worker.process` where the time from the engine to the client is measured. A stamp is
microseconds of `time.monotonic`, modulo 2^31, in the place of a token id.
"""

from __future__ import annotations

import sys
import time

import engine.worker.process
from engine.api import TokenLogprob
from engine.fake import FakeRunner
from engine.scheduling.plan import RowResult, StepPlan, StepResult

MODULUS = 1 << 31


def stamp() -> int:
    """Now."""
    return time.monotonic_ns() // 1000 % MODULUS


class StampedRunner(FakeRunner):
    """Stamps what asks for logprobs."""

    def run(self, plan: StepPlan) -> StepResult:
        """One step of the fake, the time of its end written into it."""
        result = super().run(plan)
        mark = (TokenLogprob(0.0, ((stamp(), 0.0),)),)
        return StepResult({key: RowResult(row.token_ids, mark * len(row.logprobs)) for key, row in result.rows.items()})


if __name__ == "__main__":
    setattr(engine.worker.process, "FakeRunner", StampedRunner)  # noqa: B010 - it is not meant to be replaced
    sys.exit(engine.worker.process.main())
