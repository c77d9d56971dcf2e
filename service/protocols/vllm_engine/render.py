"""Converts plain data to messages."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from engine.api import FinishReason, SamplingParams, TokenLogprob
from engine.settings import PAGE_SIZE
from service.core.answers.delivery import AnswerMessage
from service.core.model import ModelDescription
from service.core.request import Ending
from service.pb.vllm.grpc.engine import vllm_engine_pb2 as pb
from service.protocols.seam import UseCases
from service.protocols.vllm_engine.parse import ParsedGenerate
from service.version import version

_REASONS = {FinishReason.STOP: "stop", FinishReason.STOP_STRING: "stop", FinishReason.LENGTH: "length"}
_OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def chunk(message: AnswerMessage, question: ParsedGenerate, prompt_tokens: int) -> pb.GenerateResponse:
    """Makes a message of streamed tokens, or of the prompt's facts before them."""
    response = pb.GenerateResponse()
    one = response.chunk
    one.index = message.number
    one.token_ids.extend(message.token_ids)
    one.prompt_tokens, one.completion_tokens = prompt_tokens, len(message.token_ids)
    if message.logprobs:
        one.output_logprobs.CopyFrom(logprobs(message, question))
    return response


def complete(
    message: AnswerMessage, question: ParsedGenerate, ending: Ending, prompt_tokens: int
) -> pb.GenerateResponse:
    """Makes the last message, with the text and ids of the message before it or, if unary, of all."""
    response = pb.GenerateResponse()
    one = response.complete
    one.index = message.number
    one.output_ids.extend(message.token_ids)
    one.finish_reason = _REASONS[ending.reason]
    one.prompt_tokens, one.cached_tokens = prompt_tokens, ending.cached_tokens
    one.completion_tokens = ending.completion_tokens
    if message.logprobs:
        one.output_logprobs.CopyFrom(logprobs(message, question))
    if ending.stop_string is not None:
        one.matched_stop_str = ending.stop_string
    elif ending.stop_token_id is not None and ending.stop_token_id in question.stop_token_ids:
        one.matched_token_id = ending.stop_token_id
    return response


def logprobs(message: AnswerMessage, question: ParsedGenerate) -> pb.OutputLogProbs:
    """Has candidates only where requested."""
    values: Sequence[TokenLogprob] = message.logprobs
    tops = values if question.request.output.logprobs else ()
    return pb.OutputLogProbs(
        token_logprobs=[one.logprob for one in values],
        token_ids=message.token_ids,
        top_logprobs=[_top(one) for one in tops],
    )


def input_logprobs(ids: Sequence[int], values: Sequence[TokenLogprob], question: ParsedGenerate) -> pb.InputLogProbs:
    """The prompt's first token has no log-probability."""
    tops = [pb.TopLogProbs(), *map(_top, values)] if question.request.output.prompt_logprobs else ()
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=one.logprob) for one in values)],
        token_ids=ids,
        top_logprobs=tops,
    )


def _top(one: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[logprob for _, logprob in one.top], token_ids=[token_id for token_id, _ in one.top])


def model_info(described: ModelDescription) -> pb.GetModelInfoResponse:
    facts, info = described.facts, described.info
    return pb.GetModelInfoResponse(
        model_path=facts.name,
        is_generation=True,
        max_context_length=facts.max_context,
        vocab_size=facts.vocab_size,
        served_model_name=facts.name,
        architectures=[info.architecture],
        eos_token_ids=facts.eos_token_ids,
        max_req_input_len=facts.max_context - 1,
        default_sampling_params_json=_defaults(facts.defaults),
    )


def _defaults(params: SamplingParams) -> str:
    changed = {name: getattr(params, name) for name, off in _OFF.items() if getattr(params, name) != off}
    return json.dumps(changed) if changed else ""


def health(cases: UseCases) -> pb.HealthCheckResponse:
    objection = cases.objection
    return pb.HealthCheckResponse(healthy=not objection, message=objection)


def server_info(cases: UseCases) -> pb.GetServerInfoResponse:
    info = cases.model.describe().info
    return pb.GetServerInfoResponse(
        active_requests=cases.admission.live,
        is_paused=cases.admission.draining,
        uptime_seconds=time.monotonic() - cases.instruments.started_at,
        server_type="whippet",
        data_parallel_size=1,
        block_size=info.page_size,
        model_dtype=info.dtype,
        max_num_seqs=info.max_sequences,
    )


def loads(cases: UseCases) -> pb.GetLoadsResponse:
    now, most = cases.engine.load, cases.admission.slots.capacity
    return pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=version(),
        dp_rank_count=1,
        loads=[
            pb.SchedulerLoad(
                num_running_reqs=now.running,
                num_waiting_reqs=now.waiting,
                num_total_reqs=now.running + now.waiting,
                num_used_tokens=now.used_pages * PAGE_SIZE,
                max_total_num_tokens=now.total_pages * PAGE_SIZE,
                token_usage=now.used_pages / now.total_pages if now.total_pages else 0.0,
                cache_hit_rate=now.cached_tokens / now.prompt_tokens if now.prompt_tokens else 0.0,
                utilization=now.running / most,
                max_running_requests=most,
            )
        ],
    )
