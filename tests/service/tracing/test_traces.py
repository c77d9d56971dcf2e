"""What a real collector gets of calls to a real server."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from bench.grpc_frames import FrameClient
from service.config.settings import BadSettings, TraceOptions
from service.config.sources import load
from service.pb.whippet.v1 import admin_pb2, model_pb2
from service.tracing.start import start
from service.version import version
from tests.service.asked import as_stream, chat, greedy
from tests.service.conftest import ROOT, STEP, Server, ask, ask_stream, refused
from tests.service.tracing.collector import Collector, values

Serve = Callable[..., AbstractContextManager[Server]]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
CANARY = "zxcanaryzx"
METHOD = "whippet.v1.GenerationService/Generate"


@contextmanager
def traced(serve: Serve, *flags: str) -> Iterator[tuple[Server, Collector]]:
    collector = Collector()
    caches = ("--optimizations.response-cache=true", f"--fake.step-time={STEP}")
    try:
        with serve(f"--traces.endpoint={collector.endpoint}", *caches, *flags) as server:
            yield server, collector
    finally:
        collector.close()


@pytest.fixture(scope="module")
def always(serve: Serve) -> Iterator[tuple[Server, Collector]]:
    """All calls are traced. Tests of one module run one after another, and each forgets what came before."""
    with traced(serve, "--traces.sample=1") as both:
        yield both


@pytest.fixture
def all_traced(always: tuple[Server, Collector]) -> tuple[Server, Collector]:
    server, collector = always
    last = secrets.token_hex(8)
    server.models.ListModels(model_pb2.ListModelsRequest(), metadata=(("x-request-id", last),), timeout=60)
    collector.until(lambda: last in str(collector.batches))
    collector.batches.clear()
    return always


def test_a_call_is_a_span_and_what_it_waited_for_are_spans_below_it(all_traced: tuple[Server, Collector]) -> None:
    server, collector = all_traced
    before = time.time_ns()
    request = greedy(CANARY, 20, request_id="mine")
    server.generation.Generate(request, metadata=(*SAMPLED, ("x-request-id", "theirs")), timeout=60)
    (call,) = collector.calls(1)
    after = time.time_ns()
    assert call.name == METHOD
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert (call.kind, call.status.code) == (Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert before <= call.start_time_unix_nano < call.end_time_unix_nano <= after
    found = values(call.attributes)
    assert found == {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "whippet",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(CANARY),
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "whippet.request_id": "mine",
        "whippet.client_request_id": "theirs",
        "whippet.cache": "miss",
        "whippet.single_flight": "leader",
    }
    (event,) = call.events
    assert event.name == "first token"
    below = collector.below(call)
    names = [span.name for span in below]
    assert names == ["receive message", "tokenize", "cache lookup", "queue", "prefill", "decode", "deliver"]
    assert below[0].start_time_unix_nano == call.start_time_unix_nano
    assert below[-1].end_time_unix_nano == call.end_time_unix_nano
    for one, following in pairwise(below):
        assert one.start_time_unix_nano <= one.end_time_unix_nano == following.start_time_unix_nano
    decode = below[names.index("decode")]
    assert event.time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano - decode.start_time_unix_nano >= 19 * STEP * 1e9 * 0.9
    assert all(span.trace_id == call.trace_id for span in below)
    assert len({span.span_id for span in (call, *below)}) == len(below) + 1
    (batch,) = collector.batches
    resource = values(batch.resource.attributes)
    assert resource.pop("service.instance.id")
    assert resource == {"service.name": "whippet", "service.version": version()}
    assert CANARY not in str(batch)


def test_a_chat_says_so_and_a_hit_is_replayed(all_traced: tuple[Server, Collector]) -> None:
    server, collector = all_traced
    question = chat("hello")
    server.generation.Generate(question, timeout=60)
    while dict(server.generation.Generate.with_call(question, timeout=60)[1].initial_metadata())["x-cache"] == "miss":
        pass
    calls = collector.calls(2)
    assert {values(call.attributes)["gen_ai.operation.name"] for call in calls} == {"chat"}
    assert len({call.trace_id for call in calls}) == len(calls)
    assert not any(call.parent_span_id for call in calls)
    collector.until(lambda: any(span.name == "replay" for span in collector.spans))
    (hit,) = [call for call in collector.calls(2) if values(call.attributes)["whippet.cache"] == "hit-response"]
    assert [span.name for span in collector.below(hit)] == ["receive message", "tokenize", "cache lookup", "replay"]


def test_followers_carry_a_link_to_the_leaders_span(all_traced: tuple[Server, Collector]) -> None:
    server, collector = all_traced
    request = as_stream(greedy("read by many", 500))
    streams = [iter(server.generation.GenerateStream(request, timeout=60)) for _ in range(4)]
    for stream in streams:
        next(stream)
    for stream in streams:
        list(stream)
    calls = collector.calls(4)
    for call in calls:
        (event,) = call.events
        to_first = values(call.attributes)["gen_ai.response.time_to_first_chunk"]
        assert isinstance(to_first, float)
        assert abs(event.time_unix_nano - call.start_time_unix_nano - to_first * 1e9) < 1e6
    roles = {role: [one for one in calls if values(one.attributes)["whippet.single_flight"] == role]
             for role in ("leader", "follower")}  # fmt: skip
    (leader,) = roles["leader"]
    assert len(roles["follower"]) == 3
    assert not leader.links
    for follower in roles["follower"]:
        (link,) = follower.links
        assert (link.trace_id, link.span_id) == (leader.trace_id, leader.span_id)
        assert follower.trace_id != leader.trace_id
        assert [span.name for span in collector.below(follower)][-1] == "read along"


def test_refusals_and_ends_by_callers_are_spans_and_no_errors_of_ours(all_traced: tuple[Server, Collector]) -> None:
    server, collector = all_traced
    assert refused(server.generation.Generate, ask(tokens=0)).code is grpc.StatusCode.INVALID_ARGUMENT
    with FrameClient(server.data, time.monotonic) as client:  # which waits for the server's own word
        client.start(f"/{METHOD}", ask(tokens=900).SerializeToString(), (("grpc-timeout", "200m"),))
        while not client.ended:
            assert client.read()
    stream = server.generation.GenerateStream(ask_stream(tokens=900), timeout=60)
    next(stream)
    stream.cancel()
    by_code = {values(call.attributes)["rpc.response.status_code"]: call for call in collector.calls(3)}
    assert set(by_code) == {"INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CANCELLED"}
    errors = {code for code, call in by_code.items() if call.status.code == Status.STATUS_CODE_ERROR}
    assert errors == {"DEADLINE_EXCEEDED"}
    assert values(by_code["DEADLINE_EXCEEDED"].attributes)["error.type"] == "DEADLINE_EXCEEDED"
    assert [span.name for span in collector.below(by_code["INVALID_ARGUMENT"])] == ["receive message"]
    assert [span.name for span in collector.below(by_code["CANCELLED"])][-1] == "decode"


@pytest.mark.parametrize(
    "wrong",
    [
        f"00-{TRACE}-{PARENT}",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        "x" * 7000,
    ],
)
def test_what_is_no_parent_is_ignored(all_traced: tuple[Server, Collector], wrong: str) -> None:
    server, collector = all_traced
    server.models.ListModels(model_pb2.ListModelsRequest(), metadata=(("traceparent", wrong),), timeout=60)
    (call,) = collector.calls(1)
    assert not call.parent_span_id
    assert call.trace_id.hex() != TRACE


def wait_for_metric(server: Server, line: str) -> None:
    """What was sent is counted once the collector's answer has come back."""
    end = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as page:
            found = page.read().decode()
        if line in found:
            return
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_callers_decide_for_theirs(serve: Serve) -> None:
    with traced(serve, "--traces.sample=0") as (server, collector):
        for _ in range(20):
            server.models.ListModels(model_pb2.ListModelsRequest(), timeout=60)
        server.models.ListModels(model_pb2.ListModelsRequest(), metadata=SAMPLED, timeout=60)
        (call,) = collector.calls(1)
        assert call.parent_span_id.hex() == PARENT
        wait_for_metric(server, 'whippet_traces_total{outcome="exported"} 1.0')
        server.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=NOT_SAMPLED, timeout=60)
        assert server.stop() == 0  # which sends what is left
        assert len(collector.calls(1)) == 1


def test_the_log_names_the_trace_of_a_call_that_is_traced(all_traced: tuple[Server, Collector]) -> None:
    server, collector = all_traced
    server.models.GetModel(model_pb2.GetModelRequest(name="fake"), timeout=60)
    (call,) = collector.calls(1)
    collector.until(lambda: f"trace_id={call.trace_id.hex()}" in server.log.read_text())


def test_the_end_sends_what_waits(serve: Serve) -> None:
    with traced(serve, "--traces.sample=1") as (server, collector):
        for _ in range(100):
            server.models.ListModels(model_pb2.ListModelsRequest(), timeout=60)
        assert server.stop() == 0
        assert len(collector.calls(100)) == 100


def test_a_collector_that_hangs_touches_no_call_and_holds_up_no_end(serve: Serve) -> None:
    with traced(serve, "--traces.sample=1") as (server, collector):
        collector.hangs.set()
        server.generation.Generate(ask(), timeout=60)
        collector.until(lambda: collector.asked > 0)
        for _ in range(20):
            server.generation.Generate(ask(), timeout=60)
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("wrong", ["collector:4317", "ftp://collector:4317", "http://collector", "http://a:b@c:1"])
def test_an_endpoint_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(BadSettings, match=r"traces\.endpoint"):
        load(["--engine=fake", f"--traces.endpoint={wrong}"])


def test_an_authority_without_tls_is_refused() -> None:
    with pytest.raises(BadSettings, match="ca-file needs an https endpoint"):
        load(["--engine=fake", "--traces.endpoint=http://127.0.0.1:1", "--traces.ca-file=ca.pem"])


def test_without_the_extra_an_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.tracing.start.find_spec", lambda name: None)
    assert not start(TraceOptions(), "m").observers
    with pytest.raises(BadSettings, match=r"pip install -e '\.\[otel\]'"):
        start(TraceOptions(endpoint="http://127.0.0.1:4317"), "m")


@pytest.mark.product
def test_nothing_of_opentelemetry_is_imported_where_traces_are_off() -> None:
    code = "import service.serving, sys; sys.exit('opentelemetry.proto' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
