"""Converts plain data to messages."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from engine.api import FinishReason, SamplingParams, TokenLogprob
from service.core.answers.delivery import AnswerMessage
from service.core.model import ModelDescription
from service.core.parsing.answer import whole_calls
from service.core.request import CacheOutcome, CacheSource, Ending, Output, PromptFacts
from service.core.switches import OptimizationSwitch
from service.core.text import TokenTexts
from service.pb.whippet.v1 import admin_pb2, model_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.sampling_fields import MAX_ANSWERS, MAX_LOGPROBS

_INT64 = 1 << 63
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.TIME_BUDGET: pb.FINISH_REASON_TIME_BUDGET,
}
_SOURCES = {
    CacheSource.NONE: pb.CACHE_SOURCE_NONE,
    CacheSource.RESPONSE: pb.CACHE_SOURCE_RESPONSE,
    CacheSource.SEMANTIC: pb.CACHE_SOURCE_SEMANTIC,
}


def stream_message(message: AnswerMessage, output: Output, texts: TokenTexts) -> pb.GenerateStreamResponse:
    """Assigning fields costs less than passing them."""
    response = pb.GenerateStreamResponse()
    response.text = message.text
    if message.number:
        response.index = message.number
    if message.token_ids and output.token_ids:
        response.token_ids.extend(message.token_ids)
    if message.logprobs:
        _put_logprobs(response.logprobs, message.token_ids, message.logprobs, texts)
    if message.prompt_ids:
        _put_logprobs(response.prompt_logprobs, message.prompt_ids, message.prompt_logprobs, texts)
    if message.prompt is not None:
        _put_prompt_info(response.prompt_info, message.prompt)
    if message.ending is not None:
        _put_finish(response.finish, message.ending)
    if message.reasoning:
        response.reasoning = message.reasoning
    for delta in message.calls:
        response.tool_calls.add(index=delta.index, id=delta.id, name=delta.name, arguments=delta.arguments)
    return response


def whole_message(messages: Sequence[AnswerMessage], output: Output, texts: TokenTexts) -> pb.GenerateResponse:
    response = pb.GenerateResponse()
    for message in sorted(messages, key=lambda one: one.number):
        answer = response.more_answers.add(index=message.number) if message.number else response
        answer.text, answer.reasoning = message.text, message.reasoning
        if output.token_ids:
            answer.token_ids.extend(message.token_ids)
        if message.logprobs:
            _put_logprobs(answer.logprobs, message.token_ids, message.logprobs, texts)
        if message.prompt_ids:
            _put_logprobs(response.prompt_logprobs, message.prompt_ids, message.prompt_logprobs, texts)
        if message.prompt is not None:
            _put_prompt_info(response.prompt_info, message.prompt)
        if message.ending is not None:
            _put_finish(answer.finish, message.ending)
        for call in whole_calls(message.calls):
            answer.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    return response


def _put_prompt_info(into: pb.PromptInfo, facts: PromptFacts) -> None:
    """Fills in place: making one and copying it takes three times as long."""
    into.request_id, into.model, into.prompt_tokens = facts.request_id, facts.model, facts.prompt_tokens


def _put_logprobs(
    into: RepeatedCompositeFieldContainer[pb.TokenLogprobs],
    ids: Sequence[int],
    values: Sequence[TokenLogprob],
    texts: TokenTexts,
) -> None:
    for token_id, value in zip(ids, values, strict=True):
        text, raw = texts.of(token_id)
        top = into.add(token_id=token_id, logprob=value.logprob, text=text, raw=raw).top
        for other, logprob in value.top:
            text, raw = texts.of(other)
            top.add(token_id=other, logprob=logprob, text=text, raw=raw)


def _put_finish(into: pb.Finish, ending: Ending) -> None:
    into.reason, into.cache_source = _REASONS[ending.reason], _SOURCES[ending.outcome.source]
    usage, timings = into.usage, into.timings
    usage.prompt_tokens, usage.cached_tokens = ending.prompt_tokens, ending.cached_tokens
    usage.completion_tokens = ending.completion_tokens
    usage.draft_proposed, usage.draft_accepted = ending.draft_proposed, ending.draft_accepted
    put_duration(timings.queue, ending.queue)
    put_duration(timings.cache_lookup, ending.outcome.lookup)
    put_duration(timings.prefill, ending.prefill)
    put_duration(timings.decode, ending.decode)
    put_sampling(into.sampling, ending.sampling)
    if ending.outcome.entry_id:
        _put_cache_hit(into.cache_hit, ending.outcome)
    if ending.stop_string is not None:
        into.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        into.stop_token_id = ending.stop_token_id


def _put_cache_hit(into: pb.CacheHit, outcome: CacheOutcome) -> None:
    into.entry_id = outcome.entry_id
    put_duration(into.age, outcome.age)
    if outcome.similarity is not None:
        into.similarity = outcome.similarity


def put_sampling(into: pb.SamplingOptions, params: SamplingParams) -> None:
    into.temperature, into.top_k = params.temperature, params.top_k
    into.top_p, into.min_p = params.top_p, params.min_p
    into.repetition_penalty = params.repetition_penalty
    into.presence_penalty, into.frequency_penalty = params.presence_penalty, params.frequency_penalty
    into.seed = params.seed - 2 * _INT64 if params.seed >= _INT64 else params.seed
    if params.logit_bias:
        into.logit_bias.update(params.logit_bias)


def model(described: ModelDescription) -> model_pb2.Model:
    """Has no default for the seed, which would mean nothing."""
    facts, info = described.facts, described.info
    message = model_pb2.Model(
        name=facts.name,
        architecture=info.architecture,
        weight_format=info.weight_format,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        device=info.device,
        decoder=info.decoder,
        objections=[model_pb2.DecoderObjection(decoder=o.decoder, reason=o.reason) for o in info.objections],
        limits=model_pb2.ModelLimits(
            max_context_tokens=info.max_context,
            vocab_size=info.vocab_size,
            max_sequences=info.max_sequences,
            max_logprobs=MAX_LOGPROBS,
            max_answers=MAX_ANSWERS,
        ),
        weights_digest=info.weights_digest,
        tokenizer_digest=described.tokenizer_digest,
        chat=facts.chat,
        eos_token_ids=facts.eos_token_ids,
        draft_model=info.draft_model,
        proposers=[model_pb2.Proposer(name=one.name, why_not=one.why_not) for one in info.proposers],
    )
    put_sampling(message.default_sampling, facts.defaults)
    message.default_sampling.ClearField("seed")
    return message


def optimization(switch: OptimizationSwitch) -> admin_pb2.Optimization:
    return admin_pb2.Optimization(
        name=switch.name,
        enabled=switch.requested,
        effective=switch.effective,
        description=switch.description,
        why_not=switch.why_not,
    )


def put_duration(into: Duration, seconds: float) -> None:
    """Never negative. A zero is set as well, since it is known."""
    into.seconds, into.nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
