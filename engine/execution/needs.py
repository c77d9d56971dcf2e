"""What a sequence asks for, as far as it decides who may choose its tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import EngineFailed
from engine.scheduling.sequence_state import SequenceState

MOST_STOPS = 8  # stop tokens of a row that the kernels compare with; `engine.kernels.tokens.MAX_STOPS`


def chosen_by_kernels(sequence: SequenceState, *, masked: bool = False) -> bool:
    """Returns whether kernels choose the sequence's tokens. They do not where it has log-probabilities or more than
    MOST_STOPS stop tokens; where it has a constraint, only those of `masked` steps do."""
    if sequence.logprobs is not None or (sequence.constraint is not None and not masked):
        return False
    return len(sequence.stopping.stop_token_ids) <= MOST_STOPS


def require_known(token_ids: Iterable[int], vocabulary: int) -> None:
    """Raises EngineFailed where a token id lies outside the vocabulary: on a GPU the lookup of its embedding would end
    the whole process."""
    if any(not 0 <= token_id < vocabulary for token_id in token_ids):
        raise EngineFailed("a token id lies outside the vocabulary")
