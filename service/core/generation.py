"""Generates: admits and tokenizes a request, finds or generates its answer, and delivers it. Unary and streamed answers
differ in their sink alone."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from cache.api import AnswerEnding, AnswerPart
from engine.api import Constraint, FinishReason, GenerationRequest, Start, Stopping, TokenLogprob
from service.core.admission.admission import Admission, Ticket
from service.core.admission.quotas import FREE, Bill
from service.core.answers.delivery import Messages, Outlet, Sink, Whole
from service.core.answers.lookup import AnswerSources, CacheFindings
from service.core.answers.parsed_outlet import ParsedOutlet, with_marks
from service.core.answers.several import MergedOutlet, RepeatedOutlet, Sources, all_of, note_all, sibling
from service.core.answers.sources import AnswerSource
from service.core.errors import InvalidRequest, Violation
from service.core.model import ServedModel
from service.core.request import (
    CacheSource,
    ChatPrompt,
    Ending,
    ModelFacts,
    Origin,
    Prompt,
    PromptFacts,
    Request,
    Stops,
)
from service.core.validation import too_long
from service.observability.histogram import Histogram
from service.observability.record import RecordBuilder


class Generator:
    def __init__(
        self,
        model: ServedModel,
        sources: AnswerSources,
        admission: Admission,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._sources = sources
        self._admission = admission
        self._clock = clock

    @property
    def semantic(self) -> bool:
        return self._sources.semantic

    def answer(self, request: Request, origin: Origin, outlet: Outlet) -> Awaitable[None]:
        """Raises what `status` knows."""
        return self._run(request, origin, outlet)

    def stream(self, request: Request, origin: Origin, outlet: Outlet) -> Awaitable[None]:
        """Raises what `status` knows."""
        origin.record.streamed = True
        return self._run(request, origin, outlet)

    async def _run(self, request: Request, origin: Origin, outlet: Outlet) -> None:
        facts, record, admission = self._model.facts(), origin.record, self._admission
        record.request_id, record.operation = request.request_id, _operation(request.prompt)
        with (
            admission.admit(origin.tenant, request.request_id, origin.deadline, request.answers) as ticket,
            await admission.quotas.open(origin.tenant) as bill,
        ):
            record.admitted_at = self._clock()
            request = self._lowered(request, origin.tenant)
            if admission.slots.many_misses or not self._sources.may_know(request):
                admission.slots.check(request.priority, origin.deadline, origin.tenant)
            ids = await self._model.encode(request.prompt, facts, origin)
            record.prompt_tokens = len(ids)
            _check_room(request, ids, facts)
            constraint = await self._model.constraints.read(request.constraint, origin)
            found = await self._sources.look(request, _engine_request(request, ids, constraint, origin, facts), origin)
            ticket.lookup_ended()
            record.looked_up_at = self._clock()
            record.cache, record.lookup = found.outcome.header, found.outcome.lookup
            prompt = PromptFacts(request.request_id, facts.name, len(ids), found.outcome.header, ids[0])
            call = _AnswersCall(prompt, record.streamed, None if bill is FREE else bill, ticket)
            if request.answers == 1:
                await self._deliver(found, origin, outlet, call)
            elif request.sampling.temperature == 0:
                await self._deliver(found, origin, RepeatedOutlet(outlet, request.answers), call)
            else:
                await self._deliver_all(found, origin, outlet, call)

    async def _deliver(self, found: CacheFindings, origin: Origin, outlet: Outlet, call: _AnswersCall) -> None:
        request, record = found.request, origin.record
        parser = self._model.answer_parser(request, found.engine_request.token_ids)
        end = outlet if parser is None else ParsedOutlet(outlet, parser)
        sink: Sink = Messages(end, request, found.gather, self._live) if call.streamed else Whole(end, request)
        marks: Mapping[int, str] = {} if parser is None else self._model.marks(request)
        async with self._sources.open(found, origin, sink.batch, sink.limit, call.bill) as source:
            call.abortable.attach(source)
            reading = _Reading(found, source, sink, record, self._clock, marks).run(call.prompt)
            try:
                # A task of its own: what it waits for resumes it directly, not through a dozen callers twice a message.
                await (asyncio.create_task(reading) if record.streamed else reading)
            finally:
                sink.close()
                _note(record, found, source)

    async def _deliver_all(self, found: CacheFindings, origin: Origin, outlet: Outlet, call: _AnswersCall) -> None:
        """Takes all admission slots before the engine begins any answer, so that all are refused together."""
        count, merged, sources = found.request.answers, MergedOutlet(outlet), Sources()
        if count > self._admission.slots.total:
            raise InvalidRequest((Violation("n", f"must be at most {self._admission.slots.total} on this server"),))
        call.abortable.attach(sources)
        records = [RecordBuilder(intervals=origin.record.intervals) for _ in range(count)]
        each = replace(call, abortable=sources)
        try:
            await all_of(
                self._deliver(
                    replace(found, engine_request=sibling(found.engine_request, number, count)),
                    replace(origin, record=records[number]),
                    merged.of(number),
                    each,
                )
                for number in range(count)
            )
        finally:
            note_all(origin.record, records)

    def _live(self) -> int:
        return self._admission.live

    def _lowered(self, request: Request, tenant: str) -> Request:
        highest = self._admission.quotas.policy(tenant).priority
        return replace(request, priority=highest) if request.priority > highest else request


class _AnswersCall(msgspec.Struct, frozen=True):
    prompt: PromptFacts
    streamed: bool
    bill: Bill | None  # None: no quota is charged
    abortable: Ticket | Sources  # aborts the sources that are attached to it


class _Reading:
    def __init__(
        self,
        found: CacheFindings,
        source: AnswerSource,
        sink: Sink,
        record: RecordBuilder,
        clock: Callable[[], float],
        marks: Mapping[int, str],
    ) -> None:
        self._found = found
        self._record = record
        self._source = source
        self._sink = sink
        self._clock = clock
        self._want_text = found.request.output.text
        self._begun = False
        self._marks = marks  # what is put into the text for tokens that have none

    async def _scored(self, prompt: PromptFacts) -> AnswerPart:
        ids, reported = self._found.engine_request.token_ids, 1
        while True:
            part = await self._source.next()
            scores = self._source.prompt_logprobs
            if scores:
                await self._begin(prompt)
                await self._sink.score(ids[reported : reported + len(scores)], scores)
                reported += len(scores)
            if part.token_ids or part.ending is not None:
                return part

    async def _begin(self, prompt: PromptFacts) -> None:
        if not self._begun:
            self._begun = True
            await self._sink.begin(prompt)

    async def run(self, prompt: PromptFacts) -> None:
        """Leaves the last text for the message with the ending. Headers wait for the first part: whoever has seen them
        tries no other server when this one dies."""
        source, sink, record, clock, marks = self._source, self._sink, self._record, self._clock, self._marks
        # What comes out of a store does so at no pace that means anything. A call a message would cost too much here.
        between = record.intervals if self._found.hit is None else Histogram(())
        counts, borders, last, want_text = between.counts, between.borders, 0.0, self._want_text
        scored = self._found.engine_request.prompt_logprobs is not None
        part = await (self._scored(prompt) if scored else source.next())
        while True:
            if marks:
                part = with_marks(part, marks)
            ids, ending = part.token_ids, part.ending
            now, new = clock(), len(ids)
            if not last:
                record.first_token_at = now
                await self._begin(prompt)
            elif new:
                counts[bisect_left(borders, (now - last) / new)] += new
                between.total += now - last
            record.last_token_at = last = now
            record.completion_tokens += new
            if new > 1 and new > sink.room:  # for one there always is
                await self._cut(part, source.logprobs)
            elif sink.add(part.text if want_text else "", ids, source.logprobs) and ending is None:
                await sink.flush()
            if ending is not None:
                await sink.end(self._ending(ending))
                return
            part = await source.next()

    async def _cut(self, part: AnswerPart, logprobs: Sequence[TokenLogprob]) -> None:
        sink, ids, total = self._sink, part.token_ids, len(part.token_ids)
        text = part.text if self._want_text else ""
        start, begin = 0, 0
        while start < total:
            if sink.room < 1:
                await sink.flush()
            stop = min(start + sink.room, total)
            end = len(text) if stop == total or not text else part.cuts[stop - 1]
            full = sink.add(text[begin:end], ids[start:stop], logprobs[start:stop])
            start, begin = stop, end
            if full and (start < total or part.ending is None):
                await sink.flush()

    def _ending(self, ending: AnswerEnding) -> Ending:
        found, source = self._found, self._source
        outcome, request = found.outcome, found.engine_request
        start, finish = source.start, source.finish
        if not source.generated and outcome.source is CacheSource.NONE:
            outcome = replace(outcome, source=CacheSource.RESPONSE)  # another call's generation
        now, record = self._clock(), self._record
        first_at = record.first_token_at or now
        took = finish or start or Start(cached_tokens=0, queue=first_at - request.arrived_at, prefill=0.0)
        decode = now - (request.arrived_at + took.queue + took.prefill) if finish is None else finish.decode
        prompt_tokens = 0 if request.number else len(request.token_ids)
        stored = bool(outcome.entry_id)
        cached = took.cached_tokens if outcome.source is CacheSource.NONE else prompt_tokens
        record.cached_tokens = 0 if request.number else cached
        record.cache_source, record.finish_reason = outcome.source.name.lower(), ending.reason
        return Ending(
            reason=FinishReason(ending.reason),
            sampling=request.sampling,
            prompt_tokens=prompt_tokens,
            completion_tokens=record.completion_tokens,
            cached_tokens=record.cached_tokens,
            draft_proposed=source.draft_proposed,
            draft_accepted=source.draft_accepted,
            queue=0.0 if stored else max(0.0, took.queue - outcome.lookup),
            prefill=0.0 if stored else took.prefill,
            decode=0.0 if stored else decode,
            outcome=outcome,
            stop_string=ending.stop_string,
            stop_token_id=ending.stop_token_id,
        )


def _note(record: RecordBuilder, found: CacheFindings, source: AnswerSource) -> None:
    record.submitted_at = source.submitted_at
    record.draft_proposed, record.draft_accepted = source.draft_proposed, source.draft_accepted
    took = source.finish or source.start
    if took is not None:
        record.queue, record.prefill = took.queue, took.prefill
    if source.finish is not None:
        record.decode = source.finish.decode
    if found.shared:
        record.role = "leader" if source.submitted_at is not None else "follower"


def _operation(prompt: Prompt) -> str:
    return "chat" if isinstance(prompt, ChatPrompt) else "text_completion"


def _check_room(request: Request, ids: tuple[int, ...], facts: ModelFacts) -> None:
    room = facts.max_context - len(ids)
    stops = request.stops
    if not ids:
        raise InvalidRequest((Violation(request.prompt.field, "has no tokens"),))
    if room < 1:
        raise InvalidRequest((Violation(request.prompt.field, too_long(len(ids), facts.max_context)),))
    if stops.max_tokens is not None and stops.max_tokens > room and not stops.fitted:
        raise InvalidRequest((Violation("stopping.max_tokens", f"must be at most {room} after this prompt"),))
    if stops.min_tokens > room:
        raise InvalidRequest((Violation("stopping.min_tokens", f"must be at most {room} after this prompt"),))


def _most(stops: Stops, facts: ModelFacts) -> int:
    """A model's own limit is a default, which the caller's minimum may exceed."""
    if stops.max_tokens is not None:
        return stops.max_tokens
    return facts.max_context if facts.most_tokens is None else max(facts.most_tokens, stops.min_tokens)


def _engine_request(
    request: Request,
    ids: tuple[int, ...],
    constraint: Constraint | None,
    origin: Origin,
    facts: ModelFacts,
) -> GenerationRequest:
    room, stops = facts.max_context - len(ids), request.stops
    return GenerationRequest(
        request_id=f"{origin.tenant}/{request.request_id}",
        token_ids=ids,
        sampling=request.sampling,
        stopping=Stopping(
            max_tokens=min(_most(stops, facts), room),
            min_tokens=stops.min_tokens,
            stop_token_ids=stops.token_ids,
        ),
        arrived_at=origin.arrived_at,
        logprobs=request.output.logprobs,
        prompt_logprobs=request.output.prompt_logprobs,
        priority=request.priority,
        deadline=origin.deadline,
        expires_at=None if request.time_budget is None else origin.arrived_at + request.time_budget,
        bypass_prefix=True,
        constraint=constraint,
        draft_limit=request.draft_limit,
    )
