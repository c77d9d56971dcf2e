"""Serves grpc.health.v1, without tokens, which probes lack: `""` is SERVING while the process lives and its engine may
be expected, the services that generate while requests are accepted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from service.core.errors import InvalidRequest, ServiceError, Violation
from service.observability.record import Observers, RecordBuilder
from service.transport.call.context import Context
from service.transport.call.inbox import Inbox
from service.transport.call.rpc import Method, abort_with, service

SERVICE = "grpc.health.v1.Health"
GENERATION = "whippet.v1.GenerationService"
_INTERVAL = 0.1  # seconds between polls of readiness
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_REQUEST = health_pb2.HealthCheckRequest.DESCRIPTOR.full_name
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    def __init__(
        self, ready: Callable[[], bool], alive: Callable[[], bool], generating: Collection[str] = (GENERATION,)
    ) -> None:
        self._ready = ready
        self._alive = alive
        self._generating = generating
        self._status: dict[str, int] = {"": _SERVING, **dict.fromkeys(generating, _NOT_SERVING)}
        self._changed: set[asyncio.Event] = set()  # one a watcher
        self._closed = False

    def handlers(self, inbox: Inbox, observers: Observers) -> grpc.GenericRpcHandler[bytes, bytes]:
        async def check(record: RecordBuilder, context: Context) -> bytes:
            return await self._check(await self._name(inbox, record, context), context)

        async def watch(record: RecordBuilder, context: Context) -> None:
            await self._watch(await self._name(inbox, record, context), context)

        methods = {"Check": Method(check, streams=False), "Watch": Method(watch, streams=True)}
        return service(SERVICE, methods, observers)

    async def run(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(_INTERVAL)

    def refresh(self) -> None:
        if self._closed:
            return
        holds = {"": self._alive(), **dict.fromkeys(self._generating, self._ready())}
        status = {name: _SERVING if one else _NOT_SERVING for name, one in holds.items()}
        if status != self._status:
            self._status = status
            self._wake()

    def close(self) -> None:
        """Marks all services as not SERVING and ends watchers' calls."""
        self._closed = True
        self._status = dict.fromkeys(self._status, _NOT_SERVING)
        self._wake()

    def _wake(self) -> None:
        for event in self._changed:
            event.set()

    async def _check(self, name: str, context: Context) -> bytes:
        self.refresh()
        status = self._status.get(name)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _response(status)

    async def _watch(self, name: str, context: Context) -> None:
        sent = None
        event = asyncio.Event()
        self._changed.add(event)
        try:
            while True:
                event.clear()
                status = self._status.get(name, _UNKNOWN)
                if status != sent:
                    sent = status
                    await context.write(_response(status))
                if self._closed:
                    return
                await event.wait()
        finally:
            self._changed.discard(event)

    async def _name(self, inbox: Inbox, record: RecordBuilder, context: Context) -> str:
        try:
            with inbox.open(context, "") as incoming:
                data = await incoming.read()
            return str(health_pb2.HealthCheckRequest.FromString(data).service)
        except DecodeError:
            await abort_with(InvalidRequest((Violation("", f"the bytes are no {_REQUEST}"),)), record, context)
        except ServiceError as error:
            await abort_with(error, record, context)


def _response(status: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())
