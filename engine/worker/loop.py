"""Plans, runs and commits steps forever, and obeys the front's commands in between. Owns when reports are sent and what
a failed step costs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from engine.api import EngineLoad, TierReport
from engine.constraints.constraints import Constraints
from engine.errors import EngineFailed
from engine.ipc.events import Event, Failure
from engine.ipc.frames import (
    Cancel,
    Command,
    ConfigureEngine,
    EndProfile,
    Pause,
    PingEngine,
    Pong,
    Resume,
    SetLogLevel,
    SetSwitch,
    StartProfile,
    Submit,
    Switched,
    TurnedBack,
    packed,
)
from engine.ipc.framing import FrameError
from engine.ipc.link import EngineLink
from engine.kv.shared_tier import BlockTier
from engine.scheduling.plan import Runner, StepPlan, StepResult, WrongResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.worker.arrivals import Arrivals
from engine.worker.compiling import Compiling
from engine.worker.device_memory import DeviceMemory
from engine.worker.marking import Marking
from engine.worker.profiles import ProfileRecorder
from engine.worker.recording import StepRecorder, describe
from engine.worker.switches import WorkerSwitches

_log = logging.getLogger(__name__)
_LOAD_INTERVAL = 0.1  # seconds between two reports of the load while there is work
_TIER_INTERVAL = 1.0  # seconds between two while there is none: what is being written goes on being counted
_FETCH_INTERVAL = 0.001  # seconds between two looks at what is on its way, while there is nothing else to do
_TIDY_INTERVAL = 1.0  # seconds between two searches for idle processes of constraints
_MOST_FAILURES = 3  # steps in a row after which the process gives up


class Loop:
    """Runs until the front goes (returns) or the runner cannot recover (raises EngineFailed)."""

    def __init__(
        self,
        link: EngineLink,
        runner: Runner,
        scheduler: Scheduler,
        switches: WorkerSwitches,
        tier: BlockTier | None = None,
        tier_report: Callable[[], TierReport] | None = None,
        recorder: StepRecorder | None = None,
        marking: Marking | None = None,
        memory: DeviceMemory | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        self._link = link
        self._runner = runner
        self._scheduler = scheduler
        self._switches = switches
        self._tier = tier
        self._tier_report = tier_report
        self._recorder = recorder
        self._profiles = ProfileRecorder(link.send)
        self._marking = marking
        self._memory = memory
        self._compiling = Compiling(scheduler, constraints or Constraints())
        self._reported_load: EngineLoad | None = None
        self._reported_at = 0.0
        self._failures = 0  # failed steps in a row, not counting their repetitions in parts
        self._logged_failure = ""  # the failure whose traceback was logged last
        self._refused: list[Event] = []
        self._arrivals = Arrivals(link, self._obey)
        runner.meanwhile(self._early)

    def run(self) -> None:
        try:
            self._rounds()
        except (EOFError, ConnectionError, FrameError, EngineFailed):
            raise  # the front's doing, or a step's, which is recorded already
        except Exception as error:
            if self._recorder is not None:
                self._recorder.write(error)
            raise

    def _rounds(self) -> None:
        busy = False
        while True:
            try:
                self._arrivals.take(0 if busy else self._patience())
            except EOFError:
                return
            self._scheduler.collect()
            self._refused += self._compiling.collect()
            busy = self._step()
            if self._tier is not None and self._tier.spare():
                busy = True

    def _early(self) -> bool:
        """Prepares the next step while this one runs: takes in a request and gives it its slot."""
        if not self._arrivals.take_early():
            return False
        self._scheduler.start_early()
        return True

    def _patience(self) -> float | None:
        """Seconds to wait for the front while nothing can be done; None forever. Deadlines are noticed that much
        later."""
        if self._scheduler.fetching or self._compiling.waiting:
            return _FETCH_INTERVAL
        if self._scheduler.live:
            return _LOAD_INTERVAL
        if self._compiling.kept:
            return _TIDY_INTERVAL
        return None if self._tier_report is None else _TIER_INTERVAL

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(key=key, request=request, solo=solo):
                try:
                    self._compiling.admit(Sequence(request, list(request.token_ids), key=key, solo=solo))
                except ValueError as error:
                    _log.error("the front sent a request that cannot run: %s", error)
                    self._refused.append(Event(key, failure=Failure.STEP))
            case Cancel(key=key):
                self._compiling.cancel(key)
            case Pause(key=key):
                self._scheduler.pause(key)
            case Resume(key=key):
                self._scheduler.resume(key)
            case SetSwitch() | SetLogLevel():
                self._set(command)
            case PingEngine():
                self._link.send(Pong())
            case StartProfile() | EndProfile():
                self._profiles.obey(command)
            case ConfigureEngine():
                raise FrameError("configured twice")

    def _set(self, command: SetSwitch | SetLogLevel) -> None:
        if isinstance(command, SetSwitch):
            refusal = self._switches.set(command.name, command.enabled)
            self._link.send(Switched(command.ticket, refusal, self._scheduler.load.steps))
        else:
            logging.getLogger().setLevel(command.level.upper())

    def _step(self) -> bool:
        """Whether there was a step to run."""
        now = time.monotonic()
        events, self._refused = self._refused, []
        events += self._scheduler.expire(now)
        plan = self._scheduler.plan(now)
        if plan is not None:
            if self._marking is not None:
                self._marking.begin(plan)
            events += self._run(plan)
            if self._marking is not None:
                self._marking.end()
            now = time.monotonic()
        self._compiling.ended(events)
        # Sent with the last event of all, for which the front wakes anyhow.
        self._publish(events, now, idle=plan is None or not self._scheduler.live)
        return plan is not None

    def _run(self, plan: StepPlan) -> list[Event]:
        result: StepResult | None = None
        try:
            result = self._runner.run(plan)
            events = self._scheduler.commit(plan, result, time.monotonic())
        except Exception as error:
            if out_of_memory(error):
                _log.warning("a step of %d rows found no memory and is done in parts", len(plan.rows))
                return self._scheduler.out_of_memory(plan)
            return self._raised(plan, result, error)
        self._failures = 0
        if self._switches.worked():
            self._reported_at = -_LOAD_INTERVAL  # the front counts a trial's steps by the load: it gets it at once
        if self._recorder is not None:
            self._recorder.add(plan, result)
        return events

    def _raised(self, plan: StepPlan, result: StepResult | None, error: Exception) -> list[Event]:
        """Feeds the rows again in parts, and ends a row that raises alone. Raises EngineFailed where the device is lost
        or too many steps failed in a row."""
        whole = not self._scheduler.repeats
        self._failures += whole
        self._tell_failure(plan, result, error, keep=whole or len(plan.rows) == 1)
        if _device_lost(error) or (whole and self._failures == _MOST_FAILURES):
            raise EngineFailed(f"step failure {self._failures} in a row, giving up") from error
        if whole and (reverted := self._switches.failed(self._failures)) is not None:
            self._failures = 0
            self._link.send(TurnedBack(reverted))
        if result is not None and not isinstance(error, WrongResult):
            return self._scheduler.fail(plan)  # some rows' results may have been taken in
        return self._scheduler.raised(plan)

    def _tell_failure(self, plan: StepPlan, result: StepResult | None, error: Exception, *, keep: bool) -> None:
        """Logs a failed step, with a traceback unless the last failed step had the same failure. `keep` writes a
        recording, too."""
        if self._recorder is not None:
            self._recorder.add(plan, result)
            if keep:
                self._recorder.write(error)
        previous, self._logged_failure = self._logged_failure, describe(error)
        fresh = error if previous != self._logged_failure else None
        _log.error("a step of %d rows failed: %s", len(plan.rows), self._logged_failure, exc_info=fresh)

    def _publish(self, events: list[Event], now: float, idle: bool) -> None:
        load = None
        if now - self._reported_at >= _LOAD_INTERVAL or idle:
            load = self._load()
            if idle and load == self._reported_load and not self._scheduler.live:
                load = None
            else:
                self._reported_load, self._reported_at = load, now
        if events or load is not None:
            self._link.send(packed(events, load))
        if self._memory is not None:
            self._memory.look(idle=idle)

    def _load(self) -> EngineLoad:
        load = self._scheduler.load
        if self._memory is not None:
            used, total = self._memory.known
            load = replace(load, device_used_bytes=used, device_bytes=total)
        return load if self._tier_report is None else replace(load, tier=self._tier_report())


def out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for lack of memory alone, by what torch and Python raise on a device and on a CPU."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(error))
    )


def _device_lost(error: BaseException) -> bool:
    """Whether it is an error of CUDA itself: after one nothing on the device works."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    return bool(names & {"AcceleratorError", "CUDAError"}) or any("CUDA error" in str(one) for one in chain)
