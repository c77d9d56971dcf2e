"""Plain data to messages."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from engine.api import FinishReason, SamplingParams, TokenLogprob
from service.core.delivery import AnswerMessage
from service.core.model import ModelDescription
from service.core.parsing.answer import whole_calls
from service.core.request import CacheOutcome, CacheSource, Ending, Output, PromptFacts
from service.core.switches import Switch
from service.pb.whippet.v1 import admin_pb2, model_pb2
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.wishes import MAX_LOGPROBS

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


def stream_message(message: AnswerMessage, output: Output) -> pb.GenerateStreamResponse:
    """One message of a streamed answer."""
    response = pb.GenerateStreamResponse(text=message.text)
    if message.token_ids and output.token_ids:
        response.token_ids.extend(message.token_ids)
    if message.logprobs:
        response.logprobs.extend(logprobs(message.token_ids, message.logprobs))
    if message.prompt is not None:
        response.prompt_info.CopyFrom(prompt_info(message.prompt))
    if message.ending is not None:
        response.finish.CopyFrom(finish(message.ending))
    if message.reasoning:
        response.reasoning = message.reasoning
    for delta in message.calls:
        response.tool_calls.add(index=delta.index, id=delta.id, name=delta.name, arguments=delta.arguments)
    return response


def whole_message(message: AnswerMessage, output: Output) -> pb.GenerateResponse:
    """A unary answer."""
    response = pb.GenerateResponse(text=message.text)
    if output.token_ids:
        response.token_ids.extend(message.token_ids)
    if message.logprobs:
        response.logprobs.extend(logprobs(message.token_ids, message.logprobs))
    if message.prompt is not None:
        response.prompt_info.CopyFrom(prompt_info(message.prompt))
    if message.ending is not None:
        response.finish.CopyFrom(finish(message.ending))
    if message.reasoning:
        response.reasoning = message.reasoning
    for call in whole_calls(message.calls):
        response.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    return response


def prompt_info(facts: PromptFacts) -> pb.PromptInfo:
    return pb.PromptInfo(request_id=facts.request_id, model=facts.model, prompt_tokens=facts.prompt_tokens)


def logprobs(ids: Sequence[int], values: Sequence[TokenLogprob]) -> list[pb.TokenLogprobs]:
    """One message a token."""
    return [
        pb.TokenLogprobs(
            token_id=token_id,
            logprob=value.logprob,
            top=[pb.TopLogprob(token_id=other, logprob=logprob) for other, logprob in value.top],
        )
        for token_id, value in zip(ids, values, strict=True)
    ]


def finish(ending: Ending) -> pb.Finish:
    message = pb.Finish(
        reason=_REASONS[ending.reason],
        usage=pb.Usage(
            prompt_tokens=ending.prompt_tokens,
            cached_tokens=ending.cached_tokens,
            completion_tokens=ending.completion_tokens,
        ),
        timings=pb.Timings(
            queue=duration(ending.queue),
            cache_lookup=duration(ending.outcome.lookup),
            prefill=duration(ending.prefill),
            decode=duration(ending.decode),
        ),
        cache_source=_SOURCES[ending.outcome.source],
        sampling=sampling(ending.sampling),
    )
    if ending.outcome.entry_id:
        message.cache_hit.CopyFrom(_cache_hit(ending.outcome))
    if ending.stop_string is not None:
        message.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    return message


def _cache_hit(outcome: CacheOutcome) -> pb.CacheHit:
    return pb.CacheHit(entry_id=outcome.entry_id, age=duration(outcome.age), similarity=outcome.similarity)


def sampling(params: SamplingParams) -> pb.SamplingOptions:
    """The resolved values, all of them set."""
    message = pb.SamplingOptions(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed - 2 * _INT64 if params.seed >= _INT64 else params.seed,
    )
    message.logit_bias.update(params.logit_bias)
    return message


def model(described: ModelDescription) -> model_pb2.Model:
    """All there is to know of a model; a default for the seed would mean nothing."""
    facts, info = described.facts, described.info
    message = model_pb2.Model(
        name=facts.name,
        architecture=info.architecture,
        weight_format=info.weight_format,
        dtype=info.dtype,
        device=info.device,
        decoder=info.decoder,
        objections=[model_pb2.DecoderObjection(decoder=o.decoder, reason=o.reason) for o in info.objections],
        limits=model_pb2.ModelLimits(
            max_context_tokens=info.max_context,
            vocab_size=info.vocab_size,
            max_sequences=info.max_sequences,
            max_logprobs=MAX_LOGPROBS,
        ),
        default_sampling=sampling(facts.defaults),
        weights_digest=info.weights_digest,
        tokenizer_digest=described.tokenizer_digest,
        chat=facts.chat,
        eos_token_ids=facts.eos_token_ids,
    )
    message.default_sampling.ClearField("seed")
    return message


def optimization(switch: Switch) -> admin_pb2.Optimization:
    return admin_pb2.Optimization(
        name=switch.name,
        enabled=switch.requested,
        effective=switch.effective,
        description=switch.description,
        why_not=switch.why_not,
    )


def duration(seconds: float) -> Duration:
    """Never negative."""
    whole, nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)
