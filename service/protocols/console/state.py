"""What the page shows, as JSON: what GetLoad, GetModel and ListOptimizations answer, and the last errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from engine.api import EngineState
from service.protocols.seam import UseCases
from service.protocols.whippet_v1 import render, render_load

_LASTS = 1.0  # seconds


class State:
    """Made once a second at most, however many pages ask."""

    def __init__(self, cases: UseCases, clock: Callable[[], float] = time.monotonic) -> None:
        self._cases = cases
        self._clock = clock
        self._made = b""
        self._made_at = float("-inf")

    def json(self) -> bytes:
        """As of now, or of less than a second ago."""
        now = self._clock()
        if now - self._made_at >= _LASTS:
            self._made, self._made_at = msgspec.json.encode(self._read()), now
        return self._made

    def _read(self) -> dict[str, object]:
        cases = self._cases
        return {
            "load": _shown(render_load.load(cases)),
            "model": self._model(),
            "objection": cases.objection,
            "optimizations": [_shown(render.optimization(switch)) for switch in cases.switches.all()],
            "cache_bytes": dict(cases.caches.held()),
            "errors": list(self._errors()),
        }

    def _model(self) -> dict[str, Any] | None:
        ready = self._cases.engine.state is EngineState.READY and self._cases.engine.info is not None
        return _shown(render.model(self._cases.model.describe())) if ready else None

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


def _shown(message: Message) -> dict[str, Any]:
    """Fields that are zero, too."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found
