"""How far a draft model has computed each sequence, in whichever slot it is. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.sequence_state import SequenceState


def granted(newest: int) -> int:
    """Tokens that the first step of a round takes for granted, where the newest stands there: it feeds the last two."""
    return newest - 1


@dataclass(slots=True)
class _Seen:
    sequence: SequenceState
    exchanges: int
    tokens: int = 0


class Followed:
    """By slot, since a sequence is gone without a word."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def tokens(self, sequence: SequenceState) -> int:
        """Its first ones, whose keys and values are there."""
        return self._of(sequence).tokens

    def computed(self, sequence: SequenceState, until: int) -> None:
        """So many are there now."""
        seen = self._of(sequence)
        seen.tokens = max(seen.tokens, until)

    def forget(self, sequence: SequenceState) -> None:
        """None is there for sure."""
        self._of(sequence).tokens = 0

    def _of(self, sequence: SequenceState) -> _Seen:
        """Anew where the slot has changed hands or the sequence other pages."""
        one = self._seen.get(sequence.slot)
        if one is None or one.sequence is not sequence or one.exchanges != sequence.exchanges:
            one = self._seen[sequence.slot] = _Seen(sequence, sequence.exchanges)
        return one
