"""How long the drafts of rounds are, and when to begin with them: as it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.execution import device_sampling
from engine.execution.needs import chosen_by_kernels
from engine.execution.pipeline import VerifiedDraft
from engine.execution.speculation.control import Candidate, Control
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.proposer import MOST_DRAFTED, Proposer
from engine.scheduling.sequence_state import SequenceState

SOON = 64  # tokens within which what it takes to come over must be won back, the first time
TRYING = 0.03  # of the time in plain steps that trying again may cost, after that


def can_verify(sequence: SequenceState) -> bool:
    """Whether rounds choose its tokens: not where tokens are counted, since each row of a round would need the counts
    of those before it."""
    row = device_sampling.sampled_row(sequence)
    return chosen_by_kernels(sequence) and not (row is not None and row.marked)


@dataclass(slots=True)
class Stay:
    """What verifying launches with a draft model lost or won a sequence."""

    sequence: SequenceState
    lost: float = 0.0  # seconds against plain steps since it was furthest ahead of them
    left_at: int = 0  # length with which it went back to plain steps; 0: it has not


class PaidDepths:
    """As `control` finds that they pay, where the host's proposer has something to say. The device guesses for itself,
    a round or two further on."""

    def __init__(
        self,
        costs: Costs,
        proposer: Proposer,
        behind: Callable[[SequenceState], float] | None = None,
        turn: float = 0.0,
    ) -> None:
        """`costs` of a round, its draft included. `behind`: seconds that a draft model needs to catch up with a
        sequence. `turn`: seconds for which a sequence stands still when it comes from plain steps, or goes back."""
        self._costs = costs
        self._control = Control(costs, learns=behind is not None)
        self._behind = behind
        self._turn = turn
        self._proposer = proposer
        self._stays: dict[int, Stay] = {}  # by slot

    def most(self, sequence: SequenceState) -> int:
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
            stay, plain = self._stay(sequence), self._costs.seconds(1)
            stay.lost = max(0.0, stay.lost + self._costs.seconds(1 + one.proposed) - (1 + one.accepted) * plain)

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        """A draft model must catch up with the sequence first."""
        if self._behind is None:
            return True
        plain, stay = self._costs.seconds(1), self._stay(sequence)
        tokens = len(sequence.token_ids) - (stay.left_at or sequence.prompt_length)  # in plain steps
        if 2 * self._switching(sequence) <= TRYING * plain * tokens:  # as much as that may be lost before it goes
            return True
        if stay.left_at:
            return False
        rate = self.rate(sequence)
        saved = plain - self._costs.seconds(1 + depth) / sum(rate**place for place in range(1 + depth))  # a token
        rest = sequence.stopping.max_tokens - sequence.output_length
        # No plain step precedes an answer's first round.
        cost = self._switching(sequence) if sequence.output_length > 1 else self.behind(sequence)
        return cost <= saved * min(rest, SOON)

    def holds(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence has lost less than it would by going back and coming again."""
        if self._behind is None or self._reach(sequence) < 1:
            return False
        return self._stay(sequence).lost < self._switching(sequence)

    def rate(self, sequence: SequenceState) -> float:
        """How likely the next guess for it is thought to be right."""
        return self._control.rate(Candidate(sequence, self._proposer, 1))

    def behind(self, sequence: SequenceState) -> float:
        """Seconds until its first round can begin."""
        return 0.0 if self._behind is None else self._behind(sequence)

    def left(self, sequence: SequenceState) -> None:
        stay = self._stay(sequence)
        stay.lost, stay.left_at = 0.0, len(sequence.token_ids)

    def _switching(self, sequence: SequenceState) -> float:
        """Seconds that it takes to come over, and to go back."""
        return self.behind(sequence) + 2 * self._turn

    def _stay(self, sequence: SequenceState) -> Stay:
        """Anew where the slot has changed hands."""
        stay = self._stays.get(sequence.slot)
        if stay is None or stay.sequence is not sequence:
            stay = self._stays[sequence.slot] = Stay(sequence)
        return stay
