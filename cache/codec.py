"""Answers as bytes and back: msgpack arrays with typed decoding. Never pickle."""

from __future__ import annotations

from array import array
from struct import Struct

import msgspec

from cache.api import CachedCompletion, Chunk, Ending

SCHEMA = 1


class _Ending(msgspec.Struct, array_like=True, frozen=True):
    reason: str
    prompt_tokens: int
    completion_tokens: int
    stop_token_id: int | None
    stop_string: str | None


class _Chunk(msgspec.Struct, array_like=True, frozen=True):
    ids: bytes  # four bytes each, little-endian
    text: str
    ending: _Ending | None


class _Completion(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    chunks: list[_Chunk]
    max_tokens: int
    provenance: str
    created_at: float


_ENCODER = msgspec.msgpack.Encoder()
_COMPLETION = msgspec.msgpack.Decoder(_Completion)
_CHUNK = msgspec.msgpack.Decoder(_Chunk)
_WORD = Struct("<I")


def pack_completion(completion: CachedCompletion) -> bytes:
    """As it is stored."""
    chunks = [_from_chunk(chunk) for chunk in completion.chunks]
    return _ENCODER.encode(
        _Completion(SCHEMA, chunks, completion.max_tokens, completion.provenance, completion.created_at)
    )


def unpack_completion(data: bytes, entry_id: str) -> CachedCompletion | None:
    """None where it is not a whole answer of this schema."""
    try:
        raw = _COMPLETION.decode(data)
        chunks = tuple(_to_chunk(chunk) for chunk in raw.chunks)
    except (msgspec.MsgspecError, ValueError):
        return None
    whole = bool(chunks) and chunks[-1].ending is not None and all(c.ending is None for c in chunks[:-1])
    if raw.schema != SCHEMA or not whole:
        return None
    return CachedCompletion(
        chunks=chunks,
        max_tokens=raw.max_tokens,
        provenance=raw.provenance,
        created_at=raw.created_at,
        entry_id=entry_id,
    )


def pack_chunk(chunk: Chunk) -> bytes:
    """One message of an answer on its way to another replica."""
    return _ENCODER.encode(_from_chunk(chunk))


def unpack_chunk(data: bytes) -> Chunk | None:
    """None where it is not one."""
    try:
        return _to_chunk(_CHUNK.decode(data))
    except (msgspec.MsgspecError, ValueError):
        return None


def _from_chunk(chunk: Chunk) -> _Chunk:
    end = chunk.ending
    ending = (
        None
        if end is None
        else _Ending(end.reason, end.prompt_tokens, end.completion_tokens, end.stop_token_id, end.stop_string)
    )
    return _Chunk(array("I", chunk.token_ids).tobytes(), chunk.text, ending)


def _to_chunk(raw: _Chunk) -> Chunk:
    # Nearly all are of one token, and there are hundreds of them in an answer that somebody waits for.
    ids = _WORD.unpack(raw.ids) if len(raw.ids) == _WORD.size else _ids(raw.ids)
    end = raw.ending
    if end is None:
        return Chunk(ids, raw.text)
    return Chunk(
        ids,
        raw.text,
        Ending(
            reason=end.reason,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            stop_token_id=end.stop_token_id,
            stop_string=end.stop_string,
        ),
    )


def _ids(data: bytes) -> tuple[int, ...]:
    if len(data) % _WORD.size:
        raise ValueError("ids of broken length")
    return tuple(number for (number,) in _WORD.iter_unpack(data))
