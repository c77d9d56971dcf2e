"""Requests whose constraint is still being compiled: they wait outside the queue, so that nobody waits for that."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from engine.constraints.constraints import Constraints
from engine.ipc.events import Event, Failure
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence

_log = logging.getLogger(__name__)


class Compiling:
    """Stands before the scheduler where requests come and go."""

    def __init__(self, scheduler: Scheduler, constraints: Constraints) -> None:
        self._scheduler = scheduler
        self._constraints = constraints
        self._waiting: dict[int, tuple[Sequence, Future[None]]] = {}

    @property
    def waiting(self) -> bool:
        """Whether `collect` is to be called soon."""
        return bool(self._waiting)

    def admit(self, sequence: Sequence) -> None:
        """Now, or once its constraint is compiled. ValueError where it could never run."""
        constraint = sequence.request.constraint
        if constraint is None:
            self._scheduler.admit(sequence)
        else:
            self._waiting[sequence.key] = sequence, self._constraints.compile(constraint.grammar)

    def cancel(self, key: int) -> None:
        """Of any request."""
        if self._waiting.pop(key, None) is None:
            self._scheduler.cancel(key)

    def collect(self) -> list[Event]:
        """Lets those into the queue that need wait no longer; what ends those that never may."""
        failures = []
        for key, (sequence, compiled) in [*self._waiting.items()] if self._waiting else ():
            if not compiled.done():
                continue
            del self._waiting[key]
            error = compiled.exception()
            try:
                if error is None:
                    self._scheduler.admit(sequence)
                    continue
            except ValueError as refused:
                error = refused
            _log.error("a constraint cannot be used with this model: %s: %s", type(error).__name__, error)
            failures.append(Event(key, failure=Failure.CONSTRAINT))
        return failures
