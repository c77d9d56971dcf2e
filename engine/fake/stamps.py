"""Stamps an id with its time of generation: `fake.stamps`, for measuring the way from the engine to the client.

A stamp is microseconds of `time.monotonic`, modulo MODULUS, in the place of a token id: the first of the top
log-probabilities of each id that has any.
"""

from __future__ import annotations

import time

from engine.api import TokenLogprob
from engine.scheduling.plan import RowResult, StepResult

MODULUS = 1 << 31


def stamp() -> int:
    return time.monotonic_ns() // 1000 % MODULUS


def stamped(result: StepResult) -> StepResult:
    mark = (TokenLogprob(0.0, ((stamp(), 0.0),)),)
    return StepResult({key: RowResult(row.token_ids, mark * len(row.logprobs)) for key, row in result.rows.items()})
