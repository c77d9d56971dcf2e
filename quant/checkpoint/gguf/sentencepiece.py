"""Derives the ordered merges of a SentencePiece vocabulary from the scores of its pieces. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_WORK: Final = 1 << 27  # characters compared; a vocabulary of 256,000 pieces needs an eighth of this
MAX_MERGES: Final = 1 << 20  # such a vocabulary has half of this


class VocabularyTooLarge(Exception):
    """Reports pieces that are longer, or split into more pairs of pieces, than those of any known model."""


def merges_of(pieces: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the merges in order of application: by falling score of the merged piece, then by the ids of the two
    halves. Raises VocabularyTooLarge."""
    if sum(len(piece) ** 2 for piece in pieces) > MAX_WORK:
        raise VocabularyTooLarge
    found: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        score = scores[piece]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, pieces[left], pieces[right], left, right))
        if len(found) > MAX_MERGES:
            raise VocabularyTooLarge
    found.sort()
    return [(left, right) for *_, left, right in found]
