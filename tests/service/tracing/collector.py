"""A collector of OTLP over gRPC that keeps what it is sent, or fails in a way that is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

PATIENCE = 60.0  # seconds after which a test that waits has failed


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """On a free port of the loopback."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.fails: grpc.StatusCode | None = None
        self.hangs = threading.Event()  # from now on nothing is answered
        self.rejects = 0  # spans of each message
        self.asked = 0
        self.batches: list[ResourceSpans] = []
        self._over = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        else:
            self.endpoint = f"https://127.0.0.1:{self._server.add_secure_port('127.0.0.1:0', credentials)}"
        self._server.start()

    def Export(
        self, request: otlp.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> otlp.ExportTraceServiceResponse:
        self.asked += 1
        if self.hangs.is_set():
            self._over.wait(PATIENCE)
        if self.fails is not None:
            context.abort(self.fails, "as asked")
        self.batches += request.resource_spans
        partial = otlp.ExportTracePartialSuccess(rejected_spans=self.rejects)
        return otlp.ExportTraceServiceResponse(partial_success=partial)

    @property
    def spans(self) -> list[Span]:
        """In the order in which they came."""
        return [span for batch in tuple(self.batches) for scope in batch.scope_spans for span in scope.spans]

    def calls(self, count: int) -> list[Span]:
        """Waits for the spans of so many calls, and gives them."""
        self.until(lambda: len(self._calls()) >= count)
        return self._calls()

    def below(self, call: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == call.span_id]

    def until(self, found: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < end, [span.name for span in self.spans]
            time.sleep(0.01)

    def close(self) -> None:
        self._over.set()
        self._server.stop(None).wait()

    def _calls(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]


def values(attributes: Sequence[KeyValue]) -> dict[str, object]:
    """As plain values; lists of strings alone."""
    found: dict[str, object] = {}
    for one in attributes:
        kind = one.value.WhichOneof("value")
        assert kind is not None
        value = getattr(one.value, kind)
        found[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found
