"""A whole server, and a script of one whose answers are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from tests.service.certificates import HERE, Authority
from tests.service.conftest import serve, server, template
from whippet_client.pb.whippet.v1 import generation_pb2 as pb
from whippet_client.pb.whippet.v1 import generation_pb2_grpc

__all__ = ["serve", "server", "template"]


@dataclass
class Refuses:
    """A failure, and what a server says of it beside its code."""

    code: grpc.StatusCode
    reason: str = ""
    retry_ms: int | None = None
    raw: bytes | None = None  # in place of details
    late: bool = False  # after the first message of a stream


@dataclass
class Script(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each call with what comes next, and then well."""

    failures: list[Refuses] = field(default_factory=list)
    calls: list[dict[str, str | bytes]] = field(default_factory=list)  # metadata of each

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        self._called(context)
        if self.failures:
            fail(context, self.failures.pop(0))
        return pb.GenerateResponse(text="well")

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self._called(context)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not failure.late:
            fail(context, failure)
        yield pb.GenerateStreamResponse(text="we")
        if failure is not None:
            fail(context, failure)
        yield pb.GenerateStreamResponse(text="ll", finish=pb.Finish(reason=pb.FINISH_REASON_STOP))

    def _called(self, context: grpc.ServicerContext) -> None:
        self.calls.append(dict(context.invocation_metadata()))


def fail(context: grpc.ServicerContext, how: Refuses) -> None:
    details = []
    if how.reason:
        details.append(error_details_pb2.ErrorInfo(reason=how.reason, domain="whippet", metadata={"field": "f"}))
    if how.retry_ms is not None:
        delay = Duration()
        delay.FromMilliseconds(how.retry_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=how.code.value[0], message="m")
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    trailers: list[tuple[str, str | bytes]] = [
        ("grpc-status-details-bin", status.SerializeToString() if how.raw is None else how.raw)
    ]
    if how.retry_ms is not None:
        trailers.append(("grpc-retry-pushback-ms", str(how.retry_ms)))
    context.set_trailing_metadata(tuple(trailers))
    context.abort(how.code, "m")


@dataclass(frozen=True)
class Scripted:
    """A server that follows a script, with TLS and without."""

    script: Script
    address: str
    tls_address: str
    folder: Path  # ca.pem


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    authority = Authority("ca")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    key, certificate = authority.sign(*HERE)
    script = Script()
    with futures.ThreadPoolExecutor(4) as threads:
        one = grpc.server(threads)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(script, one)
        port = one.add_insecure_port("127.0.0.1:0")
        secure = one.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
        one.start()
        yield Scripted(script, f"127.0.0.1:{port}", f"127.0.0.1:{secure}", tmp_path)
        one.stop(None).wait()
