"""Makes the contract's request messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Literal, TypedDict, TypeGuard, Unpack

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message as AnyMessage

from whippet_client.pb.whippet.v1 import generation_pb2 as pb

# Of a conversation: the contract's, or as JSON has it: {"role": "user", "content": "…"}.
Message = pb.ChatMessage | Mapping[str, object]
# A text as it is, token ids as they are, or a conversation.
Prompt = str | Sequence[int] | Sequence[Message]

_PRIORITIES = {
    "background": pb.PRIORITY_BACKGROUND,
    "normal": pb.PRIORITY_NORMAL,
    "interactive": pb.PRIORITY_INTERACTIVE,
}


class ChatOptions(TypedDict, total=False):
    """Options that turn a conversation into a prompt."""

    tools: Sequence[Mapping[str, object]]  # what the model may call, as OpenAI's API has it, with its order of keys
    template_arguments: Mapping[str, object]  # {"enable_thinking": False}
    add_generation_prompt: bool
    continue_final_message: bool


class Options(ChatOptions, total=False):
    """Options of an answer. Unset ones are the model's own defaults; the contract defines the bounds of each."""

    model: str
    request_id: str
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    json_schema: str | Mapping[str, object]  # what the answer must look like: one of these five
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    text: bool  # whether the answer's text is sent
    token_ids: bool  # whether its token ids are
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool  # in text
    n: int  # answers to the one prompt
    priority: Literal["background", "normal", "interactive"]
    time_budget: float  # seconds, after which the answer ends with what there is
    max_tokens_per_message: int  # of a stream
    request: pb.GenerateRequest  # all else; what is given beside it wins


_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_STOPPING = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
_CHAT = ("template_arguments", "add_generation_prompt", "continue_final_message")
_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")
_OUTPUT = ("text", "token_ids", "logprobs", "prompt_logprobs", "skip_special_tokens")


def generate_request(prompt: Prompt, **options: Unpack[Options]) -> pb.GenerateRequest:
    """Raises TypeError, ValueError or json_format.ParseError for what the contract has no field for."""
    given: dict[str, object] = dict(options)
    request = pb.GenerateRequest()
    template = given.pop("request", None)
    if isinstance(template, pb.GenerateRequest):
        request.CopyFrom(template)
    _set_prompt(request, prompt, given)
    _set(request.sampling, given, _SAMPLING)
    _set(request.stopping, given, _STOPPING)
    _set(request.output, given, _OUTPUT)
    _set(request.delivery, given, ("max_tokens_per_message",))
    _set(request, given, ("model", "request_id", "n"))
    if "stop" in options:
        request.stopping.stop_strings[:] = options["stop"]
    if "priority" in options:
        request.priority = _PRIORITIES[options["priority"]]
    if "time_budget" in options:
        request.time_budget.FromNanoseconds(round(options["time_budget"] * 1e9))
    _set_constraint(request, given)
    _refuse(given.keys() - {"stop", "priority", "time_budget"})
    return request


def _set_constraint(request: pb.GenerateRequest, given: dict[str, object]) -> None:
    asked = {name: given.pop(name) for name in _CONSTRAINTS if name in given}
    if len(asked) > 1:
        raise TypeError(f"only one of {', '.join(asked)} can be asked for")
    for kind, value in asked.items():
        if kind == "json_schema" and not isinstance(value, str):
            value = json.dumps(value)
        if kind == "choice":
            value = pb.Choice(options=value)  # type: ignore[arg-type]
        request.constraint.CopyFrom(pb.Constraint(**{kind: value}))  # type: ignore[arg-type]


def stream_request(request: pb.GenerateRequest) -> pb.GenerateStreamRequest:
    """Converts by bytes: the same fields have the same numbers."""
    return pb.GenerateStreamRequest.FromString(request.SerializeToString())


def tokenize_request(prompt: str | Sequence[Message], model: str, **options: Unpack[ChatOptions]) -> pb.TokenizeRequest:
    """Raises TypeError for unknown options."""
    given: dict[str, object] = dict(options)
    request = pb.TokenizeRequest(model=model)
    _set_prompt(request, prompt, given)
    _refuse(given.keys())
    return request


def _set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt, given: dict[str, object]) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif _is_chat(prompt):
        request.chat.messages.extend(_message(one) for one in prompt)
        if "tools" in given:
            request.chat.tools_json = json.dumps(given.pop("tools"))
        _set(request.chat, given, _CHAT)
    elif isinstance(request, pb.GenerateRequest):
        request.token_ids.SetInParent()
        request.token_ids.ids[:] = prompt  # type: ignore[assignment]  # what is left are ids
    else:
        raise TypeError("a text or a conversation is expected")


def _refuse(left: Set[str]) -> None:
    """Raises TypeError for arguments that no field took."""
    if misplaced := left & ChatOptions.__annotations__.keys():
        raise TypeError(f"only a conversation has {', '.join(sorted(misplaced))}")
    if left:
        raise TypeError(f"no such option: {', '.join(sorted(left))}")


def _is_chat(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return bool(prompt) and not isinstance(prompt[0], int)


def _message(one: Message) -> pb.ChatMessage:
    return one if isinstance(one, pb.ChatMessage) else ParseDict(dict(one), pb.ChatMessage())


def _set(part: AnyMessage, given: dict[str, object], names: Sequence[str]) -> None:
    """Moves what is given of these fields; a part of which nothing is given stays unset."""
    values = {name: given.pop(name) for name in names if name in given}
    if values:
        part.MergeFrom(type(part)(**values))
