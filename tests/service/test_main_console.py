"""The console of a running server: its figures, its rights, its playground."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.pb.whippet.v1 import admin_pb2
from tests.service.browsed import HEADERS, browse, question
from tests.service.certificates import HERE, Authority, write_pair
from tests.service.conftest import Server, ask, ask_stream, refused
from tests.service.scraped import Page, fetch, parsed, value
from tests.service.transport.presented import entry, named
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
MARKUP = "<img src=x onerror=alert(1)></script><b>"


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    with serve("--fake.step-time=0.01", "--scheduler.max-sequences=8", "--optimizations.response-cache=true") as one:
        yield one


def test_every_figure_is_the_metrics_own(server: Server) -> None:
    """Compared while nothing happens, once the state of the second before is gone."""
    server.generation.Generate(ask("one", 4), timeout=60)
    list(server.generation.GenerateStream(ask_stream("two", 40), timeout=60))
    assert refused(server.generation.Generate, ask("x", 0)).code is grpc.StatusCode.INVALID_ARGUMENT
    server.idle()
    wait_for(lambda: _differences(server) == [])


FIGURES = {  # of GetLoad, and their families
    "steps": "engine_steps_total",
    "generated_tokens": "generated_tokens_total",
    "prompt_tokens": "prompt_tokens_total",
    "cached_tokens": "prompt_cached_tokens_total",
    "draft_proposed": "draft_proposed_tokens_total",
    "draft_accepted": "draft_accepted_tokens_total",
    "preemptions": "preemptions_total",
    "restarts": "engine_restarts_total",
    "live_requests": "requests_live",
    "looking_requests": "requests_looking",
    "queued_requests": "generations{state=waiting}",
    "queue_limit": "limits{kind=waiting}",
    "running": "engine_sequences{state=running}",
    "waiting": "engine_sequences{state=waiting}",
    "paused": "engine_sequences{state=paused}",
    "used_pages": "engine_pages{state=used}",
    "kept_pages": "engine_pages{state=kept}",
    "total_pages": "limits{kind=pages}",
}
LATENCIES = {
    "first_token": "time_to_first_token_seconds",
    "whole": "e2e_request_latency_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "queue": "request_queue_time_seconds",
}
Pairs = Iterator[tuple[str, float, float]]  # a name, what the page would show, and what a scrape says


def _differences(server: Server) -> list[tuple[str, float, float]]:
    state = browse(server.metrics, "/api/state").json()["state"]
    page = parsed(fetch(f"http://{server.metrics}/metrics"))
    pairs = [*_figures(state["load"], page), *_latencies(state["load"]["seconds"], page), *_others(state, page)]
    assert len(pairs) > 80
    assert sum(shown for _, shown, _ in pairs) > 100
    return [pair for pair in pairs if pair[1] != pair[2]]


def _figures(load: Any, page: Page) -> Pairs:
    for field, metric in FIGURES.items():
        name, _, label = metric.rstrip("}").partition("{")
        labels = dict([label.split("=")]) if label else {}
        yield field, float(load[field]), value(page, name, **labels)
    for code, number in load["ended_calls"].items():
        yield f"ended {code}", float(number), _calls(page, code)


def _latencies(seconds: Any, page: Page) -> Pairs:
    for name, metric in LATENCIES.items():
        borders, below = [*map(str, seconds[name]["borders"]), "+Inf"], 0
        for border, number in zip(borders, seconds[name]["counts"], strict=True):
            below += int(number)
            yield f"{name} {border}", float(below), _bucket(page, f"whippet_{metric}_bucket", border)


def _others(state: Any, page: Page) -> Pairs:
    for outcome in ("hit", "miss"):
        shown = float(state["load"]["cache_counts"].get(f"response_lookup.{outcome}", 0))
        yield outcome, shown, value(page, "cache_requests_total", cache="response", outcome=outcome)
    for store, size in state["cache_bytes"].items():
        yield store, float(size), value(page, "cache_bytes", store=store)
    for one in state["optimizations"]:
        enabled = page["whippet_optimization_enabled", (("name", one["name"]),)]
        yield one["name"], float(one["effective"]), enabled


def _calls(page: Page, code: str) -> float:
    """Calls that generate, of whatever protocol."""
    wanted = ("GenerationService", "vllm", "inference.")
    return sum(
        count
        for (name, labels), count in page.items()
        if name == "whippet_requests_total" and dict(labels)["code"] == code
        if any(word in dict(labels)["method"] for word in wanted)
    )


def _bucket(page: Page, name: str, border: str) -> float:
    """Of all label values together."""
    return sum(count for (found, labels), count in page.items() if found == name and dict(labels)["le"] == border)


def test_the_start_says_where_it_is(server: Server) -> None:
    assert f" console http://{server.metrics}/ metrics http://" in server.log.read_text()


def test_what_serves_and_the_last_errors(server: Server) -> None:
    assert refused(server.generation.Generate, ask(MARKUP, 0)).code is grpc.StatusCode.INVALID_ARGUMENT
    wait_for(lambda: bool(browse(server.metrics, "/api/state").json()["state"]["errors"]))
    state = browse(server.metrics, "/api/state").json()["state"]
    assert state["model"]["decoder"] == "fake"
    assert state["load"]["state"] == "ENGINE_STATE_READY"
    error = state["errors"][0]
    assert (error["method"], error["code"]) == ("whippet.v1.GenerationService/Generate", "INVALID_ARGUMENT")
    assert "onerror" not in json.dumps(state)


def test_the_playground_streams_what_a_call_over_grpc_does(server: Server) -> None:
    """With probabilities and timings; markup comes back as it was sent, in JSON, and neither is in the log."""
    asked = question(f"hello {MARKUP}", 24, output={"logprobs": 2}, sampling={"temperature": 0}, request_id="page-1")
    answer = browse(server.metrics, "/api/generate", asked)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert answer.headers["x-content-type-options"] == "nosniff"
    lines = answer.lines()
    assert lines[0]["prompt_info"]["request_id"] == "page-1"
    finish = lines[-1]["finish"]
    assert finish["usage"]["completion_tokens"] == 24
    assert set(finish["timings"]) == {"queue", "cache_lookup", "prefill", "decode"}
    tokens = [token for line in lines for token in line.get("logprobs", ())]
    assert len(tokens) == 24
    assert all(len(token["top"]) == 2 for token in tokens)
    request = ask_stream("", None)
    request.ClearField("text")
    request.chat.messages.add(role="user", content=f"hello {MARKUP}")
    request.stopping.max_tokens, request.sampling.temperature = 24, 0
    streamed = "".join(one.text for one in server.generation.GenerateStream(request, timeout=60))
    assert "".join(line.get("text", "") for line in lines) == streamed
    log = server.log.read_text()
    assert "request_id=page-1" in log
    assert "onerror" not in log


def test_a_stream_that_is_cancelled_frees_its_slot(server: Server) -> None:
    host, _, port = server.metrics.rpartition(":")
    before = server.idle()
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    body = json.dumps(question("long", 4000, request_id="page-2"))
    connection.request("POST", "/api/generate", body, {**HEADERS, "Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline()
    assert server.until(lambda load: load.running == 1).live_requests == 1
    answer.close()
    connection.close()
    after = server.idle()
    assert after.live_requests == 0
    assert after.generated_tokens - before.generated_tokens < 4000
    wait_for(lambda: "request_id=page-2" in server.log.read_text())
    (line,) = [line for line in server.log.read_text().splitlines() if "request_id=page-2" in line]
    assert " code=CANCELLED " in line


def test_admission_is_the_data_ports(serve: Serve) -> None:
    flags = ("--limits.tenant-requests=1", "--fake.step-time=0.02")
    with serve(*flags) as one:
        stream = one.generation.GenerateStream(ask_stream("x", 4000), timeout=60)
        next(iter(stream))
        answer = browse(one.metrics, "/api/generate", question("y"))
        assert answer.status == 429
        assert answer.json()["error"]["code"] == "RESOURCE_EXHAUSTED"
        assert answer.json()["error"]["retry_ms"] > 0
        stream.cancel()
        one.idle()
        assert browse(one.metrics, "/api/generate", question("y", 2)).lines()[-1]["finish"]
        one.admin.Drain(admin_pb2.DrainRequest(), timeout=60)
        assert browse(one.metrics, "/api/generate", question("y")).status == 503


def test_rights_are_those_of_the_tokens(serve: Serve, tmp_path: Path) -> None:
    rights = ("view", "generate", "admin")
    (tmp_path / "tokens").write_text("".join(entry(token=right, rights=f"[{right}]") for right in rights))
    switch = {"name": "batching", "enabled": False}
    # Though the port is open to others.
    with serve(f"--auth.tokens-file={tmp_path}/tokens", "--metrics-listen=0.0.0.0:0") as one:
        address = one.metrics.replace("0.0.0.0", "127.0.0.1")
        assert browse(address, "/", headers={}).status == 200  # the page says nothing
        for path, body in (("/api/state", None), ("/api/generate", question("x")), ("/api/switch", switch)):
            for token in ("", "nobody"):
                answer = browse(address, path, body, token=token)
                assert answer.status == 401
                assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
        for right in rights:
            shown = browse(address, "/api/state", token=right).json()
            assert shown["rights"] == [right]
            assert (shown["state"] is None) == (right == "generate")
            generated = browse(address, "/api/generate", question("x"), token=right)
            assert generated.status == (200 if right == "generate" else 403)
            if right != "admin":
                assert browse(address, "/api/switch", switch, token=right).status == 403
        enabled = admin_pb2.ListOptimizationsRequest()
        known = (("authorization", "Bearer admin"),)

        def batching() -> bool:
            found = one.admin.ListOptimizations(enabled, metadata=known, timeout=60).optimizations
            return {switch.name: switch.enabled for switch in found}["batching"]

        assert batching()
        answer = browse(address, "/api/switch", switch, token="admin")
        assert answer.lines()[0]["optimization"]["name"] == "batching"
        assert not batching()


def test_where_the_port_is_open_and_nobody_says_who_calls_there_is_no_console(serve: Serve) -> None:
    with serve("--metrics-listen=0.0.0.0:0", "--insecure") as one:
        address = one.metrics.replace("0.0.0.0", "127.0.0.1")
        for path in ("/", "/api/state"):
            assert browse(address, path).status == 403
        assert browse(address, "/api/generate", question("x")).status == 403
        assert fetch(f"http://{address}/metrics")


def test_off(serve: Serve) -> None:
    with serve("--console.enabled=false") as one:
        assert " console " not in one.log.read_text()
        assert browse(one.metrics, "/").status == 404
        assert browse(one.metrics, "/api/generate", question("x")).status == 404


def test_over_tls_certificates_say_who_looks_and_scrapes_go_on_in_plain_text(serve: Serve, tmp_path: Path) -> None:
    authority = Authority("ca")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    write_pair(tmp_path, "server", authority.sign(*HERE))
    write_pair(tmp_path, "operator", authority.sign(*HERE))
    (tmp_path / "tokens").write_text(named("DNS:localhost", "ops", "[admin]") + entry(token="user"))
    files = {"cert": "server.pem", "key": "server.key", "client-ca": "ca.pem"}
    flags = [f"--tls.{name}={tmp_path}/{file}" for name, file in files.items()]
    with serve(*flags, f"--auth.tokens-file={tmp_path}/tokens", "--metrics-listen=0.0.0.0:0") as one:
        address = one.metrics.replace("0.0.0.0", "127.0.0.1")

        def secure(client: str | None) -> http.client.HTTPSConnection:
            context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            if client is not None:
                context.load_cert_chain(tmp_path / f"{client}.pem", tmp_path / f"{client}.key")
            return http.client.HTTPSConnection(address, timeout=60, context=context)

        assert fetch(f"http://{address}/metrics")
        moved = browse(address, "/")
        assert (moved.status, moved.headers["location"]) == (308, f"https://{address}/")
        assert browse(address, "/api/state", token="user").status == 403
        assert browse(address, "/", connection=secure("operator")).body.startswith(b"<!doctype html>")
        assert browse(address, "/api/state", connection=secure("operator")).json()["rights"] == ["admin"]
        switch = {"name": "batching", "enabled": False}
        assert browse(address, "/api/switch", switch, connection=secure("operator")).status == 200
        # A token wins over the certificate, as on the other ports.
        assert browse(address, "/api/switch", switch, token="user", connection=secure("operator")).status == 403
        answer = browse(address, "/api/generate", question("x", 3), token="user", connection=secure("operator"))
        assert answer.lines()[-1]["finish"]["usage"]["completion_tokens"] == 3
        with pytest.raises(OSError):  # noqa: PT011 - the handshake or the first read fails
            browse(address, "/", connection=secure(None))
        # The new certificate is shown to the next connection.
        before = (tmp_path / "server.pem").read_bytes()
        write_pair(tmp_path, "server", authority.sign(*HERE))
        assert before != (tmp_path / "server.pem").read_bytes()
        shown = ssl.PEM_cert_to_DER_cert((tmp_path / "server.pem").read_text())

        def presented() -> bool:
            connection = secure("operator")
            connection.connect()
            found = connection.sock.getpeercert(binary_form=True)
            connection.close()
            return bool(found == shown)

        wait_for(presented)


def test_beside_relays(serve: Serve) -> None:
    with serve("--server.fronts=2") as one:
        assert browse(one.metrics, "/api/generate", question("x", 3)).lines()[-1]["finish"]


def test_a_reader_that_takes_nothing_is_given_up(serve: Serve) -> None:
    flags = ("--stream.stall-timeout=0.5", "--fake.step-time=0.0005")
    with serve(*flags) as one, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = one.metrics.rpartition(":")
        slow.connect((host, int(port)))
        # Eight megabytes, more than the kernel holds for it.
        body = json.dumps(question("x", 4000, output={"logprobs": 20}, request_id="slow")).encode()
        head = (
            f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nX-Whippet-Console: 1\r\nContent-Length: {len(body)}\r\n"
        )
        slow.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_for(lambda: "reason=STREAM_STALLED request_id=slow" in one.log.read_text())
        assert one.idle().live_requests == 0
