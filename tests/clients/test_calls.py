"""What whippet-client sends, tries again and shows a server, and what it makes of odd answers."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import ParseError

from tests.clients.conftest import Refuses, Scripted
from whippet_client import AsyncClient, Client, Internal, ResourceExhausted, Unavailable, WhippetError
from whippet_client.pb.whippet.v1 import generation_pb2 as pb
from whippet_client.requests import generate_request, stream_request, tokenize_request

C = grpc.StatusCode
DRAINING = Refuses(C.UNAVAILABLE, "DRAINING", retry_ms=1)


def test_unavailable_is_tried_again_when_the_server_says(scripted: Scripted) -> None:
    with Client(scripted.address, timeout=60) as client:
        scripted.script.failures += [DRAINING] * 4
        assert client.generate("x").text == "well"
        assert len(scripted.script.calls) == 5
        scripted.script.failures += [DRAINING] * 2
        assert client.stream("x").text() == "well"
        assert len(scripted.script.calls) == 8
        assert scripted.script.calls[-1]["grpc-previous-rpc-attempts"] == "2"


async def test_what_stays_unavailable_is_told_with_reason_and_hint(scripted: Scripted) -> None:
    async with AsyncClient(scripted.address, timeout=60) as client:
        scripted.script.failures += [DRAINING] * 5
        with pytest.raises(Unavailable, match="DRAINING") as caught:
            await client.generate("x")
    assert (caught.value.code, caught.value.reason, caught.value.retry_after) == (C.UNAVAILABLE, "DRAINING", 0.001)
    assert len(scripted.script.calls) == 5


def test_nothing_else_is_tried_again(scripted: Scripted) -> None:
    full = Refuses(C.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_ms=250)
    with Client(scripted.address, timeout=60) as client, Client(scripted.address, timeout=60, attempts=1) as once:
        scripted.script.failures += [full]
        with pytest.raises(ResourceExhausted) as caught:
            client.generate("x")
        assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 0.25)
        assert caught.value.metadata == {"field": "f"}
        scripted.script.failures += [Refuses(C.INTERNAL, "ENGINE_FAILED")]
        with pytest.raises(Internal):
            client.generate("x")
        scripted.script.failures += [DRAINING]
        with pytest.raises(Unavailable):
            once.generate("x")
    assert len(scripted.script.calls) == 3


def test_a_stream_that_has_begun_is_not_tried_again(scripted: Scripted) -> None:
    scripted.script.failures += [Refuses(C.UNAVAILABLE, "ENGINE_UNAVAILABLE", retry_ms=1, late=True)]
    with Client(scripted.address, timeout=60) as client:
        stream = client.stream("x")
        assert next(stream).text == "we"
        with pytest.raises(Unavailable):
            next(stream)
    assert len(scripted.script.calls) == 1


@pytest.mark.parametrize("raw", [b"", b"\xff\xff", b"\x08\x01"])
def test_details_that_are_none_do_no_harm(scripted: Scripted, raw: bytes) -> None:
    scripted.script.failures += [Refuses(C.DATA_LOSS, raw=raw)]
    with Client(scripted.address, timeout=60) as client, pytest.raises(WhippetError) as caught:
        client.generate("x")
    assert (caught.value.code, caught.value.reason, str(caught.value)) == (C.DATA_LOSS, "", "DATA_LOSS: m")


async def test_a_token_is_asked_for_with_each_call(scripted: Scripted) -> None:
    tokens = iter(["first", "second"])
    ca = scripted.folder / "ca.pem"
    async with AsyncClient(scripted.tls_address, token=lambda: next(tokens), ca=ca, timeout=60) as client:
        await client.generate("x")
        await client.stream("x").text()
    assert [call["authorization"] for call in scripted.script.calls] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    "address", ["10.0.0.1:50051", "dns:///models.example:50051", "127.example.com:50051", "ipv4:127.0.0.1:1,10.0.0.1:1"]
)
def test_a_token_does_not_travel_unencrypted(address: str) -> None:
    with pytest.raises(ValueError, match="unencrypted"):
        Client(address, token="t")
    Client(address, token="t", insecure=True).close()
    Client(address, token="t", tls=True).close()


def test_what_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        Client("a:1", cert=tmp_path / "c.pem")
    with pytest.raises(ValueError, match="attempts"):
        Client("a:1", attempts=6)
    with pytest.raises(FileNotFoundError):
        Client("a:1", ca=tmp_path / "none.pem")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/s", "dns:///localhost:1"])
def test_a_token_may_travel_within_this_machine(address: str) -> None:
    Client(address, token="t").close()


def test_arguments_become_the_contracts_fields() -> None:
    request = generate_request(
        [{"role": "user", "content": "hi"}, pb.ChatMessage(role="assistant", content="ho")],
        request=pb.GenerateRequest(cache=pb.CacheOptions(response=pb.CACHE_MODE_OFF), model="old"),
        model="m",
        stop=["a", "b"],
        max_tokens=3,
        temperature=0,
        logprobs=2,
        priority="interactive",
        time_budget=1.5,
        max_tokens_per_message=8,
    )
    assert request == pb.GenerateRequest(
        model="m",
        chat=pb.Chat(
            messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant", content="ho")]
        ),
        sampling=pb.SamplingOptions(temperature=0),
        stopping=pb.StoppingOptions(max_tokens=3, stop_strings=["a", "b"]),
        output=pb.OutputOptions(logprobs=2),
        cache=pb.CacheOptions(response=pb.CACHE_MODE_OFF),
        priority=pb.PRIORITY_INTERACTIVE,
        time_budget={"seconds": 1, "nanos": 500_000_000},
        delivery=pb.DeliveryOptions(max_tokens_per_message=8),
    )
    assert stream_request(request).SerializeToString(deterministic=True) == request.SerializeToString(
        deterministic=True
    )
    assert generate_request("x") == pb.GenerateRequest(text="x")
    assert generate_request([1, 2]) == pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))
    assert generate_request([]).WhichOneof("input") == "token_ids"
    assert tokenize_request([{"role": "user", "content": "hi"}], "m").chat.messages[0].content == "hi"


def test_a_conversation_has_options_of_its_own() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d"}}]
    talk = [{"role": "tool", "content": "4", "tool_call_id": "c"}]
    for request in (
        generate_request(talk, tools=tools, template_arguments={"enable_thinking": False}),
        tokenize_request(talk, "", tools=tools, template_arguments={"enable_thinking": False}),
    ):
        assert request.chat.messages[0].tool_call_id == "c"
        assert json.loads(request.chat.tools_json) == tools
        assert not request.chat.template_arguments["enable_thinking"]
        assert not request.chat.HasField("add_generation_prompt")
    assert generate_request(talk, continue_final_message=True).chat.continue_final_message
    with pytest.raises(TypeError, match="only a conversation has tools"):
        generate_request("x", tools=tools)


def test_what_the_contract_has_no_field_for_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        generate_request("x", temprature=0)
    with pytest.raises(ParseError):
        generate_request([{"role": "user", "contents": "hi"}])
    with pytest.raises(TypeError):
        tokenize_request([1, 2], "")
