"""A model with its proposers, and runs of it with drafts and without, in turns; and a proposer that
knows what comes."""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from bench.pace import asked, planner
from engine.execution.registry import EXECUTORS, Executor
from engine.execution.runner import ModelRunner
from engine.execution.speculation.captured.executor import CapturedSpeculation
from engine.execution.speculation.costs import Clock, Costs, clock_of
from engine.execution.speculation.executor import Speculation
from engine.execution.speculation.lookup import PromptLookup
from engine.execution.speculation.proposer import MOST_DRAFTED, Draft, Proposer, Wish
from engine.execution.step_state import Parts
from engine.kv.page_pool import PagePool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence_state import SequenceState
from engine.settings import EngineSettings
from engine.worker.build import make_runner, prepare

FREE = Costs({1: 1.0, 512: 1.0})  # so that drafts are always as long as a request allows
WARM = 20  # steps


@dataclass(frozen=True, slots=True)
class Wanted:
    """One stream of a run."""

    prompt: tuple[int, ...]
    tokens: int
    drafts: int | None = None  # the most a round


@dataclass(frozen=True, slots=True)
class Run:
    """Some streams at once, measured from when all have begun until the first ends."""

    tokens: int
    seconds: float
    steps: tuple[tuple[int, int], ...]  # of one stream: so many, and tokens drafted in each
    proposed: int
    accepted: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Arm:
    """A runner with its proposers, whose speculation is switched."""

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        clock: Clock,
        parts: Parts,
        speculation: Speculation | CapturedSpeculation,
    ) -> None:
        self.name = name
        self.speculation = speculation
        self.runner = runner
        self.parts = parts
        self._clock = clock

    @property
    def rounds(self) -> CapturedSpeculation | None:
        """The executor, where it launches rounds ahead."""
        return self.speculation if isinstance(self.speculation, CapturedSpeculation) else None

    def _begin(self, asks: Sequence[Wanted]) -> Scheduler:
        scheduler = planner(self.runner, PagePool(self.runner.info.total_pages), 2048)
        for key, ask in enumerate(asks):
            made = asked(key, ask.prompt, ask.tokens)
            made.request = structs.replace(made.request, draft_limit=ask.drafts)
            scheduler.admit(made)
        return scheduler

    def steps(self, asks: Sequence[Wanted]) -> tuple[list[float], list[float]]:
        """Seconds of the steps that all streams are in, with a draft and with speculation off, in turns."""
        scheduler, live, number = self._begin(asks), len(asks), 0
        found: tuple[list[float], list[float]] = ([], [])
        while live == len(asks) and (plan := scheduler.plan(0.0)) is not None:
            number += 1
            self.runner.set_optimization("speculation", number % 2 == 0)
            began = self._clock()
            result = self.runner.run(plan)
            live -= sum(event.finish is not None for event in scheduler.commit(plan, result, 0.0))
            drafted = any(row.draft_proposed for row in result.rows.values())
            if number > WARM and (number % 2 or drafted):
                found[number % 2].append(self._clock() - began)
        for key in range(len(asks)):
            scheduler.cancel(key)
        while (plan := scheduler.plan(0.0)) is not None:
            scheduler.commit(plan, self.runner.run(plan), 0.0)
        return found

    def run(self, on: bool, asks: Sequence[Wanted]) -> Run:
        """All to their ends."""
        self.runner.set_optimization("speculation", on)
        scheduler = self._begin(asks)
        ids: dict[int, list[int]] = {key: [] for key in range(len(asks))}
        begun: set[int] = set()
        steps: list[tuple[int, int]] = []
        read: Mapping[int, int] = {}
        began, ended, tokens, proposed, accepted = 0.0, 0.0, 0, 0, 0
        while (plan := scheduler.plan(0.0)) is not None:
            result = self.runner.run(plan)
            now = self._clock()
            counted = len(begun) == len(asks) and not ended
            for event in scheduler.commit(plan, result, 0.0):
                count = len(event.token_ids)
                if event.failure is not None:
                    raise RuntimeError(str(event.failure))
                if counted:
                    tokens += count
                if count:
                    begun.add(event.key)
                ids[event.key] += event.token_ids
                if event.finish is not None and not ended:
                    ended = now
            if counted:
                rows = result.rows.values()
                proposed += sum(row.draft_proposed for row in rows)
                accepted += sum(row.draft_accepted for row in rows)
                steps += [(len(row.token_ids) - row.draft_accepted, row.draft_proposed) for row in rows]
            elif not began and len(begun) == len(asks):
                began, read = now, {} if self.rounds is None else self.rounds.read
        if self.rounds is not None:
            # Several rounds came of one step of the planner.
            found = {group - 1: count - read.get(group, 0) for group, count in self.rounds.read.items()}
            plain = sum(count for count, _ in steps) - sum(found.values())
            steps = [(plain, 0), *((count, drafted) for drafted, count in found.items())]
        return Run(
            tokens,
            ended - began,
            tuple(steps),
            proposed,
            accepted,
            tuple(tuple(each) for each in ids.values()),
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """A draft's tokens a second and those without one; over runs in turns."""

    on: tuple[Run, ...]
    off: tuple[Run, ...]
    turns: int

    @property
    def rates(self) -> tuple[float, float]:
        """All tokens over the median turn's seconds."""
        return self._rate(self.on), self._rate(self.off)

    def _rate(self, runs: tuple[Run, ...]) -> float:
        each = len(runs) // self.turns
        of_turns = [runs[at : at + each] for at in range(0, len(runs), each)]
        return statistics.median(
            sum(one.tokens for one in turn) / sum(one.seconds for one in turn) for turn in of_turns
        )

    @property
    def acceptance(self) -> float:
        """A drafted token."""
        return sum(one.accepted for one in self.on) / max(1, sum(one.proposed for one in self.on))

    @property
    def same(self) -> bool:
        """Whether every answer was the same."""
        return all(on.ids == off.ids for on, off in zip(self.on, self.off, strict=True))


def beside(arm: Arm, cases: Sequence[Sequence[Wanted]], seconds: float) -> Beside:
    """Each case with and without, in turns, while there is time; at least once."""
    for case in cases:  # sizes that were not met yet are set up
        for on in (True, False):
            arm.run(on, case)
    began, turns = time.monotonic(), 0
    runs: dict[bool, list[Run]] = {True: [], False: []}
    while not turns or time.monotonic() - began < seconds * turns / (turns + 1):
        for at, case in enumerate(cases):
            for on in (True, False) if (at + turns) % 2 else (False, True):
                runs[on].append(arm.run(on, case))
        turns += 1
    return Beside(tuple(runs[True]), tuple(runs[False]), turns)


def made_of(given: argparse.Namespace, name: str, forced: bool = False) -> Arm:
    """The model with this proposer. `forced`: drafts are always as long as a request allows."""
    drafts = given.draft_model if name != "prompt_lookup" else ""
    settings = EngineSettings(
        model=given.model, device=given.device, draft_model=drafts, max_sequences=8, threads=given.threads
    )
    prepared = prepare(settings, lambda *_: None)
    known = FREE if forced else None

    def eager(parts: Parts) -> Executor:
        lookup: tuple[Proposer, ...] = (PromptLookup(),) if name != "draft_model" else ()
        return Speculation(parts, lookup if parts.draft is None else (*lookup, parts.draft), known)

    makes: dict[str, Callable[[Parts], Executor]] = {
        "speculation": eager,
        "captured_speculation": lambda parts: CapturedSpeculation(parts, known),
    }
    made: list[Executor] = []

    def noted(make: Callable[[Parts], Executor], parts: Parts) -> Executor:
        made.append(make(parts))
        return made[-1]

    registry = tuple(
        replace(one, make=partial(noted, makes[one.name])) if one.name in makes else one for one in EXECUTORS
    )
    runner = make_runner(settings, prepared, lambda *_: None, registry)
    kinds = CapturedSpeculation, Speculation
    best = next(one for kind in kinds for one in made if isinstance(one, kind))
    gc.collect()
    gc.freeze()  # as an engine process does
    return Arm(name, runner, clock_of(prepared.parts.model.placement.device), prepared.parts, best)


def record(arm: Arm, found: Beside, prompts: str, streams: int, k: int | None = None) -> dict[str, Any]:
    """As kept in bench/results. `k` null: as the engine finds."""
    on, off = found.rates
    return {
        "proposer": arm.name,
        "k": k,
        "acceptance": round(found.acceptance, 3),
        "tokens_per_second": round(on, 1),
        "baseline_tokens_per_second": round(off, 1),
        "ratio": round(on / off, 3),
        "prompts": prompts,
        "streams": streams,
        "drafted_per_token": round(sum(one.proposed for one in found.on) / sum(one.tokens for one in found.on), 3),
        "turns": found.turns,
        "same": found.same,
    }


class Forced:
    """Each token of its drafts is right with probability `acceptance`, and another one otherwise."""

    name = "forced"

    def __init__(
        self, answers: Mapping[tuple[int, ...], Items[int]], acceptance: float, depth: int = MOST_DRAFTED
    ) -> None:
        """`answers` by prompt. Drafts have `depth` tokens, if so many are wished."""
        self._answers = answers
        self._acceptance = acceptance
        self._depth = depth
        self._chance = random.Random(1)

    def measure(self, target: Callable[[], None]) -> None:
        """It costs nothing."""

    def seconds(self, rows: int, depth: int) -> float:
        """Nothing."""
        return 0.0

    def reach(self, sequence: SequenceState) -> int:
        """Up to the end of what it knows."""
        return min(self._depth, len(self._rest(sequence)))

    def propose(self, wishes: Items[Wish]) -> list[Draft]:
        """What will come, but for the mistakes."""
        return [tuple(map(self._said, self._rest(one.sequence)[: one.most])) for one in wishes]

    def _rest(self, sequence: SequenceState) -> Items[int]:
        known = self._answers.get(tuple(sequence.token_ids[: sequence.prompt_length]), ())
        return known[sequence.output_length : sequence.output_length + self._depth]

    def _said(self, token_id: int) -> int:
        return token_id if self._chance.random() < self._acceptance else token_id ^ 1
