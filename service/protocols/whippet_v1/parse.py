"""Converts messages to plain data: defaults resolved, every violation found before any is reported."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from engine.api import Priority
from service.core.errors import InvalidRequest, Unimplemented, UnknownModel, Violation
from service.core.request import (
    COALESCING_DELAY,
    Access,
    CacheUse,
    ChatPrompt,
    ConstraintText,
    Delivery,
    ModelFacts,
    Output,
    Prompt,
    Request,
    Stops,
    TextPrompt,
    TokenPrompt,
)
from service.core.validation import Violations
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.sampling_fields import (
    SamplingFields,
    StopFields,
    read_answers,
    read_constraint,
    read_logprobs,
    read_request_id,
    read_sampling,
    read_stops,
    read_token_ids,
)
from service.protocols.whippet_v1.parse_chat import read_chat

GenerationMessage = pb.GenerateRequest | pb.GenerateStreamRequest

MAX_TOKENS_PER_MESSAGE = 1024
MAX_DELAY = 60.0  # seconds
DEFAULT_DELAY = 0.05  # seconds, where a message may hold several tokens

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

# Of a message without them.
_OUTPUT = Output(text=True, token_ids=False, logprobs=None)
_DELIVERY = Delivery(1, 0.0, COALESCING_DELAY)
_CACHE = CacheUse()


def check_model(name: str, facts: ModelFacts) -> None:
    if name and name != facts.name:
        raise UnknownModel(name, facts.name)


def read_generation(message: GenerationMessage, facts: ModelFacts, semantic: bool) -> Request:
    """`semantic`: there is a semantic cache. Raises UnknownModel, InvalidRequest or Unimplemented."""
    check_model(message.model, facts)
    found = Violations()
    request = Request(
        request_id=read_request_id(message.request_id, found),
        prompt=_prompt(message, facts, found),
        # Most messages leave most of these out, and looking into each of them costs microseconds.
        sampling=read_sampling(_sampling(message), facts, found, "sampling."),
        stops=_stops(message, facts, found),
        output=_output(message.output, found) if message.HasField("output") else _OUTPUT,
        priority=_priority(message.priority, found),
        time_budget=_time_budget(message, found),
        delivery=_delivery(message.delivery, found) if message.HasField("delivery") else _DELIVERY,
        cache=_cache(message.cache, found) if message.HasField("cache") else _CACHE,
        seeded=message.sampling.HasField("seed"),
        constraint=_constraint(message.constraint, found) if message.HasField("constraint") else None,
        draft_limit=_draft_limit(message.speculation, found) if message.HasField("speculation") else None,
        answers=_answers(message, found) if message.HasField("n") else 1,
    )
    found.raise_any()
    _refuse_unimplemented(request, facts, semantic)
    return request


def read_tokenize(message: pb.TokenizeRequest, facts: ModelFacts) -> TextPrompt | ChatPrompt:
    check_model(message.model, facts)
    field = message.WhichOneof("input")
    if field is None:
        raise InvalidRequest((Violation("input", "one of text and chat is needed"),))
    if field == "text":
        return TextPrompt(message.text)
    found = Violations()
    prompt = read_chat(message.chat, facts, found)
    found.raise_any()
    _refuse_chat(prompt, facts)
    return prompt


def read_detokenize(message: pb.DetokenizeRequest, facts: ModelFacts) -> list[int]:
    check_model(message.model, facts)
    found = Violations()
    if len(message.token_ids) > facts.max_context:
        found.add("token_ids", f"must be at most {facts.max_context}")
    else:
        found.token_ids("token_ids", message.token_ids, facts.vocab_size)
    found.raise_any()
    return list(message.token_ids)


def _prompt(message: GenerationMessage, facts: ModelFacts, found: Violations) -> Prompt:
    field = message.WhichOneof("input")
    if field == "text":
        return TextPrompt(message.text)
    if field == "chat":
        return read_chat(message.chat, facts, found)
    if field == "token_ids":
        return read_token_ids(message.token_ids.ids, facts, found, TokenPrompt.field)
    found.add("input", "one of text, token_ids and chat is needed")
    return TextPrompt("")


def _sampling(message: GenerationMessage) -> SamplingFields | None:
    if not message.HasField("sampling"):
        return None
    # Its fields are called as the wish's.
    return SamplingFields(**{field.name: value for field, value in message.sampling.ListFields()})


def _stops(message: GenerationMessage, facts: ModelFacts, found: Violations) -> Stops:
    given = message.stopping
    fields = StopFields(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        min_tokens=given.min_tokens,
        strings=given.stop_strings,
        token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        include=given.include_stop,
    )
    scored = message.output.HasField("prompt_logprobs")
    return read_stops(fields, facts, found, "stopping.", "stop_strings", scored=scored)


def _answers(message: GenerationMessage, found: Violations) -> int:
    stopping = message.stopping
    return read_answers(message.n, stopping.max_tokens if stopping.HasField("max_tokens") else None, found, "n")


def _constraint(given: pb.Constraint, found: Violations) -> ConstraintText | None:
    kind = given.WhichOneof("kind")
    if kind is None:
        found.add("constraint", "one of json_schema, json_object, regex, choice and grammar is needed")
        return None
    if kind == "json_object":
        if not given.json_object:
            found.add("constraint.json_object", "must be true")
        return read_constraint(kind, (), found, "constraint.json_object")
    texts = given.choice.options if kind == "choice" else (getattr(given, kind),)
    return read_constraint(
        kind, texts, found, "constraint.choice.options" if kind == "choice" else f"constraint.{kind}"
    )


def _output(given: pb.OutputOptions, found: Violations) -> Output:
    logprobs = read_logprobs(given.logprobs if given.HasField("logprobs") else None, found, "output.logprobs")
    text = given.text if given.HasField("text") else True
    parse = given.parse if given.HasField("parse") else True
    scores = given.prompt_logprobs if given.HasField("prompt_logprobs") else None
    return Output(
        text=text,
        token_ids=given.token_ids,
        logprobs=logprobs,
        parse=parse,
        prompt_logprobs=read_logprobs(scores, found, "output.prompt_logprobs"),
        skip_special=given.skip_special_tokens if given.HasField("skip_special_tokens") else True,
    )


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
    sized = given.HasField("max_tokens_per_message")
    tokens = given.max_tokens_per_message if sized else 1
    found.number("delivery.max_tokens_per_message", tokens, 1, MAX_TOKENS_PER_MESSAGE)
    if not given.HasField("max_delay"):
        return Delivery(tokens, DEFAULT_DELAY if tokens > 1 else 0.0, None if sized else COALESCING_DELAY)
    delay = _duration("delivery.max_delay", given.max_delay, MAX_DELAY, found)
    return Delivery(tokens, delay, None if sized else min(delay, COALESCING_DELAY))


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


def _draft_limit(given: pb.SpeculationOptions, found: Violations) -> int | None:
    found.number("speculation.max_draft_tokens", given.max_draft_tokens, 0, None)
    if given.disable:
        return 0
    return given.max_draft_tokens if given.HasField("max_draft_tokens") else None


def _access(field: str, given: int, found: Violations) -> Access | None:
    if given == pb.CACHE_MODE_UNSPECIFIED:
        return None
    access = _ACCESS.get(given)  # type: ignore[call-overload]
    if access is None:
        found.add(field, "is no known cache mode")
        return None
    return Access(read=access.read, write=access.write)


def _refuse_unimplemented(request: Request, facts: ModelFacts, semantic: bool) -> None:
    requested = request.cache.semantic
    if not semantic and requested is not None and (requested.read or requested.write):
        raise Unimplemented("cache.semantic", "this server has no semantic cache")
    _refuse_chat(request.prompt, facts)


def _refuse_chat(prompt: Prompt, facts: ModelFacts) -> None:
    if isinstance(prompt, ChatPrompt) and not facts.chat:
        raise Unimplemented("chat", "the model has no chat template")
