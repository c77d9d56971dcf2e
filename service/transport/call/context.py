"""Declares what handlers use of a call, whether gRPC or a relay accepted it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

import grpc

Metadata = Iterable[tuple[str, str | bytes]]
Trailers = tuple[tuple[str, str | bytes], ...]


class Context(Protocol):
    """One call. Its reference is grpc.aio.ServicerContext."""

    def peer(self) -> str: ...

    def invocation_metadata(self) -> Metadata | None: ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        pass

    def time_remaining(self) -> float | None:
        """Seconds; None without a deadline."""

    def code(self) -> grpc.StatusCode | None:
        pass

    async def read(self) -> object:
        """Returns the next message's bytes; anything else where there is none."""

    async def write(self, message: bytes, /) -> None:
        """Returns when gRPC has taken it."""

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...], /) -> None: ...

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Trailers = (), /) -> NoReturn:
        """Raises grpc.aio.AbortError, or grpc.aio.InternalError where the caller has gone."""
