"""Sends traces to a collector: OTLP over gRPC. A collector that is slow or gone costs traces, and never a call: what
waits is bounded, what is dropped is counted."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from service.observability.record import UNKNOWN_METHOD, RecordBuilder, RequestRecord
from service.tracing.spans import Value, attributes, sampled, spans_of

MOST_WAITING = 2048  # calls, of some 2 KiB each; beyond it the oldest go
_BATCH = 64  # calls in one message
_AT_ONCE = 4  # calls that are made into spans in one turn of the event loop: half a millisecond
_INTERVAL = 0.1  # seconds between two batches: bounds the calls a second, whatever callers ask to be traced
_TIMEOUT = 10.0  # seconds for the collector to take one
_ATTEMPTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts, doubling
_FLUSH = 2.0  # seconds at the end, for all that waits
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_PASSING = {  # what OTLP names as worth another attempt
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_NOT_TRACED = ("grpc.", UNKNOWN_METHOD)  # health, reflection, and what no service has
_log = logging.getLogger(__name__)


class TraceExporter:
    """`counts`: sampled calls, by `exported` or why they were dropped."""

    def __init__(
        self, endpoint: str, ratio: float, model: str, resource: Mapping[str, Value], roots: bytes | None = None
    ) -> None:
        """`endpoint`: `http://HOST:PORT` or `https://HOST:PORT`, whose authorities are `roots` or public ones. Called
        inside the event loop."""
        self.counts = Counter(dict.fromkeys(("exported", "queue", "failed", "refused", "shutdown"), 0))
        self._ratio = ratio
        self._model = model
        self._resource = Resource(attributes=attributes(resource))
        self._scope = InstrumentationScope(name="whippet", version=str(resource.get("service.version", "")))
        self._waiting: deque[RequestRecord] = deque()
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self._failing = False
        self._address = endpoint
        self._channel = _channel(endpoint, roots)
        self._send = self._channel.unary_unary(
            _EXPORT, ExportTraceServiceRequest.SerializeToString, ExportTraceServiceResponse.FromString
        )
        self._task = asyncio.create_task(self._run(), name="traces")

    def sample(self, call: RecordBuilder) -> bool:
        return not call.method.startswith(_NOT_TRACED) and sampled(call.traceparent, call.trace_id, self._ratio)

    def __call__(self, record: RequestRecord) -> None:
        if not record.traced:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.counts["queue"] += 1
        self._waiting.append(record)
        self._news.set()

    async def close(self) -> None:
        """Sends what waits, for two seconds at most."""
        self._closing.set()
        self._news.set()
        await asyncio.wait((self._task,), timeout=_FLUSH)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.counts["shutdown"] += len(self._waiting)
        self._waiting.clear()
        await self._channel.close(None)

    async def _run(self) -> None:
        while self._waiting or not self._closing.is_set():
            await self._news.wait()
            await self._pause(_INTERVAL)
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            if not self._waiting and not self._closing.is_set():
                self._news.clear()
            if batch:
                await self._deliver(batch)

    async def _deliver(self, batch: list[RequestRecord]) -> None:
        outcome = "shutdown"
        try:
            outcome = await self._attempts(await self._message(batch))
        except Exception as error:  # a defect of ours, which must not end all traces; its text may be anything
            outcome = "failed"
            _log.error("traces: %s", type(error).__name__)
        finally:
            self.counts[outcome] += len(batch)

    async def _attempts(self, message: ExportTraceServiceRequest) -> str:
        pause = _FIRST_PAUSE
        for attempt in range(_ATTEMPTS):
            if attempt:
                await self._pause(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
            try:
                response = await self._send(message, timeout=_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                self._report(error.code().name)
                if error.code() not in _PASSING:
                    return "refused"
                if self._closing.is_set():
                    return "shutdown"
                continue
            refused = response.partial_success.rejected_spans > 0
            self._report("some spans are refused" if refused else "")
            return "refused" if refused else "exported"
        return "failed"

    async def _message(self, batch: Sequence[RequestRecord]) -> ExportTraceServiceRequest:
        message = ExportTraceServiceRequest()
        whole = message.resource_spans.add(resource=self._resource)
        spans = ScopeSpans(scope=self._scope)
        for number, record in enumerate(batch, 1):
            spans.spans.extend(spans_of(record, self._model))
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        whole.scope_spans.append(spans)
        return message

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but ends early at shutdown."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _report(self, trouble: str) -> None:
        if trouble and not self._failing:
            _log.warning("traces: %s does not take them: %s", self._address, trouble)
        elif not trouble and self._failing:
            _log.info("traces: %s takes them again", self._address)
        self._failing = bool(trouble)


def _channel(endpoint: str, roots: bytes | None) -> grpc.aio.Channel:
    scheme, _, address = endpoint.partition("://")
    options = (("grpc.max_reconnect_backoff_ms", 10_000), ("grpc.enable_http_proxy", 0))
    if scheme == "https":
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options)
    return grpc.aio.insecure_channel(address, options)
