"""What a template is given, and what it makes of it, is what transformers makes of it, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from service.core.text import ChatMessage, ChatOptions, ChatTemplateError, ToolCall
from service.core.text.chat import ChatTemplate
from service.core.text.conversation import template_variables
from tests.service.core.text.family_templates import FAMILIES, HOSTILE

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
Dict = dict[str, Any]


def user(content: Any = "Is it raining in Łódź?", **more: Any) -> Dict:
    return {"role": "user", "content": content, **more}


def answer(content: Any = "Let me see.", **more: Any) -> Dict:
    return {"role": "assistant", "content": content, **more}


def call(name: str, number: str = "abcdefgh1", /, **arguments: Any) -> Dict:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, number: str = "abcdefgh1", **more: Any) -> Dict:
    return {"role": "tool", "content": content, **more, "tool_call_id": number}


def parts(*texts: str) -> list[Dict]:
    return [{"type": "text", "text": text} for text in texts]


SYSTEM = {"role": "system", "content": " Be brief. "}
WEATHER = call("weather", place='Łódź "Centrum" <b>&\'', days=3, exact=True, at=None, near=[51.75, 19.5, {"x": 1.0}])
CHATS: list[list[Dict]] = [
    [user()],
    [SYSTEM, user(" {{ 7 * 7 }} <|im_end|> 日本\n\n"), answer("  e\u0301🙂 "), user("And?\t")],
    [user(), answer(None, tool_calls=[WEATHER]), result('{"rain": false}'), answer("No.\n"), user("Sure?")],
    [SYSTEM, user(), answer("I look.", tool_calls=[WEATHER, call("time", "abcdefgh2")]), result("no"),
     result("12:00", "abcdefgh2", name="time")],
    [user(), answer("No.", reasoning_content="It is\nsummer.\n"), user("Why?"), answer("", reasoning_content="Hm")],
    [user("a"), answer("<think>\nold\n</think>\n\nThen"), user("b"), answer("<think>\nnew\n</think>\n\nNow  ")],
    [user(parts("One.", " Two. ")), answer(parts("Three"))],
    [user("Hi", name="Zoë"), answer(""), user("")],
    [user("first"), user("again"), {"role": "critic", "content": "an odd role"}],
    [SYSTEM, user("long " * 300), answer("yes"), user("x"), answer("y"), user("z"), answer("half a sen ")],
]  # fmt: skip
TOOLS: list[Dict] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'What it is "like" in a <place>',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": " where é "},
                    "days": {"type": "integer", "description": "how many", "minimum": 1, "maximum": 1.5},
                    "near": {"type": "array", "items": {"type": "number"}, "description": "at"},
                    "more": {"type": "object", "additionalProperties": {"type": "boolean"}, "description": "m"},
                    "any": {"type": ["string", "null"], "description": "either"},
                },
                "required": ["place"],
            },
            "return": {"type": "string"},
        },
    },
    {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object",
     "properties": {}}}},
]  # fmt: skip
OPTIONS: list[Dict] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "tools": TOOLS, "enable_thinking": False, "style": ["a", 1, 2.5]},
    {"add_generation_prompt": False, "tools": TOOLS[:1], "date_string": "2 May", "tools_in_user_message": False},
    {"continue_final_message": True, "builtin_tools": ["weather"], "documents": [{"title": "t", "text": "x"}]},
]


def ours(message: Dict) -> ChatMessage:
    """As it is sent."""
    content = message["content"]
    calls = [(one["function"], one["id"]) for one in message.get("tool_calls", [])]
    return ChatMessage(
        role=message["role"],
        content=content if isinstance(content, str) else "",
        parts=tuple(part["text"] for part in content) if isinstance(content, list) else (),
        name=message.get("name", ""),
        tool_calls=tuple(ToolCall(one["name"], json.dumps(one["arguments"]), number) for one, number in calls),
        tool_call_id=message.get("tool_call_id", ""),
        reasoning=message.get("reasoning_content", ""),
    )


def told(options: Dict) -> ChatOptions:
    known = {"tools", "add_generation_prompt", "continue_final_message"}
    arguments = {name: value for name, value in options.items() if name not in known}
    return ChatOptions(
        tools=json.dumps(options["tools"]) if "tools" in options else "",
        arguments=json.dumps(arguments) if arguments else "",
        add_generation_prompt=options.get("add_generation_prompt", False),
        continue_final_message=options.get("continue_final_message", False),
    )


def rendered(template: ChatTemplate, chat: list[Dict], options: Dict) -> str | None:
    """None where it is refused."""
    ask = told(options)
    try:
        return template.render(template_variables([ours(message) for message in chat], ask), ask.continue_final_message)
    except ChatTemplateError:
        return None


def reference(source: str, chat: list[Dict], options: Dict) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([chat], chat_template=source, **options, **SPECIAL)
    except Exception:
        return None
    text: str = texts[0]
    return text


def every() -> Iterator[tuple[int, list[Dict], Dict]]:
    for number, chat in enumerate(CHATS):
        for options in OPTIONS:
            yield number, chat, options


@pytest.mark.parametrize("name", [*FAMILIES, *HOSTILE])
def test_forty_conversations(name: str) -> None:
    source = {**FAMILIES, **HOSTILE}[name]
    template = ChatTemplate(source, SPECIAL)
    count = 0
    for number, chat, options in every():
        expected = reference(source, chat, options)
        assert rendered(template, chat, options) == expected, (number, options)
        count += expected is not None
    assert count >= (12 if name in FAMILIES else 0), "most are refused: nothing was shown"


def test_order_of_keys_and_numbers_are_the_callers() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    message = ChatMessage("assistant", "", tool_calls=(ToolCall("f", '{"b": 1, "a": 1.0, "c": 12345678901234567890}'),))
    options = ChatOptions(tools='[{"z": 1, "y": {"b": 2, "a": 3}}]')
    text = template.render(template_variables([message], options))
    assert text == '[{"z": 1, "y": {"b": 2, "a": 3}}]{"b": 1, "a": 1.0, "c": 12345678901234567890}'


BROKEN = ["", "{", "[]", "1", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a":' * 40 + "1" + "}" * 40,
          '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_arguments_that_are_none_are_refused_with_their_place(text: str) -> None:
    message = ChatMessage("assistant", "", tool_calls=(ToolCall("f", "{}"), ToolCall("f", text)))
    with pytest.raises(ChatTemplateError, match=r"\[1\]\.tool_calls\[1\]\.arguments"):
        template_variables([ChatMessage("user", "x"), message], ChatOptions())
    if text:
        with pytest.raises(ChatTemplateError, match=r"tools|template_arguments"):
            template_variables([ChatMessage("user", "x")], replace(ChatOptions(), arguments=text))


def test_special_tokens_cannot_be_named_anew() -> None:
    variables = template_variables([ChatMessage("user", "x")], ChatOptions(arguments='{"bos_token": "y"}'))
    with pytest.raises(ChatTemplateError, match="are taken"):
        ChatTemplate("{{ bos_token }}", SPECIAL).render(variables)
