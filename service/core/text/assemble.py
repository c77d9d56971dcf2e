"""Converts token ids to text, cut into whole characters. `feed` returns what earlier ids made and this one settled, and
what this one made itself."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from service.core.text.pieces import ByteLevelPieces, FallbackPieces, OpaquePieces, Pieces

NOTHING = ("", "")
BROKEN = "\ufffd"
PATIENCE = 16  # ids after which the window moves on, finished character or not


class Assembler(Protocol):
    def feed(self, token_id: int) -> tuple[str, str]: ...

    def feed_ascii(self, ids: Sequence[int]) -> tuple[str, list[int]] | None:
        """Returns several ids' text and each share's length; None, with nothing fed, unless all is ASCII and nothing is
        withheld. Single steps cost several times as much."""

    def flush(self) -> str:
        """Returns what was withheld, once no more ids come."""


def assembler(pieces: Pieces, continues: bool) -> Assembler:
    if isinstance(pieces, ByteLevelPieces):
        return ByteLevelAssembler(pieces)
    if isinstance(pieces, FallbackPieces):
        return FallbackAssembler(pieces, continues)
    return WindowAssembler(pieces, continues)


class ByteLevelAssembler:
    """Ids are bytes; up to three wait for the rest of their character."""

    def __init__(self, pieces: ByteLevelPieces) -> None:
        self._table = pieces.table
        self._held = b""

    def feed(self, token_id: int) -> tuple[str, str]:
        try:
            data = self._table[token_id]
        except IndexError:
            return NOTHING
        if self._held:
            data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return "", text

    def feed_ascii(self, ids: Sequence[int]) -> tuple[str, list[int]] | None:
        table = self._table
        if self._held or max(ids) >= len(table):
            return None
        parts = [table[token_id] for token_id in ids]
        data = b"".join(parts)
        return (data.decode("ascii"), list(map(len, parts))) if data.isascii() else None

    def flush(self) -> str:
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text


class FallbackAssembler:
    """Ids are texts or single bytes. A run of bytes waits for the id after it: it is text if all of it is UTF-8, else
    one U+FFFD a byte."""

    def __init__(self, pieces: FallbackPieces, continues: bool) -> None:
        self._table = pieces.table
        self._strip_char = pieces.strip_char
        self._strip = 0 if continues else pieces.strip
        self._run = bytearray()

    def feed(self, token_id: int) -> tuple[str, str]:
        try:
            piece = self._table[token_id]
        except IndexError:
            return NOTHING
        if piece is None:
            return NOTHING
        if isinstance(piece, int):
            self._run.append(piece)
            return NOTHING
        settled = self._stripped(self._take_run()) if self._run else ""
        return settled, self._stripped(piece) if self._strip else piece

    def feed_ascii(self, ids: Sequence[int]) -> tuple[str, list[int]] | None:
        return None  # a byte's share depends on the ids after it

    def flush(self) -> str:
        return self._stripped(self._take_run())

    def _take_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return BROKEN * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip_char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class WindowAssembler:
    """Asks the library about the last few ids, with and without the newest."""

    def __init__(self, pieces: OpaquePieces, continues: bool) -> None:
        self._backend = pieces.backend
        self._silent = pieces.silent
        self._skip_special = pieces.skip_special
        self._window: list[int] = [pieces.anchor] if continues and pieces.anchor is not None else []
        self._context = len(self._window)  # ids of the window whose text is out
        self._emitted = self._decode()

    def feed(self, token_id: int) -> tuple[str, str]:
        if token_id in self._silent or self._backend.id_to_token(token_id) is None:
            return NOTHING
        self._window.append(token_id)
        text = self._decode()
        whole = len(text) > len(self._emitted) and text.startswith(self._emitted) and not text.endswith(BROKEN)
        if not whole and len(self._window) - self._context < PATIENCE:
            return NOTHING
        return "", self._advance(text)

    def feed_ascii(self, ids: Sequence[int]) -> tuple[str, list[int]] | None:
        return None  # the library is asked about each

    def flush(self) -> str:
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        fresh = text[len(self._emitted) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._emitted = self._decode()
        return fresh

    def _decode(self) -> str:
        return self._backend.decode(self._window, skip_special_tokens=self._skip_special)
