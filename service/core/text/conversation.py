"""A conversation as callers send it, and as templates see it: the dicts that users of transformers write. JSON in it
(tools, arguments) stays text until rendered, so that its size costs only there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

MAX_DEPTH = 32  # of JSON; a template prints it by recursion


_Members = dict[str, msgspec.Raw]  # looked at, and not made into objects
_read_object = msgspec.json.Decoder(_Members).decode
_read_objects = msgspec.json.Decoder(list[_Members]).decode


class ChatTemplateError(Exception):
    """The messages do not fit the template. The text is safe to send to the caller."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    parts: tuple[str, ...] = ()  # instead of content
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""

    @property
    def simple(self) -> bool:
        """Has only a role and a text."""
        return not (self.parts or self.name or self.tool_calls or self.tool_call_id or self.reasoning)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    tools: str = ""  # a JSON list of objects; empty: none
    arguments: str = ""  # a JSON object of variables; empty: none
    add_generation_prompt: bool = True
    continue_final_message: bool = False


NO_OPTIONS = ChatOptions()


def sent_texts(messages: Sequence[ChatMessage], options: ChatOptions) -> Iterator[str]:
    for message in messages:
        yield message.role
        yield message.content
        if not message.simple:
            yield from (*message.parts, message.name, message.tool_call_id, message.reasoning)
            for call in message.tool_calls:
                yield from (call.name, call.arguments, call.id)
    if options is not NO_OPTIONS:
        yield from (options.tools, options.arguments)


def template_variables(messages: Sequence[ChatMessage], options: ChatOptions, lists: bool = True) -> dict[str, Any]:
    """Without `lists`, a message's parts are one text. Raises ChatTemplateError for invalid JSON."""
    if not messages:
        raise ChatTemplateError("a chat needs at least one message")
    tools = _json(options.tools, "tools") if options.tools else None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ChatTemplateError("tools: must be a JSON list of objects")
    return {
        "documents": None,
        **(_object(options.arguments, "template_arguments") if options.arguments else {}),
        "messages": [_message(message, index, lists) for index, message in enumerate(messages)],
        "tools": tools or None,
        "add_generation_prompt": options.add_generation_prompt,
    }


def is_object(text: str) -> bool:
    """Takes 20 ns a byte, and no memory."""
    try:
        _read_object(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def count_objects(text: str) -> int | None:
    """None unless the text is a JSON list of objects."""
    try:
        return len(_read_objects(text))
    except (msgspec.DecodeError, RecursionError):
        return None


def only_flags(arguments: str) -> bool:
    """All values are true, false or null: no template can do much with them."""
    if len(arguments) > 256:
        return False
    return all(value is None or isinstance(value, bool) for value in json.loads(arguments).values())


def texts_in(value: object) -> Iterator[str]:
    """Yields every text, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Changes every text, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): with_texts(item, change) for key, item in value.items()}
    return value


def _message(message: ChatMessage, index: int, lists: bool) -> dict[str, Any]:
    content: Any = message.content
    if message.simple:
        return {"role": message.role, "content": content}
    if message.parts and not lists:
        content = "".join(message.parts)
    elif message.parts:
        content = [{"type": "text", "text": text} for text in message.parts]
    elif message.tool_calls and not content:
        content = None  # as OpenAI's API writes it: some templates tell calls by it
    made: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.name:
        made["name"] = message.name
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"[{index}].tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _object(call.arguments, f"{where}.arguments")}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _object(text: str, where: str) -> dict[str, Any]:
    value = _json(text, where)
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{where}: must be a JSON object")
    return value


def _json(text: str, where: str) -> Any:
    """Parses strictly: no NaN, no invalid text, and no deeper than a template can print."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a character cannot be tokenized
    except (ValueError, RecursionError):
        raise ChatTemplateError(f"{where}: is no JSON that can be given to a template") from None
    if _deeper(value, MAX_DEPTH):
        raise ChatTemplateError(f"{where}: is nested deeper than {MAX_DEPTH} levels")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value


def _deeper(value: object, most: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return not most or any(_deeper(item, most - 1) for item in value)
