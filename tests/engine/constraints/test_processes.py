"""Grammars in processes: what they may take, how they end, who is to blame, and that nobody waits with them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.constrained import grammar
from engine.api import Constraint
from engine.constraints.budget import DISTRUST, MIB, MOST_DEATHS, REFUSED_FOR, Budget
from engine.constraints.constraints import Constraints
from engine.constraints.processes import Processes
from engine.constraints.reasons import ConstraintReason
from engine.scheduling.plan import Row, RowEnd, RowResult, StepPlan

pytestmark = pytest.mark.product

# Distinct ones of a kind that passes the bounds of text, and grows by a megabyte in forty tokens.
GROWS = "((a{{3,30}}){{3,30}}){{3,20}}{}"
# Within the bounds of text, and some seconds of compiling.
_WORDS = ["|".join(f"{n * 7919 % 100_003}b" for n in range(part, 9000 + part)) for part in range(24)]
LARGE = Constraint(
    "start: " + " ".join(f"T{n}" for n in range(24)) + "".join(f"\nT{n}: /({one})+/" for n, one in enumerate(_WORDS))
)
WIDE = Budget(compiling=600, masking=600, stalled=6000, step_wait=600, of_all=1 << 40)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made(clock: Clock) -> Iterator[Callable[..., Constraints]]:
    """Over bytes. Closed at the end."""
    all_of_them: list[Constraints] = []

    def make(**changes: float) -> Constraints:
        all_of_them.append(Constraints("", replace(WIDE, **changes), clock))  # type: ignore[arg-type]
        return all_of_them[-1]

    yield make
    for one in all_of_them:
        one.close()


def begin(constraints: Constraints, key: int, form: Constraint, owner: str = "mallory") -> ConstraintReason | None:
    """Until it is compiled, or is not."""
    constraints.begin_compiling(key, replace_owner(form, owner), (256,), True)
    return settled(constraints, key)


def replace_owner(form: Constraint, owner: str) -> Constraint:
    return Constraint(form.grammar, owner)


def settled(constraints: Constraints, key: int) -> ConstraintReason | None:
    while not constraints.compiled(key):
        constraints.collect()
        time.sleep(0.0005)
    return constraints.failure(key)


def say(constraints: Constraints, key: int, text: bytes) -> RowResult:
    constraints.begin(StepPlan(()))
    (result,) = constraints.follow([Row(key, 0, 0, 1, True)], {key: RowResult(tuple(text))}).values()
    return result


def allowed(constraints: Constraints, key: int) -> set[int]:
    mask = constraints.mask(key)
    return {at for at in range(257) if mask[at // 8] >> at % 8 & 1}


def server_of(constraints: Constraints) -> Processes:
    found = constraints._processes
    assert isinstance(found, Processes)
    return found


def children(constraints: Constraints) -> list[int]:
    (server,) = constraints.pids
    return [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


def test_masks_and_forced_tokens_come_from_a_process(made: Callable[..., Constraints]) -> None:
    constraints = made()
    assert begin(constraints, 1, grammar("regex", "a(bcd|e)x?")) is None
    assert allowed(constraints, 1) == {*b"a"}
    assert say(constraints, 1, b"a").token_ids == (*b"a",)
    assert allowed(constraints, 1) == {*b"be"}
    found = say(constraints, 1, b"b")
    assert (bytes(found.token_ids), found.forced) == (b"bcd", 2)
    assert allowed(constraints, 1) == {*b"x", 256}
    assert say(constraints, 1, b"x").end is RowEnd.COMPLETE
    assert len(children(constraints)) == 1


def test_each_caller_has_a_process_and_shares_where_there_are_too_many(made: Callable[..., Constraints]) -> None:
    constraints = made(callers=2)
    for key, owner in enumerate(("a", "b", "a", "c"), start=1):
        assert begin(constraints, key, grammar("regex", "[a-z]+"), owner) is None
    assert sorted(len(one.keys) for one in server_of(constraints).live) == [2, 2]


def test_a_grammar_that_grows_beyond_its_bound_ends_its_sequences_alone(made: Callable[..., Constraints]) -> None:
    constraints = made(of_constraint=MIB)
    assert begin(constraints, 1, grammar("regex", "[a-z]+")) is None
    assert begin(constraints, 2, grammar("regex", GROWS.format(1))) is None
    for _ in range(400):
        if constraints._held[2].failed is not None:
            break
        say(constraints, 2, b"a")
        settled(constraints, 2)
    assert constraints.failure(2) is ConstraintReason.MEMORY
    assert not any(constraints.mask(2))
    assert constraints.stuck(2).end is RowEnd.COSTLY
    assert constraints.failure(1) is None
    assert allowed(constraints, 1) == {*b"abcdefghijklmnopqrstuvwxyz"}


def test_sequences_of_one_grammar_that_fail_together_count_once(made: Callable[..., Constraints]) -> None:
    constraints, form = made(of_constraint=MIB), grammar("regex", GROWS.format(1))
    assert [begin(constraints, key, form) for key in (1, 2)] == [None, None]
    while constraints._held[1].failed is None:
        say(constraints, 1, b"a")
        settled(constraints, 1)
    assert [settled(constraints, key) for key in (1, 2)] == [ConstraintReason.MEMORY, ConstraintReason.MEMORY]
    for key in (1, 2):
        constraints.forget(key)
    assert begin(constraints, 3, form) is None


def test_a_process_that_sends_no_message_is_killed_and_its_sequences_begin_anew(
    made: Callable[..., Constraints],
) -> None:
    constraints = made()
    assert begin(constraints, 1, grammar("regex", "[a-z]+")) is None
    process = constraints._held[1].process
    assert process is not None
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"\x00\x00\x00\x01\xc1")
        os.dup2(ours.fileno(), process.socket.fileno())
    ours.close()
    while constraints._held[1].process is process:
        constraints._processes.wait(1)
    assert settled(constraints, 1) is None
    assert allowed(constraints, 1) == {*b"abcdefghijklmnopqrstuvwxyz"}


def test_what_nobody_follows_is_dropped_when_a_caller_has_too_much(made: Callable[..., Constraints]) -> None:
    constraints = made(of_caller=4 * MIB)
    most = 0
    for key in range(1, 9):
        assert begin(constraints, key, grammar("regex", GROWS.format(key))) is None
        for _ in range(60):
            say(constraints, key, b"a")
            assert settled(constraints, key) is None
        most = max(most, server_of(constraints).used)
        constraints.forget(key)
    assert 2 * MIB < most <= 4 * MIB


def test_what_all_callers_keep_is_bounded_and_who_is_idle_goes_first(
    made: Callable[..., Constraints], clock: Clock
) -> None:
    constraints = made(of_all=2 * MIB)
    for key, owner in ((1, "idle"), (2, "busy")):
        assert begin(constraints, key, grammar("regex", GROWS.format(key)), owner) is None
        for _ in range(40):
            say(constraints, key, b"a")
            assert settled(constraints, key) is None
        if owner == "idle":
            constraints.forget(key)
    assert server_of(constraints).used > 2 * MIB
    clock.now += 2
    constraints.collect()
    assert [one.owner for one in server_of(constraints).live] == ["busy"]
    assert allowed(constraints, 2) == {*b"a2"}


def test_a_process_without_sequences_ends_after_a_while(made: Callable[..., Constraints], clock: Clock) -> None:
    constraints = made()
    assert begin(constraints, 1, grammar("regex", "[a-z]+")) is None
    constraints.forget(1)
    while server_of(constraints).live[0].asked:  # until it has forgotten it
        constraints.collect()
    clock.now += WIDE.idle - 1
    constraints.collect()
    assert constraints.kept
    clock.now += 2
    constraints.collect()
    assert not constraints.kept
    while children(constraints):
        time.sleep(0.001)


def test_a_compile_beyond_its_time_ends_its_request_and_is_refused_after_two(
    made: Callable[..., Constraints], clock: Clock
) -> None:
    """Processor time: a busy machine takes nothing away."""
    constraints = made(compiling=0.15)
    assert [begin(constraints, key, LARGE) for key in range(1, 4)] == [
        ConstraintReason.TIME,
        ConstraintReason.TIME,
        ConstraintReason.REFUSED,
    ]
    assert MOST_DEATHS == 2
    assert begin(constraints, 4, LARGE, "another") is ConstraintReason.TIME  # who has not been tried
    clock.now += REFUSED_FOR
    assert begin(constraints, 5, LARGE) is ConstraintReason.TIME


def test_who_shares_a_process_that_dies_goes_on_and_the_culprit_does_not(made: Callable[..., Constraints]) -> None:
    constraints = made(compiling=0.15)
    assert begin(constraints, 1, grammar("regex", "[a-z]{3,9}")) is None
    say(constraints, 1, b"ab")
    assert settled(constraints, 1) is None
    assert begin(constraints, 2, LARGE) is ConstraintReason.TIME
    assert settled(constraints, 1) is None
    say(constraints, 1, b"c")
    assert 256 in allowed(constraints, 1)


@pytest.mark.parametrize("who", ["child", "server"])
def test_processes_that_are_killed_come_back_and_no_answer_is_lost(made: Callable[..., Constraints], who: str) -> None:
    constraints = made()
    assert begin(constraints, 1, grammar("regex", "[a-z]{3,9}")) is None
    say(constraints, 1, b"abc")
    assert 256 in allowed(constraints, 1)
    os.kill((children(constraints) if who == "child" else constraints.pids)[0], signal.SIGKILL)
    while constraints._held[1].masked == 3:
        constraints.collect()
        time.sleep(0.001)
    assert settled(constraints, 1) is None
    assert 256 in allowed(constraints, 1)
    assert say(constraints, 1, b"defghi").end is RowEnd.COMPLETE


def test_a_step_waits_no_longer_than_it_may_and_then_not_at_all(
    made: Callable[..., Constraints], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints = made(step_wait=0.02)
    assert begin(constraints, 1, grammar("regex", "[a-z]+")) is None
    assert begin(constraints, 2, grammar("regex", "[a-z]+"), "alice") is None
    assert (constraints.ready(1), constraints.ready(2)) == (True, True)
    processes, real, asked = server_of(constraints), Processes.wait, []

    def wait(self: Processes, seconds: float) -> None:
        asked.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(Processes, "wait", wait)
    constraints.begin(StepPlan(()))
    follow = say(constraints, 1, b"a")
    assert follow == RowResult((*b"a",))
    assert sum(asked) == pytest.approx(0.02)
    asked.clear()
    assert not any(constraints.mask(1))
    assert constraints.stuck(1).end is RowEnd.LATE
    assert not constraints.ready(1)
    assert constraints.ready(2)
    assert sum(asked) == 0
    monkeypatch.setattr(Processes, "wait", real)
    assert settled(constraints, 1) is None
    assert constraints.ready(1)
    assert processes.live
    clock.now += DISTRUST
    say(constraints, 1, b"b")
    assert allowed(constraints, 1) == {*b"abcdefghijklmnopqrstuvwxyz", 256}


def test_forced_tokens_that_come_too_late_are_chosen_step_by_step(
    made: Callable[..., Constraints], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints = made()
    assert begin(constraints, 1, grammar("regex", "a(bcd|e)x?")) is None
    say(constraints, 1, b"a")
    assert settled(constraints, 1) is None

    def wait(self: Processes, seconds: float) -> None:
        clock.now += seconds

    real = Processes.wait
    monkeypatch.setattr(Processes, "wait", wait)
    assert say(constraints, 1, b"b") == RowResult((*b"b",))
    monkeypatch.setattr(Processes, "wait", real)
    assert settled(constraints, 1) is None
    assert allowed(constraints, 1) == {*b"c"}


def test_a_grammar_beyond_the_bounds_never_reaches_the_library(made: Callable[..., Constraints]) -> None:
    deep = "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(2000)) + '\nr2000: "a"\n'
    constraints = made()
    assert begin(constraints, 1, Constraint(deep)) is ConstraintReason.UNMET
    assert len(children(constraints)) == 1
