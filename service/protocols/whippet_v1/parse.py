"""Messages to plain data: defaults resolved, every violation found before any is reported."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from engine.api import Priority, SamplingParams
from service.core.errors import InvalidRequest, Unimplemented, UnknownModel, Violation
from service.core.request import (
    Access,
    CacheUse,
    ChatPrompt,
    Delivery,
    ModelFacts,
    Output,
    Prompt,
    Request,
    Stops,
    TextPrompt,
    TokenPrompt,
)
from service.core.text import ChatMessage
from service.core.validation import Violations, too_long
from service.pb.whippet.v1 import generation_pb2 as pb

GenerationMessage = pb.GenerateRequest | pb.GenerateStreamRequest
_Message = TypeVar("_Message", bound=Message)

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOKENS_PER_MESSAGE = 1024
MAX_DELAY = 60.0  # seconds
DEFAULT_DELAY = 0.05  # seconds, where a message may hold several tokens
_GREEDY_BELOW = 1e-5  # temperatures under it would overflow the logits; they are greedy in all but name
_LEAST_PENALTY = 0.009999999776482582  # 0.01 as a float; dividing logits by less overflows them
_SEEDS = 1 << 64
_REQUEST_ID = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    pb.PRIORITY_BACKGROUND: Priority.BACKGROUND,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
}

_ACCESS = {
    pb.CACHE_MODE_OFF: Access(read=False, write=False),
    pb.CACHE_MODE_READ: Access(read=True, write=False),
    pb.CACHE_MODE_WRITE: Access(read=False, write=True),
    pb.CACHE_MODE_READ_WRITE: Access(read=True, write=True),
}


def decode(kind: type[_Message], data: bytes) -> _Message:
    """Raises InvalidRequest where the bytes are no such message, invalid UTF-8 included; gRPC would answer INTERNAL."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest((Violation("", f"the bytes are no {kind.DESCRIPTOR.full_name}"),)) from None


def check_model(name: str, facts: ModelFacts) -> None:
    """Raises UnknownModel."""
    if name and name != facts.name:
        raise UnknownModel(name)


def read_generation(message: GenerationMessage, facts: ModelFacts, semantic: bool) -> Request:
    """The valid request; `semantic` says whether there is such a cache. Raises UnknownModel, InvalidRequest or
    Unimplemented."""
    check_model(message.model, facts)
    found = Violations()
    request = Request(
        request_id=_request_id(message.request_id, found),
        prompt=_prompt(message, facts, found),
        sampling=_sampling(message.sampling, facts, found),
        stops=_stops(message.stopping, facts, found),
        output=_output(message.output, found),
        priority=_priority(message.priority, found),
        time_budget=_time_budget(message, found),
        delivery=_delivery(message.delivery, found),
        cache=_cache(message.cache, found),
        seeded=message.sampling.HasField("seed"),
    )
    found.number("speculation.max_draft_tokens", message.speculation.max_draft_tokens, 0, None)
    found.raise_any()
    _refuse_unimplemented(message, request, facts, semantic)
    return request


def read_tokenize(message: pb.TokenizeRequest, facts: ModelFacts) -> TextPrompt | ChatPrompt:
    """The text or the chat to tokenize."""
    check_model(message.model, facts)
    field = message.WhichOneof("input")
    if field is None:
        raise InvalidRequest((Violation("input", "one of text and chat is needed"),))
    if field == "text":
        return TextPrompt(message.text)
    found = Violations()
    prompt = _chat(message.chat, facts, found)
    found.raise_any()
    _refuse_chat(prompt, facts)
    return prompt


def read_detokenize(message: pb.DetokenizeRequest, facts: ModelFacts) -> list[int]:
    """The token ids to turn into text."""
    check_model(message.model, facts)
    found = Violations()
    if len(message.token_ids) > facts.max_context:
        found.add("token_ids", f"must be at most {facts.max_context}")
    else:
        found.token_ids("token_ids", message.token_ids, facts.vocab_size)
    found.raise_any()
    return list(message.token_ids)


def _request_id(given: str, found: Violations) -> str:
    if not given:
        return secrets.token_hex(12)
    if not _REQUEST_ID.fullmatch(given):
        found.add("request_id", "must be at most 128 bytes of printable ASCII, without a space at either end")
    return given


def _prompt(message: GenerationMessage, facts: ModelFacts, found: Violations) -> Prompt:
    field = message.WhichOneof("input")
    if field == "text":
        return TextPrompt(message.text)
    if field == "chat":
        return _chat(message.chat, facts, found)
    if field == "token_ids":
        return _token_ids(message.token_ids.ids, facts, found)
    found.add("input", "one of text, token_ids and chat is needed")
    return TextPrompt("")


def _token_ids(ids: Sequence[int], facts: ModelFacts, found: Violations) -> TokenPrompt:
    if not ids:
        found.add(TokenPrompt.field, "must not be empty")
    elif len(ids) >= facts.max_context:
        found.add(TokenPrompt.field, too_long(len(ids), facts.max_context))
    elif found.token_ids(TokenPrompt.field, ids, facts.vocab_size):
        return TokenPrompt(tuple(ids))
    return TokenPrompt(())


def _chat(chat: pb.Chat, facts: ModelFacts, found: Violations) -> ChatPrompt:
    if not chat.messages:
        found.add("chat.messages", "must not be empty")
    if len(chat.messages) > facts.max_context:
        found.add("chat.messages", f"must be at most {facts.max_context}")
        return ChatPrompt(())
    for index, message in enumerate(chat.messages):
        if not message.role:
            found.add(f"chat.messages[{index}].role", "must not be empty")
    return ChatPrompt(tuple(ChatMessage(role=message.role, content=message.content) for message in chat.messages))


def _sampling(given: pb.SamplingOptions, facts: ModelFacts, found: Violations) -> SamplingParams:
    default = facts.defaults

    def pick(name: str, fallback: float, low: float, high: float, above: bool = False) -> float:
        if not given.HasField(name):
            return fallback
        value: float = getattr(given, name)
        found.number(f"sampling.{name}", value, low, high, above=above)
        return value

    temperature = pick("temperature", default.temperature, 0, 100)
    top_k = given.top_k if given.HasField("top_k") else default.top_k
    found.number("sampling.top_k", top_k, 0, None)
    return SamplingParams(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=top_k,
        top_p=pick("top_p", default.top_p, 0, 1, above=True),
        min_p=pick("min_p", default.min_p, 0, 1),
        repetition_penalty=pick("repetition_penalty", default.repetition_penalty, _LEAST_PENALTY, 100),
        presence_penalty=pick("presence_penalty", default.presence_penalty, -2, 2),
        frequency_penalty=pick("frequency_penalty", default.frequency_penalty, -2, 2),
        seed=given.seed % _SEEDS if given.HasField("seed") else secrets.randbits(63),
        logit_bias=_logit_bias(given, facts, found),
    )


def _logit_bias(given: pb.SamplingOptions, facts: ModelFacts, found: Violations) -> tuple[tuple[int, float], ...]:
    if len(given.logit_bias) > MAX_LOGIT_BIAS:
        found.add("sampling.logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries")
        return ()
    bias = sorted(given.logit_bias.items())
    for token_id, value in bias:
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < facts.vocab_size:
            found.add(field, f"must name a token id from 0 to {facts.vocab_size - 1}")
        found.number(field, value, -100, 100)
    return tuple(bias)


def _stops(given: pb.StoppingOptions, facts: ModelFacts, found: Violations) -> Stops:
    max_tokens = given.max_tokens if given.HasField("max_tokens") else None
    if max_tokens is not None:
        found.number("stopping.max_tokens", max_tokens, 1, None)
    found.number("stopping.min_tokens", given.min_tokens, 0, None)
    if max_tokens is not None and 1 <= max_tokens < given.min_tokens:
        found.add("stopping.min_tokens", "must be at most max_tokens")
    _check_stop_strings(given.stop_strings, found)
    own = () if given.ignore_eos else facts.eos_token_ids
    token_ids: tuple[int, ...] = ()
    if len(given.stop_token_ids) > MAX_STOP_TOKENS:
        found.add("stopping.stop_token_ids", f"must be at most {MAX_STOP_TOKENS}")
    elif found.token_ids("stopping.stop_token_ids", given.stop_token_ids, facts.vocab_size):
        token_ids = tuple(dict.fromkeys((*given.stop_token_ids, *own)))
    return Stops(
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        strings=tuple(dict.fromkeys(given.stop_strings)) if len(given.stop_strings) <= MAX_STOP_STRINGS else (),
        token_ids=token_ids,
        include=given.include_stop,
    )


def _check_stop_strings(strings: Sequence[str], found: Violations) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        found.add("stopping.stop_strings", f"must be at most {MAX_STOP_STRINGS}")
        return
    for index, string in enumerate(strings):
        if len(string) > MAX_STOP_BYTES or not 1 <= len(string.encode()) <= MAX_STOP_BYTES:
            found.add(f"stopping.stop_strings[{index}]", f"must have 1 to {MAX_STOP_BYTES} bytes")


def _output(given: pb.OutputOptions, found: Violations) -> Output:
    logprobs = given.logprobs if given.HasField("logprobs") else None
    found.number("output.logprobs", given.logprobs, 0, MAX_LOGPROBS)
    return Output(given.text if given.HasField("text") else True, given.token_ids, logprobs)


def _priority(given: int, found: Violations) -> Priority:
    priority = _PRIORITIES.get(given)  # type: ignore[call-overload]
    if priority is None:
        found.add("priority", "is no known priority")
        return Priority.NORMAL
    return Priority(priority)


def _time_budget(message: GenerationMessage, found: Violations) -> float | None:
    if not message.HasField("time_budget"):
        return None
    return _duration("time_budget", message.time_budget, None, found, above=True)


def _delivery(given: pb.DeliveryOptions, found: Violations) -> Delivery:
    tokens = given.max_tokens_per_message if given.HasField("max_tokens_per_message") else 1
    found.number("delivery.max_tokens_per_message", tokens, 1, MAX_TOKENS_PER_MESSAGE)
    if not given.HasField("max_delay"):
        return Delivery(tokens, DEFAULT_DELAY if tokens > 1 else 0.0)
    return Delivery(tokens, _duration("delivery.max_delay", given.max_delay, MAX_DELAY, found))


def _cache(given: pb.CacheOptions, found: Violations) -> CacheUse:
    max_age = _duration("cache.max_age", given.max_age, None, found) if given.HasField("max_age") else None
    threshold = given.semantic_threshold if given.HasField("semantic_threshold") else None
    found.number("cache.semantic_threshold", given.semantic_threshold, 0, 1)
    return CacheUse(
        response=_access("cache.response", given.response, found),
        semantic=_access("cache.semantic", given.semantic, found),
        bypass_prefix=given.bypass_prefix,
        max_age=max_age,
        threshold=threshold,
    )


def _duration(field: str, given: Duration, high: float | None, found: Violations, *, above: bool = False) -> float:
    return found.duration(field, given.seconds, given.nanos, high, above=above)


def _access(field: str, given: int, found: Violations) -> Access | None:
    if given == pb.CACHE_MODE_UNSPECIFIED:
        return None
    access = _ACCESS.get(given)  # type: ignore[call-overload]
    if access is None:
        found.add(field, "is no known cache mode")
        return None
    return Access(read=access.read, write=access.write)


def _refuse_unimplemented(message: GenerationMessage, request: Request, facts: ModelFacts, semantic: bool) -> None:
    wished = request.cache.semantic
    if not semantic and wished is not None and (wished.read or wished.write):
        raise Unimplemented("cache.semantic", "this server has no semantic cache")
    if message.speculation.max_draft_tokens > 0:
        raise Unimplemented("speculation.max_draft_tokens", "this server has no draft model")
    _refuse_chat(request.prompt, facts)


def _refuse_chat(prompt: Prompt, facts: ModelFacts) -> None:
    if isinstance(prompt, ChatPrompt) and not facts.chat:
        raise Unimplemented("chat", "the model has no chat template")
