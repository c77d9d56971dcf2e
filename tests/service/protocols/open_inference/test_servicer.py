"""Streams of requests that go on for long."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
from collections.abc import Callable, Iterator

import grpc
import pytest

from bench.floods import HTTP2
from service.pb.inference import grpc_service_pb2 as pb
from service.pb.inference import grpc_service_pb2_grpc
from tests.service.conftest import PATIENCE, Server
from tests.service.protocols.open_inference.test_tritonclient import question

pytestmark = pytest.mark.product
Serve = Callable[..., contextlib.AbstractContextManager[Server]]
CONNECTIONS = 16


def test_a_stream_is_not_evicted_between_its_requests(serve: Serve) -> None:
    """Its connection has been there longest, and all come from one address."""
    requests: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()

    def asked() -> Iterator[pb.ModelInferRequest]:
        yield from iter(requests.get, None)

    with serve(f"--limits.connections={CONNECTIONS}") as server, contextlib.ExitStack() as held:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(held.enter_context(grpc.insecure_channel(server.data)))
        stream = stub.ModelStreamInfer(asked(), timeout=PATIENCE)
        requests.put(question("first", stream=False, tokens=2))
        assert not next(stream).error_message
        strangers = [held.enter_context(socket.create_connection(address(server.data))) for _ in range(CONNECTIONS)]
        for one in strangers:
            one.sendall(HTTP2)
        until_closed(strangers)
        requests.put(question("second", stream=False, tokens=2))
        requests.put(None)
        assert [answer.error_message for answer in stream] == [""]


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def until_closed(sockets: list[socket.socket]) -> None:
    """Waits until the server has closed one of the sockets."""
    while True:
        readable, _, _ = select.select(sockets, [], [], PATIENCE)
        assert readable, "none was closed"
        for one in readable:
            try:
                if not one.recv(4096):
                    return
            except ConnectionResetError:
                return
