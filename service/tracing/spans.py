"""Converts a call's record to OpenTelemetry spans: its own, and below it one for each phase.

Attributes have names of the semantic conventions for RPC and generative AI, else `whippet.…`. No text of a prompt or an
answer, and no tenant.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import pairwise

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from service.observability.record import UNKNOWN_METHOD, RequestRecord

Value = str | int | float | bool | list[str]

_PARENT_HERE, _PARENT_ELSEWHERE = 0x101, 0x301  # flags: sampled, and whether the parent is another process's
# Of a server's span, a status that is the caller's own doing is no error.
_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}


def sampled(traceparent: str, trace_id: str, ratio: float) -> bool:
    """Follows the caller's decision, else samples `ratio` by the trace's id if any, so that every server decides
    alike."""
    if traceparent:
        return bool(int(traceparent[-2:], 16) & 1)
    if trace_id:
        return int(trace_id[16:], 16) < ratio * 2**64
    return random.random() < ratio


def spans_of(record: RequestRecord, model: str) -> list[Span]:
    """The call's own span comes first."""
    trace_id = bytes.fromhex(record.trace_id)
    call = Span(
        trace_id=trace_id,
        span_id=bytes.fromhex(record.span_id),
        parent_span_id=bytes.fromhex(record.traceparent[36:52]),
        flags=_PARENT_ELSEWHERE if record.traceparent else _PARENT_HERE,
        name=record.method,
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=_wall(record, record.arrived_at),
        end_time_unix_nano=_wall(record, record.ended_at),
        attributes=attributes({**_rpc(record), **_generation(record, model)}),
        status=Status(code=Status.STATUS_CODE_ERROR) if record.code in _ERRORS else None,
    )
    first = _first_token(record)
    if first is not None:
        call.events.add(time_unix_nano=_wall(record, first), name="first token")
    if record.leader_span_id:
        call.links.add(
            trace_id=bytes.fromhex(record.leader_trace_id),
            span_id=bytes.fromhex(record.leader_span_id),
            attributes=attributes({"whippet.link": "leader"}),
        )
    return [
        call,
        *(
            Span(
                trace_id=trace_id,
                span_id=random.randbytes(8),
                parent_span_id=call.span_id,
                flags=_PARENT_HERE,
                name=name,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=_wall(record, begin),
                end_time_unix_nano=_wall(record, end),
            )
            for name, begin, end in phases(record)
        ),
    ]


def phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Seconds, monotonic; the last phase lasts until the call's end."""
    begun: list[tuple[str, float]] = [("receive message", record.arrived_at)]
    if record.admitted_at is not None:
        begun.append(("tokenize", record.admitted_at))
    if record.looked_up_at is not None:
        if record.lookup:
            begun.append(("cache lookup", record.looked_up_at - record.lookup))
        begun.append((_source(record), record.looked_up_at))
    if record.submitted_at is not None and record.queue is not None:
        planned = record.arrived_at + record.queue
        begun.append(("prefill", planned))
        begun.append(("decode", planned + (record.prefill or 0.0)))
        if record.decode is not None:
            begun.append(("deliver", planned + (record.prefill or 0.0) + record.decode))
    # Clocks are read at several places: none begins before the one before it, and none after the call has ended.
    at = record.arrived_at
    ordered: list[tuple[str, float]] = []
    for name, time in begun:
        at = min(max(at, time), record.ended_at)
        ordered.append((name, at))
    for (name, begin), (_, end) in pairwise([*ordered, ("", record.ended_at)]):
        yield name, begin, end


def _first_token(record: RequestRecord) -> float | None:
    """A unary answer is read in large parts, so that the engine's time is more exact."""
    if record.streamed or record.queue is None or record.prefill is None:
        return record.first_token_at
    return min(record.ended_at, record.arrived_at + record.queue + record.prefill)


def _source(record: RequestRecord) -> str:
    if record.submitted_at is not None:
        return "queue"
    if record.role == "follower":
        return "read along"
    return "replay" if record.cache.startswith("hit") else "queue"


def _rpc(record: RequestRecord) -> dict[str, Value]:
    found: dict[str, Value] = {
        "rpc.system.name": "grpc",
        "rpc.method": "_OTHER" if record.method == UNKNOWN_METHOD else record.method,
        "rpc.response.status_code": record.code,
    }
    if record.code in _ERRORS:
        found["error.type"] = record.code
    for name, value in (
        ("whippet.refusal", record.reason),
        ("whippet.request_id", record.request_id),
        ("whippet.client_request_id", record.client_request_id),
    ):
        if value:
            found[name] = value
    return found


def _generation(record: RequestRecord, model: str) -> dict[str, Value]:
    if not record.operation:
        return {}
    found: dict[str, Value] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "whippet",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }
    if record.cache:
        found["whippet.cache"] = record.cache
    if record.finish_reason:
        found["gen_ai.response.finish_reasons"] = [record.finish_reason]
        found["gen_ai.response.model"] = model
    if record.first_token_at is not None and record.streamed:
        found["gen_ai.response.time_to_first_chunk"] = record.first_token_at - record.arrived_at
    if record.role:
        found["whippet.single_flight"] = record.role
    return found


def attributes(values: Mapping[str, Value]) -> Iterator[KeyValue]:
    for key, value in values.items():
        yield KeyValue(key=key, value=_any(value))


def _any(value: Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=map(_any, value)))


def _wall(record: RequestRecord, monotonic: float) -> int:
    """Nanoseconds since 1970. One reading of the wall clock a call, so that its spans fit into each other."""
    return int(record.started_at * 1e9) + int((monotonic - record.arrived_at) * 1e9)
