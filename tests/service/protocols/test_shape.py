"""Large messages are looked at before objects are built out of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import Message

from service.core.errors import InvalidRequest
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.shape import MOST_FIELDS, UNCOUNTED, check_shape
from tests.service.conftest import Server, ask, refused


def field(number: int, content: bytes) -> bytes:
    """One of the wire type that has a length."""
    size = len(content)
    prefix = bytearray([number << 3 | 2])
    while size >= 0x80:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(prefix) + bytes([size]) + content


def many(entry: bytes) -> bytes:
    """Four megabytes of it."""
    return entry * (4_000_000 // len(entry))


CROWDED = {
    "empty chat messages": field(5, many(b"\x0a\x00")),
    "chat messages with a role": field(5, many(b"\x0a\x03\x0a\x01r")),
    "logit biases": field(6, many(b"\x4a\x07\x08\x01\x15\x00\x00\x80\x3f")),
    "empty logit biases": field(6, many(b"\x4a\x00")),
    "ids one by one": field(4, many(b"\x08\x01")),
    "empty stop strings": field(7, many(b"\x1a\x00")),
    "unknown numbers": many(b"\x78\x01"),
    "unknown groups": many(b"\x7b\x7c"),
    "the same field again and again": many(b"\x3a\x00"),
    "inputs that replace each other": many(b"\x2a\x00\x1a\x00"),
}


@pytest.mark.parametrize("name", CROWDED)
def test_too_many_fields_are_refused_at_a_bound(server: Server, name: str) -> None:
    with pytest.raises(InvalidRequest, match=str(MOST_FIELDS)):
        check_shape(pb.GenerateRequest, CROWDED[name])
    generate = server.channel.unary_unary("/whippet.v1.GenerationService/Generate")
    refusal = refused(generate, CROWDED[name])
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(MOST_FIELDS) in refusal.message


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(text="x" * 4_000_000),
        pb.GenerateRequest(text="ü" * 2_000_000),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 3_000_000)),
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="some words " * 40)] * 4000),
            sampling=pb.SamplingOptions(logit_bias={n: -1.0 for n in range(1024)}, seed=-1),
        ),
        pb.TokenizeRequest(text="x" * 100_000),
        pb.DetokenizeRequest(token_ids=range(1_000_000)),
    ],
)
def test_large_messages_that_mean_something_pass(message: Message) -> None:
    data = message.SerializeToString()
    assert len(data) > UNCOUNTED
    check_shape(type(message), data)


def test_small_ones_are_not_counted() -> None:
    check_shape(pb.GenerateRequest, field(5, b"\x0a\x00" * 30_000))


def test_cut_and_random_bytes_raise_nothing_else() -> None:
    whole = CROWDED["chat messages with a role"][: UNCOUNTED + 1]
    with pytest.raises(InvalidRequest):
        check_shape(pb.GenerateRequest, whole)
    draw = random.Random(1)
    for _ in range(50):
        data = draw.randbytes(UNCOUNTED + 1 + draw.randrange(1000))
        with contextlib.suppress(InvalidRequest):
            check_shape(pb.GenerateRequest, data)


def test_unknown_fields_are_not_kept(serve: Callable[..., contextlib.AbstractContextManager[Server]]) -> None:
    """Thirty streams that live at once were 3 MB each: the front is no larger for them."""
    padded = ask("padded", 3000).SerializeToString() + field(15, b"z" * 3_000_000)
    with serve("--fake.step-time=0.05", "--scheduler.max-sequences=8") as server:
        stream = server.channel.unary_stream("/whippet.v1.GenerationService/GenerateStream")
        calls = []
        for count in (4, 36):  # what is kept for ever is there after the first ones
            before = server.rss()
            while len(calls) < count:
                calls.append(stream(padded, timeout=60))
                server.until(lambda load: load.running + load.waiting + load.paused == len(calls))
        assert server.rss() - before < 40_000_000
        for call in calls:
            call.cancel()
        server.idle()
