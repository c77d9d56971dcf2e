"""Who guesses what follows a sequence."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Final, NamedTuple, Protocol

from engine.scheduling.sequence_state import SequenceState

MOST_DRAFTED: Final = 7  # tokens of a draft: with the last token, a step of eight
Draft = tuple[int, ...]


class DraftRequest(NamedTuple):
    """Asks for a draft of a sequence, of at most `most` tokens."""

    sequence: SequenceState
    most: int


class Proposer(Protocol):
    """Guesses. Wrong ones cost time and never change an answer.

    It is asked step after step for whatever sequences decode then, and keeps what it needs of them by slot, which holds
    another `SequenceState` once it has changed hands.
    """

    @property
    def name(self) -> str:
        """One word, for settings, metrics and logs."""

    def reach(self, sequence: SequenceState) -> int:
        """How many tokens it could propose after the sequence's last one, were it asked in this step. Cheap."""

    def propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        """A draft for each, which may be shorter than wished, or empty."""

    def seconds(self, rows: int, depth: int) -> float:
        """Returns the seconds of drafts of `depth` tokens for `rows` sequences, as measured at the start."""

    def measure(self, target: Callable[[], None]) -> None:
        """Finds out what `seconds` tells, with the step `target` of the model in between, as there is between drafts.
        Called once, before the first request, in torch's inference mode."""
