"""Reads once what each token id stands for, so that a token costs a table look-up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import Tokenizer as Backend

_Entry = TypeVar("_Entry")

MAX_ID = 2**22 - 1  # several times the largest vocabularies
MAX_TOKEN = 2**12  # characters
MAX_CONTENT = 64  # characters that a decoder may put for a part of a token
BYTE_TOKEN = re.compile(r"<0x(\+[0-9a-fA-F]|[0-9a-fA-F]{2})>")


def byte_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies spell bytes: printable ones as themselves, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


@dataclass(frozen=True, slots=True)
class ByteLevelPieces:
    """Holds b"" for ids without text."""

    table: list[bytes]


@dataclass(frozen=True, slots=True)
class FallbackPieces:
    """A vocabulary of texts and single bytes; None for ids without text. A text that stands alone loses up to `strip`
    leading `strip_char`."""

    table: list[str | int | None]
    strip_char: str
    strip: int


@dataclass(frozen=True, slots=True)
class OpaquePieces:
    """Only the library can convert these ids. `anchor` is an id that has text."""

    backend: Backend
    silent: frozenset[int]
    anchor: int | None
    skip_special: bool = True


Pieces = ByteLevelPieces | FallbackPieces | OpaquePieces


def read_pieces(backend: Backend, tokens: list[str | None]) -> Pieces:
    """Raises ValueError where the decoder, which runs for every token, could take forever."""
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    silent = frozenset(index for index, token in enumerate(tokens) if token in special)
    steps = _decoder_steps(backend)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level(tokens, silent)
    return _fallback(tokens, silent, steps) or _opaque(backend, tokens, silent)


def with_special(pieces: Pieces, backend: Backend, tokens: Mapping[int, str]) -> Pieces:
    match pieces:
        case ByteLevelPieces(table=data):
            return ByteLevelPieces(_with(data, dict(zip(tokens, _spelled(tokens.values()), strict=True))))
        case FallbackPieces(table=table, strip_char=char, strip=strip):
            pairs = _replaced(_decoder_steps(backend))
            visible = {index: _fallback_piece(token, pairs) for index, token in tokens.items()}
            return FallbackPieces(_with(table, visible), char, strip)
        case OpaquePieces(anchor=anchor):
            return OpaquePieces(backend, frozenset(), anchor, skip_special=False)


def _with(table: list[_Entry], more: Mapping[int, _Entry]) -> list[_Entry]:
    return [more.get(index, entry) for index, entry in enumerate(table)]


def read_tokens(backend: Backend) -> list[str | None]:
    """None where an id is unused. Raises ValueError where ids or tokens are too large for a table."""
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = backend.get_added_tokens_decoder()
    highest = max([*vocabulary.values(), *added], default=-1)
    if highest > MAX_ID:
        raise ValueError(f"has token {highest}; ids go up to {MAX_ID}")
    longest = max(map(len, [*vocabulary, *(token.content for token in added.values())]), default=0)
    if longest > MAX_TOKEN:
        raise ValueError(f"has a token of {longest} characters; tokens have up to {MAX_TOKEN}")
    tokens: list[str | None] = [None] * (highest + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    for index, extra in added.items():
        tokens[index] = extra.content
    return tokens


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps = list(state["decoders"]) if state["type"] == "Sequence" else [state]
    for step in steps:
        text = step.get("content", "")
        if (
            step["type"] == "Sequence"
            or len(text) > MAX_CONTENT
            or not step.get("pattern", {"String": "x"}).get("String")
        ):
            raise ValueError("has a decoder of unknown cost")
    return steps


def _byte_level(tokens: list[str | None], silent: frozenset[int]) -> ByteLevelPieces:
    return ByteLevelPieces(_spelled(None if index in silent else token for index, token in enumerate(tokens)))


def _spelled(tokens: Iterable[str | None]) -> list[bytes]:
    letters = byte_letters()
    latin = str.maketrans({letter: chr(byte) for letter, byte in letters.items()})
    spelled = set(letters)
    table = []
    for token in tokens:
        if token is None:
            table.append(b"")
        elif spelled.issuperset(token):
            table.append(token.translate(latin).encode("latin-1"))
        else:  # an added token in plain text
            table.append(token.encode("utf-8"))
    return table


def _fallback(tokens: list[str | None], silent: frozenset[int], steps: list[dict[str, Any]]) -> FallbackPieces | None:
    """Recognises the pipeline of SentencePiece models: Replace … Replace, ByteFallback, Fuse and maybe Strip."""
    replaced = 0
    while replaced < len(steps) and steps[replaced]["type"] == "Replace" and "String" in steps[replaced]["pattern"]:
        replaced += 1
    rest = steps[replaced:]
    if [step["type"] for step in rest] not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    strip_char, strip = (rest[2]["content"], rest[2]["start"]) if len(rest) == 3 else (" ", 0)
    if len(rest) == 3 and rest[2]["stop"] != 0:
        return None
    pairs = _replaced(steps[:replaced])
    table: list[str | int | None] = []
    for index, token in enumerate(tokens):
        table.append(None if token is None or index in silent else _fallback_piece(token, pairs))
    return FallbackPieces(table, strip_char, strip)


def _replaced(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["pattern"]["String"], one["content"]) for one in steps if one["type"] == "Replace"]


def _fallback_piece(token: str, pairs: list[tuple[str, str]]) -> str | int:
    for pattern, content in pairs:
        token = token.replace(pattern, content)
    byte = BYTE_TOKEN.fullmatch(token)
    return int(byte[1], 16) if byte else token


def _opaque(backend: Backend, tokens: list[str | None], silent: frozenset[int]) -> OpaquePieces:
    plain = (n for n, token in enumerate(tokens) if token is not None and n not in silent)
    anchor = next((n for n in plain if backend.decode([n]).strip().isalnum()), None)
    return OpaquePieces(backend, silent, anchor)
