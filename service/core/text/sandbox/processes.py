"""Runs jobs on callers' bytes beside the event loop, under limits of time and memory.

To add a kind: write a function as in `jobs` in a module that imports neither gRPC nor torch, add it to `jobs.KINDS`,
and call `run`. Small jobs have processes of their own, so that they never wait behind a large one. A process is killed
where a job takes too much, or its caller has gone and it does not end within a moment.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.cores import usable_cores
from engine.errors import DeadlineExceeded
from service.core.errors import Overloaded, Reason
from service.core.text.sandbox.control import DONE, REFUSED, ConfigureSandbox
from service.core.text.sandbox.forking import RETRY, ForkServerSupervisor, Worker
from service.core.text.sandbox.jobs import KINDS, JobRefused
from service.core.text.turns import FairTurns

SMALL = 64 * 2**10  # bytes of a payload
_MOMENT = 0.1  # seconds that a job gets to end once its caller has gone
_LOAD_MEMORY = 768 * 2**20  # bytes; the largest vocabularies take less than half of it


class JobFailed(Exception):
    """The worker has a defect or died of one. Does not blame the input."""


class JobDied(JobFailed):
    """The process ended before it answered, and not for lack of memory."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    processes: int
    seconds: float  # a job
    memory: int  # bytes a process, beyond the tokenizer
    jobs: int  # that wait
    waiting: int  # bytes of their payloads
    each: int | None = None  # processes that one sender may use at a time; None: all


_CORES = usable_cores()
SMALL_LIMITS = ProcessLimits(
    processes=max(1, min(4, _CORES // 4)), seconds=5.0, memory=256 * 2**20, jobs=256, waiting=4 * 2**20
)
LARGE_LIMITS = ProcessLimits(processes=1, seconds=30.0, memory=768 * 2**20, jobs=32, waiting=32 * 2**20)
# One sender uses at most one of the two processes, so that a slow constraint delays no other sender's constraint. They
# are apart from the pools of text jobs, which therefore never wait for a constraint.
CONSTRAINT_LIMITS = ProcessLimits(processes=2, seconds=3.0, memory=320 * 2**20, jobs=256, waiting=16 * 2**20, each=1)
_APART = "constraint"  # the kind of job with processes of its own


class TextProcesses:
    """The processes of one server. Used from one event loop."""

    def __init__(
        self,
        model: str | None,  # folder; None: bytes are tokens
        kinds: Mapping[str, str] = KINDS,
        *,
        small: ProcessLimits = SMALL_LIMITS,
        large: ProcessLimits = LARGE_LIMITS,
        constraints: ProcessLimits = CONSTRAINT_LIMITS,
        refusals: Counter[str] | None = None,  # by reason
        template: Path | None = None,  # file instead of the model's chat templates
    ) -> None:
        counted = Counter[str]() if refusals is None else refusals
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._server = ForkServerSupervisor(
            ConfigureSandbox(model, tuple(kinds.values()), _LOAD_MEMORY, None if template is None else str(template))
        )
        self._small = _Pool(self._server, small, counted)
        self._large = _Pool(self._server, large, counted)
        self._constraints = _Pool(self._server, constraints, counted)

    @property
    def digest(self) -> str:
        return self._server.digest

    @property
    def pids(self) -> tuple[int, ...]:
        """The fork server's pid; its children are the workers."""
        return self._server.pids

    async def start(self) -> None:
        """Returns once jobs can be done. Raises InvalidModel."""
        await self._server.start()
        await asyncio.gather(self._small.warm(), self._large.warm())

    async def run(self, kind: str, payload: bytes, deadline: float | None = None, sender: str = "") -> bytes:
        """Senders take turns. `deadline` is on the clock of time.monotonic; a cancelled job is abandoned. Raises
        JobRefused (excessive time or memory included), Overloaded, DeadlineExceeded, EngineUnavailable, or
        JobFailed."""
        pool = self._small if len(payload) <= SMALL else self._large
        if kind == _APART:
            pool = self._constraints
        return await pool.run(self._numbers[kind], payload, deadline, sender)

    async def close(self) -> None:
        await self._server.close()


class _Pool:
    def __init__(self, server: ForkServerSupervisor, limits: ProcessLimits, refusals: Counter[str]) -> None:
        self._server = server
        self._limits = limits
        self._refusals = refusals
        self._turns = FairTurns(limits.processes, limits.each)
        self._waiting = 0  # jobs
        self._bytes = 0  # theirs
        self._idle: list[Worker] = []

    async def warm(self) -> None:
        self._idle.append(await self._server.fork(self._limits.memory))

    async def run(self, kind: int, payload: bytes, deadline: float | None, sender: str) -> bytes:
        await self._wait(len(payload), deadline, sender)
        job = asyncio.ensure_future(self._job(kind, payload, deadline))
        job.add_done_callback(lambda done: self._over(done, sender))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(_MOMENT, job.cancel)
            raise

    async def _wait(self, size: int, deadline: float | None, sender: str) -> None:
        if self._waiting >= self._limits.jobs or self._bytes + size > self._limits.waiting:
            self._refusals[Reason.TEXT_QUEUE] += 1
            raise Overloaded("too much text waits to be processed", Reason.TEXT_QUEUE, RETRY)
        self._waiting += 1
        self._bytes += size
        try:
            async with asyncio.timeout(_left(deadline)):
                await self._turns.acquire(sender)
        except TimeoutError:
            raise DeadlineExceeded("the deadline has passed") from None
        finally:
            self._waiting -= 1
            self._bytes -= size

    def _over(self, job: asyncio.Task[bytes], sender: str) -> None:
        self._turns.release(sender)
        if not job.cancelled():
            job.exception()  # seen, though the caller may have gone

    async def _job(self, kind: int, payload: bytes, deadline: float | None) -> bytes:
        self._idle = [worker for worker in self._idle if not worker.ended.done()]
        worker = self._idle.pop() if self._idle else await self._server.fork(self._limits.memory)
        try:
            seconds, left = self._limits.seconds, _left(deadline)
            async with asyncio.timeout(seconds if left is None else min(seconds, left)):
                outcome, result = await worker.exchange(kind, payload)
        except TimeoutError:
            worker.kill()
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded("the deadline has passed") from None
            raise JobRefused(f"takes more than {self._limits.seconds:g} seconds to process") from None
        except (EOFError, OSError):
            raise await self._death(worker) from None
        except BaseException:
            worker.kill()
            raise
        self._idle.append(worker)
        if outcome == DONE:
            return result
        if outcome == REFUSED:
            raise JobRefused(result.decode())
        raise JobFailed(f"a text process met {result.decode()}")

    async def _death(self, worker: Worker) -> Exception:
        """Returns why the worker stopped answering. A library in Rust or C that gets no memory aborts."""
        code = await worker.ended
        if code == -signal.SIGABRT:
            return JobRefused("takes more memory to process than is allowed")
        return JobDied(f"a text process ended with {code}")


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
