"""Checks a chat's roles, parts, tools and template options before anything is rendered."""

from __future__ import annotations

import json

from service.core.errors import Unimplemented
from service.core.request import ChatPrompt, ModelFacts
from service.core.text import NO_OPTIONS, ChatMessage, ChatOptions, ToolCall
from service.core.text.conversation import count_objects, is_object
from service.core.validation import Violations
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.whippet_v1.structs import StructReader, StructTooLarge

MAX_TOOLS = 1024
MAX_TOOL_CALLS = 256  # of one message
MAX_PARTS = 1024  # of one message
MAX_ARGUMENTS = 64
MAX_ARGUMENT_NAME = 64  # characters
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
_NOT_THE_MODEL = frozenset({"system", "developer", "user", "tool", "function"})
_NOT_A_TOOL = frozenset({"system", "developer", "user", "assistant"})


def read_chat(chat: pb.Chat, facts: ModelFacts, found: Violations) -> ChatPrompt:
    """Raises Unimplemented where a message has an image."""
    if not chat.messages:
        found.add("chat.messages", "must not be empty")
    if len(chat.messages) > facts.max_context:
        found.add("chat.messages", f"must be at most {facts.max_context}")
        return ChatPrompt(())
    messages = tuple(_message(message, f"chat.messages[{n}]", found) for n, message in enumerate(chat.messages))
    return ChatPrompt(messages, _options(chat, found))


def _message(message: pb.ChatMessage, where: str, found: Violations) -> ChatMessage:
    if not message.role:
        found.add(f"{where}.role", "must not be empty")
    if not (message.parts or message.tool_calls or message.name or message.tool_call_id or message.reasoning):
        return ChatMessage(message.role, message.content)
    if message.parts and message.content:
        found.add(f"{where}.parts", "must be empty where content is not")
    if message.tool_calls and message.role in _NOT_THE_MODEL:
        found.add(f"{where}.tool_calls", f"are the model's: role {message.role} has none")
    if message.tool_call_id and message.role in _NOT_A_TOOL:
        found.add(f"{where}.tool_call_id", f"names the call that a result belongs to: role {message.role} has none")
    return ChatMessage(
        role=message.role,
        content=message.content,
        parts=_parts(message, where, found),
        name=message.name,
        tool_calls=_tool_calls(message, where, found),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _parts(message: pb.ChatMessage, where: str, found: Violations) -> tuple[str, ...]:
    if len(message.parts) > MAX_PARTS:
        found.add(f"{where}.parts", f"must be at most {MAX_PARTS}")
        return ()
    for index, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind == "image":
            raise Unimplemented(f"{where}.parts[{index}].image", "the model takes no images")
        if kind is None:
            found.add(f"{where}.parts[{index}]", "must have a text")
    return tuple(part.text for part in message.parts)


def _tool_calls(message: pb.ChatMessage, where: str, found: Violations) -> tuple[ToolCall, ...]:
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        found.add(f"{where}.tool_calls", f"must be at most {MAX_TOOL_CALLS}")
        return ()
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            found.add(f"{where}.tool_calls[{index}].name", "must not be empty")
        if not is_object(call.arguments):
            found.add(f"{where}.tool_calls[{index}].arguments", "must be a JSON object")
    return tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls)


def _options(chat: pb.Chat, found: Violations) -> ChatOptions:
    continues = chat.continue_final_message
    begins = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
    if begins and continues:
        found.add("chat.add_generation_prompt", "must not be true beside continue_final_message")
    if not (chat.tools or chat.tools_json or chat.HasField("template_arguments")):
        plain = begins and not continues
        return NO_OPTIONS if plain else ChatOptions(add_generation_prompt=begins, continue_final_message=continues)
    reader = StructReader()
    return ChatOptions(
        tools=_tools(chat, reader, found),
        arguments=_arguments(chat, reader, found) if chat.HasField("template_arguments") else "",
        add_generation_prompt=begins,
        continue_final_message=continues,
    )


def _tools(chat: pb.Chat, reader: StructReader, found: Violations) -> str:
    if chat.tools_json:
        return _tools_json(chat, found)
    if len(chat.tools) > MAX_TOOLS:
        found.add("chat.tools", f"must be at most {MAX_TOOLS}")
        return ""
    tools = []
    for index, tool in enumerate(chat.tools):
        try:
            tools.append(reader.read(tool))
        except StructTooLarge as error:
            found.add(f"chat.tools[{index}]", str(error))
            return ""
        if not tools[-1]:
            found.add(f"chat.tools[{index}]", "must not be empty")
    return json.dumps(tools, ensure_ascii=False) if tools else ""


def _tools_json(chat: pb.Chat, found: Violations) -> str:
    if chat.tools:
        found.add("chat.tools_json", "must be empty where tools is not")
        return ""
    count = count_objects(chat.tools_json)
    if count is None:
        found.add("chat.tools_json", "must be a JSON list of objects")
    elif count > MAX_TOOLS:
        found.add("chat.tools_json", f"must have at most {MAX_TOOLS}")
    return chat.tools_json if count else ""


def _arguments(chat: pb.Chat, reader: StructReader, found: Violations) -> str:
    given = chat.template_arguments
    field = "chat.template_arguments"
    if len(given.fields) > MAX_ARGUMENTS:
        found.add(field, f"must be at most {MAX_ARGUMENTS}")
        return ""
    for name in given.fields:
        if name in RESERVED:
            found.add(f"{field}.{name}", "is given to the template anyway")
        elif not name.isidentifier() or len(name) > MAX_ARGUMENT_NAME:
            found.add(field, f"must have names of variables, of at most {MAX_ARGUMENT_NAME} characters")
            return ""
    try:
        arguments = reader.read(given)
    except StructTooLarge as error:
        found.add(field, str(error))
        return ""
    return json.dumps(arguments, ensure_ascii=False) if arguments else ""
