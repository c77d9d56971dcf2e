"""Frames typed messages on a byte stream between two of our processes: a length of four bytes, then msgpack."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME = 64 * 1024 * 1024  # bytes
_HEADER = 4  # bytes, big-endian length of what follows
_Message = TypeVar("_Message")


class FrameError(Exception):
    pass


def _as_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_text)


def encode(message: msgspec.Struct) -> bytes:
    """Raises FrameError where it would be too long."""
    buffer = bytearray(_HEADER)
    _encoder.encode_into(message, buffer, _HEADER)
    length = len(buffer) - _HEADER
    if length > MAX_FRAME:
        raise FrameError(f"a message of {length} bytes is too long")
    buffer[:_HEADER] = length.to_bytes(_HEADER, "big")
    return bytes(buffer)


class FrameReader(Generic[_Message]):
    def __init__(self, decoder: msgspec.msgpack.Decoder[_Message]) -> None:
        self._decoder = decoder
        self._rest = bytearray()  # begins with a frame that has not come whole

    def feed(self, data: bytes) -> list[_Message]:
        """Returns complete messages. After a FrameError the stream cannot be read on."""
        if self._rest:
            self._rest += data
            if _frame_end(self._rest, 0) > len(self._rest):
                return []
            data = bytes(self._rest)
            self._rest.clear()
        view = memoryview(data)
        messages = []
        start, size = 0, len(data)
        while start < size and (end := _frame_end(data, start)) <= size:
            try:
                messages.append(self._decoder.decode(view[start + _HEADER : end]))
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
                raise FrameError(f"{type(error).__name__}: {error}") from None
            start = end
        if start < size:
            self._rest += view[start:]
        return messages


def _frame_end(data: bytes | bytearray, start: int) -> int:
    """Beyond the data where the frame's length is incomplete."""
    if len(data) - start < _HEADER:
        return start + _HEADER + len(data)
    length = int.from_bytes(data[start : start + _HEADER], "big")
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is too long")
    return start + _HEADER + length
