"""Defines proposers, which guess what follows a sequence."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final, NamedTuple, Protocol

from engine.scheduling.sequence_state import SequenceState

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
