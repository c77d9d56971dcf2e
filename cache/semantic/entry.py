"""Packs a question and its answer for the store."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from cache.answers.codec import pack_completion, unpack_completion
from cache.api import CachedCompletion
from cache.semantic.embedder import Vector

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class SemanticEntry:
    text: str
    vector: Vector
    completion: CachedCompletion


class _RawEntry(msgspec.Struct, array_like=True, frozen=True):
    schema: int
    text: str
    vector: bytes  # two bytes a number
    completion: bytes


_DECODER = msgspec.msgpack.Decoder(_RawEntry)


def pack_entry(entry: SemanticEntry) -> bytes:
    vector = entry.vector.astype(np.float16).tobytes()
    return msgspec.msgpack.encode(_RawEntry(SCHEMA, entry.text, vector, pack_completion(entry.completion)))


@dataclass(frozen=True, slots=True)
class Stored:
    """Vector and answer are decoded on demand, since most are never used."""

    text: str
    entry_id: str
    _vector: bytes
    _completion: bytes

    def vector(self) -> Vector | None:
        """None where it is not a unit vector."""
        vector = np.frombuffer(self._vector, np.float16).astype(np.float32)
        length = float(np.linalg.norm(vector))
        return vector / length if 0.9 < length < 1.1 else None

    def completion(self) -> CachedCompletion | None:
        """None where it is not a whole answer of this schema."""
        return unpack_completion(self._completion, self.entry_id)


def unpack_entry(data: bytes, width: int, entry_id: str) -> Stored | None:
    try:
        raw = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError):
        return None
    if raw.schema != SCHEMA or len(raw.vector) != 2 * width:
        return None
    return Stored(raw.text, entry_id, raw.vector, raw.completion)
