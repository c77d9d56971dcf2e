"""The use case: a request is let in, tokenized, given to the engine, and its tokens become text until something stops
it. Unary and streamed answers differ in their sink alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.api import (
    Finish,
    FinishReason,
    GenerationRequest,
    Start,
    Stopping,
    TokenEvents,
    TokenLogprob,
    TokenStream,
)
from service.core.admission import Admission
from service.core.admission_slots import AdmissionSlot
from service.core.answers.lookup import Sources
from service.core.answers.streams import Generated
from service.core.delivery import Messages, Outlet, Sink, Whole
from service.core.errors import InvalidRequest, Violation
from service.core.model import ServedModel
from service.core.request import CacheOutcome, CacheSource, Ending, EndReason, ModelFacts, Origin, PromptFacts, Request
from service.core.text import Detokenizer
from service.core.validation import too_long

_REASONS = {
    FinishReason.STOP: EndReason.STOP,
    FinishReason.LENGTH: EndReason.LENGTH,
    FinishReason.TIME_BUDGET: EndReason.TIME_BUDGET,
}


class Generator:
    """Answers requests."""

    def __init__(
        self,
        model: ServedModel,
        sources: Sources,
        admission: Admission,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._sources = sources
        self._admission = admission
        self._clock = clock

    @property
    def semantic(self) -> bool:
        """Whether there is a semantic cache."""
        return self._sources.semantic

    async def answer(self, request: Request, origin: Origin, outlet: Outlet) -> None:
        """The whole answer in one message. Raises what `status` knows."""
        await self._run(request, origin, lambda gather: Whole(outlet, request))

    async def stream(self, request: Request, origin: Origin, outlet: Outlet) -> None:
        """The answer in messages as the request's `delivery` says. Raises what `status` knows."""
        await self._run(request, origin, lambda gather: Messages(outlet, request, gather))

    async def _run(self, request: Request, origin: Origin, make_sink: Callable[[bool], Sink]) -> None:
        facts = self._model.facts()
        with self._admission.admit(origin.tenant, request.request_id, origin.deadline) as ticket:
            if self._admission.slots.weary or not self._sources.may_know(request):
                self._admission.slots.check(request.priority, origin.deadline)
            ids = await self._model.encode(request.prompt, facts)
            looked = await self._sources.look(request, _engine_request(request, ids, origin, facts), origin.tenant)
            ticket.looked()
            sink = make_sink(looked.chunked)
            async with self._sources.open(looked, request, origin, sink.batch) as source:
                ticket.attach(source.stream)
                try:
                    await sink.begin(PromptFacts(request.request_id, facts.name, len(ids), looked.served.header))
                    detokenizer = self._model.detokenizer(request)
                    answer = Asked(request, looked.request, looked.served, source.generated)
                    await _Answer(answer, source.slot, sink, detokenizer, self._clock).run(source.stream)
                finally:
                    sink.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer is the answer to, and where it comes from."""

    asked: Request
    request: GenerationRequest
    served: CacheOutcome
    generated: Generated | None


class _Answer:
    """One answer on its way from its source to the sink."""

    def __init__(
        self,
        asked: Asked,
        slot: AdmissionSlot | None,
        sink: Sink,
        detokenizer: Detokenizer | None,
        clock: Callable[[], float],
    ) -> None:
        self._asked = asked
        self._slot = slot
        self._sink = sink
        self._detokenizer = detokenizer
        self._clock = clock
        self._want_text = asked.asked.output.text
        self._include_stop = asked.asked.stops.include
        self._count = 0  # tokens of the answer so far
        self._start = Start(cached_tokens=0, queue=0.0, prefill=0.0)  # until the first ids tell

    async def run(self, stream: TokenStream) -> None:
        """From the first event to the last message."""
        async for events in stream:
            if events.start is not None:
                self._start = events.start
                if self._slot is not None:
                    self._slot.start()
            if events.finish is not None:
                await self._finish(events, events.finish)
                return
            stop = await self._take(events.token_ids, events.logprobs, last=False)
            if stop is not None:
                stream.cancel()
                await self._sink.end(self._cut(stop))
                return

    async def _take(self, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], last: bool) -> str | None:
        """Ids become pieces no longer than the sink has room for. Returns the stop string that matched, if one did.
        With `last`, the last piece is left for the message that carries the finish."""
        sink = self._sink
        start, end = 0, len(ids)
        while start < end:
            room = sink.room or await self._make_room()
            upto = min(start + room, end)
            piece = ids if upto - start == end else ids[start:upto]
            text, stop, count = self._text(piece)
            self._count += count
            full = sink.add(text, piece[:count], logprobs[start : start + count])
            if stop is not None:
                return stop
            start = upto
            if full and (start < end or not last):
                await sink.flush()
        return None

    def _text(self, ids: tuple[int, ...]) -> tuple[str, str | None, int]:
        """Their text, the stop string that matched, and how many of them belong to the answer."""
        if self._detokenizer is None:
            return "", None, len(ids)
        text, stop, count = self._detokenizer.push(ids)
        return (text if self._want_text else ""), stop, count

    async def _make_room(self) -> int:
        await self._sink.flush()
        return self._sink.room

    async def _finish(self, events: TokenEvents, finish: Finish) -> None:
        """The engine's last event. The id of a stop token is part of the answer; its text is not, unless asked for."""
        ids, logprobs = events.token_ids, events.logprobs
        cut = finish.stop_token_id is not None and not self._include_stop
        kept = len(ids) - 1 if cut else len(ids)
        stop = await self._take(ids[:kept], logprobs[:kept], last=True)
        if stop is not None:
            await self._sink.end(self._cut(stop))
            return
        if self._detokenizer is not None:
            tail = self._detokenizer.flush()
            if self._want_text:
                self._sink.add(tail.text, (), ())
            if tail.stop is not None:
                await self._sink.end(self._cut(tail.stop))
                return
        if cut:
            if not self._sink.room:
                await self._sink.flush()
            self._count += 1
            self._sink.add("", ids[kept:], logprobs[kept:])
        await self._sink.end(self._ending(_REASONS[finish.reason], finish, finish.decode))

    def _cut(self, stop: str) -> Ending:
        """A stop string matched, so that the engine's own ending never comes."""
        start = self._start
        first_at = self._asked.request.arrived_at + start.queue + start.prefill
        return replace(self._ending(EndReason.STOP_STRING, start, self._clock() - first_at), stop_string=stop)

    def _ending(self, reason: EndReason, took: Start | Finish, decode: float) -> Ending:
        asked, served = self._asked, self._asked.served
        generated = asked.generated
        if generated is not None and generated.start is None and served.source is CacheSource.NONE:
            served = replace(served, source=CacheSource.RESPONSE)  # read along with somebody else's
        prompt_tokens = len(asked.request.token_ids)
        stored = served.source is not CacheSource.NONE
        instant = bool(served.entry_id)
        return Ending(
            reason=reason,
            sampling=asked.request.sampling,
            prompt_tokens=prompt_tokens,
            completion_tokens=self._count,
            cached_tokens=prompt_tokens if stored else took.cached_tokens,
            queue=0.0 if instant else max(0.0, took.queue - served.lookup),
            prefill=0.0 if instant else took.prefill,
            decode=0.0 if instant else decode,
            served=served,
            stop_token_id=took.stop_token_id if isinstance(took, Finish) else None,
        )


def _engine_request(request: Request, ids: tuple[int, ...], origin: Origin, facts: ModelFacts) -> GenerationRequest:
    """Raises InvalidRequest where prompt and answer do not fit into the context."""
    room = facts.max_context - len(ids)
    stops = request.stops
    if not ids:
        raise InvalidRequest((Violation(request.prompt.field, "has no tokens"),))
    if room < 1:
        raise InvalidRequest((Violation(request.prompt.field, too_long(len(ids), facts.max_context)),))
    if stops.max_tokens is not None and stops.max_tokens > room:
        raise InvalidRequest((Violation("stopping.max_tokens", f"must be at most {room} after this prompt"),))
    if stops.min_tokens > room:
        raise InvalidRequest((Violation("stopping.min_tokens", f"must be at most {room} after this prompt"),))
    return GenerationRequest(
        request_id=f"{origin.tenant}/{request.request_id}",
        token_ids=ids,
        sampling=request.sampling,
        stopping=Stopping(
            max_tokens=room if stops.max_tokens is None else stops.max_tokens,
            min_tokens=stops.min_tokens,
            stop_token_ids=stops.token_ids,
        ),
        arrived_at=origin.arrived_at,
        logprobs=request.output.logprobs,
        priority=request.priority,
        deadline=origin.deadline,
        expires_at=None if request.time_budget is None else origin.arrived_at + request.time_budget,
    )
