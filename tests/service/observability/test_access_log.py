"""One line for each call: what it says, what it never says, and how many there may be."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.log_lines import JsonLines
from service.observability.access_log import AccessLog
from service.observability.record import RecordBuilder
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.asked import kept
from tests.service.conftest import PATIENCE, Server, ask, ask_stream, refused

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
SERVICE = "whippet.v1.GenerationService"


def lines(log: Path) -> list[dict[str, Any]]:
    """All that are no announcement on stdout, which has the same file here."""
    written = log.read_text()
    whole = written[: written.rfind("\n") + 1].splitlines()
    announced = ("serving ", "call it: ", "ready: ")
    return [json.loads(line) for line in whole if not line.startswith(announced)]


def told(server: Server, **wanted: str) -> dict[str, Any]:
    """Waits for the line of a call."""
    end = time.monotonic() + PATIENCE
    while True:
        for line in lines(server.log):
            if line["logger"] == "access" and wanted.items() <= line.items():
                return line
        assert time.monotonic() < end, wanted
        time.sleep(0.02)


@pytest.fixture(scope="module")
def talkative(serve: Serve) -> Iterator[Server]:
    flags = ("--log.format=json", "--log-level=debug", "--optimizations.response-cache=true", "--fake.faults=true")
    with serve(*flags, "--fake.step-time=0.001") as one:
        yield one


def test_a_line_of_a_call_that_ended_well(talkative: Server) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    list(
        talkative.generation.GenerateStream(
            ask_stream("hello", 8, request_id="mine"),
            metadata=(("x-request-id", "theirs"), ("traceparent", parent)),
            timeout=60,
        )
    )
    line = told(talkative, request_id="mine")
    assert (line["level"], line["process"], line["method"]) == ("info", "front", f"{SERVICE}/GenerateStream")
    assert (line["code"], line["finish_reason"], line["client_request_id"]) == ("OK", "length", "theirs")
    assert line["trace_id"] == parent[3:35]
    assert (line["prompt_tokens"], line["completion_tokens"], line["messages_out"]) == (5, 8, 8)
    assert 0 < line["first_token_ms"] <= line["total_ms"]
    assert line["queue_ms"] + line["prefill_ms"] + line["decode_ms"] <= line["total_ms"]
    assert line["bytes_out"] > line["bytes_in"] > 0
    assert "tenant" not in line


def test_a_hit_and_a_follower(talkative: Server) -> None:
    greedy = {"sampling": pb.SamplingOptions(temperature=0)}
    slow = ask("asked twice at once", 400, request_id="first", **greedy)
    first = talkative.generation.Generate.future(slow, timeout=60)
    talkative.until(lambda load: load.running == 1)
    talkative.generation.Generate(ask("asked twice at once", 400, request_id="second", **greedy), timeout=60)
    first.result()
    leader, follower = told(talkative, request_id="first"), told(talkative, request_id="second")
    assert (leader["role"], follower["role"]) == ("leader", "follower")
    assert follower["leader_request_id"] == "first"
    assert leader["trace_id"]  # so that a trace of the follower can name the leader's
    assert "queue_ms" not in follower
    kept(talkative, pb.GenerateRequest.FromString(slow.SerializeToString()))
    assert told(talkative, cache="hit-response")["completion_tokens"] == 400


def test_lines_of_calls_that_did_not(talkative: Server) -> None:
    assert refused(talkative.generation.Generate, ask("x", 0)).code is grpc.StatusCode.INVALID_ARGUMENT
    assert told(talkative, method=f"{SERVICE}/Generate", code="INVALID_ARGUMENT")["level"] == "info"
    assert refused(talkative.channel.unary_unary("/any.Thing/Secret"), b"").code is grpc.StatusCode.UNIMPLEMENTED
    told(talkative, method="unknown", code="UNIMPLEMENTED")
    call = talkative.generation.GenerateStream(ask_stream("x", 4000, request_id="cut"), timeout=60)
    next(call)
    call.cancel()
    line = told(talkative, request_id="cut", code="CANCELLED")
    assert line["completion_tokens"] >= 1
    assert "finish_reason" not in line


def test_all_other_lines_are_objects_too(serve: Serve) -> None:
    """Those of both processes, of a death and of an end among them; `lines` parses each."""
    with serve("--log.format=json", "--log-level=debug", "--fake.faults=true") as server:
        killed = server.engine_pid()
        with contextlib.suppress(grpc.RpcError):
            os.kill(killed, signal.SIGKILL)
            list(server.generation.GenerateStream(ask_stream("x", 4000), timeout=60))
        end = time.monotonic() + PATIENCE
        while server.engine_pids() in ([], [killed]):  # the call may have ended before its death was noticed
            assert time.monotonic() < end
            time.sleep(0.01)
        assert server.stop() == 0
        every = lines(server.log)
        assert {line["process"] for line in every} == {"front", "engine"}
        assert [line for line in every if line["logger"] == "engine.client.supervisor" and line["level"] == "error"]


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "access")
    return caplog


def record(code: str = "OK", **fields: Any) -> Any:
    return RecordBuilder("a.B/C").build()._replace(code=code, **fields)


def test_a_flood_is_a_few_lines_and_a_number(written: pytest.LogCaptureFixture) -> None:
    now = 0.0
    access = AccessLog(tenants=False, clock=lambda: now)
    for _ in range(10_000):
        access(record("UNAUTHENTICATED"))
    assert len(written.records) == 20
    assert access.left_out == 9_980
    access(record("OK"))  # what is served has a bound of its own
    assert len(written.records) == 21
    assert written.records[-1].__dict__["fields"]["left_out"] == 9_980
    now = 1.0
    for _ in range(30):
        access(record("UNAUTHENTICATED"))
    assert len(written.records) == 41
    assert "left_out" not in written.records[-1].__dict__["fields"]


def test_who_is_named(written: pytest.LogCaptureFixture) -> None:
    AccessLog(tenants=True)(record(tenant="acme"))
    AccessLog(tenants=False)(record(tenant="acme"))
    named, unnamed = written.messages
    assert "tenant=acme" in named
    assert "acme" not in unnamed
    assert unnamed.startswith("method=a.B/C code=OK total_ms=")


def test_probes_are_for_debugging(written: pytest.LogCaptureFixture) -> None:
    AccessLog(tenants=False)(record(method="grpc.health.v1.Health/Check"))
    assert not written.records
    AccessLog(tenants=False)(record("RESOURCE_EXHAUSTED", method="grpc.health.v1.Health/Check"))
    assert len(written.records) == 1


def test_a_line_is_one_line_whatever_it_says() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    one = logging.LogRecord("x", logging.ERROR, "f.py", 1, "a\nb\u2028%s", ("\x1b[0m\udcff",), info)
    line = JsonLines("engine").format(one)
    assert line.isascii()
    assert line.isprintable()
    parsed = json.loads(line)
    assert parsed["message"] == "a\nb\u2028\x1b[0m\udcff"
    assert parsed["trace"].endswith("two\nlines")
    assert (parsed["process"], parsed["level"], parsed["logger"]) == ("engine", "error", "x")
