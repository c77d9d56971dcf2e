"""Reads answers in one way, whether generated, shared, or from a cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from cache.api import BEGUN, AnswerPart, CachedCompletion, Diverged, LeaderRefused, Unfinished
from engine.api import Finish, Start, TokenLogprob
from engine.errors import Aborted, DeadlineExceeded, EngineUnavailable
from service.core.admission.admission_slots import AdmissionSlots
from service.core.answers.engine_answer import EngineAnswer
from service.core.errors import Overloaded
from service.core.text import Detokenizer

_RETRY = 0.5  # seconds


class AnswerSource(Protocol):
    """One reader's answer, up to the stop. The engine's figures are those of a generation for this reader."""

    @property
    def generated(self) -> bool:
        """Known once the answer has ended."""

    @property
    def submitted_at(self) -> float | None:
        """Seconds on the clock of `time.monotonic`."""

    @property
    def start(self) -> Start | None:
        pass

    @property
    def finish(self) -> Finish | None:
        """None where a stop string ends the answer."""

    @property
    def draft_proposed(self) -> int:
        pass

    @property
    def draft_accepted(self) -> int:
        pass

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Belong to the part that `next` returned last, one an id."""

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Belong to the prompt's next tokens, from the second on; they came with the part that `next` returned last."""

    async def next(self) -> AnswerPart:
        """Returns parts until one has an ending. Raises what `engine.errors` lists."""

    def abort(self, reason: str) -> None:
        pass


class SharedAnswer:
    """Reads a shared or stored answer. Its deadline or an abort ends this reading alone."""

    def __init__(
        self,
        parts: AsyncIterator[AnswerPart],
        own: EngineAnswer | None,
        deadline: float | None,
        slots: AdmissionSlots | None = None,
        arrived_at: float = 0.0,
    ) -> None:
        """`own` is how it would be, or is, generated for this request; `slots` bound its wait after `arrived_at`."""
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._parts = parts
        self._own = own
        self._held: AnswerPart | None = None  # that `opened` took
        self._error: Aborted | DeadlineExceeded | Overloaded | None = None
        self._task: asyncio.Task[object] | None = None  # that reads
        self._waiting = False
        self._timer: asyncio.TimerHandle | None = None
        self._patience = None if slots is None else slots.patience(arrived_at, self._fail)
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    @property
    def generated(self) -> bool:
        return self.start is not None or self.finish is not None

    @property
    def submitted_at(self) -> float | None:
        return None if self._own is None else self._own.submitted_at

    @property
    def start(self) -> Start | None:
        return None if self._own is None else self._own.start

    @property
    def finish(self) -> Finish | None:
        return None if self._own is None else self._own.finish

    @property
    def draft_proposed(self) -> int:
        return 0 if self._own is None else self._own.draft_proposed

    @property
    def draft_accepted(self) -> int:
        return 0 if self._own is None else self._own.draft_accepted

    async def opened(self) -> None:
        """Returns once the answer can no longer be refused. Called by the task that reads."""
        self._task = asyncio.current_task()
        first = await self.next()
        if first is not BEGUN:
            self._held = first

    async def next(self) -> AnswerPart:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        if self._error is not None:
            raise self._error
        self._waiting = True
        try:
            part = await self._parts.__anext__()
            if self._patience is not None and part is not BEGUN:
                self._patience.cancel()
                self._patience = None
            return part
        except asyncio.CancelledError:
            if self._error is not None and self._task is not None and self._task.uncancel() == 0:
                raise self._error from None
            raise
        except LeaderRefused as refused:
            raise refused.reason from None
        except (Unfinished, Diverged) as error:
            raise EngineUnavailable(str(error), _RETRY) from None
        finally:
            self._waiting = False

    def abort(self, reason: str) -> None:
        self._fail(Aborted(reason))

    def close(self) -> None:
        for timer in (self._timer, self._patience):
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the deadline has passed"))

    def _fail(self, error: Aborted | DeadlineExceeded | Overloaded) -> None:
        if self._error is None:
            self._error = error
            if self._waiting and self._task is not None:
                self._task.cancel()


async def stored_parts(
    completion: CachedCompletion, detokenizer: Detokenizer | None
) -> AsyncGenerator[AnswerPart, None]:
    """Given a detokenizer, yields parts with cuts, which are not stored."""
    for part in completion.parts:
        ids = part.token_ids
        if detokenizer is None:
            yield part
        elif part.ending is not None and part.ending.stop_token_id is not None and not detokenizer.include_stop:
            pushed = detokenizer.push(ids[:-1])
            yield part._replace(cuts=(*pushed.cuts, len(part.text)) if pushed.ids else ())
        else:
            yield part._replace(cuts=detokenizer.push(ids).cuts)
