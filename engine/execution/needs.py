"""Decides what can choose a sequence's tokens, by which the router picks executors. Torch-free."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from engine.errors import EngineFailed
from engine.scheduling.sequence_state import SequenceState

MOST_STOPS = 8  # stop tokens of a row that the kernels compare with; `engine.kernels.tokens.MAX_STOPS`


class Needs(enum.Enum):
    """Names what can choose a sequence's tokens; fixed from admission to end."""

    KERNELS = "kernels"
    MASK = "mask"  # the kernels, given a mask for each token: the sequence has a constraint
    SAMPLER = "sampler"  # torch alone: the sequence has log-probabilities or too many stop tokens
    MASKED_SAMPLER = "masked sampler"  # torch alone, and the sequence has a constraint


def needs_of(sequence: SequenceState) -> Needs:
    constrained = sequence.constraint is not None
    if sequence.logprobs is not None or len(sequence.stopping.stop_token_ids) > MOST_STOPS:
        return Needs.MASKED_SAMPLER if constrained else Needs.SAMPLER
    return Needs.MASK if constrained else Needs.KERNELS


def chosen_by_kernels(sequence: SequenceState) -> bool:
    return needs_of(sequence) is Needs.KERNELS


def require_known(token_ids: Iterable[int], vocabulary: int) -> None:
    """Raises EngineFailed for an unknown id: looking it up on a GPU would end the process."""
    if any(not 0 <= token_id < vocabulary for token_id in token_ids):
        raise EngineFailed("a token id lies outside the vocabulary")
