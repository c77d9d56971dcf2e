"""What verifying launches for several sequences would give one of them, while it has none. Torch-free.

With prompt lookup, the host looks up in plain steps what a launch would have guessed and sees what comes, so no
sequence has to try launches. What a draft model would have guessed is not to be had so cheaply: it is tried.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from engine.execution.pipeline import VerifiedDraft
from engine.execution.speculation.control import PRIOR
from engine.execution.speculation.depths import PaidDepths
from engine.execution.speculation.lookup import PromptLookup
from engine.execution.speculation.proposer import Draft, DraftRequest
from engine.scheduling.sequence_state import SequenceState

_PRIOR_RATE = PRIOR[0] / PRIOR[1]  # that a guess is right, when a draft model is tried again
_LONGEST_PAUSE = 31  # tokens between two looks at a text that repeats nothing: a look takes the host some microseconds


class AcceptanceEstimate(Protocol):
    """What drafts are expected to give sequences that decode together. Keyed by slot."""

    @property
    def tried(self) -> bool:
        """Whether rounds alone show what they bring."""

    def first(self, sequence: SequenceState, most: int) -> float:
        """Tokens that a round is taken to bring, with drafts of `most` tokens, before anything is known of it."""

    def prior(self, sequence: SequenceState, most: int) -> float:
        """The same, once it was in none for a while."""

    def seen(self, sequence: SequenceState, most: int) -> int | None:
        """Tokens that a round would have brought a moment ago, asked in plain steps; None: not known."""

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        """What a round brought."""

    def behind(self, sequences: Items[SequenceState]) -> float:
        """Seconds until their first round can begin."""


@dataclass(slots=True)
class LookupWatch:
    """What is looked up of a sequence meanwhile."""

    sequence: SequenceState
    guess: Draft = ()  # what would have been drafted
    guessed_at: int = 0  # length of the sequence then; 0: nothing was
    pause: int = 0  # tokens after a guess that was wrong
    looks_at: int = 0  # length of the sequence at the next look

    def compare(self) -> int | None:
        """What the guess would have brought, once that is known."""
        ids = self.sequence.token_ids
        came = ids[self.guessed_at : self.guessed_at + len(self.guess)]
        pairs = enumerate(zip(came, self.guess, strict=False))
        right = next((at for at, (token, guessed) in pairs if token != guessed), len(came))
        if right == len(came) < len(self.guess):
            return None
        self.pause = 0 if right else min(2 * self.pause + 1, _LONGEST_PAUSE)
        self.looks_at = len(ids) + self.pause
        self.guessed_at = 0
        return 1 + right


class LookupEstimate:
    """An `AcceptanceEstimate` for drafts that are looked up."""

    tried = False

    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup
        self._watches: dict[int, LookupWatch] = {}  # by slot

    def first(self, sequence: SequenceState, most: int) -> float:
        return 1.0

    def prior(self, sequence: SequenceState, most: int) -> float:
        return 1.0

    def seen(self, sequence: SequenceState, most: int) -> int | None:
        watch, found, length = self._of(sequence), None, len(sequence.token_ids)
        if watch.guessed_at and length > watch.guessed_at:
            found = watch.compare()
        if not watch.guessed_at and length >= watch.looks_at:
            watch.guess = self._lookup.propose((DraftRequest(sequence, most),))[0] if most else ()
            watch.guessed_at = length
        return found

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        self._of(sequence).guessed_at = 0

    def behind(self, sequences: Items[SequenceState]) -> float:
        return 0.0

    def _of(self, sequence: SequenceState) -> LookupWatch:
        watch = self._watches.get(sequence.slot)
        if watch is None or watch.sequence is not sequence:
            watch = self._watches[sequence.slot] = LookupWatch(sequence)
        return watch


class DraftEstimate:
    """An `AcceptanceEstimate` for drafts of a model, by how often it was right."""

    tried = True

    def __init__(self, depths: PaidDepths) -> None:
        """`depths`: of sequences alone, which learn of rounds together as well."""
        self._depths = depths

    def first(self, sequence: SequenceState, most: int) -> float:
        return _expected(self._depths.rate(sequence), most)

    def prior(self, sequence: SequenceState, most: int) -> float:
        return _expected(_PRIOR_RATE, most)

    def seen(self, sequence: SequenceState, most: int) -> int | None:
        return None

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        if one.proposed:
            self._depths.observe(sequence, one)

    def behind(self, sequences: Items[SequenceState]) -> float:
        return sum(self._depths.behind(one) for one in sequences)


def _expected(rate: float, most: int) -> float:
    """Tokens of a round whose guesses are right so often, each if all before it were."""
    return sum(rate**place for place in range(1 + most))
