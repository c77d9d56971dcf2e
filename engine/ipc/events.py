"""What the engine loop reports of one sequence after one step. Named tuples, since they are made by the ten thousand a
second and travel as arrays."""

from __future__ import annotations

import enum
from typing import NamedTuple

from engine.api import Finish, Start, TokenLogprob


class Failure(enum.StrEnum):
    """Each has its exception in `engine.errors`."""

    DEADLINE = "deadline"
    STEP = "step"
    MEMORY = "memory"
    CONSTRAINT = "constraint"
    CONSTRAINT_COST = "constraint_cost"


class Event(NamedTuple):
    key: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    failure: Failure | None = None
    start: Start | None = None  # with the first ids
    draft_proposed: int = 0  # draft tokens that were verified for these ids
    draft_accepted: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the next tokens of the prompt
