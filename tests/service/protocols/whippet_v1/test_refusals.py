"""Each row of the table of statuses, through a real channel."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from engine.fake import Fault
from service.pb.whippet.v1 import admin_pb2, model_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.conftest import PATIENCE, Refusal, Server, ask, ask_stream, refused

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def both(server: Server, request: pb.GenerateRequest, **options: object) -> Refusal:
    """Unary and stream must refuse alike."""
    one = refused(server.generation.Generate, request, **options)
    stream = pb.GenerateStreamRequest.FromString(request.SerializeToString())
    two = refused(server.generation.GenerateStream, stream, **options)
    assert (one.code, one.message, set(one.details)) == (two.code, two.message, set(two.details))
    return one


def test_every_violation_is_named(server: Server) -> None:
    request = ask("x", None, request_id="no\nline", priority=77, time_budget=Duration(seconds=-1))  # type: ignore[arg-type]
    request.sampling.temperature = float("nan")
    request.sampling.top_p = 0.0
    request.sampling.min_p = 1.5
    request.sampling.top_k = -1
    request.sampling.repetition_penalty = 0.0
    request.sampling.presence_penalty = -2.5
    request.sampling.frequency_penalty = float("inf")
    request.sampling.logit_bias[256] = 1.0
    request.sampling.logit_bias[5] = float("nan")
    request.stopping.max_tokens = 0
    request.stopping.min_tokens = -1
    request.stopping.stop_strings.extend(["", "x" * 257])
    request.stopping.stop_token_ids.extend([3, -1, 256])
    request.output.logprobs = 21
    request.cache.response = 9  # type: ignore[assignment]
    request.cache.max_age.nanos = -5
    request.speculation.max_draft_tokens = -1
    request.delivery.max_tokens_per_message = 0
    request.delivery.max_delay.seconds = 61
    refusal = both(server, request)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.fields == {
        "request_id",
        "priority",
        "time_budget",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.top_k",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.logit_bias[256]",
        "sampling.logit_bias[5]",
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.stop_strings[0]",
        "stopping.stop_strings[1]",
        "stopping.stop_token_ids[1]",
        "stopping.stop_token_ids[2]",
        "output.logprobs",
        "cache.response",
        "cache.max_age",
        "speculation.max_draft_tokens",
        "delivery.max_tokens_per_message",
        "delivery.max_delay",
    }


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids"),
        (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
        (pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(content="x")])), "chat.messages[0].role"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 256])), "token_ids.ids[2]"),
        (pb.GenerateRequest(text="x" * 4096), "text"),
        (pb.GenerateRequest(text="x" * 4_000_000), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 4096)), "token_ids.ids"),
        (ask("x" * 4000, 97), "stopping.max_tokens"),
        (ask("x" * 4000, None, stopping=pb.StoppingOptions(min_tokens=97)), "stopping.min_tokens"),
        (ask("x", 5, stopping=pb.StoppingOptions(min_tokens=6, max_tokens=5)), "stopping.min_tokens"),
        (ask("x", 5, stopping=pb.StoppingOptions(stop_strings=["a"] * 17)), "stopping.stop_strings"),
        (ask("x", 5, stopping=pb.StoppingOptions(stop_token_ids=[1] * 65)), "stopping.stop_token_ids"),
        (ask("x", 5, request_id=" padded"), "request_id"),
        (ask("x", 5, request_id="x" * 129), "request_id"),
        (ask("x", 5, request_id="smörgås"), "request_id"),
    ],
)
def test_one_violation(server: Server, request_: pb.GenerateRequest, field: str) -> None:
    refusal = both(server, request_)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.fields == {field}


def test_a_prompt_that_just_fits_is_served(server: Server) -> None:
    answer = server.generation.Generate(ask("x" * 4095, None), timeout=60)
    assert answer.finish.usage.completion_tokens == 1
    assert server.generation.Generate(ask("x" * 4000, 96), timeout=60).finish.usage.completion_tokens == 96


def test_giant_lists_of_wrong_ids_get_a_short_answer(server: Server) -> None:
    refusal = refused(server.generation.Detokenize, pb.DetokenizeRequest(token_ids=[300] * 100_000))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(refusal.fields) <= 9
    bias = {token_id: 200.0 for token_id in range(300, 1300)}
    refusal = both(server, ask("x", 1, sampling=pb.SamplingOptions(logit_bias=bias)))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert sum(len(str(value)) for value in refusal.trailers.values()) < 16_000


def test_unknown_model(server: Server) -> None:
    for call, request in (
        (server.generation.Generate, ask("x", 1, model="other")),
        (server.generation.GenerateStream, ask_stream("x", 1, model="other")),
        (server.generation.Tokenize, pb.TokenizeRequest(model="other", text="x")),
        (server.generation.Detokenize, pb.DetokenizeRequest(model="other", token_ids=[1])),
        (server.models.GetModel, model_pb2.GetModelRequest(name="other")),
    ):
        refusal = refused(call, request)
        assert refusal.code is grpc.StatusCode.NOT_FOUND
        assert refusal.message == "no such model is served here: 'other'; 'fake' is"
        detail = refusal.details["ResourceInfo"]
        assert (detail.resource_type, detail.resource_name) == ("whippet.v1.Model", "other")  # type: ignore[attr-defined]
    assert server.generation.Generate(ask("x", 1, model="fake"), timeout=60).prompt_info.model == "fake"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cache": pb.CacheOptions(semantic=pb.CACHE_MODE_READ)}, "cache.semantic"),
        ({"cache": pb.CacheOptions(semantic=pb.CACHE_MODE_WRITE)}, "cache.semantic"),
        ({"cache": pb.CacheOptions(semantic=pb.CACHE_MODE_READ_WRITE)}, "cache.semantic"),
    ],
)
def test_what_this_build_lacks(server: Server, fields: dict[str, object], field: str) -> None:
    refusal = both(server, ask("x", 1, **fields))
    assert refusal.code is grpc.StatusCode.UNIMPLEMENTED
    assert refusal.reason == "UNIMPLEMENTED_OPTION"
    assert refusal.details["ErrorInfo"].metadata["field"] == field  # type: ignore[attr-defined]


def test_what_asks_for_nothing_that_lacks(server: Server) -> None:
    cache = pb.CacheOptions(response=pb.CACHE_MODE_OFF, semantic=pb.CACHE_MODE_OFF, bypass_prefix=True)
    cache.max_age.seconds = 5
    speculation = pb.SpeculationOptions(disable=True, max_draft_tokens=100)
    assert server.generation.Generate(ask("x", 1, cache=cache, speculation=speculation), timeout=60).text


@contextlib.contextmanager
def occupied(server: Server, count: int) -> object:
    """So many long answers under way."""
    calls = [server.generation.GenerateStream(ask_stream(f"busy {n}", 3000), timeout=60) for n in range(count)]
    server.until(lambda load: load.running + load.waiting == count)
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()
        server.idle()


def test_a_full_queue(serve: Serve) -> None:
    flags = ("--fake.step-time=0.01", "--scheduler.max-sequences=2", "--limits.queued-requests=3")
    with serve(*flags) as small, occupied(small, 5):
        for _ in range(20):
            refusal = both(small, ask("one more", 1))
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refusal.reason == "QUEUE_FULL"
            assert 100 <= refusal.retry_ms <= 60_000


def test_too_many_prompt_tokens_wait(serve: Serve) -> None:
    flags = ("--fake.step-time=0.01", "--scheduler.max-sequences=1", "--limits.queued-prompt-tokens=1000")
    with serve(*flags) as small, occupied(small, 1):
        waiting = small.generation.GenerateStream(ask_stream("x" * 900, 5), timeout=60)
        small.until(lambda load: load.waiting == 1)
        refusal = both(small, ask("x" * 200, 1))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.reason == "QUEUED_TOKENS"
        assert refusal.retry_ms >= 100
        waiting.cancel()


def test_a_long_prompt_alone_is_never_too_long_to_wait(serve: Serve) -> None:
    with serve("--limits.queued-prompt-tokens=10") as small:
        assert small.generation.Generate(ask("x" * 3000, 1), timeout=60).text


def test_deadlines(server: Server) -> None:
    call = server.generation.GenerateStream(ask_stream("late", 4000), timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.idle()


def test_admin_abort(server: Server) -> None:
    call = server.generation.GenerateStream(ask_stream("doomed", 4000, request_id="doomed"), timeout=60)
    next(call)
    server.admin.AbortGeneration(admin_pb2.AbortGenerationRequest(request_id="doomed"), timeout=60)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    refusal = Refusal.of(caught.value)
    assert refusal.code is grpc.StatusCode.ABORTED
    assert refusal.reason == "REQUEST_ABORTED"
    server.idle()
    gone = refused(server.admin.AbortGeneration, admin_pb2.AbortGenerationRequest(request_id="doomed"))
    assert gone.code is grpc.StatusCode.NOT_FOUND
    other = refused(server.admin.AbortGeneration, admin_pb2.AbortGenerationRequest(request_id="doomed", tenant="t"))
    assert other.code is grpc.StatusCode.NOT_FOUND


def test_tokens_and_rights(serve: Serve, tmp_path: Path) -> None:
    def entry(tenant: str, token: str, rights: str) -> str:
        return f'- {{tenant: {tenant}, sha256: "{hashlib.sha256(token.encode()).hexdigest()}", rights: [{rights}]}}\n'

    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        entry("acme", "talk", "generate") + entry("ops", "rule", "admin") + entry("acme", "all", "generate, admin")
    )
    with serve(f"--auth.tokens-file={tokens}", "--limits.tenant-requests=1", "--fake.step-time=0.01") as guarded:
        talk, rule, both_rights = ((("authorization", f"Bearer {token}"),) for token in ("talk", "rule", "all"))
        for metadata in (
            (),
            (("authorization", "Bearer wrong"),),
            (("authorization", "Basic talk"),),
            (("authorization", "Bearer "),),
        ):
            assert both(guarded, ask("x", 1), metadata=metadata).code is grpc.StatusCode.UNAUTHENTICATED
        assert both(guarded, ask("x", 1), metadata=rule).code is grpc.StatusCode.PERMISSION_DENIED
        load = admin_pb2.GetLoadRequest()
        assert refused(guarded.admin.GetLoad, load).code is grpc.StatusCode.UNAUTHENTICATED
        assert refused(guarded.admin.GetLoad, load, metadata=talk).code is grpc.StatusCode.PERMISSION_DENIED
        assert guarded.admin.GetLoad(load, metadata=rule, timeout=60).total_pages > 0
        assert guarded.generation.Generate(ask("x", 1), metadata=both_rights, timeout=60).text

        held = guarded.generation.GenerateStream(ask_stream("x", 3000, request_id="held"), metadata=talk, timeout=60)
        next(held)
        refusal = both(guarded, ask("x", 1), metadata=both_rights)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_QUOTA")
        abort = admin_pb2.AbortGenerationRequest(request_id="held")
        assert refused(guarded.admin.AbortGeneration, abort, metadata=rule).code is grpc.StatusCode.NOT_FOUND
        abort.tenant = "acme"
        guarded.admin.AbortGeneration(abort, metadata=rule, timeout=60)
        with pytest.raises(grpc.RpcError):
            list(held)

        tokens.write_text(entry("acme", "talk2", "generate"))  # read again while running
        end = time.monotonic() + PATIENCE
        while (
            refused(guarded.generation.Generate, pb.GenerateRequest(), metadata=talk).code
            is not grpc.StatusCode.UNAUTHENTICATED
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        fresh = (("authorization", "bearer talk2"),)
        assert guarded.generation.Generate(ask("x", 1), metadata=fresh, timeout=60).text
        tokens.write_text("not: a list")
        end = time.monotonic() + PATIENCE
        while "the old tokens stay in force" not in guarded.log.read_text():
            assert guarded.generation.Generate(ask("x", 1), metadata=fresh, timeout=60).text
            assert time.monotonic() < end
            time.sleep(0.05)
        assert guarded.generation.Generate(ask("x", 1), metadata=fresh, timeout=60).text
        log = guarded.log.read_text()
        assert "talk" not in log
        assert "the old tokens stay in force" in log


def test_a_broken_step_is_internal_and_says_nothing_of_it(serve: Serve) -> None:
    with serve("--fake.faults=true", "--fake.step-time=0.001") as faulty:
        for fault in (Fault.RAISE, Fault.SICK_ROW):
            broken = pb.TokenIds(ids=[0, fault, 3])
            neighbour = faulty.generation.GenerateStream(ask_stream("fine", 100), timeout=60)
            call = faulty.generation.GenerateStream(ask_stream(token_ids=broken), timeout=60)
            came = []
            with pytest.raises(grpc.RpcError) as caught:
                came.extend(call)
            refusal = Refusal.of(caught.value)
            assert refusal.code is grpc.StatusCode.INTERNAL
            assert refusal.reason == "ENGINE_FAILED"
            assert "Traceback" not in refusal.message
            assert ".py" not in refusal.message
            assert sum(1 for _ in neighbour) == 100, "it was in the same step"
            assert faulty.generation.Generate(ask("still here", 3), timeout=60).text
        faulty.idle()
        assert faulty.load().restarts == 0


def test_an_engine_that_dies_is_unavailable_and_comes_back(serve: Serve) -> None:
    with serve("--fake.step-time=0.005") as mortal:
        for restarts in (1, 2):
            streams = [mortal.generation.GenerateStream(ask_stream(f"cut {n}", 3000), timeout=60) for n in range(4)]
            came = [len(next(stream).text) for stream in streams]
            assert came == [1] * 4
            started = time.monotonic()
            os.kill(mortal.engine_pid(), signal.SIGKILL)
            for stream in streams:
                with pytest.raises(grpc.RpcError) as caught:
                    list(stream)
                refusal = Refusal.of(caught.value)
                assert refusal.code is grpc.StatusCode.UNAVAILABLE
                assert refusal.reason == "ENGINE_UNAVAILABLE"
                assert refusal.retry_ms > 0
            assert time.monotonic() - started < PATIENCE
            assert mortal.process.poll() is None
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    answer = mortal.generation.Generate(ask("again", 3), timeout=60)
                    break
                except grpc.RpcError as error:
                    refusal = Refusal.of(error)
                    assert refusal.code is grpc.StatusCode.UNAVAILABLE
                    assert refusal.retry_ms > 0
                    assert time.monotonic() < end
                    time.sleep(0.02)
            assert len(answer.text) == 3
            assert mortal.idle().restarts == restarts


@pytest.mark.proof
def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once(serve: Serve) -> None:
    """With one place and answers of 0.2 s, who has thirty before him cannot be served within three seconds."""
    with serve("--fake.step-time=0.01", "--scheduler.max-sequences=1") as narrow:
        calls = [narrow.generation.Generate.future(ask(f"n{n}", 20), timeout=60) for n in range(40)]
        end = time.monotonic() + PATIENCE
        while sum(call.done() for call in calls) < 10:
            assert time.monotonic() < end
            time.sleep(0.01)
        refusal = both(narrow, ask("hopeless", 5), timeout=3.0)
        assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "cannot be met" in refusal.message
        for call in calls:
            assert len(call.result().text) == 20
        assert narrow.idle().generated_tokens == 40 * 20
