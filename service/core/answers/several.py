"""Sends several answers to one prompt through one call's outlet. Equal ones are generated once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

from msgspec.structs import replace

from engine.api import GenerationRequest
from service.core.admission.admission import Abortable
from service.core.answers.delivery import AnswerMessage, Outlet
from service.core.request import PromptFacts
from service.observability.record import RecordBuilder

_SEEDS = 1 << 64


def sibling(request: GenerationRequest, number: int, siblings: int) -> GenerationRequest:
    """The first sibling equals the request of a single answer."""
    sampling = replace(request.sampling, seed=(request.sampling.seed + number) % _SEEDS)
    return replace(
        request,
        request_id=f"{request.request_id}#{number}",
        sampling=sampling,
        number=number,
        siblings=siblings,
        prompt_logprobs=None if number else request.prompt_logprobs,
    )


class MergedOutlet:
    """Sends one message at a time, in the order of the calls."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._turn = asyncio.Lock()
        self._begun = False
        self._prompt: PromptFacts | None = None  # until a message has taken it

    def of(self, number: int) -> Outlet:
        return _Numbered(self, number)

    async def begin(self, prompt: PromptFacts) -> None:
        async with self._turn:
            if not self._begun:
                self._begun, self._prompt = True, prompt
                await self._outlet.begin(prompt)

    async def send(self, message: AnswerMessage) -> None:
        async with self._turn:
            prompt, self._prompt = self._prompt, None
            await self._outlet.send(replace(message, prompt=prompt))


class _Numbered:
    def __init__(self, merged: MergedOutlet, number: int) -> None:
        self._merged = merged
        self._number = number

    async def begin(self, prompt: PromptFacts) -> None:
        await self._merged.begin(prompt)

    async def send(self, message: AnswerMessage) -> None:
        await self._merged.send(replace(message, number=self._number))


class RepeatedOutlet:
    def __init__(self, outlet: Outlet, answers: int) -> None:
        self._outlet = outlet
        self._answers = answers

    async def begin(self, prompt: PromptFacts) -> None:
        await self._outlet.begin(prompt)

    async def send(self, message: AnswerMessage) -> None:
        await self._outlet.send(message)
        if message.prompt_ids and not message.token_ids and message.ending is None:
            return
        for number in range(1, self._answers):
            await self._outlet.send(_copied(message, number))


class Sources:
    def __init__(self) -> None:
        self._sources: list[Abortable] = []

    def attach(self, source: Abortable) -> None:
        self._sources.append(source)

    def abort(self, reason: str) -> None:
        for source in self._sources:
            source.abort(reason)


async def all_of(readings: Iterable[Coroutine[object, object, None]]) -> None:
    """Where one fails, cancels the others and raises its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for reading in readings:
                group.create_task(reading)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def note_all(record: RecordBuilder, parts: list[RecordBuilder]) -> None:
    first = parts[0]
    for name in ("submitted_at", "queue", "prefill", "cached_tokens", "cache_source", "finish_reason"):
        setattr(record, name, getattr(first, name))
    record.draft_proposed = sum(part.draft_proposed for part in parts)
    record.draft_accepted = sum(part.draft_accepted for part in parts)
    record.completion_tokens = sum(part.completion_tokens for part in parts)
    record.first_token_at = min(
        (part.first_token_at for part in parts if part.first_token_at is not None), default=None
    )
    record.last_token_at = max((part.last_token_at for part in parts if part.last_token_at is not None), default=None)
    record.decode = max((part.decode for part in parts if part.decode is not None), default=None)


def _copied(message: AnswerMessage, number: int) -> AnswerMessage:
    ending = message.ending
    if ending is not None:
        ending = replace(ending, prompt_tokens=0, cached_tokens=0, draft_proposed=0, draft_accepted=0)
    return replace(message, number=number, prompt=None, ending=ending, prompt_ids=(), prompt_logprobs=())
