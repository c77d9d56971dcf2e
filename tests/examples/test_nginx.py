"""examples/load-balancing/nginx.conf, as a real NGINX takes it, in front of servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from tests import nginx
from tests.examples.behind import PATIENCE, Serve, asked, backend, certificates, client, ended, kill, with_tls, working
from tests.service.conftest import Server, ask, refused

pytestmark = pytest.mark.proof

Pair = tuple[Server, Server]
RETRIES = {
    "name": [{}],
    "retryPolicy": {
        "maxAttempts": 5,
        "initialBackoff": "0.1s",
        "maxBackoff": "1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    },
}


@pytest.fixture(scope="module")
def pair(serve: Serve) -> Iterator[Pair]:
    with serve("--fake.step-time=0.005") as one, serve("--fake.step-time=0.005") as other:
        yield one, other


@contextlib.contextmanager
def before(folder: Path, *servers: Server) -> Iterator[GenerationServiceStub]:
    """A client of an NGINX before them, that does what NGINX cannot."""
    options = (("grpc.service_config", json.dumps({"methodConfig": [RETRIES]})),)
    backends = [backend(one) for one in servers]
    with nginx.running(folder, backends) as address, grpc.insecure_channel(address, options) as channel:
        yield GenerationServiceStub(channel)


def test_messages_come_one_by_one_and_errors_as_they_were(pair: Pair, tmp_path: Path) -> None:
    with nginx.running(tmp_path, [backend(one) for one in pair]) as address, client(address) as stub:
        streams = [stub.GenerateStream(asked(f"by and by {n}", 4000), timeout=PATIENCE) for n in range(2)]
        for stream in streams:
            assert all(next(stream).token_ids for _ in range(3))
        assert list(map(working, pair)) == [1, 1]  # they go on, one on each
        for stream in streams:
            stream.cancel()
        assert stub.Generate(ask("unary", 8), timeout=PATIENCE).finish.usage.completion_tokens == 8
        wrong = refused(stub.Generate, ask("x", 8, model="another"), timeout=PATIENCE)
        assert wrong.code is grpc.StatusCode.NOT_FOUND
        long = ask("x", 1, token_ids={"ids": [70_000] * 1_500_000})
        assert (
            refused(stub.Generate, long, timeout=PATIENCE).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        )  # in gRPC's words


def test_a_drain_loses_no_call_of_a_client_that_tries_again(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    with serve("--fake.step-time=0.005") as leaving, before(tmp_path, leaving, pair[0]) as stub:
        streams = [stub.GenerateStream(asked(f"runs {n}", 200), timeout=PATIENCE) for n in range(4)]
        assert all(next(stream).token_ids for stream in streams)
        assert working(leaving)
        leaving.process.terminate()
        while leaving.process.poll() is None:
            assert ended(stub.Generate.future(ask("meanwhile", 4), timeout=PATIENCE)) == "whole"
        assert leaving.process.returncode == 0
        assert {sum(len(message.token_ids) for message in stream) for stream in streams} == {199}
        assert ended(stub.Generate.future(ask("afterwards", 4), timeout=PATIENCE)) == "whole"


def test_a_server_that_is_killed_costs_no_call_of_a_client_that_tries_again(
    serve: Serve, pair: Pair, tmp_path: Path
) -> None:
    with serve("--fake.step-time=30") as slow, before(tmp_path, slow, pair[0]) as stub:
        futures = [stub.Generate.future(ask(f"unary {n}", 8), timeout=PATIENCE) for n in range(8)]
        slow.until(lambda load: load.live_requests >= 2, PATIENCE)
        kill(slow)
        assert {ended(future) for future in futures} == {"whole"}


def test_where_no_server_answers_the_status_is_one_of_grpc(serve: Serve, tmp_path: Path) -> None:
    with serve() as gone:
        backends = [backend(gone)] * 2
    with nginx.running(tmp_path, backends) as address, client(address) as stub:
        refusal = refused(stub.Generate, ask("anybody", 1), timeout=PATIENCE)
        assert (refusal.code, refusal.message) == (grpc.StatusCode.UNAVAILABLE, "no server has answered")


def test_with_tls_on_both_sides(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    trusted = certificates(folder)
    flags = (f"--tls.cert={folder}/tls.crt", f"--tls.key={folder}/tls.key", f"--tls.client-ca={folder}/ca.crt")
    example = with_tls(nginx.EXAMPLE.read_text(), folder, "/etc/nginx/tls")
    example = example.replace("listen 50050 http2;", "").replace("grpc_pass grpc://whippet;", "")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serve(*flags))
        address = stack.enter_context(nginx.running(tmp_path, [backend(server)] * 2, example))
        stub = stack.enter_context(client(address, trusted))
        assert ended(stub.Generate.future(ask("safe", 8), timeout=PATIENCE)) == "whole"
