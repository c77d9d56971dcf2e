"""Answers through a real channel: what a stream says, a unary answer says too, whatever is asked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.properties import example_count
from tests.service.conftest import PATIENCE, Server, ask, ask_stream, refused

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]


def streamed(server: Server, request: pb.GenerateStreamRequest) -> list[pb.GenerateStreamResponse]:
    return list(server.generation.GenerateStream(request, timeout=60))


def text_of(messages: list[pb.GenerateStreamResponse]) -> str:
    return "".join(message.text for message in messages)


def ids_of(messages: list[pb.GenerateStreamResponse]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


def plain(server: Server, text: str, tokens: int) -> str:
    """What the fake engine says to this prompt, nothing stopping it."""
    return str(server.generation.Generate(ask(text, tokens), timeout=60).text)


def timeless(finish: pb.Finish) -> pb.Finish:
    """Without what no two runs share."""
    copy = pb.Finish()
    copy.CopyFrom(finish)
    copy.ClearField("timings")
    return copy


def test_first_message_says_what_was_asked_and_last_how_it_ended(server: Server) -> None:
    messages = streamed(server, ask_stream("hello", 6, request_id="mine"))
    assert [message.HasField("prompt_info") for message in messages] == [True] + [False] * (len(messages) - 1)
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    info = messages[0].prompt_info
    assert (info.request_id, info.model, info.prompt_tokens) == ("mine", "fake", 5)
    finish = messages[-1].finish
    assert finish.reason == pb.FINISH_REASON_LENGTH
    assert finish.usage.completion_tokens == 6
    assert finish.cache_source == pb.CACHE_SOURCE_NONE
    assert len(messages) == 6


def test_headers_come_with_the_answer(server: Server) -> None:
    call = server.generation.GenerateStream(ask_stream("hello", 4, request_id="named"), timeout=60)
    headers = dict(call.initial_metadata())
    assert (headers["x-request-id"], headers["x-cache"]) == ("named", "off")
    list(call)
    _, call = server.generation.Generate.with_call(ask("hello", 4), timeout=60)
    headers = dict(call.initial_metadata())
    assert len(headers["x-request-id"]) >= 16
    assert headers["x-cache"] == "off"


REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(min_size=1, max_size=20),
        "tokens": st.integers(1, 60),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.floats(0, 2, width=32),
        "stop_strings": st.lists(st.text(alphabet="ab +", min_size=1, max_size=2), max_size=3),
        "stop_token_ids": st.lists(st.integers(32, 126), max_size=3),
        "min_tokens": st.integers(0, 5),
        "include_stop": st.booleans(),
        "logprobs": st.integers(0, 5),
        "token_ids": st.booleans(),
        "want_text": st.booleans(),
        "per_message": st.integers(1, 9),
        "max_delay": st.sampled_from([0.0, 0.002, 0.05]),
    },
)


def build(fields: dict[str, Any]) -> pb.GenerateRequest:
    request = ask(fields.get("text", "x"), max(fields.get("tokens", 20), fields.get("min_tokens", 0)))
    request.cache.bypass_prefix = True  # what is asked again would begin with what is there
    request.sampling.seed = fields.get("seed", 1)
    request.sampling.temperature = fields.get("temperature", 0.0)
    request.stopping.stop_strings.extend(fields.get("stop_strings", []))
    request.stopping.stop_token_ids.extend(fields.get("stop_token_ids", []))
    request.stopping.min_tokens = fields.get("min_tokens", 0)
    request.stopping.include_stop = fields.get("include_stop", False)
    if "logprobs" in fields:
        request.output.logprobs = fields["logprobs"]
    request.output.token_ids = fields.get("token_ids", False)
    request.output.text = fields.get("want_text", True)
    request.delivery.max_tokens_per_message = fields.get("per_message", 1)
    if "max_delay" in fields:
        request.delivery.max_delay.FromNanoseconds(round(fields["max_delay"] * 1e9))
    return request


@settings(max_examples=example_count(60), deadline=None)
@given(REQUESTS)
def test_a_stream_and_a_unary_answer_say_the_same(server: Server, fields: dict[str, Any]) -> None:
    request = build(fields)
    whole = server.generation.Generate(request, timeout=60)
    messages = streamed(server, pb.GenerateStreamRequest.FromString(request.SerializeToString()))
    assert text_of(messages) == whole.text
    assert ids_of(messages) == list(whole.token_ids)
    assert [place for message in messages for place in message.logprobs] == list(whole.logprobs)
    assert timeless(messages[-1].finish) == timeless(whole.finish)
    limit = request.delivery.max_tokens_per_message
    if request.output.token_ids:
        assert max(len(message.token_ids) for message in messages) <= limit
        assert len(whole.token_ids) == whole.finish.usage.completion_tokens
    if request.output.HasField("logprobs"):
        assert len(whole.logprobs) == whole.finish.usage.completion_tokens
        assert all(len(place.top) == request.output.logprobs for place in whole.logprobs)
    if not request.output.text:
        assert whole.text == ""
    assert whole.finish.sampling.seed == request.sampling.seed


def test_text_and_ids_belong_together(server: Server) -> None:
    whole = server.generation.Generate(ask("together", 40, output=pb.OutputOptions(token_ids=True)), timeout=60)
    assert bytes(whole.token_ids).decode() == whole.text  # the fake's ids are printable ASCII


def test_a_stop_string_cuts_the_answer_where_it_first_appears(server: Server) -> None:
    full = plain(server, "cut me", 200)
    for stop in (full[10:12], full[20:23], full[7]):
        at = full.index(stop)
        stopping = pb.StoppingOptions(max_tokens=200, stop_strings=["\x01never", stop])
        for kept, include in ((full[:at], False), (full[: at + len(stop)], True)):
            stopping.include_stop = include
            answer = server.generation.Generate(ask("cut me", None, stopping=stopping), timeout=60)
            assert answer.text == kept
            assert answer.finish.reason == pb.FINISH_REASON_STOP_STRING
            assert answer.finish.stop_string == stop
            assert answer.finish.usage.completion_tokens == at + len(stop)  # a byte a token
            timings = answer.finish.timings
            assert min(part.ToNanoseconds() for part in (timings.queue, timings.prefill, timings.decode)) > 0
    server.idle()


def test_a_stop_string_ends_the_engines_work_too(serve: Serve) -> None:
    with serve("--fake.step-time=0.02") as slow:
        full = plain(slow, "stop", 12)
        before = slow.load().generated_tokens
        stopping = pb.StoppingOptions(max_tokens=3000, stop_strings=[full[3]])
        delivery = pb.DeliveryOptions(max_tokens_per_message=1000, max_delay=Duration(seconds=60))
        started = time.monotonic()
        messages = streamed(slow, ask_stream("stop", None, stopping=stopping, delivery=delivery))
        assert messages[-1].finish.reason == pb.FINISH_REASON_STOP_STRING
        assert time.monotonic() - started < PATIENCE  # and not after 60 s
        assert slow.idle().generated_tokens - before < 40


def test_a_stop_token_is_counted_and_sent_but_its_text_is_not(server: Server) -> None:
    request = ask("halt", None, output=pb.OutputOptions(token_ids=True, logprobs=1))
    request.stopping.max_tokens = 2000
    request.stopping.stop_token_ids.append(ord("Q"))
    for include in (False, True):
        request.stopping.include_stop = include
        answer = server.generation.Generate(request, timeout=60)
        ids = list(answer.token_ids)
        assert answer.finish.reason == pb.FINISH_REASON_STOP
        assert answer.finish.stop_token_id == ord("Q") == ids[-1]
        assert answer.finish.usage.completion_tokens == len(ids) == len(answer.logprobs)
        assert answer.text.encode() == bytes(ids if include else ids[:-1])


def test_min_tokens_holds_back_stop_strings(server: Server) -> None:
    full = plain(server, "min", 100)
    stop = full[2]
    stopping = pb.StoppingOptions(max_tokens=100, min_tokens=50, stop_strings=[stop])
    answer = server.generation.Generate(ask("min", None, stopping=stopping), timeout=60)
    assert answer.finish.usage.completion_tokens >= 50
    at = full.find(stop, 49)
    assert answer.text == (full if at < 0 else full[:at])


def test_same_seed_same_answer_and_a_fresh_one_is_told(server: Server) -> None:
    sampling = pb.SamplingOptions(temperature=1.0, seed=-5)
    one, two = (server.generation.Generate(ask("seed", 30, sampling=sampling), timeout=60) for _ in range(2))
    assert one.text == two.text
    assert one.finish.sampling.seed == -5
    fresh = pb.SamplingOptions(temperature=1.0)
    three, four = (server.generation.Generate(ask("seed", 30, sampling=fresh), timeout=60) for _ in range(2))
    assert three.finish.sampling.seed != four.finish.sampling.seed
    assert three.text != four.text
    again = pb.SamplingOptions(temperature=1.0, seed=three.finish.sampling.seed)
    assert server.generation.Generate(ask("seed", 30, sampling=again), timeout=60).text == three.text


def test_unset_values_come_back_resolved(server: Server) -> None:
    sampling = pb.SamplingOptions(top_p=0.5, logit_bias={7: -2.5})
    used = server.generation.Generate(ask("resolved", 1, sampling=sampling), timeout=60).finish.sampling
    names = {field.name for field, _ in used.ListFields()}
    assert names == {field.name for field in pb.SamplingOptions.DESCRIPTOR.fields}
    assert (used.temperature, used.top_k, used.top_p, used.min_p) == (0.0, 0, 0.5, 0.0)
    assert (used.repetition_penalty, used.presence_penalty, used.frequency_penalty) == (1.0, 0.0, 0.0)
    assert dict(used.logit_bias) == {7: -2.5}


def test_unset_max_tokens_takes_what_the_context_leaves(serve: Serve) -> None:
    with serve("--fake.max-context=64") as small:
        answer = small.generation.Generate(ask("12345", None), timeout=60)
        assert answer.finish.reason == pb.FINISH_REASON_LENGTH
        assert answer.finish.usage.completion_tokens == 59


def test_time_budget_ends_an_answer_well(server: Server) -> None:
    started = time.monotonic()
    request = ask_stream("budget", 4000, time_budget=Duration(nanos=200_000_000))
    messages = streamed(server, request)
    assert 0.15 < time.monotonic() - started < PATIENCE
    finish = messages[-1].finish
    assert finish.reason == pb.FINISH_REASON_TIME_BUDGET
    assert 0 < finish.usage.completion_tokens < 4000
    assert len(text_of(messages)) == finish.usage.completion_tokens


def test_time_budget_runs_in_the_queue_too(serve: Serve) -> None:
    with serve("--fake.step-time=0.02", "--scheduler.max-sequences=1") as narrow:
        first = narrow.generation.GenerateStream(ask_stream("long", 3000), timeout=60)
        next(first)
        started = time.monotonic()
        second = narrow.generation.Generate(ask("waits", 5, time_budget=Duration(nanos=300_000_000)), timeout=60)
        assert 0.2 < time.monotonic() - started < PATIENCE  # the first one takes 60 s
        assert second.finish.reason == pb.FINISH_REASON_TIME_BUDGET
        assert second.finish.usage.completion_tokens == 0
        assert second.text == ""
        assert second.prompt_info.prompt_tokens == 5
        first.cancel()


def test_one_token_is_not_held_back_and_several_are_gathered(serve: Serve) -> None:
    with serve("--fake.step-time=0.01") as slow:
        for message in slow.generation.GenerateStream(ask_stream("alone", 30), timeout=60):
            assert len(message.text) == 1
        delivery = pb.DeliveryOptions(max_tokens_per_message=10, max_delay=Duration(seconds=5))
        messages = streamed(slow, ask_stream("alone", 30, delivery=delivery))
        lengths = [len(message.text) for message in messages]  # three of ten, unless the machine was late for a step
        assert sum(lengths) == 30
        assert max(lengths) == 10
        assert len(lengths) <= 6
        delivery = pb.DeliveryOptions(max_tokens_per_message=1000, max_delay=Duration(nanos=50_000_000))
        messages = streamed(slow, ask_stream("alone", 30, delivery=delivery))
        assert 2 <= len(messages) <= 20
        assert sum(len(message.text) for message in messages) == 30


def test_a_character_of_several_tokens_arrives_whole(server: Server) -> None:
    """The fake makes ASCII; a logit bias cannot change that, so the prompt's own round trip stands for it."""
    ids = server.generation.Tokenize(pb.TokenizeRequest(text="🙂é日"), timeout=60).token_ids
    assert list(ids) == list("🙂é日".encode())
    assert server.generation.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=60).text == "🙂é日"


def test_chat_goes_through_the_template(server: Server) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    ids = list(server.generation.Tokenize(pb.TokenizeRequest(chat=chat), timeout=60).token_ids)
    assert bytes(ids) == b"user: hi\nassistant: "
    by_chat = server.generation.Generate(ask(tokens=20, chat=chat), timeout=60)
    by_ids = server.generation.Generate(ask(tokens=20, token_ids=pb.TokenIds(ids=ids)), timeout=60)
    assert by_chat.prompt_info.prompt_tokens == len(ids)
    assert by_chat.text == by_ids.text


def test_neither_text_nor_ids_leaves_the_counts(server: Server) -> None:
    messages = streamed(server, ask_stream("quiet", 20, output=pb.OutputOptions(text=False)))
    assert len(messages) == 1
    assert messages[0].finish.usage.completion_tokens == 20
    assert messages[0].prompt_info.prompt_tokens == 5


@pytest.mark.parametrize("how", ["cancel", "deadline", "disconnect"])
def test_an_answer_nobody_waits_for_frees_its_place(server: Server, how: str) -> None:
    channel = grpc.insecure_channel(server.data)
    call = channel.unary_stream(
        "/whippet.v1.GenerationService/GenerateStream",
        request_serializer=pb.GenerateStreamRequest.SerializeToString,
        response_deserializer=pb.GenerateStreamResponse.FromString,
    )(ask_stream("abandoned", 4000), timeout=2.0 if how == "deadline" else 60)
    next(call)
    before = server.load().generated_tokens
    if how == "cancel":
        call.cancel()
    elif how == "disconnect":
        channel.close()
    else:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert server.idle().generated_tokens < before + 3900  # long before its end
    channel.close()


def test_the_name_of_an_ended_request_is_free_again(server: Server) -> None:
    for _ in range(3):
        assert server.generation.Generate(ask("again", 2, request_id="same"), timeout=60).text


def test_a_live_name_is_taken(server: Server) -> None:
    call = server.generation.GenerateStream(ask_stream("mine", 4000, request_id="taken"), timeout=60)
    next(call)
    refusal = refused(server.generation.Generate, ask("other", 2, request_id="taken"))
    assert refusal.code is grpc.StatusCode.ALREADY_EXISTS
    assert refusal.reason == "REQUEST_ID_IN_USE"
    call.cancel()
    server.idle()
