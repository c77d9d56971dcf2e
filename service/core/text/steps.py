"""Derives from a tokenizer's steps whether it is fast with any text, and how many bytes a token can stand for."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend

from service.core.text.pieces import ByteLevelPieces, FallbackPieces, Pieces

_MAX_CONTENT = 16  # characters that a step may put for one
_MAX_POST = 16 * 2**10  # characters of the post-processor: it may put tokens around a text

# Patterns of models that are served, whose cost is linear but for runs of spaces. Any other may go back over a text for
# ever, so a tokenizer with one is run in text processes alone.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEMO = r"(?:[ \t]*\n)+[ \t]*| ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+|\s+"
_QWEN, _LLAMA3 = (f"{_WORDS}|{_LETTERS}|{number}|{_REST}" for number in (r"\p{N}", r"\p{N}{1,3}"))
PATTERNS = frozenset({_GPT2, _QWEN, _LLAMA3, _DEMO})
_PLAIN = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "Prepend", "Digits", "Metaspace"})
_PLAIN |= {"ByteLevel", "Whitespace", "WhitespaceSplit", "Punctuation"}

# Steps that drop no text; but NFC may make one byte of three and a half, as of U+1FBE U+0308 U+0341.
_KEEPING = frozenset({"ByteLevel", "Digits", "NFC", "Split", "Prepend", "Metaspace", "Replace"})
_NFC = 4


def is_plain(backend: Backend) -> bool:
    """Whether any short text is fast; stricter than necessary."""
    model, post = backend.model, backend.post_processor
    if type(model).__name__ != "BPE" or getattr(model, "dropout", None) is not None:
        return False
    if post is not None and len(post.__getstate__()) > _MAX_POST:
        return False
    return all(_is_plain(step) for step in _steps(backend))


def longest_token(backend: Backend, pieces: Pieces) -> int:
    """Bytes of UTF-8; 0 where some are dropped, so that there is no bound."""
    added = backend.get_added_tokens_decoder().values()
    steps = _steps(backend)
    kinds = {step["type"] for step in steps}
    lossy = any(token.lstrip or token.rstrip for token in added) or not all(_keeps(step) for step in steps)
    if lossy or type(backend.model).__name__ != "BPE":
        return 0
    if isinstance(pieces, ByteLevelPieces):
        if "ByteLevel" not in kinds or not {bytes([byte]) for byte in range(256)} <= set(pieces.table):
            return 0
        longest = max(map(len, pieces.table))
    elif isinstance(pieces, FallbackPieces):
        if not getattr(backend.model, "byte_fallback", False) or not set(range(256)) <= set(pieces.table):
            return 0
        longest = max(len(piece.encode()) for piece in pieces.table if isinstance(piece, str))
    else:
        return 0
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return longest * (_NFC if "NFC" in kinds else 1)


def _is_plain(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "Split":
            return step["pattern"].get("Regex") in PATTERNS or bool(step["pattern"].get("String"))
        case "Replace":
            return bool(step["pattern"].get("String")) and len(step["content"]) <= _MAX_CONTENT
        case "Prepend":
            return len(step["prepend"]) <= _MAX_CONTENT
        case kind:
            return kind in _PLAIN


def _keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return len(step["content"].encode()) >= len(step["pattern"].get("String", step["content"] + " ").encode())
    return step["type"] in _KEEPING and step.get("behavior") != "Removed"


def _steps(backend: Backend) -> list[dict[str, Any]]:
    steps = []
    for part, inner in ((backend.normalizer, "normalizers"), (backend.pre_tokenizer, "pretokenizers")):
        state = {} if part is None else json.loads(part.__getstate__())
        steps += state.get(inner, [state] if state else [])
    return steps
