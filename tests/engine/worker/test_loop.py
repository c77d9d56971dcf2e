"""The loop over a real socket, in a thread; the test is the front."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.api import TRIAL_STEPS, EngineLoad, FinishReason
from engine.errors import EngineFailed, Unsupported
from engine.fake import FakeRunner, Fault, plain_request
from engine.ipc.events import Event, Failure
from engine.ipc.frames import (
    Cancel,
    Command,
    Configure,
    EndProfile,
    FrameError,
    Pause,
    Profiled,
    Report,
    Resume,
    StartProfile,
    Step,
    Submit,
    Switch,
    Switched,
    encode,
    report_reader,
)
from engine.ipc.link import Link
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.settings import EngineSettings, FakeSettings
from engine.worker.device_memory import DeviceMemory
from engine.worker.loop import Loop, out_of_memory
from engine.worker.switches import Switches

PATIENCE = 60.0  # seconds after which a test that waits has failed


def _all_of(step: Step) -> list[Event]:
    return [Event(key, (one,)) for key, one in zip(step.keys, step.ids, strict=True)] + step.events


class Front:
    """The other end of a running loop."""

    def __init__(
        self, memory: DeviceMemory | None = None, runner: type[FakeRunner] = FakeRunner, **fake: object
    ) -> None:
        settings = EngineSettings(
            model="",
            kind="fake",
            max_sequences=2,
            fake=FakeSettings(faults=True, total_pages=64, **fake),  # type: ignore[arg-type]
        )
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE)
        self.reader = report_reader()
        self.seen: list[Report] = []
        limits = Limits(max_sequences=2, max_batch_tokens=64, max_context=1024)
        self.runner, self.scheduler = runner(settings), Scheduler(limits, PagePool(64))
        switches = Switches(settings, self.runner, self.scheduler)
        self.loop = Loop(Link(theirs), self.runner, self.scheduler, switches, memory=memory)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(theirs,))
        self.thread.start()

    def _run(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                self.loop.run()
            except Exception as error:
                self.error = error

    def send(self, *commands: Command) -> None:
        self.socket.sendall(b"".join(encode(command) for command in commands))

    def receive(self) -> list[Report]:
        data = self.socket.recv(1 << 16)
        assert data, "the loop has gone"
        reports = self.reader.feed(data)
        self.seen += reports
        return reports

    def events(self, key: int) -> list[Event]:
        return [event for step in self.steps() for event in step if event.key == key]

    def steps(self) -> list[list[Event]]:
        """What each brought, of those that brought anything."""
        told = [_all_of(report) for report in self.seen if isinstance(report, Step)]
        return [step for step in told if step]

    def read_to_end(self, key: int) -> list[Event]:
        while not any(event.finish or event.failure for event in self.events(key)):
            self.receive()
        return self.events(key)

    def loads(self) -> list[EngineLoad]:
        return [report.load for report in self.seen if isinstance(report, Step) and report.load is not None]

    def wait_for_load(self, **wanted: int) -> EngineLoad:
        """Until the last load told is such."""
        while True:
            for load in self.loads()[-1:]:
                if all(getattr(load, name) == value for name, value in wanted.items()):
                    return load
            self.receive()

    def close(self) -> None:
        self.socket.close()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


class Watched(FakeRunner):
    """In its first step it does what the test says, and nothing meanwhile of its own accord."""

    in_step: Callable[[Callable[[], bool]], None]

    def meanwhile(self, piece: Callable[[], bool]) -> None:
        self.piece = piece

    def run(self, plan: StepPlan) -> StepResult:
        in_step, self.in_step = self.in_step, lambda piece: None
        in_step(self.piece)
        return super().run(plan)


def during_a_step(in_step: Callable[[Front, Callable[[], bool]], None]) -> Front:
    """A front whose first request, of one token, is in a step in which this is done."""
    front = Front(runner=Watched)
    assert isinstance(front.runner, Watched)
    front.runner.in_step = lambda piece: in_step(front, piece)
    front.send(Submit(1, plain_request((5,), max_tokens=1)))
    return front


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.close()


def test_a_request_runs_and_the_load_falls_to_nothing(front: Front) -> None:
    front.send(Submit(1, plain_request((1, 2, 3), 9)))
    events = front.read_to_end(1)
    assert sum(len(event.token_ids) for event in events) == 9
    finish = events[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.LENGTH
    load = front.wait_for_load(running=0, used_pages=0)
    assert (load.steps, load.generated_tokens, load.total_pages) == (9, 9, 64)


def test_the_last_event_of_all_brings_the_load_along(front: Front) -> None:
    """The front is woken once for both, also where it was told of the load a moment ago."""
    for key in range(1, 4):
        front.send(Submit(key, plain_request((5,), max_tokens=1)))
        front.read_to_end(key)
    steps = [report for report in front.seen if isinstance(report, Step) and _all_of(report)]
    told = [None if step.load is None else (step.load.running, step.load.generated_tokens) for step in steps]
    assert told == [(0, 1), (0, 2), (0, 3)]


def test_one_frame_a_step_for_all() -> None:
    front = Front(step_time=0.005)
    front.send(Submit(1, plain_request((1,), 20)), Submit(2, plain_request((2,), 20)))
    front.read_to_end(1)
    frames = front.steps()
    assert [[event.key for event in events] for events in frames] == [[1, 2]] * 20
    front.close()


def test_an_idle_loop_says_nothing(front: Front) -> None:
    front.send(Submit(1, plain_request((1,), 2)))
    front.wait_for_load(running=0, generated_tokens=2)
    front.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        front.socket.recv(1)


def test_a_loop_with_only_paused_work_keeps_saying_that_it_lives(front: Front) -> None:
    front.send(Submit(1, plain_request((1,), 900)), Pause(1))
    started = time.monotonic()
    while len(front.loads()) < 5:
        front.receive()
    front.wait_for_load(paused=1)
    assert time.monotonic() - started < PATIENCE
    front.send(Resume(1))
    front.read_to_end(1)


def test_a_timer_fires_without_any_step(front: Front) -> None:
    now = time.monotonic()
    front.send(Submit(1, plain_request((1,), 900, expires_at=now + 0.3)), Pause(1))
    finish = front.read_to_end(1)[-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.TIME_BUDGET
    assert 0.3 <= time.monotonic() - now < PATIENCE


def test_a_broken_step_costs_its_own_requests(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        front.send(Submit(1, plain_request((0, Fault.RAISE, 3))), Submit(2, plain_request((7,) * 3, 900)))
        assert front.read_to_end(1)[-1].failure is Failure.STEP
    assert front.read_to_end(2)[-1].failure is Failure.STEP, "it was in the same step"
    assert "as asked" in caplog.text
    front.send(Submit(3, plain_request((7,) * 3, 5)))
    assert front.read_to_end(3)[-1].finish is not None
    front.wait_for_load(running=0, used_pages=0)


def test_a_row_that_finds_no_memory_costs_itself_alone(front: Front) -> None:
    """Nor is it one of the failures after which the process gives up."""
    for key in range(1, 6):
        front.send(Submit(key, plain_request((0, Fault.MEMORY, 3))))
    front.send(Submit(6, plain_request((7,) * 3, 50)))
    for key in range(1, 6):
        events = front.read_to_end(key)
        assert events[-1].failure is Failure.MEMORY
        assert sum(len(event.token_ids) for event in events) == 3
    assert sum(len(event.token_ids) for event in front.read_to_end(6)) == 50
    front.wait_for_load(running=0, used_pages=0)


@pytest.mark.parametrize(
    ("error", "lack"),
    [
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (EngineFailed("out of memory"), False),
    ],
)
def test_what_is_a_lack_of_memory(error: Exception, lack: bool) -> None:
    assert out_of_memory(error) is lack


def test_a_sick_row_costs_itself_alone(front: Front) -> None:
    front.send(Submit(1, plain_request((0, Fault.SICK_ROW, 3))), Submit(2, plain_request((7,) * 3, 50)))
    assert front.read_to_end(1)[-1].failure is Failure.STEP
    assert len(front.events(1)) == 4
    assert front.read_to_end(2)[-1].finish is not None


def test_three_broken_steps_in_a_row_are_the_end(front: Front) -> None:
    for key in (1, 2):
        front.send(Submit(key, plain_request((0, Fault.RAISE))))
        front.read_to_end(key)
    front.send(Submit(3, plain_request((1,), 3)))
    front.read_to_end(3)
    for key in (4, 5):
        front.send(Submit(key, plain_request((0, Fault.RAISE))))
        front.read_to_end(key)
    assert front.thread.is_alive(), "a good step between them was to count"
    front.send(Submit(6, plain_request((0, Fault.RAISE))))
    front.thread.join(PATIENCE)
    assert isinstance(front.error, EngineFailed)


def test_a_lost_device_is_the_end_at_once(front: Front) -> None:
    front.send(Submit(1, plain_request((0, Fault.DEVICE, 2))))
    front.thread.join(PATIENCE)
    assert isinstance(front.error, EngineFailed)


def test_a_request_that_cannot_run_fails_alone(front: Front) -> None:
    front.send(Submit(1, plain_request(())), Submit(2, plain_request((1,) * 2000)), Submit(3, plain_request((1,), 2)))
    assert front.read_to_end(1)[-1].failure is Failure.STEP
    assert front.read_to_end(2)[-1].failure is Failure.STEP
    assert front.read_to_end(3)[-1].finish is not None


def test_switches_answer(front: Front) -> None:
    front.send(Switch(1, "batching", False), Switch(2, "nonsense", True))
    while sum(isinstance(report, Switched) for report in front.seen) < 2:
        front.receive()
    answers = {report.ticket: report.refusal for report in front.seen if isinstance(report, Switched)}
    assert answers[1] is None
    assert "nonsense" in (answers[2] or "")


def test_the_front_hears_of_the_step_with_which_a_trial_ends(front: Front) -> None:
    front.send(Switch(1, "graphs", False), Submit(1, plain_request((1,), 2 * TRIAL_STEPS)))
    front.read_to_end(1)
    since = next(report.steps for report in front.seen if isinstance(report, Switched))
    assert since + TRIAL_STEPS in [load.steps for load in front.loads()]


def test_a_runner_that_fails_to_switch_is_no_end(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeRunner, name: str, enabled: bool) -> None:
        raise EngineFailed("no memory for it") if enabled else Unsupported("never")

    monkeypatch.setattr(FakeRunner, "set_optimization", refuse)
    front.send(Switch(1, "graphs", True), Switch(2, "graphs", False))
    while len(front.seen) < 2:
        front.receive()
    assert front.seen[:2] == [Switched(1, "no memory for it"), Switched(2, "never")]


def test_cancel_frees_everything(front: Front) -> None:
    front.send(*[Submit(key, plain_request((1,) * 50, 900)) for key in range(1, 30)])
    front.wait_for_load(running=2, waiting=27)
    front.send(*[Cancel(key) for key in range(1, 30)])
    front.wait_for_load(running=0, waiting=0, used_pages=0)


def test_settings_come_once(front: Front) -> None:
    front.send(Configure(EngineSettings(model="")))
    front.thread.join(PATIENCE)
    assert isinstance(front.error, FrameError)


def test_a_loop_ends_when_the_front_goes() -> None:
    front = Front()
    front.send(Submit(1, plain_request((1,), 900)))
    front.close()
    assert front.error is None or isinstance(front.error, ConnectionError)


def test_a_prompt_that_comes_during_a_step_has_its_slot_before_the_end() -> None:
    def in_step(front: Front, piece: Callable[[], bool]) -> None:
        assert not piece(), "nothing has come"
        front.send(Submit(2, plain_request((6,) * 20, 3)))
        assert piece()
        assert front.scheduler.load.running == 2
        assert not piece()

    front = during_a_step(in_step)
    front.read_to_end(2)
    assert [[event.key for event in step] for step in front.steps()] == [[1], [2], [2], [2]]
    front.close()


def test_a_switch_that_comes_during_a_step_is_set_behind_it() -> None:
    def in_step(front: Front, piece: Callable[[], bool]) -> None:
        front.send(Switch(9, "batching", False), Submit(2, plain_request((6,), 3)))
        assert not piece()

    front = during_a_step(in_step)
    front.read_to_end(2)
    assert front.seen[1] == Switched(9, None, 1), "behind the step, before the next"
    front.close()


def profiles(front: Front, count: int) -> list[Profiled]:
    while len(found := [report for report in front.seen if isinstance(report, Profiled)]) < count:
        front.receive()
    return found


def test_a_profile_names_the_functions_of_the_step_loop() -> None:
    front = Front(step_time=0.002)
    front.send(StartProfile(7, PATIENCE), Submit(1, plain_request((1,), 100)))
    front.read_to_end(1)
    front.send(EndProfile(7))
    (found,) = profiles(front, 1)
    assert found.ticket == 7
    assert "Loop._step (engine/worker/loop.py:" in found.stacks
    front.close()


def test_only_the_latest_profile_has_stacks_and_none_goes_on(front: Front) -> None:
    front.send(StartProfile(1, PATIENCE), StartProfile(2, PATIENCE), EndProfile(1), EndProfile(2), EndProfile(2))
    found = profiles(front, 3)
    assert [one.ticket for one in found] == [1, 2, 2]
    assert not found[0].stacks
    assert not found[2].stacks
    assert "stack sampler" not in {thread.name for thread in threading.enumerate()}


def test_a_driver_is_asked_for_memory_where_nobody_waits_or_seldom() -> None:
    answers = iter([(59, 100), (58, 100), RuntimeError("CUDA error"), (56, 100), (55, 100)])
    looks = [(0.5, True), (1.0, True), (2.5, False), (10.9, False), (11.0, False), (11.5, True), (12.0, True)]
    times = iter([0.0, *(at for at, _ in looks)])

    def ask() -> tuple[int, int]:
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    memory = DeviceMemory(ask, lambda: next(times))
    known = [memory.known]
    for _, idle in looks:
        memory.look(idle=idle)
        known.append(memory.known)
    assert [used for used, _ in known] == [41, 41, 42, 42, 42, 42, 42, 44]
    assert next(answers) == (55, 100), "each look that was due has asked once"


def test_the_load_tells_of_a_gpus_memory() -> None:
    front = Front(memory=DeviceMemory(lambda: (25, 100)))
    front.send(Submit(1, plain_request((1,), 3)))
    front.read_to_end(1)
    load = front.wait_for_load(running=0)
    assert (load.device_used_bytes, load.device_bytes) == (75, 100)
    front.close()
