"""Chats to plain data: parts, calls, tools and a template's variables; what is wrong is named with its place."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from service.core.errors import Unimplemented
from service.core.request import ChatPrompt
from service.core.text import ChatMessage, ChatOptions, ToolCall
from service.core.validation import Violations
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.whippet_v1.parse_chat import read_chat
from service.protocols.whippet_v1.structs import MAX_DEPTH, MAX_VALUES
from tests.service.conftest import Server, refused
from tests.service.protocols.whippet_v1.test_parse import FACTS, fields, read

USER = {"role": "user", "content": "hi"}


def chat(*messages: dict[str, Any], **more: Any) -> pb.Chat:
    return ParseDict({"messages": list(messages or (USER,)), **more}, pb.Chat())


def prompt(given: pb.Chat) -> ChatPrompt:
    found = read(pb.GenerateRequest(chat=given)).prompt
    assert isinstance(found, ChatPrompt)
    return found


def test_everything_that_a_message_may_have() -> None:
    calls = [{"id": "1", "name": "f", "arguments": '{"a": 1.0}'}, {"name": "g", "arguments": "{}"}]
    given = chat(
        {"role": "user", "parts": [{"text": "a"}, {"text": ""}], "name": "Zoë"},
        {"role": "assistant", "tool_calls": calls, "reasoning": "hm"},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    )
    assert prompt(given).messages == (
        ChatMessage("user", "", parts=("a", ""), name="Zoë"),
        ChatMessage(
            "assistant", "", tool_calls=(ToolCall("f", '{"a": 1.0}', "1"), ToolCall("g", "{}")), reasoning="hm"
        ),
        ChatMessage("tool", "r", tool_call_id="1"),
    )


def test_how_a_prompt_ends() -> None:
    def ends(**more: bool) -> tuple[bool, bool]:
        options = prompt(chat(**more)).options
        return options.add_generation_prompt, options.continue_final_message

    assert ends() == ends(continue_final_message=False) == (True, False)
    assert ends(add_generation_prompt=False) == (False, False)
    assert ends(continue_final_message=True) == (False, True)
    assert ends(continue_final_message=True, add_generation_prompt=False) == (False, True)
    both = chat(add_generation_prompt=True, continue_final_message=True)
    assert fields(pb.GenerateRequest(chat=both)) == {"chat.add_generation_prompt"}
    assert prompt(chat(continue_final_message=True)).continues
    assert not prompt(chat()).continues


def test_numbers_of_a_struct_are_whole_where_they_can_be() -> None:
    rest = {"e": 1e300, "f": True, "g": None, "h": [[], {}, "x"]}
    text = prompt(chat(template_arguments={"a": 1, "b": 1.5, "c": -0.0, "d": 2.0**53, **rest})).options.arguments
    assert text == json.dumps({"a": 1, "b": 1.5, "c": 0, "d": 2**53, **rest})


def test_keys_of_a_struct_have_one_order() -> None:
    properties = {"zone": {"type": "string"}, "type": {"type": "integer"}, "name": {}, "about": {}}
    function = {
        "parameters": {"required": ["name", "zone", "nothing", 5], "properties": properties, "type": "object"},
        "description": "d",
        "name": "f",
    }
    tool = json.loads(prompt(chat(tools=[{"function": function, "type": "function"}])).options.tools)[0]
    assert list(tool) == ["type", "function"]
    assert list(tool["function"]) == ["name", "description", "parameters"]
    assert list(tool["function"]["parameters"]) == ["type", "properties", "required"]
    assert list(tool["function"]["parameters"]["properties"]) == ["name", "zone", "about", "type"]


def test_tools_as_text_stay_as_they_are() -> None:
    text = ' [{"z": 1.0, "a": 2}] '
    assert prompt(chat(tools_json=text)).options == ChatOptions(tools=text)
    assert prompt(chat(tools_json="[]")).options == prompt(chat(tools=[])).options == ChatOptions()


def deep(levels: int) -> Struct:
    inner = Struct()
    for _ in range(levels):
        inner = Struct(fields={"a": Value(struct_value=inner)})
    return inner


FIRST = "chat.messages[0]"
CALL = {"name": "f", "arguments": "{}"}
WRONG: list[tuple[pb.Chat, str]] = [
    (chat({**USER, "parts": [{"text": "x"}]}), "chat.messages[0].parts"),
    (chat({"role": "user", "parts": [{}]}), "chat.messages[0].parts[0]"),
    (chat({"role": "user", "parts": [{"text": "x"}] * 1025}), "chat.messages[0].parts"),
    (chat(USER, {**USER, "tool_calls": [CALL]}), "chat.messages[1].tool_calls"),
    (chat({"role": "assistant", "tool_calls": [CALL] * 257}), "chat.messages[0].tool_calls"),
    (chat({"role": "assistant", "tool_calls": [CALL, {"arguments": "{}"}]}), "chat.messages[0].tool_calls[1].name"),
    (chat({**USER, "tool_call_id": "1"}), "chat.messages[0].tool_call_id"),
    (chat(tools=[{}]), "chat.tools[0]"),
    (chat(tools=[{"a": 1}] * 1025), "chat.tools"),
    (chat(tools=[{"a": 1}], tools_json='[{"a": 1}]'), "chat.tools_json"),
    (chat(tools_json="{}"), "chat.tools_json"),
    (chat(tools_json="[" * 100_000), "chat.tools_json"),
    (chat(tools_json=json.dumps([{}] * 1025)), "chat.tools_json"),
    (chat(tools=[{"a": [1] * MAX_VALUES}]), "chat.tools[0]"),
    (pb.Chat(messages=[pb.ChatMessage(**USER)], tools=[deep(MAX_DEPTH + 1)]), "chat.tools[0]"),
    (chat(template_arguments={"messages": []}), "chat.template_arguments.messages"),
    (chat(template_arguments={"no name": 1}), "chat.template_arguments"),
    (chat(template_arguments={f"a{n}": 1 for n in range(65)}), "chat.template_arguments"),
    (
        pb.Chat(messages=[pb.ChatMessage(**USER)], template_arguments=Struct(fields={"a": Value(number_value=1e999)})),
        "chat.template_arguments",
    ),
]
NO_OBJECTS = ("", "x", "[]", "{'a': 1}", '{"a": 1,}', '{"a":' * 100_000)
WRONG += [
    (chat({"role": "assistant", "tool_calls": [{**CALL, "arguments": text}]}), f"{FIRST}.tool_calls[0].arguments")
    for text in NO_OBJECTS
]


@pytest.mark.parametrize(("given", "field"), WRONG, ids=[f"{n}:{field}" for n, (_, field) in enumerate(WRONG)])
def test_what_is_wrong_is_named_with_its_place(given: pb.Chat, field: str) -> None:
    assert fields(pb.GenerateRequest(chat=given)) == {field}


def test_as_deep_and_as_many_as_allowed() -> None:
    given = pb.Chat(messages=[pb.ChatMessage(**USER)], tools=[deep(MAX_DEPTH)])
    assert prompt(pb.Chat.FromString(given.SerializeToString())).options.tools.count("{") == MAX_DEPTH + 1
    full = Struct(fields={"a": Value(list_value=ListValue(values=[Value(number_value=1)] * (MAX_VALUES - 1)))})
    assert prompt(pb.Chat(messages=[pb.ChatMessage(**USER)], tools=[full])).options.tools


def test_an_image_is_refused_by_its_place() -> None:
    given = chat(USER, {"role": "user", "parts": [{"text": "what is"}, {"image": {"url": "http://example.org/a.png"}}]})
    with pytest.raises(Unimplemented, match="takes no images") as caught:
        read_chat(given, FACTS, Violations())
    assert caught.value.field == "chat.messages[1].parts[1].image"


def test_over_the_wire(server: Server) -> None:
    """The fake model's template prints roles and contents alone; parts and tools get there, and wrong ones do not."""
    rich = chat({"role": "user", "parts": [{"text": "a"}]}, tools=[{"name": "f"}], template_arguments={"x": [1]})
    ids = server.generation.Tokenize(pb.TokenizeRequest(chat=rich), timeout=60).token_ids
    assert bytes(ids).decode() == '[{"name": "f"}]\nuser: a\nassistant: '
    goes_on = chat({"role": "user", "content": "go o"}, continue_final_message=True)
    assert bytes(server.generation.Tokenize(pb.TokenizeRequest(chat=goes_on), timeout=60).token_ids) == b"user: go o"
    calls = [{"name": "f", "arguments": '{"a": "\\ud800"}'}]
    for given, code, place in (
        (chat({"role": "user", "parts": [{"image": {}}]}), grpc.StatusCode.UNIMPLEMENTED, "parts[0].image"),
        (chat({"role": "assistant", "tool_calls": calls}), grpc.StatusCode.INVALID_ARGUMENT, "tool_calls[0].arguments"),
    ):
        refusal = refused(server.generation.Generate, pb.GenerateRequest(chat=given), timeout=60)
        assert refusal.code is code
        assert place in refusal.message + str(refusal.details.values())
