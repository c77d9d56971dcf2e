"""A model that is split over threads of one process: ranks without processes, for tests of what they compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.constraints.constraints import Constraints
from engine.execution.registry import EXECUTORS, ExecutorEntry
from engine.execution.runner import ModelRunner
from engine.model.split import Part
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare
from engine.worker.messages import Order
from engine.worker.mirror import Follower
from tests.engine.quantized import nothing, settings


class Meeting:
    """Where the threads exchange tensors: each lays its own down, and takes what it needs once all have."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.table: list[torch.Tensor] = [torch.empty(0)] * ranks


class ThreadExchange:
    """An `RankExchange`."""

    def __init__(self, part: Part, meeting: Meeting) -> None:
        self.part = part
        self._meeting = meeting

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.table[self.part.rank] = x.clone()
        self._meeting.barrier.wait()
        found = list(self._meeting.table)
        self._meeting.barrier.wait()
        return found

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._all(x)[0])

    def collect(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        found = self._all(x)
        return found if self.part.first else None


class Threads:
    """The group as its first rank sees it; a `Membership` and `Others`."""

    def __init__(self, chosen: EngineSettings, ranks: int) -> None:
        self.part = Part(0, ranks)
        self.here = ranks
        self.others = self
        self.failures: list[BaseException] = []
        self._meeting = Meeting(ranks)
        self._orders = [queue.SimpleQueue[Order | None]() for _ in range(1, ranks)]
        self._threads = [
            threading.Thread(target=self._serve, args=(chosen, Part(rank, ranks)), daemon=True)
            for rank in range(1, ranks)
        ]
        for thread in self._threads:
            thread.start()

    def meet(self, progress: Callable[[str, int, int], None]) -> ThreadExchange:
        return ThreadExchange(self.part, self._meeting)

    def met(self) -> None: ...

    def send(self, order: Order) -> None:
        for one in self._orders:
            one.put(order)

    def lost(self, reason: str) -> None:
        self._meeting.barrier.abort()
        raise AssertionError(reason)

    def close(self) -> None:
        for one in self._orders:
            one.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, chosen: EngineSettings, part: Part) -> None:
        try:
            prepared = prepare(chosen, nothing, member=_Other(part, self._meeting))
            exchange = ThreadExchange(part, self._meeting)
            follower = Follower(prepared.parts.model, prepared.parts.pool, prepared.config, exchange)
            with torch.inference_mode():
                while (order := self._orders[part.rank - 1].get()) is not None:
                    follower.obey(order)
        except BaseException as error:
            self.failures.append(error)
            self._meeting.barrier.abort()


class _Other:
    others = None

    def __init__(self, part: Part, meeting: Meeting) -> None:
        self.part = part
        self.here = part.ranks
        self._meeting = meeting

    def meet(self, progress: Callable[[str, int, int], None]) -> ThreadExchange:
        return ThreadExchange(self.part, self._meeting)

    def met(self) -> None: ...


def split_runner(
    folder: Path,
    ranks: int,
    constraints: Constraints | None = None,
    registry: tuple[ExecutorEntry, ...] = EXECUTORS,
    **given: Any,
) -> tuple[ModelRunner, Threads]:
    """Returns a runner of a model that is split over threads, and these."""
    chosen = settings(folder, **given)
    threads = Threads(chosen, ranks)
    try:
        prepared = prepare(chosen, nothing, constraints, member=threads)
        return make_runner(chosen, prepared, nothing, registry), threads
    except threading.BrokenBarrierError:
        raise threads.failures[0] from None
