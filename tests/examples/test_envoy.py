"""examples/load-balancing/envoy.yaml, as a real Envoy takes it, in front of servers. That no stream is lost while they
are replaced is shown in tests/timing/test_rolling.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2
from tests import envoy
from tests.examples.behind import PATIENCE, Serve, asked, backend, certificates, client, ended, kill, with_tls, working
from tests.service.conftest import Server, ask, refused

pytestmark = pytest.mark.proof

Pair = tuple[Server, Server]
NEVER = "86400s"


@pytest.fixture(scope="module")
def pair(serve: Serve) -> Iterator[Pair]:
    with serve("--fake.step-time=0.005") as one, serve("--fake.step-time=0.005") as other:
        yield one, other


def late_to_notice(config: dict[str, Any]) -> None:
    """Health is asked once, so that what happens next is seen by calls alone."""
    (cluster,) = config["static_resources"]["clusters"]
    cluster["health_checks"][0] |= {"interval": NEVER, "no_traffic_interval": NEVER}


def short_connections(config: dict[str, Any]) -> None:
    """Of clients."""
    (listener,) = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["common_http_protocol_options"]["max_connection_duration"] = "0.2s"
    manager["drain_timeout"] = "0.2s"


def test_messages_come_one_by_one_and_errors_as_they_were(pair: Pair, tmp_path: Path) -> None:
    with envoy.running(tmp_path, [backend(one) for one in pair]) as proxy, client(proxy.address) as stub:
        stream = stub.GenerateStream(asked("by and by", 4000), timeout=PATIENCE)
        assert all(next(stream).token_ids for _ in range(3))
        assert sum(map(working, pair)) == 1  # it goes on: nobody has gathered it up
        stream.cancel()
        assert stub.Generate(ask("unary", 8), timeout=PATIENCE).finish.usage.completion_tokens == 8
        wrong = refused(stub.Generate, ask("x", 8, model="another"), timeout=PATIENCE)
        assert wrong.code is grpc.StatusCode.NOT_FOUND
        for _ in range(12):  # impatient callers put no server out
            refused(stub.Generate, ask("late", 4000), timeout=0.05)
        assert proxy.stat("outlier_detection.ejections_active") == 0
        assert proxy.stat("membership_healthy") == 2


def test_who_is_refused_by_one_is_served_by_the_other_and_else_hears_the_hint(pair: Pair, tmp_path: Path) -> None:
    """Refused is who comes to a server that drains, before health has told Envoy."""
    backends = [backend(one) for one in pair]
    with envoy.running(tmp_path, backends, late_to_notice) as proxy, client(proxy.address) as stub:
        try:
            pair[0].admin.Drain(admin_pb2.DrainRequest(), timeout=PATIENCE)
            # One after the other: of two servers the one that refuses is the least busy, and is soon asked again.
            for number in range(16):
                assert ended(stub.Generate.future(ask(f"elsewhere {number}", 4), timeout=PATIENCE)) == "whole"
            assert proxy.stat("upstream_rq_retry") > 0
            pair[1].admin.Drain(admin_pb2.DrainRequest(), timeout=PATIENCE)
            refusal = refused(stub.Generate, ask("nowhere", 4), timeout=PATIENCE)
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert refusal.retry_ms > 0
        finally:
            for one in pair:
                one.admin.Undrain(admin_pb2.UndrainRequest(), timeout=PATIENCE)


def test_a_server_that_is_killed_costs_no_request_that_had_no_token(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    """One whose step takes half a minute is killed under the requests that it was given."""
    with serve("--fake.step-time=30") as slow:
        backends = [backend(slow), backend(pair[0])]
        with envoy.running(tmp_path, backends, late_to_notice) as proxy, client(proxy.address) as stub:
            futures = [stub.Generate.future(ask(f"unary {n}", 8), timeout=PATIENCE) for n in range(12)]
            streams = [stub.GenerateStream(asked(f"streamed {n}", 8), timeout=PATIENCE) for n in range(12)]
            slow.until(lambda load: load.live_requests >= 4, PATIENCE)
            pair[0].idle(PATIENCE)
            kill(slow)
            assert {ended(future) for future in futures} == {"whole"}
            assert {sum(len(message.token_ids) for message in stream) for stream in streams} == {8}
            proxy.until("outlier_detection.ejections_active", lambda count: count == 1)  # health was not asked
            assert ended(stub.Generate.future(ask("after", 8), timeout=PATIENCE)) == "whole"


def test_an_answer_that_has_begun_is_not_begun_again(serve: Serve, pair: Pair, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        dying = stack.enter_context(serve("--fake.step-time=0.05"))
        proxy = stack.enter_context(envoy.running(tmp_path, [backend(dying)]))
        stub = stack.enter_context(client(proxy.address))
        stream = stub.GenerateStream(asked("begun", 4000), timeout=PATIENCE)
        next(stream)
        kill(dying)
        assert refused(lambda **_: stream).code is grpc.StatusCode.INTERNAL
        assert proxy.stat("upstream_rq_retry") == 0


def test_streams_outlive_the_connections_that_clients_are_to_make_anew(pair: Pair, tmp_path: Path) -> None:
    backends = [backend(one) for one in pair]
    with envoy.running(tmp_path, backends, short_connections) as proxy, client(proxy.address) as stub:
        stream = stub.GenerateStream(asked("long", 400), timeout=PATIENCE)  # two seconds
        assert sum(len(message.token_ids) for message in stream) == 400
        assert ended(stub.Generate.future(ask("anew", 8), timeout=PATIENCE)) == "whole"


def test_with_tls_on_both_sides(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    trusted = certificates(folder)
    flags = (f"--tls.cert={folder}/tls.crt", f"--tls.key={folder}/tls.key", f"--tls.client-ca={folder}/ca.crt")
    example = with_tls(envoy.EXAMPLE.read_text(), folder, "/etc/envoy/tls")
    with serve(*flags) as server, envoy.running(tmp_path, [backend(server)], example=example) as proxy:
        with client(proxy.address, trusted) as stub:
            assert ended(stub.Generate.future(ask("safe", 8), timeout=PATIENCE)) == "whole"
        with client(proxy.address) as stub:
            assert refused(stub.Generate, ask("plain", 8), timeout=PATIENCE).code is grpc.StatusCode.UNAVAILABLE
