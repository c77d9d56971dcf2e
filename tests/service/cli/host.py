"""A real server on a real channel, which does what a test tells it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1 import generation_pb2_grpc

Behaviour = Callable[[pb.GenerateStreamRequest, grpc.ServicerContext], Iterator[pb.GenerateStreamResponse]]


def two_words(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
    yield pb.GenerateStreamResponse(
        text="Grüße, ", prompt_info=pb.PromptInfo(request_id="r1", model="m", prompt_tokens=3)
    )
    yield pb.GenerateStreamResponse(
        text="Welt",
        finish=pb.Finish(
            reason=pb.FINISH_REASON_STOP_STRING,
            stop_string="\n",
            usage=pb.Usage(prompt_tokens=3, completion_tokens=2),
            timings=pb.Timings(queue=Duration(nanos=1_500_000), decode=Duration(seconds=2)),
            cache_source=pb.CACHE_SOURCE_NONE,
            sampling=pb.SamplingOptions(temperature=0.7, seed=11),
        ),
    )


class Scripted(generation_pb2_grpc.GenerationServiceServicer):
    """Does what it is told and keeps what it was asked."""

    def __init__(self) -> None:
        self.behaviour: Behaviour = two_words
        self.requests: list[pb.GenerateStreamRequest] = []
        self.metadata: dict[str, str] = {}
        self.ended = threading.Event()

    def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateStreamResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        context.add_callback(self.ended.set)
        yield from self.behaviour(request, context)


class Host:
    """`address`: a Unix socket; None: a free port."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None, address: str | None = None) -> None:
        self.servicer = Scripted()
        self.server = grpc.server(ThreadPoolExecutor(4))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.servicer, self.server)
        if address is not None:
            port = self.server.add_insecure_port(address)
        elif credentials is None:
            port = self.server.add_insecure_port("127.0.0.1:0")
        else:
            port = self.server.add_secure_port("127.0.0.1:0", credentials)
        self.address = address or f"127.0.0.1:{port}"
        self.server.start()

    @property
    def request(self) -> pb.GenerateStreamRequest:
        return self.servicer.requests[-1]


def pack(*details: object) -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status(code=3, message="bad")
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)  # type: ignore[arg-type]
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def refusing(code: grpc.StatusCode, message: str, *details: object, after: int = 0) -> Behaviour:
    def behave(request: pb.GenerateStreamRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateStreamResponse]:
        for _ in range(after):
            yield pb.GenerateStreamResponse(text="part ")
        context.set_trailing_metadata(pack(*details))
        context.abort(code, message)

    return behave
