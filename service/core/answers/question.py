"""Converts a request to the caches' key: what must be equal for one answer."""

from __future__ import annotations

import re
from dataclasses import astuple

from cache.api import Parameter, Question, SemanticTurn
from engine.api import GenerationRequest
from service.core.request import ChatPrompt, Request, TextPrompt
from service.core.text import NO_OPTIONS, ChatMessage

_USER = "user"
_ENDS = re.compile(r"[\W_]*\Z")  # signs and blanks after the last letter
_END = 64  # characters that are looked at: from the first of many, the search would try each


def cacheable(request: Request) -> bool:
    """Whether all generations answer alike (greedy or seeded) and no log-probabilities are sent."""
    output = request.output
    repeatable = request.sampling.temperature == 0 or (request.seeded and request.answers == 1)
    return repeatable and output.logprobs is None and output.prompt_logprobs is None


def question_of(request: Request, engine_request: GenerationRequest, tenant: str) -> Question:
    sampling, stops, constraint = engine_request.sampling, request.stops, engine_request.constraint
    return Question(
        tenant=tenant,
        token_ids=engine_request.token_ids,
        parameters=(
            ("temperature", sampling.temperature),
            ("top_k", sampling.top_k),
            ("top_p", sampling.top_p),
            ("min_p", sampling.min_p),
            ("repetition_penalty", sampling.repetition_penalty),
            ("presence_penalty", sampling.presence_penalty),
            ("frequency_penalty", sampling.frequency_penalty),
            ("seed", sampling.seed if request.seeded else None),
            ("logit_bias", sampling.logit_bias),
            ("min_tokens", stops.min_tokens),
            ("stop_strings", stops.strings),
            ("stop_token_ids", stops.token_ids),
            ("include_stop", stops.include),
            ("continues", request.prompt.continues),
            *(() if constraint is None else (("constraint", constraint.grammar),)),
            *(() if request.output.skip_special else (("skip_special", False),)),
        ),
        max_tokens=engine_request.stopping.max_tokens,
        deterministic=cacheable(request),
        max_age=request.cache.max_age,
    )


def turn_of(request: Request, question: Question, caller: str, requested: bool) -> SemanticTurn | None:
    """Returns the last user turn with the messages before it. Plain text is a turn only where the caller asked for the
    semantic cache by name; its last sign or space must be equal, since a continuation depends on it."""
    prompt = request.prompt
    if request.constraint is not None:  # what it shapes answers no other words
        return None
    if isinstance(prompt, ChatPrompt):
        *before, last = prompt.messages
        if last.role != _USER or not last.simple:
            return None
        options = () if prompt.options == NO_OPTIONS else (astuple(prompt.options),)
        context: Parameter = ("chat", tuple(_message_parameter(message) for message in before), *options)
        text, plain = last.content, not prompt.options.tools
    elif isinstance(prompt, TextPrompt) and requested:
        ends = _ENDS.search(prompt.text[-_END:])
        context, text, plain = ("text", ends[0] if ends else ""), prompt.text, True
    else:
        return None
    return SemanticTurn(
        question=question,
        context=context,
        text=text,
        greedy=request.sampling.temperature == 0,
        plain=plain,
        caller=caller,
        threshold=request.cache.threshold,
    )


def _message_parameter(message: ChatMessage) -> Parameter:
    simple: Parameter = (message.role, message.content)
    return simple if message.simple else tuple(astuple(message))
