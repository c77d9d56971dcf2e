"""The response cache through a real channel: what is served twice is generated once, and says the same."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.properties import example_count
from tests.service.asked import as_stream, generate, generated, greedy, kept, said
from tests.service.conftest import Server, ask, refused
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
OFF = pb.CacheOptions(response=pb.CACHE_MODE_OFF)


def steady(finish: pb.Finish) -> pb.Finish:
    """What a generated and a stored answer share."""
    copy = pb.Finish()
    copy.CopyFrom(finish)
    for field in ("timings", "cache_source", "cache_hit"):
        copy.ClearField(field)
    copy.usage.ClearField("cached_tokens")
    copy.sampling.ClearField("seed")
    return copy


def test_a_hit_is_the_same_stream_and_takes_no_slot(cached: Server) -> None:
    request = greedy("the same twice", 12, output=pb.OutputOptions(token_ids=True))
    first = list(cached.generation.GenerateStream(as_stream(request), timeout=60))
    ended = time.time()
    kept(cached, request)
    before, elapsed = generated(cached), time.time() - ended
    call = cached.generation.GenerateStream(as_stream(request), timeout=60)
    assert dict(call.initial_metadata())["x-cache"] == "hit-response"
    second = list(call)
    assert generated(cached) == before
    assert [(m.text, list(m.token_ids)) for m in first] == [(m.text, list(m.token_ids)) for m in second]
    assert len(second) == 12
    one, two = first[-1].finish, second[-1].finish
    assert steady(one) == steady(two)
    assert (one.cache_source, two.cache_source) == (pb.CACHE_SOURCE_NONE, pb.CACHE_SOURCE_RESPONSE)
    assert not one.HasField("cache_hit")
    assert two.cache_hit.entry_id
    assert not two.cache_hit.HasField("similarity")
    assert 0 < elapsed <= two.cache_hit.age.ToNanoseconds() / 1e9 < 600
    assert two.usage.cached_tokens == two.usage.prompt_tokens == 14
    assert 0 < two.timings.cache_lookup.ToNanoseconds() < 60e9
    assert two.timings.queue.ToNanoseconds() == two.timings.decode.ToNanoseconds() == 0
    whole, header = generate(cached, request)
    assert header == "hit-response"  # a stream and a whole answer share entries
    assert whole.text == "".join(m.text for m in first)


SHAPES = st.fixed_dictionaries(
    {"text": st.text(min_size=1, max_size=12), "tokens": st.integers(1, 40)},
    optional={
        "seed": st.integers(-(2**63), 2**63 - 1),
        "stop_strings": st.lists(st.text(alphabet="ab e+", min_size=1, max_size=2), max_size=3),
        "stop_token_ids": st.lists(st.integers(32, 126), max_size=3),
        "min_tokens": st.integers(0, 1),
        "include_stop": st.booleans(),
        "token_ids": st.booleans(),
        "want_text": st.booleans(),
        "chat": st.booleans(),
        "per_message": st.integers(1, 9),
    },
)


def shaped(shape: dict[str, Any]) -> pb.GenerateRequest:
    fields: dict[str, Any] = {}
    if shape.get("chat"):
        fields["chat"] = pb.Chat(messages=[pb.ChatMessage(role="user", content=shape["text"])])
    request = greedy(shape["text"], shape["tokens"], **fields)
    if "seed" in shape:
        request.sampling.temperature, request.sampling.seed = 0.9, shape["seed"]
    for name in ("stop_strings", "stop_token_ids"):
        getattr(request.stopping, name).extend(shape.get(name, ()))
    request.stopping.min_tokens = shape.get("min_tokens", 0)
    request.stopping.include_stop = shape.get("include_stop", False)
    request.output.token_ids = shape.get("token_ids", False)
    request.output.text = shape.get("want_text", True)
    request.delivery.max_tokens_per_message = shape.get("per_message", 1)
    return request


@settings(max_examples=example_count(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SHAPES)
def test_cached_or_not_the_answer_is_the_same(cached: Server, shape: dict[str, Any]) -> None:
    request = shaped(shape)
    plain = pb.GenerateRequest.FromString(request.SerializeToString())
    plain.cache.CopyFrom(OFF)
    expected, header = generate(cached, plain)
    assert header == "off"
    wanted = (expected.text, list(expected.token_ids), steady(expected.finish))
    for _ in range(2):  # generated or joined, then joined or stored
        messages = list(cached.generation.GenerateStream(as_stream(request), timeout=60))
        ids = [i for message in messages for i in message.token_ids]
        assert ("".join(m.text for m in messages), ids, steady(messages[-1].finish)) == wanted
        if request.output.token_ids:
            assert all(len(m.token_ids) <= request.delivery.max_tokens_per_message + 1 for m in messages)
    kept(cached, request)
    stored, header = generate(cached, request)
    assert header == "hit-response"
    assert (stored.text, list(stored.token_ids), steady(stored.finish)) == wanted


OTHERS: dict[str, dict[str, Any]] = {
    "temperature": {"sampling": {"temperature": 0.5}},
    "top_k": {"sampling": {"top_k": 5}},
    "top_p": {"sampling": {"top_p": 0.5}},
    "min_p": {"sampling": {"min_p": 0.5}},
    "repetition_penalty": {"sampling": {"repetition_penalty": 1.5}},
    "presence_penalty": {"sampling": {"presence_penalty": 0.5}},
    "frequency_penalty": {"sampling": {"frequency_penalty": 0.5}},
    "seed": {"sampling": {"seed": 8}},
    "logit_bias": {"sampling": {"logit_bias": {3: 1.0}}},
    "min_tokens": {"stopping": {"min_tokens": 2}},
    "max_tokens": {"stopping": {"max_tokens": 9}},
    "stop_strings": {"stopping": {"stop_strings": ["never"]}},
    "stop_token_ids": {"stopping": {"stop_token_ids": [200]}},
    "include_stop": {"stopping": {"include_stop": True}},
    "prompt": {"text": "the matrix."},
    "template": {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="the matrix")])},
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_shapes_the_answer_is_in_its_key(cached: Server, name: str) -> None:
    base = ask("the matrix", 8, sampling=pb.SamplingOptions(temperature=0.7, seed=7))
    assert said(cached, base) in ("miss", "hit-response")
    kept(cached, base)
    other = pb.GenerateRequest.FromString(base.SerializeToString())
    change = pb.GenerateRequest(**OTHERS[name])
    if change.sampling.logit_bias:
        other.sampling.logit_bias.update(change.sampling.logit_bias)
        change.sampling.ClearField("logit_bias")
    other.MergeFrom(change)
    other.cache.response = pb.CACHE_MODE_READ
    assert said(cached, other) == "miss"


def test_what_is_only_about_delivery_is_not_in_the_key(cached: Server) -> None:
    base = greedy("delivered in many ways", 8)
    generate(cached, base)
    kept(cached, base)
    base.request_id, base.priority = "another", pb.PRIORITY_BACKGROUND
    base.output.token_ids, base.delivery.max_tokens_per_message = True, 3
    base.time_budget.FromSeconds(30)
    base.speculation.disable = True
    answer, header = generate(cached, base)
    assert (header, len(answer.token_ids)) == ("hit-response", 8)


def test_an_answer_that_stopped_by_itself_serves_larger_limits(cached: Server) -> None:
    stopped = greedy("stops by itself", 500, stopping=pb.StoppingOptions(stop_token_ids=[101, 97, 116, 111]))
    first, _ = generate(cached, stopped)
    assert first.finish.reason == pb.FINISH_REASON_STOP
    kept(cached, stopped)
    count = first.finish.usage.completion_tokens
    for limit, header in ((900, "hit-response"), (count + 1, "hit-response"), (count - 1, "miss")):
        stopped.stopping.max_tokens = limit
        assert said(cached, stopped) == header, limit
    cut = greedy("cut by its limit", 5)
    generate(cached, cut)
    kept(cached, cut)
    for limit in (4, 6):
        cut.stopping.max_tokens = limit
        assert said(cached, cut) == "miss", limit


def test_modes(cached: Server) -> None:
    request = greedy("modes", 4)

    def with_mode(mode: Any) -> str:
        request.cache.response = mode
        header = said(cached, request)
        if mode == pb.CACHE_MODE_WRITE:
            kept(cached, request)
        return header

    assert with_mode(pb.CACHE_MODE_OFF) == "off"
    assert with_mode(pb.CACHE_MODE_READ) == "miss"
    assert with_mode(pb.CACHE_MODE_READ) == "miss"  # the first one was not written
    assert with_mode(pb.CACHE_MODE_WRITE) == "off"
    assert with_mode(pb.CACHE_MODE_READ) == "hit-response"
    before = generated(cached)
    assert with_mode(pb.CACHE_MODE_WRITE) == "off"
    wait_for(lambda: generated(cached) == before + 4)  # written anew, not read; the load is reported now and then
    assert with_mode(pb.CACHE_MODE_UNSPECIFIED) == "hit-response"


def test_max_age(cached: Server) -> None:
    request = greedy("ages", 4)
    generate(cached, request)
    kept(cached, request)
    time.sleep(0.05)
    request.cache.max_age.FromMilliseconds(20)
    assert said(cached, request) == "miss"
    request.cache.max_age.FromSeconds(60)
    assert said(cached, request) == "hit-response"


@pytest.mark.parametrize(
    "fields",
    [{"sampling": pb.SamplingOptions(temperature=0.7)}, {"output": pb.OutputOptions(logprobs=2)}],
    ids=["sampled", "logprobs"],
)
def test_what_is_not_to_be_kept_passes_by(cached: Server, fields: dict[str, Any]) -> None:
    request = ask("passes by", 4, **fields) if "sampling" in fields else greedy("passes by", 4, **fields)
    for _ in range(2):
        answer, header = generate(cached, request)
        assert header == "bypass"
        assert answer.finish.cache_source == pb.CACHE_SOURCE_NONE
        time.sleep(0.05)
    assert len(answer.logprobs) == (4 if "output" in fields else 0)


@pytest.mark.parametrize(("fault", "code"), [(1, grpc.StatusCode.INTERNAL), (2, grpc.StatusCode.INTERNAL)])
def test_what_failed_is_never_kept(cached: Server, fault: int, code: grpc.StatusCode) -> None:
    request = greedy("", 20, token_ids=pb.TokenIds(ids=[0, fault, 3]))
    calls = [cached.generation.Generate.future(request, timeout=60) for _ in range(5)]
    assert {call.exception().code() for call in calls} == {code}  # type: ignore[attr-defined]
    cached.until(lambda load: load.state == admin_pb2.ENGINE_STATE_READY)
    assert refused(cached.generation.Generate, request).code is code


def test_what_was_cut_by_time_is_never_kept(cached: Server) -> None:
    request = greedy("cut by time", 2000)
    request.time_budget.FromMilliseconds(100)
    for _ in range(2):
        answer, header = generate(cached, request)
        assert (header, answer.finish.reason) == ("miss", pb.FINISH_REASON_TIME_BUDGET)
        time.sleep(0.05)


def test_the_switch_works_while_requests_are_served(cached: Server) -> None:
    request = greedy("switched", 6)
    text = generate(cached, request)[0].text
    kept(cached, request)
    for enabled, header in ((False, "off"), (True, "hit-response")):
        change = admin_pb2.SetOptimizationRequest(name="response_cache", enabled=enabled)
        assert cached.admin.SetOptimization(change, timeout=60).optimization.enabled is enabled
        answer, found = generate(cached, request)
        assert (answer.text, found) == (text, header)


def test_flush_by_entry_by_kind_and_by_tenant(cached: Server) -> None:
    def flush(**what: Any) -> int:
        return int(cached.admin.FlushCache(admin_pb2.FlushCacheRequest(**what), timeout=60).entries)

    def hits() -> list[bool]:
        time.sleep(1.1)  # a flight that is over can be joined for a second
        reads = [greedy(f"flushed {n}", 4, cache=pb.CacheOptions(response=pb.CACHE_MODE_READ)) for n in range(3)]
        return [said(cached, read) == "hit-response" for read in reads]

    def fill() -> list[str]:
        for n in range(3):
            generate(cached, greedy(f"flushed {n}", 4))
            kept(cached, greedy(f"flushed {n}", 4))
        return [generate(cached, greedy(f"flushed {n}", 4))[0].finish.cache_hit.entry_id for n in range(3)]

    ids = fill()
    assert flush(entry_id=ids[1]) == 1
    assert hits() == [True, False, True]
    assert flush(tenant="nobody") == 0
    assert flush(kind=admin_pb2.CACHE_KIND_SEMANTIC) == 0
    assert hits() == [True, False, True]
    assert flush(kind=admin_pb2.CACHE_KIND_RESPONSE) >= 2
    assert hits() == [False, False, False]
    fill()
    assert flush(tenant="default") >= 3
    assert hits() == [False, False, False]
    bad = refused(cached.admin.FlushCache, admin_pb2.FlushCacheRequest(entry_id="*", kind=9))  # type: ignore[arg-type]
    assert (bad.code, bad.fields) == (grpc.StatusCode.INVALID_ARGUMENT, {"entry_id", "kind"})
    both = admin_pb2.FlushCacheRequest(kind=admin_pb2.CACHE_KIND_PREFIX, entry_id="a" * 64)
    assert refused(cached.admin.FlushCache, both).fields == {"entry_id"}


def test_load_tells_what_the_caches_did(cached: Server) -> None:
    request = greedy("counted", 4)
    before = dict(cached.load().cache_counts)
    generate(cached, request)
    kept(cached, request)
    after = dict(cached.load().cache_counts)
    assert after["response_lookup.hit"] > before.get("response_lookup.hit", 0)
    assert after["response_lookup.miss"] > before.get("response_lookup.miss", 0)
    assert not any("counted" in name for name in after)


def test_a_replay_can_be_left(cached: Server) -> None:
    request = greedy("left halfway", 500)
    generate(cached, request)
    kept(cached, request)
    call = cached.generation.GenerateStream(as_stream(request), timeout=60)
    next(call)
    call.cancel()
    again = list(cached.generation.GenerateStream(as_stream(request), timeout=60))
    assert len(again) == 500


def test_no_prompt_in_the_log(cached: Server) -> None:
    assert "the same twice" not in cached.log.read_text()
