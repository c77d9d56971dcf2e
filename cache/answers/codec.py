"""Converts answers to bytes and back: msgpack arrays with typed decoding. Never pickle."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cache.api import AnswerPart, CachedCompletion

SCHEMA = 2  # 1 had ids as bytes
_MOST = 1 << 32  # is no id, nor is anything above


class _Completion(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    parts: tuple[AnswerPart, ...]
    max_tokens: int
    provenance: str
    created_at: float


_ENCODER = msgspec.msgpack.Encoder()
_COMPLETION = msgspec.msgpack.Decoder(_Completion)
_PART = msgspec.msgpack.Decoder(AnswerPart)


def pack_completion(completion: CachedCompletion) -> bytes:
    """Packs without cuts, which a reader with smaller messages makes again."""
    parts = [part[:3] for part in completion.parts]
    return _ENCODER.encode((SCHEMA, parts, completion.max_tokens, completion.provenance, completion.created_at))


def unpack_completion(data: bytes, entry_id: str) -> CachedCompletion | None:
    """None where it is not a whole answer of this schema."""
    try:
        raw = _COMPLETION.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    parts = raw.parts
    whole = bool(parts) and parts[-1].ending is not None and all(c.ending is None for c in parts[:-1])
    if raw.schema != SCHEMA or not whole or not _are_ids([i for part in parts for i in part.token_ids]):
        return None
    return CachedCompletion(
        parts=parts,
        max_tokens=raw.max_tokens,
        provenance=raw.provenance,
        created_at=raw.created_at,
        entry_id=entry_id,
    )


def pack_part(part: AnswerPart) -> bytes:
    return _ENCODER.encode(part if part.cuts else part[:3])


def unpack_part(data: bytes) -> AnswerPart | None:
    """None where no reader can cut it."""
    try:
        part = _PART.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    cuttable = len(part.cuts) == max(0, len(part.token_ids) - 1) or not part.text
    return part if cuttable and _are_ids(part.token_ids) else None


def _are_ids(numbers: Sequence[int]) -> bool:
    return not numbers or (min(numbers) >= 0 and max(numbers) < _MOST)
