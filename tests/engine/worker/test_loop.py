"""The loop over a real socket, in a thread; the test is the front."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from engine.api import TRIAL_STEPS, FinishReason
from engine.errors import EngineFailed, Unsupported
from engine.fake import FakeRunner, Fault, plain_request
from engine.ipc.events import Failure
from engine.ipc.frames import (
    Cancel,
    ConfigureEngine,
    EndProfile,
    Pause,
    Profiled,
    Resume,
    SetSwitch,
    StartProfile,
    StepEvents,
    Submit,
    Switched,
)
from engine.ipc.framing import FrameError
from engine.scheduling.plan import Assignment, StepPlan, StepResult
from engine.settings import EngineSettings
from engine.worker.device_memory import DeviceMemory
from engine.worker.loop import out_of_memory
from tests.engine.worker.loops import PATIENCE, Front, all_of


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
    steps = [report for report in front.seen if isinstance(report, StepEvents) and all_of(report)]
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


def test_a_step_that_raises_costs_the_request_that_raises(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        front.send(Submit(1, plain_request((0, Fault.RAISE, 3))), Submit(2, plain_request((7,) * 3, 50)))
        assert front.read_to_end(1)[-1].failure is Failure.STEP
    assert len(front.events(1)) == 4
    assert sum(len(event.token_ids) for event in front.read_to_end(2)) == 50
    assert caplog.text.count("a step of 2 rows failed") == caplog.text.count("a step of 1 rows failed") == 1
    assert caplog.text.count("Traceback") == 1, "it was the same failure"
    front.send(Submit(3, plain_request((7,) * 3, 5)))
    assert front.read_to_end(3)[-1].finish is not None
    front.wait_for_load(running=0, used_pages=0)


def test_what_raises_in_parts_of_one_step_is_one_failure(front: Front) -> None:
    """Two that raise at once, again and again, end no process as long as others' steps go well."""
    for key in range(1, 20, 3):
        front.send(*(Submit(key + at, plain_request((0, Fault.RAISE, 2))) for at in range(2)))
        front.send(Submit(key + 2, plain_request((7,) * 3, 3)))
        for at in range(2):
            assert front.read_to_end(key + at)[-1].failure is Failure.STEP
        assert front.read_to_end(key + 2)[-1].finish is not None


class Torn(FakeRunner):
    """Loses one row's result where two rows come together, once."""

    torn = 0

    def run(self, plan: StepPlan, assignment: Assignment | None = None) -> StepResult:
        result = super().run(plan)
        if len(plan.rows) < 2 or self.torn:
            return result
        Torn.torn += 1
        return StepResult({key: row for key, row in result.rows.items() if key != 2})


def test_a_result_that_is_not_what_was_planned_costs_nobody() -> None:
    front = Front(runner=Torn)
    front.send(*(Submit(key, plain_request((7, key), 30)) for key in (1, 2)))
    for key in (1, 2):
        assert sum(len(event.token_ids) for event in front.read_to_end(key)) == 30
    assert Torn.torn == 1
    front.close()


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
    front.send(SetSwitch(1, "batching", False), SetSwitch(2, "nonsense", True))
    while sum(isinstance(report, Switched) for report in front.seen) < 2:
        front.receive()
    answers = {report.ticket: report.refusal for report in front.seen if isinstance(report, Switched)}
    assert answers[1] is None
    assert "nonsense" in (answers[2] or "")


def test_the_front_hears_of_the_step_with_which_a_trial_ends(front: Front) -> None:
    front.send(SetSwitch(1, "graphs", False), Submit(1, plain_request((1,), 2 * TRIAL_STEPS)))
    front.read_to_end(1)
    since = next(report.steps for report in front.seen if isinstance(report, Switched))
    assert since + TRIAL_STEPS in [load.steps for load in front.loads()]


def test_a_runner_that_fails_to_switch_is_no_end(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeRunner, name: str, enabled: bool) -> None:
        raise EngineFailed("no memory for it") if enabled else Unsupported("never")

    monkeypatch.setattr(FakeRunner, "set_optimization", refuse)
    front.send(SetSwitch(1, "graphs", True), SetSwitch(2, "graphs", False))
    while len(front.seen) < 2:
        front.receive()
    assert front.seen[:2] == [Switched(1, "no memory for it"), Switched(2, "never")]


def test_cancel_frees_everything(front: Front) -> None:
    front.send(*[Submit(key, plain_request((1,) * 50, 900)) for key in range(1, 30)])
    front.wait_for_load(running=2, waiting=27)
    front.send(*[Cancel(key) for key in range(1, 30)])
    front.wait_for_load(running=0, waiting=0, used_pages=0)


def test_settings_come_once(front: Front) -> None:
    front.send(ConfigureEngine(EngineSettings(model="")))
    front.thread.join(PATIENCE)
    assert isinstance(front.error, FrameError)


def test_a_loop_ends_when_the_front_goes() -> None:
    front = Front()
    front.send(Submit(1, plain_request((1,), 900)))
    front.close()
    assert front.error is None or isinstance(front.error, ConnectionError)


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
