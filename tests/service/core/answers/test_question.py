"""What of a chat must be equal before the semantic cache compares its last message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from cache.api import SemanticTurn
from service.core.answers.question import turn_of
from service.core.request import ChatPrompt
from service.core.text import NO_OPTIONS, ChatMessage, ToolCall
from service.pb.whippet.v1 import generation_pb2 as pb
from tests.service.protocols.whippet_v1.test_parse import read

LAST = ChatMessage("user", "How do I sell a used car?")
QUESTION: Any = None


def turn(*messages: ChatMessage, **options: Any) -> SemanticTurn | None:
    prompt = ChatPrompt((*messages, LAST), replace(NO_OPTIONS, **options))
    return turn_of(structs.replace(read(pb.GenerateRequest()), prompt=prompt), QUESTION, "", False)


def test_all_that_a_template_is_told_must_be_equal() -> None:
    call = ToolCall("f", "{}")
    assert turn() == turn()
    told = [
        turn(),
        turn(arguments='{"enable_thinking": false}'),
        turn(arguments='{"enable_thinking": true}'),
        turn(add_generation_prompt=False),
        turn(ChatMessage("assistant", "a")),
        turn(ChatMessage("assistant", "a", reasoning="b")),
        turn(ChatMessage("assistant", "", parts=("a",))),
        turn(ChatMessage("assistant", "a", tool_calls=(call,))),
        turn(ChatMessage("assistant", "a", tool_calls=(replace(call, arguments='{"a": 1}'),))),
        turn(ChatMessage("tool", "a", tool_call_id="1")),
        turn(ChatMessage("tool", "a", name="1")),
    ]
    assert len({one.context for one in told if one}) == len(told)


def test_calls_of_tools_are_not_served_by_likeness() -> None:
    simple, tools = turn(), turn(tools='[{"name": "f"}]')
    assert simple is not None
    assert tools is not None
    assert (simple.plain, tools.plain) == (True, False)


def test_only_a_plain_last_message_is_compared() -> None:
    for field in ({"parts": ("x",)}, {"name": "x"}):
        prompt = ChatPrompt((replace(LAST, **field),))  # type: ignore[arg-type]
        assert turn_of(structs.replace(read(pb.GenerateRequest()), prompt=prompt), QUESTION, "", False) is None
