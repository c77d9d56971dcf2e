"""Logs one line for each call that has ended: caller, request, outcome and times. Never any text.

A line costs tens of microseconds on the event loop. So refused and served calls have a bound each; further lines are
dropped, and the next one reports how many.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from service.observability.record import RequestRecord

_SERVED, _REFUSED = 300, 20  # lines a second; the first takes some 1 to 2 % of a core
_PROBES = "grpc."  # services of gRPC itself: health and reflection, at level DEBUG unless they fail
_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "draft_proposed",
    "draft_accepted",
    "bytes_in",
    "bytes_out",
    "messages_out",
)
_log = logging.getLogger("access")


class AccessLog:
    def __init__(self, tenants: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.left_out = 0  # lines so far
        self._tenants = tenants
        self._served, self._refused = _Bound(_SERVED, clock), _Bound(_REFUSED, clock)
        self._untold = 0  # of those left out

    def __call__(self, record: RequestRecord) -> None:
        good = record.code == "OK"
        level = logging.DEBUG if good and record.method.startswith(_PROBES) else logging.INFO
        if not _log.isEnabledFor(level):
            return
        if not (self._served if good else self._refused).take():
            self.left_out += 1
            self._untold += 1
            return
        fields = _fields(record)
        if self._tenants and record.tenant:
            fields["tenant"] = record.tenant
        if self._untold:
            fields["left_out"], self._untold = self._untold, 0
        line = _log.makeRecord("access", level, "", 0, "%s", (_Words(fields),), None, extra={"fields": fields})
        _log.handle(line)  # `log` would walk the stack to find who calls


class _Words:
    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._fields.items())


class _Bound:
    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._left = float(rate)
        self._at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def _fields(record: RequestRecord) -> dict[str, object]:
    """Times are in milliseconds."""
    fields: dict[str, object] = {"method": record.method, "code": record.code}
    for name in ("reason", "request_id", "client_request_id", "trace_id"):
        if value := getattr(record, name):
            fields[name] = value
    fields["total_ms"] = _ms(record.ended_at - record.arrived_at)
    if record.first_token_at is not None:
        fields["first_token_ms"] = _ms(record.first_token_at - record.arrived_at)
    for name in ("queue", "prefill", "decode", "lookup"):
        if seconds := getattr(record, name):
            fields[f"{name}_ms"] = _ms(seconds)
    for name in _COUNTS:
        if value := getattr(record, name):
            fields[name] = value
    for name in ("cache", "role", "leader_request_id", "finish_reason"):
        if value := getattr(record, name):
            fields[name] = value
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
