"""Builds the messages of an answer."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from engine.api import Engine, EngineState, SamplingParams, TokenLogprob
from engine.settings import PAGE_SIZE
from service.core.request import CacheSource, Ending, EndReason, PromptFacts, Served
from service.core.switches import Switch
from service.pb.whippet.v1 import admin_pb2
from service.pb.whippet.v1 import generation_pb2 as pb

_INT64 = 1 << 63
_REASONS = {
    EndReason.STOP: pb.FINISH_REASON_STOP,
    EndReason.LENGTH: pb.FINISH_REASON_LENGTH,
    EndReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    EndReason.TIME_BUDGET: pb.FINISH_REASON_TIME_BUDGET,
}
_SOURCES = {
    CacheSource.NONE: pb.CACHE_SOURCE_NONE,
    CacheSource.RESPONSE: pb.CACHE_SOURCE_RESPONSE,
    CacheSource.SEMANTIC: pb.CACHE_SOURCE_SEMANTIC,
}
_STATES = {
    EngineState.LOADING: admin_pb2.ENGINE_STATE_LOADING,
    EngineState.READY: admin_pb2.ENGINE_STATE_READY,
    EngineState.RESTARTING: admin_pb2.ENGINE_STATE_RESTARTING,
    EngineState.STOPPED: admin_pb2.ENGINE_STATE_STOPPED,
}


def prompt_info(facts: PromptFacts) -> pb.PromptInfo:
    """What was asked."""
    return pb.PromptInfo(request_id=facts.request_id, model=facts.model, prompt_tokens=facts.prompt_tokens)


def logprobs(ids: Sequence[int], places: Sequence[TokenLogprob]) -> list[pb.TokenLogprobs]:
    """One message a token."""
    return [
        pb.TokenLogprobs(
            token_id=token_id,
            logprob=place.logprob,
            top=[pb.TopLogprob(token_id=other, logprob=value) for other, value in place.top],
        )
        for token_id, place in zip(ids, places, strict=True)
    ]


def finish(ending: Ending) -> pb.Finish:
    """Why and how it ended."""
    message = pb.Finish(
        reason=_REASONS[ending.reason],
        usage=pb.Usage(
            prompt_tokens=ending.prompt_tokens,
            cached_tokens=ending.cached_tokens,
            completion_tokens=ending.completion_tokens,
        ),
        timings=pb.Timings(
            queue=_duration(ending.queue),
            cache_lookup=_duration(ending.served.lookup),
            prefill=_duration(ending.prefill),
            decode=_duration(ending.decode),
        ),
        cache_source=_SOURCES[ending.served.source],
        sampling=sampling(ending.sampling),
    )
    if ending.served.entry_id:
        message.cache_hit.CopyFrom(_cache_hit(ending.served))
    if ending.stop_string is not None:
        message.stop_string = ending.stop_string
    elif ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    return message


def _cache_hit(served: Served) -> pb.CacheHit:
    return pb.CacheHit(entry_id=served.entry_id, age=_duration(served.age), similarity=served.similarity)


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


def load(engine: Engine, draining: bool) -> admin_pb2.GetLoadResponse:
    """How busy the engine is."""
    now, info = engine.load, engine.info
    state = _STATES[engine.state]
    if draining and engine.state is EngineState.READY:
        state = admin_pb2.ENGINE_STATE_DRAINING
    return admin_pb2.GetLoadResponse(
        state=state,
        running=now.running,
        waiting=now.waiting,
        paused=now.paused,
        used_pages=now.used_pages,
        total_pages=now.total_pages if info is None else info.total_pages,
        page_size=PAGE_SIZE,
        steps=now.steps,
        generated_tokens=now.generated_tokens,
        preemptions=now.preemptions,
        restarts=engine.restarts,
    )


def optimization(switch: Switch) -> admin_pb2.Optimization:
    """One switch."""
    return admin_pb2.Optimization(name=switch.name, enabled=switch.enabled, description=switch.description)


def _duration(seconds: float) -> Duration:
    """Never negative."""
    duration = Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration
