"""Repeats recorded steps and compares the results: `python -m engine.worker.replay FILE --model FOLDER`.

Tokens that were computed before the first recorded step, by another sequence, or came from Redis, are computed first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from msgspec import structs

from engine.errors import EngineError
from engine.fake import FakeRunner
from engine.fake.checked import CheckedRunner
from engine.fake.checker import BrokenPlan
from engine.scheduling.plan import Admitted, Assignment, Released, Row, RowResult, Runner, StepPlan, StepResult
from engine.scheduling.sequence_state import SequenceState, SequenceTable, readmission
from engine.settings import DecoderChoice, Device, Dtype, EngineSettings
from engine.worker.recording import (
    HeldSequence,
    NoRecording,
    RecordedStep,
    Recording,
    describe,
    read_recording,
)

PIECE = 512  # tokens of a row that only makes up for what is missing


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """How many steps went as recorded, and the first difference."""

    steps: int  # that were equal
    difference: str | None  # None: all were


class Replay:
    def __init__(self, runner: Runner, held: tuple[HeldSequence, ...] = ()) -> None:
        self._runner = CheckedRunner(runner)
        self._truth = SequenceTable()  # the sequences as recorded
        self._astray: set[int] = set()  # keys that the runner does not have as they were recorded
        for one in held:
            row = Row(one.admitted.key, one.admitted.slot, 0, 1, False, 0, one.pages)
            self._truth.apply(StepPlan((row,) if one.pages else (), (one.admitted,)))
            self._astray.add(one.admitted.key)

    def step(self, recorded: RecordedStep) -> str | None:
        plan = recorded.plan
        try:
            result = self._run(plan, None if recorded.result is None else recorded.result.assignment)
        except BrokenPlan as broken:
            return f"the plan breaks a rule: {broken}"
        except Exception as error:
            return f"raises {describe(error)}"
        if recorded.result is None:
            return "returned a result where the recorded one raised"
        difference = self._difference(plan, recorded.result, result)
        self._truth.append(plan.rows, recorded.result.rows)
        return difference

    def _run(self, plan: StepPlan, assignment: Assignment | None) -> StepResult:
        """Runs the step on the executors that computed it when it was recorded, as far as they are in use here."""
        self._truth.apply(plan)
        self._astray -= {admitted.key for admitted in plan.admitted}
        rejoined = [self._truth.of(row) for row in plan.rows if row.key in self._astray]
        released = (*plan.released, *(Released(state.key, state.slot) for state in rejoined))
        admitted: tuple[Admitted, ...] = (*plan.admitted, *map(readmission, rejoined))
        if admitted or released:
            self._runner.run(StepPlan((), admitted, released))
        rows = {row.key: self._made_up(self._recorded(row)) for row in plan.rows}
        if assignment is not None:
            shares = (structs.replace(one, rows=tuple(rows[row.key] for row in one.rows)) for one in assignment.shares)
            assignment = Assignment(tuple(shares))
        return self._runner.run(StepPlan(tuple(rows.values())), assignment)

    def _recorded(self, row: Row) -> Row:
        """Gives the row all its pages where the runner has just been given its sequence anew."""
        if row.key not in self._astray:
            return row
        self._astray.discard(row.key)
        return _with_pages(row, 0, tuple(self._truth.of(row).pages))

    def _made_up(self, row: Row) -> Row:
        """Computes all tokens before the row."""
        while (done := self._runner.checker.in_place(row)) < row.start:
            count = min(PIECE, row.start - done)
            missing = Row(row.key, row.slot, done, count, False, row.first_page, row.pages)
            self._runner.run(StepPlan((missing,)))
            row = _with_pages(row, 0, ())
        return row

    def _difference(self, plan: StepPlan, recorded: StepResult, found: StepResult) -> str | None:
        """Compares ids alone. Their number may depend on time: surplus or missing ones are left to later steps."""
        for row in plan.rows:
            if not row.sample:
                continue
            theirs, ours = (side.rows.get(row.key, RowResult(())).token_ids for side in (recorded, found))
            both = min(len(theirs), len(ours))
            if theirs[:both] != ours[:both] or (not both and theirs != ours):
                state: SequenceState = self._truth.of(row)
                return f"sequence {row.key}, after {len(state.token_ids)} tokens: {list(theirs)} became {list(ours)}"
            if len(theirs) != len(ours):
                self._astray.add(row.key)
        return None


def replay(recording: Recording, runner: Runner) -> ReplayOutcome:
    """Stops at the first step that is different."""
    steps = Replay(runner, recording.held)
    for count, recorded in enumerate(recording.steps):
        difference = steps.step(recorded)
        if difference is not None:
            return ReplayOutcome(count, difference)
    return ReplayOutcome(len(recording.steps), None)


def settings_of(recording: Recording, model: str, device: Device | None, decoder: DecoderChoice) -> EngineSettings:
    """Recorded settings, but for the given model, device and decoder. One process repeats steps of a split model."""
    info, changes = recording.info, dict[str, Any](tensor_parallel=1)
    if info.dtype in get_args(Dtype):
        changes["dtype"] = info.dtype
    if device is not None:
        changes["device"] = device
    return replace(
        recording.settings,
        model=model,
        decoder=decoder,
        max_context=info.max_context,
        kv_bytes=info.total_pages * recording.page_bytes,
        **changes,
    )


def make_runner(settings: EngineSettings) -> Runner:
    if settings.kind == "fake":
        return FakeRunner(settings)
    from engine.worker.build import build  # torch: seconds that a recording of the fake engine need not pay

    return build(settings, lambda phase, done, total: None)


def main(argv: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Returns 0: all steps are equal; 1: one is not; 2: they cannot be repeated here."""
    given = _parser().parse_args(argv)
    try:
        recording = read_recording(given.file)
        if recording.settings.kind == "model" and not given.model:
            raise NoRecording("--model is needed: the steps are of a real model")
        runner = make_runner(settings_of(recording, given.model, given.device, given.decoder))
    except (OSError, NoRecording, EngineError) as error:
        say(str(error))
        return 2
    if runner.info.weights_digest != recording.info.weights_digest:
        say("the weights are others than those recorded")
    if recording.fault is not None:
        say(f"recorded fault: {recording.fault}")
    outcome = replay(recording, runner)
    runner.close()
    if outcome.difference is None:
        say(f"{outcome.steps} steps, all equal")
        return 0
    say(f"{outcome.steps} steps are equal; step {recording.first + outcome.steps}: {outcome.difference}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whippet replay",
        description="Does the steps again that an engine wrote to a file when one of them failed.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what engine.record-steps wrote")
    parser.add_argument("--model", default="", help="the model folder")
    parser.add_argument("--device", choices=get_args(Device), help="else as recorded")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto", help="default: auto")
    return parser


def _with_pages(row: Row, first: int, pages: tuple[int, ...]) -> Row:
    return Row(row.key, row.slot, row.start, row.count, row.sample, first, pages, row.score)


if __name__ == "__main__":
    sys.exit(main())
