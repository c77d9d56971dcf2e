"""When rounds are the way to go on for a sequence that decodes alone: where a draft is expected to pay. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from engine.execution.speculation.captured.rounds import GROUPS, RoundTold
from engine.scheduling.sequence_state import SequenceState

PATIENCE = 64  # tokens: to come and go costs about a step each time
BEGINNING = 16  # tokens: most texts that repeat anything have done so by then


class Depths(Protocol):
    """Who says how long drafts should be."""

    def depth(self, sequence: SequenceState) -> int:
        """Tokens to draft next of a sequence that decodes alone."""

    def most(self, sequence: SequenceState) -> int:
        """The longest draft that it may ever have; 0 where rounds cannot serve it."""

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """What came of a draft."""

    def worth(self, sequence: SequenceState, depth: int) -> bool:
        """Whether to begin rounds with drafts of `depth` tokens is worth what it costs."""

    def holds(self, sequence: SequenceState) -> bool:
        """Whether it should go on with short drafts, though none is expected to pay."""

    def left(self, sequence: SequenceState) -> None:
        """It goes on in plain steps."""


def group_of(depth: int) -> int:
    """Rows of the shortest round that drafts so many tokens."""
    return next(group for group in GROUPS if group > depth)


class Alone:
    """A `claiming.Chooser` for one sequence, which it keeps for a while in rounds without a draft."""

    def __init__(self, depths: Depths, patience: int = PATIENCE, beginning: int = 0) -> None:
        """`patience`: tokens without a draft until the sequence goes back. `beginning`: so many tokens of an answer
        come in rounds whether or not there is a draft."""
        self._patience = patience
        self._beginning = beginning
        self._depths = depths
        self._sequence: SequenceState | None = None  # that has gone over, or is about to
        self._until = 0  # its length at which it goes back

    def group(self, sequences: Items[SequenceState], *, continues: bool) -> int:
        """See `claiming.Chooser`."""
        (sequence,) = sequences
        if not self._depths.most(sequence):
            return 0
        length, depth = len(sequence.token_ids), self._depths.depth(sequence)
        if self._sequence is not sequence and sequence.output_length <= 1:
            self._sequence, self._until = sequence, length + self._beginning
        stays = continues or (self._sequence is sequence and length < self._until)
        if depth and (stays or self._depths.worth(sequence, depth)):
            self._sequence, self._until = sequence, length + self._patience
            return group_of(depth)
        if stays and length >= self._until:
            if self._depths.holds(sequence):
                return group_of(1)
            self._depths.left(sequence)
            return 0
        return int(stays)

    def most(self, sequence: SequenceState) -> int:
        """See `claiming.Chooser`."""
        return self._depths.most(sequence)

    def told(self, sequence: SequenceState, one: RoundTold) -> None:
        """Of drafts."""
        if one.proposed:
            self._depths.told(sequence, one)
