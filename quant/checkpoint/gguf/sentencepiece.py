"""Which pairs of pieces a SentencePiece vocabulary merges, and in which order: told by its scores. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_WORK: Final = 1 << 27  # characters that are compared; a vocabulary of 256,000 pieces takes an eighth of it
MAX_MERGES: Final = 1 << 20  # that vocabulary has half of them


class TooMuch(Exception):
    """The pieces are longer, or more alike, than those of any model."""


def merges_of(pieces: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The better a piece's score, the earlier it is made; of two halves, those of the lower ids come first."""
    if sum(len(piece) ** 2 for piece in pieces) > MAX_WORK:
        raise TooMuch
    found: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        score = scores[piece]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, pieces[left], pieces[right], left, right))
        if len(found) > MAX_MERGES:
            raise TooMuch
    found.sort()
    return [(left, right) for *_, left, right in found]
