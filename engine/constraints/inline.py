"""Follows grammars in the calling process, without time bounds, for benches and tests with their own vocabulary. Has
the methods of `Processes` that `Constraints` calls."""

from __future__ import annotations

from collections import deque

from engine.constraints.budget import Budget
from engine.constraints.following import Following
from engine.constraints.grammars import Grammars
from engine.constraints.heap import HeapGauge
from engine.constraints.messages import Answer, Command, answer_reader
from engine.constraints.processes import ConstraintProcess, ProcessListener


class Inline:
    """`wait` delivers the answers, as `Processes.wait` does."""

    def __init__(self, grammars: Grammars, listener: ProcessListener) -> None:
        self._following = Following(grammars, Budget(), lambda: 0, HeapGauge().give_back)
        self._listener = listener
        self._grammars = grammars
        self._process: ConstraintProcess | None = None
        self._answers: deque[Answer] = deque()
        self.unloadable = ""

    @property
    def mask_bytes(self) -> int:
        return len(self._grammars.matcher("").compute_bitmask())

    @property
    def live(self) -> tuple[ConstraintProcess, ...]:
        return ()

    def start(self) -> bool:
        return True

    def of(self, owner: str) -> ConstraintProcess:
        if self._process is None:
            import socket

            self._process = ConstraintProcess(1, owner, socket.socket(), answer_reader())
        return self._process

    def ask(self, process: ConstraintProcess, command: Command) -> None:
        self._answers.extend(self._following.obey(command))

    def wait(self, seconds: float) -> None:
        while self._answers:
            assert self._process is not None
            self._listener.on_answer(self._process, self._answers.popleft())

    def tidy(self) -> None: ...

    def leave(self, process: ConstraintProcess, key: int) -> None:
        process.keys.discard(key)

    def close(self) -> None:
        if self._process is not None:
            self._process.socket.close()
            self._process = None
