"""Converts messages to plain data. Refuses by name what is not served."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.api import Priority
from service.core.errors import Unimplemented
from service.core.request import (
    COALESCING_DELAY,
    CacheUse,
    ConstraintText,
    Delivery,
    ModelFacts,
    Output,
    Prompt,
    Request,
    TextPrompt,
    TokenPrompt,
)
from service.core.validation import Violations
from service.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
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

_SAMPLING = "sampling_params."
_EACH_TOKEN = Delivery(1, 0.0, COALESCING_DELAY)
# Fields of the use cases, as this protocol calls them.
NAMES = {
    TokenPrompt.field: "tokenized.input_ids",
    "stopping.max_tokens": f"{_SAMPLING}max_tokens",
    "stopping.min_tokens": f"{_SAMPLING}min_tokens",
    "n": f"{_SAMPLING}n",
}
_LACKING = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")


@dataclass(frozen=True, slots=True)
class ParsedGenerate:
    request: Request
    streamed: bool
    stop_token_ids: frozenset[int]  # the caller's own, without those of the model


def read_generate(message: pb.GenerateRequest, facts: ModelFacts) -> ParsedGenerate:
    """Raises InvalidRequest or Unimplemented."""
    given, found = message.sampling_params, Violations()
    request = Request(
        request_id=read_request_id(message.request_id, found),
        prompt=_prompt(message, facts, found),
        sampling=read_sampling(_sampling_fields(given), facts, found, _SAMPLING),
        stops=read_stops(_stop_fields(given), facts, found, _SAMPLING, scored=given.HasField("prompt_logprobs")),
        output=Output(
            False, True, _logprobs("logprobs", given, found), True, _logprobs("prompt_logprobs", given, found)
        ),
        priority=Priority.NORMAL,
        time_budget=None,
        delivery=_EACH_TOKEN,
        cache=CacheUse(),
        seeded=given.HasField("seed"),
        answers=_answers(given, found),
        constraint=_constraint(given, found),
    )
    found.raise_any()
    for field in _lacking(message):
        raise Unimplemented(field, f"{field}: this server does not serve it")
    return ParsedGenerate(request, message.stream, frozenset(given.stop_token_ids))


def _lacking(message: pb.GenerateRequest) -> Iterator[str]:
    given = message.sampling_params
    yield from (field for field in _LACKING if message.HasField(field))
    if message.extra_mm_inputs:
        yield "extra_mm_inputs"
    if message.data_parallel_rank:
        yield "data_parallel_rank"
    if given.HasField("structural_tag"):
        yield f"{_SAMPLING}structural_tag"
    if given.HasField("truncate_prompt_tokens"):
        yield f"{_SAMPLING}truncate_prompt_tokens"


def _prompt(message: pb.GenerateRequest, facts: ModelFacts, found: Violations) -> Prompt:
    field = message.WhichOneof("input")
    if field == "text":
        return TextPrompt(message.text)
    if field == "tokenized":
        return read_token_ids(message.tokenized.input_ids, facts, found, NAMES[TokenPrompt.field])
    found.add("input", "one of tokenized and text is needed")
    return TokenPrompt(())


def _sampling_fields(given: pb.SamplingParams) -> SamplingFields:
    """Reads 0 as "off" in numbers without presence: a gateway applies the model's defaults itself."""
    return SamplingFields(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=given.top_k,
        top_p=given.top_p or 1.0,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty or 1.0,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        seed=given.seed if given.HasField("seed") else None,
        logit_bias=given.logit_bias,
    )


def _stop_fields(given: pb.SamplingParams) -> StopFields:
    return StopFields(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        fitted=True,
        min_tokens=given.min_tokens,
        strings=given.stop,
        token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
    )


def _constraint(given: pb.SamplingParams, found: Violations) -> ConstraintText | None:
    kind = given.WhichOneof("constraint")
    if kind is None or kind == "structural_tag" or (kind == "json_object" and not given.json_object):
        return None
    if kind == "json_object":
        return read_constraint(kind, (), found, _SAMPLING + kind)
    texts = given.choice.choices if kind == "choice" else (getattr(given, kind),)
    return read_constraint(kind, texts, found, _SAMPLING + kind)


def _logprobs(name: Literal["logprobs", "prompt_logprobs"], given: pb.SamplingParams, found: Violations) -> int | None:
    return read_logprobs(getattr(given, name) if given.HasField(name) else None, found, _SAMPLING + name)


def _answers(given: pb.SamplingParams, found: Violations) -> int:
    most = given.max_tokens if given.HasField("max_tokens") else None
    return read_answers(given.n or 1, most, found, f"{_SAMPLING}n")
