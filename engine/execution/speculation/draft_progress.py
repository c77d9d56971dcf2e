"""How far a draft model has computed each sequence. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.sequence_state import SequenceState


def prefix_length(newest: int) -> int:
    """Returns the tokens that the draft model must have computed before a launch for a sequence whose newest token
    stands at `newest`: its first step feeds the last two."""
    return newest - 1


@dataclass(slots=True)
class _Computed:
    sequence: SequenceState
    page_table_version: int
    tokens: int = 0


class DraftProgress:
    """Keyed by slot, because executors are not notified when a sequence ends."""

    def __init__(self) -> None:
        self._computed: dict[int, _Computed] = {}

    def tokens(self, sequence: SequenceState) -> int:
        """Returns how many of the sequence's first tokens have their keys and values."""
        return self._of(sequence).tokens

    def computed(self, sequence: SequenceState, until: int) -> None:
        """Notes that its first `until` tokens are computed."""
        one = self._of(sequence)
        one.tokens = max(one.tokens, until)

    def forget(self, sequence: SequenceState) -> None:
        """Notes that none of its tokens is computed for sure."""
        self._of(sequence).tokens = 0

    def _of(self, sequence: SequenceState) -> _Computed:
        """Begins anew where another sequence has the slot, or the sequence other pages."""
        one = self._computed.get(sequence.slot)
        if one is None or one.sequence is not sequence or one.page_table_version != sequence.page_table_version:
            one = self._computed[sequence.slot] = _Computed(sequence, sequence.page_table_version)
        return one
