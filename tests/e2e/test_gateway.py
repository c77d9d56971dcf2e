"""OpenAI's HTTP by a real gateway in front of the demo model: the same words as whippet.v1 gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest

from service.pb.whippet.v1 import generation_pb2 as pb
from service.pb.whippet.v1.generation_pb2_grpc import GenerationServiceStub
from tests.gateways import Gateway, smg

pytestmark = pytest.mark.product

HELLO = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")]))
TEXT = pb.GenerateRequest(text="def read_json(path):\n")
MOST = 24  # tokens


@pytest.fixture(scope="module")
def gateway(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with smg(tmp_path_factory.mktemp("smg"), "demo", demo.data) as running:
        yield running


@pytest.fixture(scope="module")
def ours(demo: Any) -> GenerationServiceStub:
    return GenerationServiceStub(grpc.insecure_channel(demo.data))


def native(ours: GenerationServiceStub, request: pb.GenerateRequest) -> pb.GenerateResponse:
    whole = pb.GenerateRequest()
    whole.CopyFrom(request)
    whole.sampling.temperature = 0
    whole.stopping.max_tokens = MOST
    whole.output.logprobs = 2
    return ours.Generate(whole, timeout=90)


def usage(found: Any) -> tuple[int, int]:
    return found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]


def counted(answer: pb.GenerateResponse) -> tuple[int, int]:
    return answer.finish.usage.prompt_tokens, answer.finish.usage.completion_tokens


def test_an_answer_of_a_schema(gateway: Gateway) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    whole = gateway.chat("Hello", model="demo", max_tokens=80, response_format=form).json["choices"][0]
    assert whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(whole["message"]["content"]), schema)
    wrong = {"type": "json_schema", "json_schema": {"name": "place", "schema": {"type": "strin"}}}
    assert gateway.chat("Hello", model="demo", max_tokens=8, response_format=wrong).status >= 400


def test_chat(gateway: Gateway, ours: GenerationServiceStub) -> None:
    expected = native(ours, HELLO)
    whole = gateway.chat("Hello", model="demo", max_tokens=MOST).json
    assert whole["choices"][0]["message"]["content"] == expected.text
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert usage(whole) == counted(expected)
    streamed = gateway.chat(
        "Hello", model="demo", max_tokens=MOST, stream=True, stream_options={"include_usage": True}
    ).events
    *pieces, last = streamed
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in pieces) == expected.text
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage(last) == counted(expected)


def test_completions(gateway: Gateway, ours: GenerationServiceStub) -> None:
    expected = native(ours, TEXT)
    wishes = {"model": "demo", "prompt": TEXT.text, "max_tokens": MOST, "temperature": 0}
    whole = gateway.ask("completions", **wishes).json
    assert whole["choices"][0]["text"] == expected.text
    assert usage(whole) == counted(expected)
    streamed = gateway.ask("completions", **wishes, stream=True).events
    assert "".join(one["choices"][0]["text"] for one in streamed if one["choices"]) == expected.text
    assert streamed[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stop_ends_what_is_generated_and_billed(gateway: Gateway, ours: GenerationServiceStub) -> None:
    expected = native(ours, HELLO)
    word = expected.text.split()[3]
    found = gateway.chat("Hello", model="demo", max_tokens=MOST, stop=[word]).json
    assert found["choices"][0]["message"]["content"] == expected.text[: expected.text.index(word)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert usage(found)[1] < counted(expected)[1]


def test_log_probabilities(gateway: Gateway, ours: GenerationServiceStub) -> None:
    expected = native(ours, HELLO)
    found = gateway.chat("Hello", model="demo", max_tokens=MOST, logprobs=True, top_logprobs=2).json
    places = found["choices"][0]["logprobs"]["content"]
    assert len(places) >= len(expected.logprobs) - 1  # the end-of-text token may be left out
    for place, one in zip(places, expected.logprobs, strict=False):
        assert place["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert [top["logprob"] for top in place["top_logprobs"]] == pytest.approx(
            [top.logprob for top in one.top], abs=1e-4
        )


@pytest.mark.parametrize("stream", [False, True])
def test_two_answers(gateway: Gateway, ours: GenerationServiceStub, stream: bool) -> None:
    alone = []
    for seed in (11, 12):
        request = pb.GenerateRequest()
        request.CopyFrom(HELLO)
        request.sampling.temperature, request.sampling.seed, request.stopping.max_tokens = 1, seed, MOST
        alone.append(ours.Generate(request, timeout=90))
    wishes = {"model": "demo", "max_tokens": MOST, "temperature": 1, "seed": 11, "n": 2}
    if stream:
        events = gateway.chat("Hello", **wishes, stream=True).events
        choices = [choice for event in events for choice in event["choices"]]
        texts = ["".join(one["delta"].get("content") or "" for one in choices if one["index"] == n) for n in (0, 1)]
    else:
        whole = gateway.chat("Hello", **wishes).json
        texts = [one["message"]["content"] for one in sorted(whole["choices"], key=lambda one: one["index"])]
        assert usage(whole)[1] == sum(counted(one)[1] for one in alone)
    assert texts == [one.text for one in alone]


def test_two_completions_behind_their_prompt(gateway: Gateway, ours: GenerationServiceStub) -> None:
    expected = native(ours, TEXT).text
    wishes = {"model": "demo", "prompt": TEXT.text, "max_tokens": MOST, "temperature": 0}
    found = gateway.ask("completions", **wishes, n=2, echo=True).json
    assert [one["text"] for one in found["choices"]] == [TEXT.text + expected] * 2


@pytest.mark.proof
def test_what_is_refused_is_named_to_the_one_who_asked(gateway: Gateway) -> None:
    answer = gateway.ask("completions", model="demo", prompt="Hello", max_tokens=0)
    assert answer.status == 400
    assert "sampling_params.max_tokens" in answer.body
