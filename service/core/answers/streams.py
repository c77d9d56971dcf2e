"""Answers that are stored or shared, as streams of events: whoever reads one cannot tell it from the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace

from cache.api import BEGUN, AnswerEnding, AnswerPart, CachedCompletion, Diverged, Refused, Unfinished
from engine.api import Engine, Finish, FinishReason, GenerationRequest, Start, TokenEvents, TokenStream
from engine.errors import Aborted, DeadlineExceeded, EngineUnavailable
from service.core.admission_slots import AdmissionSlot
from service.core.request import Delivery
from service.core.text import Detokenizer

STOP_STRING = "stop_string"
_SHARED = Delivery(16, 0.02)  # the coarsest that the messages of an answer may be that others may read along
_RETRY = 0.5  # seconds


@dataclass(slots=True)
class Generated:
    """What only the one for whom an answer is generated knows of it. Empty for those who read along."""

    start: Start | None = None
    finish: Finish | None = None


class Leader:
    """Generates an answer for all who wait for it: ids with their text, up to the stop."""

    def __init__(
        self,
        engine: Engine,
        request: GenerationRequest,
        detokenizer: Callable[[], Detokenizer],
        batch: Delivery,
        enter: Callable[[], AdmissionSlot],
        whole: Callable[[CachedCompletion], None],
    ) -> None:
        self.generated = Generated()
        self._engine = engine
        self._request = request
        self._detokenizer = detokenizer
        self._batch = replace(
            batch,
            max_tokens=min(batch.max_tokens, _SHARED.max_tokens),
            max_delay=min(batch.max_delay, _SHARED.max_delay),
        )
        self._enter = enter  # raises Refused
        self._whole = whole  # is given the answer when it is complete

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Raises what the engine raises, and Refused."""
        with self._enter() as slot:
            stream = self._engine.submit(self._request)
            stream.batch(self._batch.max_tokens, self._batch.max_delay)
            parts: list[AnswerPart] = []
            try:
                yield BEGUN
                async for part in self._read(stream, slot):
                    parts.append(part)
                    if part.ending is not None:
                        self._whole(self._completion(parts))
                    yield part
            finally:
                stream.cancel()

    async def _read(self, stream: TokenStream, slot: AdmissionSlot) -> AsyncGenerator[AnswerPart, None]:
        detokenizer, count = self._detokenizer(), 0
        async for events in stream:
            finish = events.finish
            if events.start is not None:
                slot.start()
                self.generated.start = events.start
            ids = events.token_ids
            cut = finish is not None and finish.stop_token_id is not None and not detokenizer.include_stop
            text, stop, kept = detokenizer.push(ids[:-1] if cut else ids)
            if stop is None and finish is not None:
                rest, stop, _ = detokenizer.flush()
                text += rest
            if stop is None:
                self.generated.finish = finish
            else:
                ids = ids[:kept]
            count += len(ids)
            yield AnswerPart(ids, text, self._ending(finish, stop, count))
            if stop is not None or finish is not None:
                return

    def _ending(self, finish: Finish | None, stop: str | None, count: int) -> AnswerEnding | None:
        prompt_tokens = len(self._request.token_ids)
        if stop is not None:
            return AnswerEnding(
                reason=STOP_STRING, prompt_tokens=prompt_tokens, completion_tokens=count, stop_string=stop
            )
        if finish is None:
            return None
        return AnswerEnding(
            reason=finish.reason.value,
            prompt_tokens=prompt_tokens,
            completion_tokens=count,
            stop_token_id=finish.stop_token_id,
        )

    def _completion(self, parts: list[AnswerPart]) -> CachedCompletion:
        info = self._engine.info
        return CachedCompletion(
            parts=tuple(parts),
            max_tokens=self._request.stopping.max_tokens,
            provenance="" if info is None else f"{info.decoder} {info.weight_format} {info.dtype} {info.device}",
            created_at=time.time(),
        )


async def stored(completion: CachedCompletion) -> AsyncGenerator[AnswerPart, None]:
    """The messages of a stored answer, as fast as they are taken."""
    for part in completion.replay():
        yield part


class AnswerStream:
    """A `TokenStream` over parts. It ends early when it is aborted or its deadline passes; nobody else notices."""

    def __init__(
        self, parts: AsyncIterator[AnswerPart], generated: Generated, arrived_at: float, deadline: float | None
    ) -> None:
        self._chunks = parts
        self._generated = generated
        self._arrived_at = arrived_at
        self._held: AnswerPart | None = None  # that `opened` took
        self._first_at: float | None = None
        self._error: Aborted | DeadlineExceeded | None = None
        self._waiter: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> TokenEvents:
        part, self._held = self._held or await self._next(), None
        start = None
        if self._first_at is None:
            self._first_at = time.monotonic()
            start = self._generated.start or Start(
                cached_tokens=0, queue=self._first_at - self._arrived_at, prefill=0.0
            )
        finish = None if part.ending is None else self._finish(part.ending, self._first_at)
        return TokenEvents(part.token_ids, (), finish, start)

    async def opened(self) -> None:
        """Returns once the answer is under way: from then on nobody refuses it. Raises what reading would."""
        first = await self._next()
        if first is not BEGUN:
            self._held = first

    def batch(self, tokens: int, delay: float) -> None:
        """Parts are what they are: the sink puts them together."""

    def cancel(self) -> None:
        """As the protocol says."""
        if self._timer is not None:
            self._timer.cancel()

    def abort(self, reason: str) -> None:
        """As the protocol says."""
        self._fail(Aborted(reason))

    async def _next(self) -> AnswerPart:
        if self._error is not None:
            raise self._error
        task = self._waiter = asyncio.current_task()
        try:
            return await anext(self._chunks)
        except asyncio.CancelledError:
            if self._error is not None and task is not None and task.uncancel() == 0:
                raise self._error from None
            raise
        except Refused as refused:
            raise refused.reason from None
        except (Unfinished, Diverged) as error:
            raise EngineUnavailable(str(error), _RETRY) from None
        finally:
            self._waiter = None

    def _finish(self, ending: AnswerEnding, first_at: float) -> Finish:
        if self._generated.finish is not None:
            return self._generated.finish
        # A stop string is found again by whoever makes the text.
        reason = FinishReason.STOP if ending.reason == STOP_STRING else FinishReason(ending.reason)
        return Finish(
            reason=reason,
            stop_token_id=ending.stop_token_id,
            cached_tokens=0,
            queue=first_at - self._arrived_at,
            prefill=0.0,
            decode=time.monotonic() - first_at,
        )

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the deadline has passed"))

    def _fail(self, error: Aborted | DeadlineExceeded) -> None:
        if self._error is None:
            self._error = error
            if self._waiter is not None:
                self._waiter.cancel()
