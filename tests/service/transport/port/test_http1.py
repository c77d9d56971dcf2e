"""Heads and bodies of HTTP/1.1."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import pytest

from service.transport.port.http1 import MAX_BODY, Exchange, RequestHead, RequestRefused, head, parse_head, response


def exchange(headers: dict[str, str], body: bytes = b"") -> Exchange:
    reader = asyncio.StreamReader()
    reader.feed_data(body)
    reader.feed_eof()
    writer = MagicMock()
    writer.get_extra_info.return_value = None
    return Exchange(RequestHead("POST", "/", headers), reader, writer, MagicMock())


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"GET /a?b=c HTTP/1.1\r\nHost: X\r\n\r\n", RequestHead("GET", "/a", {"host": "X"}, True)),
        (b"GET / HTTP/1.1\r\nA: 1\r\na:2\r\n\r\n", RequestHead("GET", "/", {"a": "1, 2"}, True)),
        (b"GET / HTTP/1.1\r\nConnection: Close\r\n\r\n", RequestHead("GET", "/", {"connection": "Close"})),
        (b"GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", RequestHead("GET", "/", {"content-length": "0"})),
        (b"GET\r\nno colon\r\n\r\n", RequestHead("GET", "", {})),
        (b"\r\n\r\n", RequestHead("", "", {})),
        (b"\xff\xfe / x\r\nA: \xe9\r\n\r\n", RequestHead("ÿþ", "/", {"a": "é"})),
    ],
)
def test_heads(head: bytes, expected: RequestHead) -> None:
    assert parse_head(head) == expected


async def test_a_body_has_its_length() -> None:
    assert await exchange({"content-length": "3"}, b"abcd").body() == b"abc"
    with pytest.raises(asyncio.IncompleteReadError):
        await exchange({"content-length": "5"}, b"abcd").body()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 411),
        ({"content-length": "-1"}, 411),
        ({"content-length": "1, 1"}, 411),
        ({"content-length": "²"}, 411),
        ({"content-length": "3", "transfer-encoding": "chunked"}, 411),
        ({"content-length": str(MAX_BODY + 1)}, 413),
        ({"content-length": "9" * 5000}, 413),
    ],
)
async def test_bodies_that_are_not_read(headers: dict[str, str], status: int) -> None:
    with pytest.raises(RequestRefused) as refused:
        await exchange(headers, b"abc").body()
    assert refused.value.status == status


def test_responses_end_with_their_connection() -> None:
    whole = response(200, "text/plain", b"abc", headers={"A": "b"})
    assert whole == (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nA: b\r\n\r\nabc"
    )
    assert response(200, "text/plain", b"abc", bodiless=True).endswith(b"\r\n\r\n")
    assert b"Content-Length" not in head(200, {})
