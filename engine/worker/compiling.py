"""Holds requests outside the queue while their constraint is compiled, so that no other request waits."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from engine.constraints.constraints import Constraints
from engine.constraints.reasons import ConstraintReason
from engine.ipc.events import Event, Failure
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

_log = logging.getLogger(__name__)


class Compiling:
    """Stands before the scheduler where requests come and go."""

    def __init__(self, scheduler: Scheduler, constraints: Constraints) -> None:
        self._scheduler = scheduler
        self._constraints = constraints
        self._waiting: dict[int, Sequence] = {}

    @property
    def waiting(self) -> bool:
        """Whether `collect` must be called soon."""
        return bool(self._waiting) or self._constraints.busy

    @property
    def kept(self) -> bool:
        """Whether `collect` must be called about every second, so that memory is given back."""
        return self._constraints.kept

    def admit(self, sequence: Sequence) -> None:
        """Admits a request now, or once its constraint is compiled. ValueError where it could never run."""
        request = sequence.request
        if request.constraint is None:
            self._scheduler.admit(sequence)
            return
        self._waiting[sequence.key] = sequence
        stops, forcing = request.stopping.stop_token_ids, request.logprobs is None
        self._constraints.begin_compiling(sequence.key, request.constraint, stops, forcing)

    def cancel(self, key: int) -> None:
        if self._waiting.pop(key, None) is None:
            self._scheduler.cancel(key)
        self._constraints.forget(key)

    def ended(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.finish is not None or event.failure is not None:
                self._constraints.forget(event.key)

    def collect(self) -> list[Event]:
        """Enqueues requests whose constraints are compiled; returns the ends of those that failed."""
        self._constraints.collect()
        failures = []
        for key, sequence in [*self._waiting.items()] if self._waiting else ():
            if not self._constraints.compiled(key):
                continue
            del self._waiting[key]
            reason = self._constraints.failure(key)
            if reason is None:
                try:
                    self._scheduler.admit(sequence)
                    continue
                except ValueError as refused:
                    _log.error("the front sent a request that cannot run: %s", refused)
                    failures.append(Event(key, failure=Failure.STEP))
                    continue
            if self._constraints.unloadable:
                _log.error("this model cannot follow constraints: %s", self._constraints.unloadable)
            costly = reason is not ConstraintReason.UNMET
            failures.append(Event(key, failure=Failure.CONSTRAINT_COST if costly else Failure.CONSTRAINT))
        return failures
