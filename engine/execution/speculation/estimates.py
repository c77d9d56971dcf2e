"""How long drafts pay, and what verifying launches would give sequences that have none.

With prompt lookup, the host looks up in plain steps what a launch would have guessed and compares it with the tokens
that follow, so no launch is tried for it. A draft model's guesses cost as much as its launches: these are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.execution import device_sampling
from engine.execution.needs import chosen_by_kernels
from engine.execution.pipeline import VerifiedDraft
from engine.execution.speculation.control import PRIOR, Candidate, Control
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.proposer import MOST_DRAFTED, Draft, DraftRequest, PromptLookup, Proposer
from engine.scheduling.sequence_state import PerSequence, SequenceState

_PRIOR_RATE = PRIOR[0] / PRIOR[1]  # that a guess is right, when a draft model is tried again
_LONGEST_PAUSE = 31  # tokens between two looks at a text that repeats nothing: a look takes the host some microseconds


class AcceptanceEstimate:
    """What drafts are expected to give sequences that decode together: nothing, where a subclass knows no better."""

    tried = False  # whether only verifying launches show what drafts give

    def first(self, sequence: SequenceState, most: int) -> float:
        """Returns the expected tokens of a launch with drafts of `most` tokens, before the sequence had any."""
        return 1.0

    def prior(self, sequence: SequenceState, most: int) -> float:
        """Returns the same for a sequence that had no launch for a while."""
        return 1.0

    def seen(self, sequence: SequenceState, most: int) -> int | None:
        """Returns the tokens that a launch would have given just now, where that is known. Asked in plain steps."""
        return None

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None: ...

    def behind(self, sequences: Items[SequenceState]) -> float:
        """Returns the seconds until their first launch can begin."""
        return 0.0


@dataclass(slots=True)
class LookupWatch:
    """The guess for a sequence in plain steps, to compare with the tokens that follow."""

    sequence: SequenceState
    guess: Draft = ()  # what would have been drafted
    guessed_at: int = 0  # length of the sequence then; 0: nothing was
    pause: int = 0  # tokens after a guess that was wrong
    looks_at: int = 0  # length of the sequence at the next look

    def compare(self) -> int | None:
        """Returns the tokens that the guess would have given, once they are known."""
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


class LookupEstimate(AcceptanceEstimate):
    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup
        self._watches = PerSequence(LookupWatch)

    def seen(self, sequence: SequenceState, most: int) -> int | None:
        watch, found, length = self._watches.of(sequence), None, len(sequence.token_ids)
        if watch.guessed_at and length > watch.guessed_at:
            found = watch.compare()
        if not watch.guessed_at and length >= watch.looks_at:
            watch.guess = self._lookup.propose((DraftRequest(sequence, most),))[0] if most else ()
            watch.guessed_at = length
        return found

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        self._watches.of(sequence).guessed_at = 0


class DraftEstimate(AcceptanceEstimate):
    """Estimates by how often the draft model was right."""

    tried = True

    def __init__(self, depths: PaidDepths) -> None:
        self._depths = depths

    def first(self, sequence: SequenceState, most: int) -> float:
        return _expected(self._depths.rate(sequence), most)

    def prior(self, sequence: SequenceState, most: int) -> float:
        return _expected(_PRIOR_RATE, most)

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        if one.proposed:
            self._depths.observe(sequence, one)

    def behind(self, sequences: Items[SequenceState]) -> float:
        return sum(self._depths.behind(one) for one in sequences)


def _expected(rate: float, most: int) -> float:
    """Returns the mean tokens of a launch whose guesses are right at this rate, each if all before it were."""
    return sum(rate**place for place in range(1 + most))


SOON = 64  # tokens within which what it takes to come over must be won back, the first time
TRYING = 0.03  # of the time in plain steps that trying again may cost, after that


def can_verify(sequence: SequenceState) -> bool:
    """Returns whether verifying launches can choose the sequence's tokens: not where tokens are counted, since each row
    of a launch would need the counts of those before it."""
    row = device_sampling.sampled_row(sequence)
    return chosen_by_kernels(sequence) and not (row is not None and row.marked)


@dataclass(slots=True)
class Stay:
    """What verifying launches with a draft model lost or won a sequence."""

    lost: float = 0.0  # seconds against plain steps since it was furthest ahead of them
    left_at: int = 0  # length with which it went back to plain steps; 0: it has not


class PaidDepths:
    """Chooses drafts as long as they pay, where the host's proposer has a guess. The device's own guesses are a launch
    or two further on."""

    def __init__(
        self,
        costs: Costs,
        proposer: Proposer,
        behind: Callable[[SequenceState], float] | None = None,
        turn: float = 0.0,
    ) -> None:
        """`costs` of a launch with its draft. `behind`: seconds that a draft model needs to catch up with a sequence.
        `turn`: seconds for which a sequence stands still when it changes between launches and plain steps."""
        self._costs = costs
        self._control = Control(costs, learns=behind is not None)
        self._behind = behind
        self._turn = turn
        self._proposer = proposer
        self._stays = PerSequence(lambda sequence: Stay())

    def most(self, sequence: SequenceState) -> int:
        """Returns 0 where verifying launches cannot serve the sequence."""
        if not can_verify(sequence):
            return 0
        return MOST_DRAFTED if sequence.draft_limit is None else min(sequence.draft_limit, MOST_DRAFTED)

    def depth(self, sequence: SequenceState) -> int:
        reach = self._reach(sequence)
        if reach < 1:
            return 0
        (depth,) = self._control.depths([Candidate(sequence, self._proposer, reach)], 1, 1)
        return depth

    def _reach(self, sequence: SequenceState) -> int:
        return min(self.most(sequence), self._proposer.reach(sequence))

    def observe(self, sequence: SequenceState, one: VerifiedDraft) -> None:
        self._control.observe(Candidate(sequence, self._proposer, one.proposed), one.proposed, one.accepted)
        if self._behind is not None:
            stay, plain = self._stays.of(sequence), self._costs.seconds(1)
            stay.lost = max(0.0, stay.lost + self._costs.seconds(1 + one.proposed) - (1 + one.accepted) * plain)

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        """Returns whether a first launch with drafts of `depth` tokens is worth its delay."""
        if self._behind is None:
            return True
        plain, stay = self._costs.seconds(1), self._stays.of(sequence)
        tokens = len(sequence.token_ids) - (stay.left_at or sequence.prompt_length)  # in plain steps
        if 2 * self._switching(sequence) <= TRYING * plain * tokens:  # as much as that may be lost before it goes
            return True
        if stay.left_at:
            return False
        rate = self.rate(sequence)
        saved = plain - self._costs.seconds(1 + depth) / sum(rate**place for place in range(1 + depth))  # a token
        rest = sequence.stopping.max_tokens - sequence.output_length
        # No plain step precedes an answer's first launch.
        cost = self._switching(sequence) if sequence.output_length > 1 else self.behind(sequence)
        return cost <= saved * min(rest, SOON)

    def holds(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence has lost less than it would by going back and coming again."""
        if self._behind is None or self._reach(sequence) < 1:
            return False
        return self._stays.of(sequence).lost < self._switching(sequence)

    def rate(self, sequence: SequenceState) -> float:
        """Returns the estimated probability that the next guess is right."""
        return self._control.rate(Candidate(sequence, self._proposer, 1))

    def behind(self, sequence: SequenceState) -> float:
        return 0.0 if self._behind is None else self._behind(sequence)

    def left(self, sequence: SequenceState) -> None:
        stay = self._stays.of(sequence)
        stay.lost, stay.left_at = 0.0, len(sequence.token_ids)

    def _switching(self, sequence: SequenceState) -> float:
        """Returns the seconds to change to launches and back."""
        return self.behind(sequence) + 2 * self._turn
