"""Defines one function per kind of job: tokenizer and payload to bytes. It raises JobRefused where the caller's input
is at fault."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from service.core.text.conversation import ChatMessage, ChatOptions, ChatTemplateError
from service.core.text.tokenizer import Tokenizer
from service.core.validation import too_long

KINDS = {
    "encode": "service.core.text.sandbox.jobs:encode",
    "encode_chat": "service.core.text.sandbox.jobs:encode_chat",
    "decode": "service.core.text.sandbox.jobs:decode",
    "constraint": "service.core.text.constraint:constraint",
}
_WORD = "I"  # 32 bits, unsigned: a token id


class JobRefused(Exception):
    """The text is safe to send to the caller."""


class EncodeText(msgspec.Struct, frozen=True, array_like=True):
    text: str
    most: int | None  # tokens; None: however many


class EncodeChat(msgspec.Struct, frozen=True, array_like=True):
    messages: tuple[ChatMessage, ...]
    options: ChatOptions
    most: int | None


_read_text = msgspec.msgpack.Decoder(EncodeText).decode
_read_chat = msgspec.msgpack.Decoder(EncodeChat).decode
pack = msgspec.msgpack.Encoder().encode


def encode(tokenizer: Tokenizer, payload: bytes) -> bytes:
    job = _read_text(payload)
    return _bounded(tokenizer.encode(job.text), job.most)


def encode_chat(tokenizer: Tokenizer, payload: bytes) -> bytes:
    job = _read_chat(payload)
    try:
        return _bounded(tokenizer.encode_chat(job.messages, job.options, job.most), job.most)
    except ChatTemplateError as error:
        raise JobRefused(str(error)) from error


def decode(tokenizer: Tokenizer, payload: bytes) -> bytes:
    return tokenizer.decode(unpack_ids(payload)).encode()


def pack_ids(ids: Sequence[int]) -> bytes:
    return array(_WORD, ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    ids = array(_WORD)
    ids.frombytes(data)
    return ids


def _bounded(ids: list[int], most: int | None) -> bytes:
    if most is not None and len(ids) > most:
        raise JobRefused(too_long(len(ids), most + 1))
    return pack_ids(ids)
