"""Profiles of the engine process, beside its step loop: stacks of Python, not kernels on a device."""

from __future__ import annotations

from collections.abc import Callable

from engine.ipc.frames import EndProfile, Profiled, StartProfile
from engine.stacks import StackSampler


class ProfileRecorder:
    def __init__(self, send: Callable[[Profiled], None]) -> None:
        self._send = send
        self._ticket: int | None = None
        self._sampler: StackSampler | None = None

    def obey(self, command: StartProfile | EndProfile) -> None:
        """A profile also ends by itself."""
        if isinstance(command, EndProfile) and command.ticket != self._ticket:
            self._send(Profiled(command.ticket, ""))
            return
        stacks = "" if self._sampler is None else self._sampler.finish()
        self._ticket = self._sampler = None
        if isinstance(command, EndProfile):
            self._send(Profiled(command.ticket, stacks))
            return
        self._ticket, self._sampler = command.ticket, StackSampler(command.seconds)
        self._sampler.start()
