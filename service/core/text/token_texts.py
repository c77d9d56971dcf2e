"""Spells single tokens for readers of log-probabilities."""

from __future__ import annotations

from service.core.text.assemble import BROKEN
from service.core.text.pieces import ByteLevelPieces, FallbackPieces, Pieces

NOTHING = ("", b"")


class TokenTexts:
    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Returns the text, and the bytes where they are no whole characters. Empty for an id without text."""
        pieces = self._pieces
        if isinstance(pieces, ByteLevelPieces):
            return _text(pieces.table[token_id]) if token_id < len(pieces.table) else NOTHING
        if isinstance(pieces, FallbackPieces):
            piece = pieces.table[token_id] if token_id < len(pieces.table) else None
            if piece is None:
                return NOTHING
            return (piece, b"") if isinstance(piece, str) else _text(bytes((piece,)))
        return pieces.backend.decode([token_id], skip_special_tokens=False), b""


def _text(data: bytes) -> tuple[str, bytes]:
    text = data.decode("utf-8", "replace")
    return (text, data) if BROKEN in text else (text, b"")
