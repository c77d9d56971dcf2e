"""HTTP/1.1 of the metrics port: heads and bodies bounded, one request at a time on a connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

MAX_HEAD = 8192  # bytes of a request without its body
MAX_BODY = 65_536  # bytes
TEXT = "text/plain; charset=utf-8"
KEPT = {"Connection": "keep-alive"}
_REASONS = {
    200: "OK",
    308: "Permanent Redirect",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
    415: "Unsupported Media Type",
    421: "Misdirected Request",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    499: "Client Closed Request",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class RequestRefused(Exception):
    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = headers or {}

    def response(self) -> bytes:
        return response(self.status, TEXT, f"{self.text}\n".encode(), headers=self.headers)


@dataclass(frozen=True, slots=True)
class RequestHead:
    method: str  # empty where the first line has none, like the path
    path: str  # without the query
    headers: Mapping[str, str]  # by name in small letters; values of one name are joined by commas
    keeps: bool = False  # whether the client may send another request on the connection


def parse_head(head: bytes) -> RequestHead:
    """Leaves out a line that is no header."""
    first, *rest = head.decode("latin-1").split("\r\n")
    method, target, *_ = [*first.split(" "), "", ""]
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        if colon:
            name = name.lower()
            headers[name] = f"{headers[name]}, {value.strip()}" if name in headers else value.strip()
    bare = headers.keys().isdisjoint(("content-length", "transfer-encoding"))
    keeps = bare and first.endswith(" HTTP/1.1") and headers.get("connection", "").lower() != "close"
    return RequestHead(method, target.partition("?")[0], headers, keeps)


class Exchange:
    def __init__(
        self,
        request: RequestHead,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hold: Hold,
    ) -> None:
        self.request = request
        self.writer = writer
        self._reader = reader
        self.keeps = False  # whether the connection outlives the response
        # Makes the response for a client that repeats the request; None: it has to be answered as if it were new.
        self.again: Callable[[], bytes | None] | None = None
        self._hold = hold
        tls = writer.get_extra_info("ssl_object")
        self.secure = tls is not None  # whether the connection is TLS
        self.names = {} if tls is None else _names(tls.getpeercert() or {})  # of the client's certificate

    @property
    def peer(self) -> str:
        """A name that no gRPC connection has."""
        host, port, *_ = self.writer.get_extra_info("peername") or ("", 0)
        return f"http:{host}:{port}"

    def respond(self, kind: str, body: bytes, headers: Mapping[str, str], *, bodiless: bool = False) -> None:
        """Sends success, and keeps the connection where the client can use it."""
        self.keeps = self.request.keeps
        self.writer.write(response(200, kind, body, bodiless, {**headers, **KEPT} if self.keeps else headers))

    def hold(self) -> None:
        """Takes a place for a response that may last. Raises RequestRefused where all are taken."""
        if not self._hold.take():
            raise RequestRefused(503, "too many calls are under way on this port")

    def release(self) -> None:
        """Bounds the rest of the response in time again."""
        self._hold.end()

    async def body(self) -> bytes:
        length = self.request.headers.get("content-length", "")
        if "transfer-encoding" in self.request.headers or not (length.isascii() and length.isdigit()):
            raise RequestRefused(411, "a body needs a Content-Length")
        if len(length) > 9 or int(length) > MAX_BODY:
            raise RequestRefused(413, f"the body is larger than {MAX_BODY} bytes")
        return await self._reader.readexactly(int(length))

    async def gone(self) -> None:
        """Returns once the client has closed the connection, or sends what belongs to no request."""
        with contextlib.suppress(OSError):
            await self._reader.read(1)


class Hold(Protocol):
    def take(self) -> bool:
        pass

    def end(self) -> None:
        pass


class Site(Protocol):
    def answer(self, exchange: Exchange) -> Awaitable[None]:
        """Raises RequestRefused only before anything was written."""


def response(
    status: int, kind: str, body: bytes, bodiless: bool = False, headers: Mapping[str, str] | None = None
) -> bytes:
    return head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}) + (
        b"" if bodiless else body
    )


def head(status: int, headers: Mapping[str, str]) -> bytes:
    """The response ends with its connection unless the headers state otherwise."""
    headers = {"Connection": "close", **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\n{lines}\r\n".encode("latin-1")


def _names(certificate: Mapping[str, object]) -> Mapping[str, Iterable[bytes]]:
    found: dict[str, list[bytes]] = {}
    alternative = certificate.get("subjectAltName", ())
    assert isinstance(alternative, tuple)
    for kind, name in alternative:
        if kind in ("URI", "DNS", "email"):
            found.setdefault(f"peer_{kind.lower()}", []).append(str(name).encode())
    return found
