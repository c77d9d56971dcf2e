"""Chooses which running sequences the next step may feed, and how many prompt tokens: all of them, unless one is in its
solo or a step failed. Solos take turns with all the others.

Rows of a step that found no memory are halved until the rest fits or a row is alone; prompts go on in smaller chunks
until sixteen steps in a row went well. Rows of a step that raised are halved until the row that raises is alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from engine.scheduling.plan import Row
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE

_CALM = 16  # steps without lack of memory after which chunks may be twice as long
_PATIENCE = 3  # times in a row that a row may find none, alone and with the fewest tokens


class Turns:
    def __init__(self, prompt_tokens: int) -> None:
        self.budget = prompt_tokens  # of the next step
        self._whole = prompt_tokens
        self._calm = 0  # steps
        self._parts: deque[frozenset[int]] = deque()  # keys; each part is fed by a step of its own, once
        self.repeats = False  # whether the next step feeds part of a step that failed
        self._solos: set[int] = set()  # keys of live sequences that have one, begun, done or not
        self._hopeless = 0  # times in a row that the least there is found no memory
        self._others_next = False

    def admitted(self, sequence: Sequence) -> None:
        if sequence.solo[1]:
            self._solos.add(sequence.key)

    def ended(self, sequence: Sequence) -> None:
        self._solos.discard(sequence.key)

    def next(self, running: list[Sequence]) -> Items[Sequence]:
        while self._parts:
            part = self._parts.popleft()
            chosen = [one for one in running if one.key in part and not one.paused]
            if chosen:
                self.repeats = True
                return chosen
        self.repeats = False
        if self._solos:
            return self._by_turns([one for one in running if not one.paused])
        return tuple(running)

    def went_well(self) -> None:
        self._hopeless = 0
        if self.budget < self._whole:
            self._calm += 1
            if self._calm == _CALM:
                self._calm, self.budget = 0, min(self._whole, 2 * self.budget)

    def split(self, rows: Items[Row]) -> bool:
        """Halves rows that found no memory together. False where nothing less can be tried."""
        if len(rows) == 1 and rows[0].count <= PAGE_SIZE:
            self._hopeless += 1
            if self._hopeless == _PATIENCE:
                self._hopeless = 0
                return False
        tokens = sum(row.count for row in rows if row.count > PAGE_SIZE)
        if tokens:
            self.budget = max(PAGE_SIZE, min(self.budget, tokens) // 2)
        self._calm = 0
        self._halve(rows)
        return True

    def part(self, rows: Items[Row]) -> bool:
        """Halves the rows of a step that raised. False for a row that was alone."""
        if len(rows) > 1:
            self._halve(rows)
        return len(rows) > 1

    def _halve(self, rows: Items[Row]) -> None:
        keys = [row.key for row in rows]
        half = len(keys) // 2
        self._parts.extendleft(frozenset(part) for part in (keys[half:], keys[:half]) if part)

    def _by_turns(self, ready: list[Sequence]) -> list[Sequence]:
        in_solo = [one for one in ready if one.in_solo]
        if not in_solo:
            return ready
        others = [one for one in ready if not one.in_solo]
        self._others_next = bool(others) and not self._others_next
        return in_solo[:1] if self._others_next or not others else others
