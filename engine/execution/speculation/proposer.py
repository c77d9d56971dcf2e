"""Guesses the tokens that follow a sequence. Prompt lookup repeats what followed the last few tokens where they
occurred before, in the prompt or the answer."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final, NamedTuple, Protocol

from engine.scheduling.sequence_state import PerSequence, SequenceState

MOST_DRAFTED: Final = 7  # tokens of a draft: with the last token, a step of eight
Draft = tuple[int, ...]


class DraftRequest(NamedTuple):
    sequence: SequenceState
    most: int


class Proposer(Protocol):
    """A wrong guess costs time and never changes an answer. What is kept of a sequence is kept by slot, which may hold
    another `SequenceState` in the next step."""

    @property
    def name(self) -> str:
        """One word, for settings, metrics and logs."""

    def reach(self, sequence: SequenceState) -> int:
        """Returns how many tokens it could propose in this step; cheap."""

    def propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        """A draft may be shorter than asked for, or empty."""

    def seconds(self, rows: int, depth: int) -> float: ...

    def measure(self, target: Callable[[], None]) -> None:
        """Runs the model's step `target` between drafts, as in service. Called once, in torch's inference mode."""


SHORTEST, LONGEST = 2, 4  # tokens that must agree, and that are compared
MOST_PLACES = 16  # earlier ones that a search looks at
_NONE = -1


class PairIndex:
    """Finds where pairs of adjacent tokens stood last and before. A token takes little more than a dict's entry."""

    def __init__(self, sequence: SequenceState) -> None:
        self.sequence = sequence
        self.placed_at = self.placed = 0  # length of the sequence at the last search, and what it found
        self._last: dict[tuple[int, int], int] = {}  # pair → place of its second token
        self._before = array("i", (_NONE,))  # place → the same pair's place before that

    def place(self) -> int:
        """Returns the place behind the longest earlier match of the last tokens, the latest of equals; 0: none."""
        ids = self.sequence.token_ids
        last = len(ids) - 1
        if last < SHORTEST:
            return 0
        for at in range(len(self._before), last):  # the last pair has no successor yet
            pair = ids[at - 1], ids[at]
            self._before.append(self._last.get(pair, _NONE))
            self._last[pair] = at
        best, found = 0, 0
        at = self._last.get((ids[last - 1], ids[last]), _NONE)
        for _ in range(MOST_PLACES):
            if at == _NONE:
                break
            length = SHORTEST
            while length < LONGEST and length <= at and ids[at - length] == ids[last - length]:
                length += 1
            if length > best:
                best, found = length, at + 1
            if length == LONGEST:
                break
            at = self._before[at]
        return found


class PromptLookup:
    """A `Proposer` without weights."""

    name = "prompt_lookup"

    def __init__(self) -> None:
        self._indices = PerSequence(PairIndex)

    def measure(self, target: Callable[[], None]) -> None: ...

    def seconds(self, rows: int, depth: int) -> float:
        """A lookup takes microseconds, nothing beside a step."""
        return 0.0

    def reach(self, sequence: SequenceState) -> int:
        """A match that runs into the end repeats, so any length can be had."""
        return MOST_DRAFTED if self._place(sequence) else 0

    def propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        ids, place = request.sequence.token_ids, self._place(request.sequence)
        if not place:
            return ()
        found = ids[place : place + request.most]
        for at in range(request.most - len(found)):
            found.append(found[at])
        return tuple(found)

    def _place(self, sequence: SequenceState) -> int:
        index, length = self._indices.of(sequence), len(sequence.token_ids)
        if index.placed_at != length:
            index.placed_at, index.placed = length, index.place()
        return index.placed
