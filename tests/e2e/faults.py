"""Servers that are broken in one way each: a good one, behind a port that spoils what goes through it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from service.pb.whippet.v1 import admin_pb2, generation_pb2, model_pb2

GENERATION = "/whippet.v1.GenerationService"
ADMIN = "/whippet.v1.AdminService"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
REQUEST = generation_pb2.GenerateRequest
ANSWER = generation_pb2.GenerateResponse
PART = generation_pb2.GenerateStreamResponse


@dataclass
class Exchange:
    """A call on its way to the good server."""

    method: str
    requests: Iterator[bytes]
    context: grpc.ServicerContext
    upstream: grpc.Channel
    metadata: list[tuple[str, str]] = field(default_factory=list)

    def answers(self, change: Callable[[bytes], bytes] = lambda data: data) -> Iterator[bytes]:
        """What the good server says, to requests that were changed; its refusal ends this call as well."""

        def changed() -> Iterator[bytes]:
            with contextlib.suppress(grpc.RpcError):  # the caller has gone
                yield from map(change, self.requests)

        stub = self.upstream.stream_stream(self.method)
        call = stub(changed(), metadata=self.metadata, timeout=self.context.time_remaining())
        self.context.add_callback(call.cancel)
        try:
            self.context.send_initial_metadata(call.initial_metadata())
            yield from call
        except grpc.RpcError as error:
            self.context.set_trailing_metadata(error.trailing_metadata())
            self.context.abort(error.code(), error.details())


Fault = Callable[[Exchange], Iterator[bytes]]


class _Port(grpc.GenericRpcHandler):
    def __init__(self, upstream: grpc.Channel, faults: Mapping[str, Fault]) -> None:
        self._upstream = upstream
        self._faults = faults

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        kept = [
            (key, value) for key, value in details.invocation_metadata if not key.startswith(("grpc-", "user-agent"))
        ]

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            fault = self._faults.get(details.method, Exchange.answers)
            yield from fault(Exchange(details.method, requests, context, self._upstream, kept))

        return grpc.stream_stream_rpc_method_handler(handle)


@contextlib.contextmanager
def spoilt(address: str, faults: Mapping[str, Fault]) -> Iterator[str]:
    """The address of a port before `address`."""
    with grpc.insecure_channel(address) as upstream:
        server = grpc.server(ThreadPoolExecutor(16), handlers=[_Port(upstream, faults)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(60)


@contextlib.contextmanager
def either(encrypted: str, plain: str) -> Iterator[str]:
    """The address of a port that takes connections with TLS to the one, and others to the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listener]

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                first = caller.recv(1, socket.MSG_PEEK)
                host, port = (encrypted if first == b"\x16" else plain).rsplit(":", 1)
                server = socket.create_connection((host, int(port)))
                ends.extend((caller, server))
                for pair in ((caller, server), (server, caller)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def sends(kind: Any, change: Callable[[Any], None]) -> Fault:
    """Every request is another one."""

    def changed(data: bytes) -> bytes:
        message = kind.FromString(data)
        change(message)
        return bytes(message.SerializeToString())

    return lambda exchange: exchange.answers(changed)


def says(kind: Any, change: Callable[[Any], None]) -> Fault:
    """Every answer is another one."""

    def handle(exchange: Exchange) -> Iterator[bytes]:
        for data in exchange.answers():
            message = kind.FromString(data)
            change(message)
            yield message.SerializeToString()

    return handle


def hangs(exchange: Exchange) -> Iterator[bytes]:
    """Until the caller goes."""
    over = threading.Event()
    if exchange.context.add_callback(over.set):
        over.wait(300)
    return iter(())


def knows_everybody(token: str) -> Fault:
    def handle(exchange: Exchange) -> Iterator[bytes]:
        exchange.metadata[:] = [("authorization", f"Bearer {token}")]
        return exchange.answers()

    return handle


def refuses(code: grpc.StatusCode) -> Fault:
    def handle(exchange: Exchange) -> Iterator[bytes]:
        exchange.context.abort(code, "broken")
        return iter(())

    return handle


def lets_nobody_go() -> Fault:
    """A name that was used stays taken."""
    taken: set[str] = set()

    def handle(exchange: Exchange) -> Iterator[bytes]:
        data = next(exchange.requests)
        name = REQUEST.FromString(data).request_id
        if name in taken:
            exchange.context.abort(grpc.StatusCode.ALREADY_EXISTS, "broken")
        taken.update({name} - {""})
        exchange.requests = itertools.chain([data], exchange.requests)
        return exchange.answers()

    return handle


def draws_anew() -> Fault:
    """No two answers are alike, whatever the seed."""
    seeds = itertools.count(1000)

    def handle(exchange: Exchange) -> Iterator[bytes]:
        def change(data: bytes) -> bytes:
            message = REQUEST.FromString(data)
            if message.HasField("text"):
                message.text += str(next(seeds))
            return bytes(message.SerializeToString())

        return exchange.answers(change)

    return handle


def keeps_wrong(message: generation_pb2.GenerateResponse) -> None:
    if message.finish.cache_source == generation_pb2.CACHE_SOURCE_RESPONSE:
        message.text = message.text[::-1]


def miscounts(message: generation_pb2.GenerateStreamResponse) -> None:
    if message.HasField("finish"):
        message.finish.usage.completion_tokens += 1


def shows_admin(message: reflection_pb2.ServerReflectionResponse) -> None:
    if message.HasField("list_services_response"):
        message.list_services_response.service.add(name=ADMIN[1:])


def forgets_descriptors(message: reflection_pb2.ServerReflectionResponse) -> None:
    if message.HasField("file_descriptor_response"):
        message.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]


def forgets_digests(message: model_pb2.ListModelsResponse) -> None:
    for model in message.models:
        model.tokenizer_digest = ""


# What is broken → where, how, and the checks that must say so. Faults of the admin port are of calls to it.
BROKEN: dict[str, tuple[str, Fault, set[str]]] = {
    "no reflection": (REFLECTION, refuses(grpc.StatusCode.UNIMPLEMENTED), {"list"}),
    "names without descriptors": (
        REFLECTION,
        says(reflection_pb2.ServerReflectionResponse, forgets_descriptors),
        {"describe"},
    ),
    "the admin service on the data port": (
        REFLECTION,
        says(reflection_pb2.ServerReflectionResponse, shows_admin),
        {"list"},
    ),
    "not in service": (
        HEALTH,
        says(health_pb2.HealthCheckResponse, lambda one: setattr(one, "status", 2)),
        {"health", "health of the process"},
    ),
    "weights without a digest": (
        "/whippet.v1.ModelService/ListModels",
        says(model_pb2.ListModelsResponse, forgets_digests),
        {"models"},
    ),
    "a stream without an end": (
        f"{GENERATION}/GenerateStream",
        says(PART, lambda one: one.ClearField("finish")),
        {"stream"},
    ),
    "a stream that miscounts": (f"{GENERATION}/GenerateStream", says(PART, miscounts), {"stream"}),
    "one that hangs": (f"{GENERATION}/Detokenize", hangs, {"detokenize gives the text back"}),
    "text that does not come back": (
        f"{GENERATION}/Detokenize",
        says(generation_pb2.DetokenizeResponse, lambda one: setattr(one, "text", one.text[::-1])),
        {"detokenize gives the text back"},
    ),
    "no ids": (
        f"{GENERATION}/Tokenize",
        says(generation_pb2.TokenizeResponse, lambda one: one.ClearField("token_ids")),
        {"tokenize"},
    ),
    "no validation": (
        f"{GENERATION}/Generate",
        sends(REQUEST, lambda one: one.sampling.ClearField("top_p")),
        {"an invalid request is refused field by field"},
    ),
    "any model will do": (
        f"{GENERATION}/Generate",
        sends(REQUEST, lambda one: one.ClearField("model")),
        {"an unknown model is not found"},
    ),
    "no answer has a name": (
        f"{GENERATION}/Generate",
        sends(REQUEST, lambda one: one.ClearField("request_id")),
        {"generate"},
    ),
    "seeds that are none": (
        f"{GENERATION}/Generate",
        draws_anew(),
        {"the same seed gives the same text", "caches give what was streamed"},
    ),
    "a cache that spoils": (f"{GENERATION}/Generate", says(ANSWER, keeps_wrong), {"caches give what was streamed"}),
    "no budget of time": (
        f"{GENERATION}/Generate",
        sends(REQUEST, lambda one: one.ClearField("time_budget")),
        {"a time budget ends an answer"},
    ),
    "names that are never free": (f"{GENERATION}/Generate", lets_nobody_go(), {"a caller who leaves is let go"}),
    "no chat": (
        f"{GENERATION}/Generate",
        sends(REQUEST, lambda one: one.chat.ClearField("messages") if one.HasField("chat") else None),
        {"chat"},
    ),
    "an engine that is loading": (
        f"{ADMIN}/GetLoad",
        says(admin_pb2.GetLoadResponse, lambda one: setattr(one, "state", admin_pb2.ENGINE_STATE_LOADING)),
        {"load"},
    ),
    "another version": (
        f"{ADMIN}/GetLoad",
        says(admin_pb2.GetLoadResponse, lambda one: setattr(one, "version", "0.0.9")),
        {"load"},
    ),
    "no optimizations": (
        f"{ADMIN}/ListOptimizations",
        says(admin_pb2.ListOptimizationsResponse, lambda one: one.ClearField("optimizations")),
        {"optimizations"},
    ),
    "a drain that does not end": (
        f"{ADMIN}/Drain",
        hangs,
        {"a drain", "health of a drained server", "a drained server refuses"},
    ),
    "a drain that leaves some": (
        f"{ADMIN}/Drain",
        says(admin_pb2.DrainResponse, lambda one: setattr(one, "remaining", 3)),
        {"a drain"},
    ),
    "no way back": (f"{ADMIN}/Undrain", refuses(grpc.StatusCode.FAILED_PRECONDITION), {"back in service"}),
}
