"""Measures the gain of speculation: tokens a second with and without, in turns, in one process, by proposer and
prompts.

    python -m bench.speculation --model models/demo --draft-model models/demo-draft

Three parts. `texts`: sets of prompts of real text, one stream, drafts as long as the engine finds that
they pay. `depths`: drafts of k tokens always, beside what acceptance and the cost table predict. `streams`: several
at once, and one that copies beside seven that ask for no drafts. Greedy. On one thread of a CPU the clock is
that thread's own, which others on the machine do not disturb. Answers are compared, id for id.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from msgspec import structs
from tokenizers import Tokenizer

from bench import workloads as texts
from bench.pace import asked, planner, quantile
from bench.result import device, revision
from bench.workloads import append
from engine.execution.registry import EXECUTORS, Executor
from engine.execution.runner import ModelRunner
from engine.execution.speculation.costs import Clock, Costs, clock_of
from engine.execution.speculation.eager_executor import Speculation
from engine.execution.speculation.proposer import MOST_DRAFTED, Draft, DraftRequest, PromptLookup, Proposer
from engine.execution.speculation.verify_executor import CapturedSpeculation
from engine.execution.step_state import Parts
from engine.kv.page_pool import PagePool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence_state import SequenceState
from engine.settings import Device, EngineSettings
from engine.worker.build import make_runner, prepare

NAMES = ("device", "model", "proposer", "k", "prompts", "streams", "revision")  # of a record
PARTS = ("texts", "depths", "streams")
PROPOSERS = ("prompt_lookup", "draft_model", "both")
OTHERS = 7


def of_texts(arm: Arm, given: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    for name in given.sets:
        cases = [[Wanted(one, given.tokens)] for one in texts.prompts(name, tokenizer, given.prompts)]
        yield record(arm, beside(arm, cases, given.seconds), name, 1)


def of_streams(arm: Arm, given: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Measures two and four streams that copy, that write code and that chat; then one beside seven that ask for no
    drafts."""
    for name in ("edit", "code", "chat"):
        prompts = texts.prompts(name, tokenizer, 4)
        for count in (2, 4):
            case = [Wanted(prompts[at % len(prompts)], given.tokens) for at in range(count)]
            yield record(arm, beside(arm, [case], given.seconds), name, count)
    copying = texts.prompts("edit", tokenizer, 1)
    others = texts.prompts("code", tokenizer, OTHERS)
    case = [Wanted(copying[0], 2 * given.tokens), *(Wanted(one, given.tokens, 0) for one in others)]
    found = beside(arm, [case], given.seconds)
    yield record(arm, found, "edit beside seven of code", 1 + OTHERS) | waits(*arm.steps(case))


def waits(on: list[float], off: list[float]) -> dict[str, Any]:
    """Computes what a further token costs the other streams of the step: each of them gets one a step."""
    if not on:
        return {"others_tpot_p95_ratio": 1.0}  # nothing was drafted: it would cost too much
    p95 = [quantile(each, 0.95) for each in (on, off)]
    return {
        "others_tpot_p95_us": [round(each * 1e6, 1) for each in p95],
        "others_tpot_p95_ratio": round(p95[0] / p95[1], 3),
    }


def line_of(one: dict[str, Any]) -> str:
    extra = {
        name: one[name] for name in ("predicted_ratio", "others_tpot_p95_us", "others_tpot_p95_ratio") if name in one
    }
    return (
        f"{one['proposer']:>14} k {one['k'] or '-'} {one['prompts']:>26} x{one['streams']} "
        f"{one['tokens_per_second']:9.1f} beside {one['baseline_tokens_per_second']:9.1f} tok/s = {one['ratio']:5.3f}"
        f"  accepted {one['acceptance']:5.3f} drafted a token {one['drafted_per_token']:5.3f}"
        f"  {'same' if one['same'] else 'DIFFERENT'} {one['turns']} turns {extra or ''}"
    )


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tokenizer = Tokenizer.from_file(str(Path(given.model, "tokenizer.json")))
    for name in given.proposers:
        arm = made_of(given, name)
        if "texts" in given.parts:
            yield from of_texts(arm, given, tokenizer)
        if "streams" in given.parts and name != "both":
            yield from of_streams(arm, given, tokenizer)
        arm.runner.close()
        if "depths" in given.parts:
            forced = made_of(given, name, forced=True)
            yield from of_depths(given, forced, None if arm.rounds is None else arm.rounds.costs, tokenizer)
            forced.runner.close()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="models/demo", help="a folder with a tokenizer that the texts suit")
    parser.add_argument("--draft-model", default="models/demo-draft")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--proposers", nargs="+", choices=PROPOSERS, default=list(PROPOSERS))
    parser.add_argument("--sets", nargs="+", choices=texts.SETS, default=list(texts.SETS))
    parser.add_argument("--prompts", type=int, default=4, help="of a set, at most")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a line of the table; once through at least")
    parser.add_argument("--append", type=Path, help="a JSON list that gets a record a line")
    parser.add_argument("--revision", help="the commit, where git is not")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(argv)
    about = {"device": device(), "revision": given.revision or revision(), "model": Path(given.model).name}
    records = []
    for one in measured(given):
        print(line_of(one), flush=True)
        records.append(about | one)
        if given.append is not None:
            append(given.append, records[-1:], NAMES)
    print(json.dumps(records))
    return 0


Table = Callable[[int], float]  # seconds of a step of one sequence, by the tokens drafted in it


def of_depths(
    given: argparse.Namespace, arm: Arm, rounds: Costs | None, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Measures drafts of always k tokens, and the cost table's prediction for these steps, beside those without drafts
    in the same run. `rounds`: costs of a GPU's."""
    prompts = texts.prompts("edit", tokenizer, 2) + texts.prompts("code", tokenizer, 2)
    for k in range(1, 1 + MOST_DRAFTED):
        tables = [table(arm, rounds)]
        found = beside(arm, [[Wanted(one, given.tokens, k)] for one in prompts], given.seconds)
        before = found.turns * sum(beginning(arm, one, k) for one in prompts)
        tables.append(table(arm, rounds))
        predicted = [plain(found, rounds, each) / needed(found, k, before, each) for each in tables]
        yield record(arm, found, "edit and code", 1, k) | {"predicted_ratio": round(statistics.mean(predicted), 3)}


def beginning(arm: Arm, prompt: tuple[int, ...], k: int) -> float:
    """Measures seconds from a prompt's token to the next, by a verifying step: the host's part before the first one
    among them, and a draft model's prefill. A GPU's are so short that it takes many."""
    times = 5 if arm.rounds is None else 25
    return statistics.median(arm.run(True, [Wanted(prompt, 2, k)]).seconds for _ in range(times))


def table(arm: Arm, rounds: Costs | None) -> Table:
    """Returns a GPU's table as it was made at the start. A CPU's as a start would make it now, since machines are slow
    at times."""
    if rounds is not None:
        return lambda drafted: rounds.seconds(1 + drafted)
    assert isinstance(arm.speculation, Speculation)
    costs, draft = arm.speculation.measured(), None if arm.name == "prompt_lookup" else arm.parts.draft
    drafts = [0.0 if draft is None else draft.seconds(1, depth) for depth in range(1 + MOST_DRAFTED)]
    return lambda drafted: costs.seconds(1 + drafted) + drafts[drafted]


def needed(found: Beside, k: int, beginnings: float, seconds: Table) -> float:
    """Predicts the steps with drafts by a table. What precedes first verifying steps is in no table: `beginnings` took
    this long in all, those steps included."""
    # A round has rooms for more tokens than k, where k is no size of a round.
    steps = sum(count * seconds(min(drafted, k)) for one in found.on for count, drafted in one.steps)
    return steps + beginnings - len(found.on) * seconds(k)


def plain(found: Beside, rounds: Costs | None, seconds: Table) -> float:
    """Returns the steps without drafts: as measured, where they are another executor's, which no table knows."""
    if rounds is not None:
        return sum(one.seconds for one in found.off)
    return sum(count * seconds(drafted) for one in found.off for count, drafted in one.steps)


FREE = Costs({1: 1.0, 512: 1.0})  # so that drafts are always as long as a request allows
WARM = 20  # steps


@dataclass(frozen=True, slots=True)
class Wanted:
    prompt: tuple[int, ...]
    tokens: int
    drafts: int | None = None  # the most a round


@dataclass(frozen=True, slots=True)
class SpeculationRun:
    """Figures of concurrent streams, measured from when all have begun until the first ends."""

    tokens: int
    seconds: float
    steps: tuple[tuple[int, int], ...]  # of one stream: how many, and tokens drafted in each
    proposed: int
    accepted: int
    ids: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Arm:
    """Holds a runner with its proposers, whose speculation is switched."""

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
        """Returns the executor, where it launches verifying steps ahead."""
        return self.speculation if isinstance(self.speculation, CapturedSpeculation) else None

    def _begin(self, asks: Sequence[Wanted]) -> Scheduler:
        scheduler = planner(self.runner, PagePool(self.runner.info.total_pages), 2048)
        for key, ask in enumerate(asks):
            made = asked(key, ask.prompt, ask.tokens)
            made.request = structs.replace(made.request, draft_limit=ask.drafts)
            scheduler.admit(made)
        return scheduler

    def steps(self, asks: Sequence[Wanted]) -> tuple[list[float], list[float]]:
        """Measures seconds of the steps that all streams are in, with a draft and with speculation off, in turns."""
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

    def run(self, on: bool, asks: Sequence[Wanted]) -> SpeculationRun:
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
        return SpeculationRun(
            tokens,
            ended - began,
            tuple(steps),
            proposed,
            accepted,
            tuple(tuple(each) for each in ids.values()),
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """Tokens a second with drafts and without; over runs in turns."""

    on: tuple[SpeculationRun, ...]
    off: tuple[SpeculationRun, ...]
    turns: int

    @property
    def rates(self) -> tuple[float, float]:
        """Returns all tokens over the median turn's seconds."""
        return self._rate(self.on), self._rate(self.off)

    def _rate(self, runs: tuple[SpeculationRun, ...]) -> float:
        each = len(runs) // self.turns
        of_turns = [runs[at : at + each] for at in range(0, len(runs), each)]
        return statistics.median(
            sum(one.tokens for one in turn) / sum(one.seconds for one in turn) for turn in of_turns
        )

    @property
    def acceptance(self) -> float:
        return sum(one.accepted for one in self.on) / max(1, sum(one.proposed for one in self.on))

    @property
    def same(self) -> bool:
        return all(on.ids == off.ids for on, off in zip(self.on, self.off, strict=True))


def beside(arm: Arm, cases: Sequence[Sequence[Wanted]], seconds: float) -> Beside:
    """Runs each case with and without, in turns, while there is time; at least once."""
    for case in cases:  # sizes that were not met yet are set up
        for on in (True, False):
            arm.run(on, case)
    began, turns = time.monotonic(), 0
    runs: dict[bool, list[SpeculationRun]] = {True: [], False: []}
    while not turns or time.monotonic() - began < seconds * turns / (turns + 1):
        for at, case in enumerate(cases):
            for on in (True, False) if (at + turns) % 2 else (False, True):
                runs[on].append(arm.run(on, case))
        turns += 1
    return Beside(tuple(runs[True]), tuple(runs[False]), turns)


def made_of(given: argparse.Namespace, name: str, forced: bool = False) -> Arm:
    """Opens the model with this proposer. `forced`: drafts are always as long as a request allows."""
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
    """Makes a record of bench/results. `k` null: as the engine chooses."""
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
    """Proposes drafts, each token of which is right with probability `acceptance`."""

    name = "forced"

    def __init__(
        self, answers: Mapping[tuple[int, ...], Items[int]], acceptance: float, depth: int = MOST_DRAFTED
    ) -> None:
        """`answers` by prompt. Drafts have `depth` tokens, if as many are requested."""
        self._answers = answers
        self._acceptance = acceptance
        self._depth = depth
        self._chance = random.Random(1)

    def measure(self, target: Callable[[], None]) -> None:
        """Measures nothing: this proposer costs nothing."""

    def seconds(self, rows: int, depth: int) -> float:
        """Returns no time at all."""
        return 0.0

    def reach(self, sequence: SequenceState) -> int:
        return min(self._depth, len(self._rest(sequence)))

    def propose(self, requests: Items[DraftRequest]) -> list[Draft]:
        return [tuple(map(self._spoiled, self._rest(one.sequence)[: one.most])) for one in requests]

    def _rest(self, sequence: SequenceState) -> Items[int]:
        known = self._answers.get(tuple(sequence.token_ids[: sequence.prompt_length]), ())
        return known[sequence.output_length : sequence.output_length + self._depth]

    def _spoiled(self, token_id: int) -> int:
        return token_id if self._chance.random() < self._acceptance else token_id ^ 1


if __name__ == "__main__":
    sys.exit(main())
