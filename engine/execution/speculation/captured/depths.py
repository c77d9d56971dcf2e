"""How long the drafts of rounds are, and when to begin with them: as it pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.execution import device_sampling
from engine.execution.graph_decode.pipeline import can_sample
from engine.execution.speculation.captured.rounds import RoundTold
from engine.execution.speculation.control import Candidate, Control
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.proposer import MOST_DRAFTED, Proposer
from engine.scheduling.sequence_state import SequenceState

SOON = 64  # tokens within which a draft model's catching up must be won back, the first time
TRYING = 0.03  # of the time in plain steps that catching up may cost, after that


def fits_rounds(sequence: SequenceState) -> bool:
    """Whether rounds choose its tokens: not where tokens are counted, since each row of a round would need the counts
    of those before it."""
    row = device_sampling.sampled_row(sequence)
    return can_sample(sequence) and not (row is not None and row.marked)


@dataclass(frozen=True, slots=True)
class Left:
    """A sequence that has gone back to plain steps."""

    sequence: SequenceState
    length: int  # that it had


class PaidDepths:
    """As `control` finds that they pay, where the host's proposer has something to say. The device guesses for itself,
    a round or two further on."""

    def __init__(
        self, costs: Costs, proposer: Proposer, behind: Callable[[SequenceState], float] | None = None
    ) -> None:
        """`costs` of a round, its draft included. `behind`: seconds that a draft model needs to catch up with a
        sequence."""
        self._costs = costs
        self._control = Control(costs)
        self._behind = behind
        self._proposer = proposer
        self._left: dict[int, Left] = {}  # by slot

    def most(self, sequence: SequenceState) -> int:
        """See `single.Depths`."""
        if not fits_rounds(sequence):
            return 0
        return MOST_DRAFTED if sequence.draft_limit is None else min(sequence.draft_limit, MOST_DRAFTED)

    def depth(self, sequence: SequenceState) -> int:
        """See `single.Depths`."""
        reach = min(self.most(sequence), self._proposer.reach(sequence))
        if reach < 1:
            return 0
        (depth,) = self._control.depths([Candidate(sequence, self._proposer, reach)], 1, 1)
        return depth

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """See `single.Depths`."""
        self._control.told(Candidate(sequence, self._proposer, one.proposed), one.proposed, one.accepted)

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        """A draft model must catch up with the sequence first."""
        if self._behind is None:
            return True
        cost, plain, left = self.behind(sequence), self._costs.seconds(1), self._left.get(sequence.slot)
        if left is not None and left.sequence is sequence:
            return cost <= TRYING * plain * (len(sequence.token_ids) - left.length)
        rate = self.rate(sequence)
        saved = plain - self._costs.seconds(1 + depth) / sum(rate**place for place in range(1 + depth))  # a token
        rest = sequence.stopping.max_tokens - sequence.output_length
        return cost <= max(saved * min(rest, SOON), TRYING * plain * sequence.output_length)

    def rate(self, sequence: SequenceState) -> float:
        """How likely the next guess for it is thought to be right."""
        return self._control.rate(Candidate(sequence, self._proposer, 1))

    def behind(self, sequence: SequenceState) -> float:
        """Seconds until its first round can begin."""
        return 0.0 if self._behind is None else self._behind(sequence)

    def left(self, sequence: SequenceState) -> None:
        """See `single.Depths`."""
        self._left[sequence.slot] = Left(sequence, len(sequence.token_ids))
