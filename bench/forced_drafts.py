"""A proposer that knows what comes and is right as often as it is told to be: for measuring what acceptance
is worth, and for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from engine.execution.speculation.proposer import MOST_DRAFTED, Draft, Wish
from engine.scheduling.sequence_state import SequenceState


class Forced:
    """Each token of its drafts is right with probability `acceptance`, and another one otherwise."""

    name = "forced"

    def __init__(
        self, answers: Mapping[tuple[int, ...], Items[int]], acceptance: float, depth: int = MOST_DRAFTED
    ) -> None:
        """`answers` by prompt. Drafts have `depth` tokens, if so many are wished."""
        self._answers = answers
        self._acceptance = acceptance
        self._depth = depth
        self._chance = random.Random(1)

    def measure(self, target: Callable[[], None]) -> None:
        """It costs nothing."""

    def seconds(self, rows: int, depth: int) -> float:
        """Nothing."""
        return 0.0

    def reach(self, sequence: SequenceState) -> int:
        """Up to the end of what it knows."""
        return min(self._depth, len(self._rest(sequence)))

    def propose(self, wishes: Items[Wish]) -> list[Draft]:
        """What will come, but for the mistakes."""
        return [tuple(map(self._said, self._rest(one.sequence)[: one.most])) for one in wishes]

    def _rest(self, sequence: SequenceState) -> Items[int]:
        known = self._answers.get(tuple(sequence.token_ids[: sequence.prompt_length]), ())
        return known[sequence.output_length : sequence.output_length + self._depth]

    def _said(self, token_id: int) -> int:
        return token_id if self._chance.random() < self._acceptance else token_id ^ 1
