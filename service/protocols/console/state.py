"""Collects the page's state as JSON: answers of GetLoad, GetModel and ListOptimizations, and the last errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from engine.api import EngineState
from service.protocols.console.calls import JSON, SAFE
from service.protocols.seam import UseCases
from service.protocols.whippet_v1 import render, render_load
from service.protocols.whippet_v1.rights import ADMIN, RIGHTS
from service.transport.call.auth import Rights
from service.transport.port.http1 import KEPT, response

_LASTS = 1.0  # seconds


class ConsoleState:
    """Computed once a second at most, however many pages poll."""

    def __init__(self, cases: UseCases, clock: Callable[[], float] = time.monotonic) -> None:
        self._cases = cases
        self._clock = clock
        self._whole = b""
        self._made: dict[Rights, bytes] = {}  # of it
        self._responses: dict[Rights, bytes] = {}  # of that
        self._made_at = float("-inf")

    def json(self, rights: Rights) -> bytes:
        """Callers without the right to view get only their rights."""
        now = self._clock()
        if now - self._made_at >= _LASTS:
            self._made_at, self._whole = now, msgspec.json.encode(self._read())
            self._made, self._responses = {}, {}
        if rights not in self._made:
            looks = not RIGHTS[ADMIN]["GetLoad"].isdisjoint(rights)
            state = self._whole if looks else b"null"
            self._made[rights] = b'{"rights":%b,"state":%b}' % (msgspec.json.encode(sorted(rights)), state)
        return self._made[rights]

    def response(self, rights: Rights) -> bytes:
        body = self.json(rights)
        if rights not in self._responses:
            self._responses[rights] = response(200, JSON, body, headers={**SAFE, **KEPT})
        return self._responses[rights]

    def _read(self) -> dict[str, object]:
        cases = self._cases
        return {
            "load": _page_state(render_load.load(cases)),
            "model": self._model(),
            "objection": cases.objection,
            "optimizations": [_page_state(render.optimization(switch)) for switch in cases.switches.all()],
            "cache_bytes": dict(cases.caches.held()),
            "errors": list(self._errors()),
        }

    def _model(self) -> dict[str, Any] | None:
        ready = self._cases.engine.state is EngineState.READY and self._cases.engine.info is not None
        return _page_state(render.model(self._cases.model.describe())) if ready else None

    def _errors(self) -> Iterator[dict[str, object]]:
        for record in self._cases.instruments.recent:
            yield {
                "at": record.started_at,
                "method": record.method,
                "code": record.code,
                "reason": record.reason,
                "request_id": record.request_id,
                "seconds": record.ended_at - record.arrived_at,
            }


def _page_state(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
