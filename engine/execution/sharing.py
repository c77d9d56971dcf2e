"""How the rows of a step are shared out among executors. Torch-free.

What one launched ahead of its tokens is lost where another takes its rows, or is brought first: then the step in which
a better executor claims them is still done by the one that has them, and leaves nothing under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Protocol, runtime_checkable

from engine.scheduling.plan import Row, RowResult


class Claiming(Protocol):
    """An executor, as far as rows go."""

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Those of the rows that it does, in their order."""

    def run(self, rows: tuple[Row, ...]) -> Mapping[int, RowResult]:
        """One step of rows that it claimed; by key, what those that sample brought."""


@runtime_checkable
class HandingOver(Protocol):
    """One that launches steps ahead of their tokens, for rows that executors before it may claim."""

    def hand_over(self, rows: tuple[Row, ...]) -> Mapping[int, RowResult]:
        """A step of these rows, after which nothing is under way for them. Empty where nothing is, or where it cannot
        do all of them: then another may do the step."""


@runtime_checkable
class TakingOver(Protocol):
    """One that may claim rows of executors behind it."""

    @property
    def waits(self) -> bool:
        """Whether what they launched ahead is brought first."""


class Sharing:
    """Executors, best first."""

    def __init__(self, executors: Items[Claiming]) -> None:
        self._executors = [(one, one if isinstance(one, TakingOver) else None) for one in executors]
        self._ahead = [one for one in executors if isinstance(one, HandingOver)]

    def run(self, rows: tuple[Row, ...]) -> tuple[dict[int, RowResult], tuple[Row, ...]]:
        """One step: what came of rows that were claimed, and the others."""
        results: dict[int, RowResult] = {}
        left = rows
        for executor, taking in self._executors:
            claimed = executor.claims(left) if left else ()
            if claimed:
                handed = self._handed_over(claimed) if taking is not None and taking.waits else None
                results |= handed or executor.run(claimed)
                left = _without(left, claimed)
        return results, left

    def _handed_over(self, rows: tuple[Row, ...]) -> Mapping[int, RowResult] | None:
        """A step of the executor that has something under way for these rows, if one has."""
        return next((found for one in self._ahead if (found := one.hand_over(rows))), None)


def _without(rows: tuple[Row, ...], claimed: tuple[Row, ...]) -> tuple[Row, ...]:
    if len(claimed) == len(rows):
        return ()
    keys = {row.key for row in claimed}
    return tuple(row for row in rows if row.key not in keys)
