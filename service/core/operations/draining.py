"""Drains the server: health reports it at once, but callers learn of it late, so requests are admitted for `delay`
seconds more."""

from __future__ import annotations

import asyncio

from service.core.admission.admission import Admission
from service.core.errors import ShuttingDown


class Drain:
    def __init__(self, admission: Admission, delay: float) -> None:
        self._admission = admission
        self._delay = delay
        self._refuses = asyncio.Event()
        self._undone = asyncio.Event()  # of the present drain
        self._timer: asyncio.TimerHandle | None = None  # until requests are refused
        self._for_good = False
        self._begun = False

    @property
    def begun(self) -> bool:
        """Callers should go elsewhere, admitted or not."""
        return self._begun

    @property
    def admitting(self) -> bool:
        return not self._refuses.is_set()

    def begin(self, *, for_good: bool = False) -> None:
        """A second call does not change the delay."""
        self._for_good |= for_good
        if self._begun:
            return
        self._begun = True
        self._undone = asyncio.Event()
        if self._delay:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self.refuse)
        else:
            self.refuse()

    def refuse(self) -> None:
        """Refuses new requests without further delay."""
        self._stop_timer()
        self._admission.drain()
        self._refuses.set()

    def undo(self) -> None:
        """Raises ShuttingDown where the process is to end."""
        if self._for_good:
            raise ShuttingDown
        self._stop_timer()
        self._begun = False
        self._refuses.clear()
        self._admission.resume()
        self._undone.set()

    async def refused(self) -> None:
        await self._refuses.wait()

    async def over(self, within: float | None) -> int:
        """Waits until no request is live and new ones are refused, the drain is undone, or `within` seconds are over.
        Returns how many are live then."""
        waits = (asyncio.ensure_future(self._drained()), asyncio.ensure_future(self._undone.wait()))
        try:
            await asyncio.wait(waits, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        return self._admission.live

    async def _drained(self) -> None:
        await self._refuses.wait()
        await self._admission.idle(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
