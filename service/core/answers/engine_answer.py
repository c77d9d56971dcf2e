"""Generates the answer for this request, and its text, once for all readers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from msgspec.structs import replace

from cache.api import BEGUN, AnswerEnding, AnswerPart, CachedCompletion, LeaderRefused
from engine.api import (
    Engine,
    Finish,
    FinishReason,
    GenerationRequest,
    Priority,
    Start,
    TokenEvents,
    TokenLogprob,
    TokenStream,
)
from engine.errors import Aborted, DeadlineExceeded
from service.core.admission.admission_slots import AdmissionSlot, AdmissionSlots
from service.core.admission.quotas import Bill
from service.core.answers.delivery import MOST, coalescing_delay
from service.core.errors import Overloaded
from service.core.request import Delivery, Origin, Request
from service.core.text import Detokenizer


class Detokenizers(Protocol):
    def detokenizer(self, request: Request) -> Detokenizer | None:
        """None where neither text nor stop strings are requested."""

    def text_maker(self, request: Request) -> Detokenizer:
        """Makes the answer's text, sent or not."""


class CompletionSink(Protocol):
    def take(self, completion: CachedCompletion) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Generating:
    request: Request
    engine_request: GenerationRequest
    batch: Delivery
    origin: Origin | None = None  # None: no caller waits, as of an audit
    shared: bool = False  # several may read it: each has a waiting time of its own, and may lead where this one cannot
    bill: Bill | None = None  # None: no quota is charged


class EngineAnswer:
    """Implements `cache.api.Generation`, and `AnswerSource` for a single reader. Holds an admission slot until
    it ends."""

    def __init__(
        self,
        engine: Engine,
        slots: AdmissionSlots,
        detokenizers: Detokenizers,
        work: Generating,
        sink: CompletionSink | None = None,
    ) -> None:
        """`sink` gets the text, whether or not the caller wants it."""
        self.submitted_at: float | None = None
        self.start: Start | None = None
        self.finish: Finish | None = None  # where the engine ended it, and not a stop string
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.draft_proposed = self.draft_accepted = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._engine = engine
        self._slots = slots
        self._detokenizers = detokenizers
        self._work = work
        self._request = work.engine_request
        self._bill = work.bill
        self._sink = sink
        self._detokenizer: Detokenizer | None = None
        interactive = self._request.priority == Priority.INTERACTIVE  # gets what is there by its turn
        self._coalesces = work.batch.coalescing_delay is not None
        self._most_delay = 0.0 if interactive else work.batch.coalescing_delay or 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: Exception | None = None
        self._slot: AdmissionSlot | None = None
        self._stream: TokenStream | None = None
        self._parts: list[AnswerPart] = []  # for `sink`
        self._count = 0  # tokens

    @property
    def generated(self) -> bool:
        return True

    def begin(self) -> TokenStream:
        """Raises DeadlineExceeded, EngineUnavailable, and Overloaded (LeaderRefused where the answer is shared)."""
        work = self._work
        slot = self._take_slot()
        request = replace(self._request, forward=slot.forward) if slot.forward else self._request
        try:
            stream = self._engine.submit(request)
        except BaseException:
            slot.__exit__(None, None, None)
            raise
        slot.on_evict(self.refuse)
        if work.origin is not None and not work.shared:
            self._timer = self._slots.patience(work.origin.arrived_at, self.refuse)
        if self._bill is not None and not self._request.number:
            self._bill.charge(len(self._request.token_ids))
        stream.batch(work.batch.max_tokens, work.batch.max_delay)
        self.submitted_at = time.monotonic()
        self._slot, self._stream = slot, stream
        make = self._detokenizers.detokenizer if self._sink is None else self._detokenizers.text_maker
        self._detokenizer = make(work.request)
        return stream

    def _take_slot(self) -> AdmissionSlot:
        request, origin = self._request, self._work.origin
        size = 0 if request.number else len(request.token_ids)
        try:
            if origin is None:
                return self._slots.take(request.priority, size, None)
            return self._slots.take(request.priority, size, origin.deadline, origin.tenant, request.arrived_at)
        except (DeadlineExceeded, Overloaded) as error:
            if self._work.shared:  # another reader may generate in this one's stead
                raise LeaderRefused(error) from None
            raise

    async def __aenter__(self) -> EngineAnswer:
        try:
            self.begin()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def next(self) -> AnswerPart:
        """Raises what the engine raises, and its own refusal."""
        if self._stream is None:
            self.begin()
            return BEGUN
        if self._coalesces and self._count:  # the first tokens are never delayed
            delay = self._most_delay and coalescing_delay(self._slots.running, self._most_delay, self._slots.stormed)
            self._stream.batch(MOST if delay else 1, delay)
        try:
            events = await self._stream.__anext__()
        except Aborted:
            if self._refusal is not None:
                raise self._refusal from None
            raise
        if events.start is not None:
            self._started(events.start)
        part = self._part(events)
        self.prompt_logprobs = events.prompt_logprobs
        if events.draft_proposed:
            self.draft_proposed += events.draft_proposed
            self.draft_accepted += events.draft_accepted
        new = len(part.token_ids)
        self.logprobs = events.logprobs[:new]
        if self._bill is not None:
            self._bill.charge(new)
        self._count += new
        if self._sink is not None:
            self._parts.append(part)
        if part.ending is not None:
            self._ended()
        return part

    def _ended(self) -> None:
        self.close()
        if self._sink is not None:
            self._sink.take(self._completion())

    def _started(self, start: Start) -> None:
        self.start = start
        self._stop_timer()
        if self._slot is not None:
            self._slot.start()

    def abort(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.abort(reason)

    def refuse(self, error: Overloaded) -> None:
        """Gives the slot up. A leader of a shared generation gets the error as LeaderRefused."""
        self._refusal = LeaderRefused(error) if self._work.shared else error
        self.abort("")
        self._leave()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._leave()

    def _leave(self) -> None:
        self._stop_timer()
        if self._slot is not None:
            self._slot.__exit__(None, None, None)
            self._slot = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _part(self, events: TokenEvents) -> AnswerPart:
        ids, detokenizer = events.token_ids, self._detokenizer
        if events.finish is not None:
            return self._last(ids, events.finish)
        if detokenizer is None:
            return AnswerPart(ids, "")
        if detokenizer.feed is not None and len(ids) == 1:
            settled, made = detokenizer.feed(ids[0])
            return AnswerPart(ids, settled + made if settled else made)
        text, stop, kept, cuts = detokenizer.push(ids)
        if stop is not None:
            return AnswerPart(ids[:kept], text, self._ending(FinishReason.STOP_STRING, kept, stop_string=stop), cuts)
        return AnswerPart(ids, text, None, cuts)

    def _last(self, ids: tuple[int, ...], finish: Finish) -> AnswerPart:
        """A stop token's id is part of the answer; its text only if requested."""
        text = ""
        cuts: tuple[int, ...] = ()
        detokenizer = self._detokenizer
        if detokenizer is not None:
            silent = finish.stop_token_id is not None and not detokenizer.include_stop
            text, stop, kept, cuts = detokenizer.push(ids[:-1] if silent else ids)
            if stop is None:
                rest, stop, _, _ = detokenizer.flush()
                text += rest
            if stop is not None:
                ending = self._ending(FinishReason.STOP_STRING, kept, stop_string=stop)
                return AnswerPart(ids[:kept], text, ending, cuts)
            if silent and kept:
                cuts = (*cuts, len(text))
        self.finish = finish
        ending = self._ending(finish.reason, len(ids), stop_token_id=finish.stop_token_id)
        return AnswerPart(ids, text, ending, cuts)

    def _ending(
        self, reason: FinishReason, count: int, stop_token_id: int | None = None, stop_string: str | None = None
    ) -> AnswerEnding:
        return AnswerEnding(
            reason=reason.value,
            prompt_tokens=len(self._request.token_ids),
            completion_tokens=self._count + count,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
        )

    def _completion(self) -> CachedCompletion:
        info = self._engine.info
        return CachedCompletion(
            parts=tuple(self._parts),
            max_tokens=self._request.stopping.max_tokens,
            provenance="" if info is None else f"{info.decoder} {info.weight_format} {info.dtype} {info.device}",
            created_at=time.time(),
        )
