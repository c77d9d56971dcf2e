"""What speculation brings: tokens a second with and without, in turns, in one process, by proposer and prompts.

    python -m bench.speculation --model models/demo --draft-model models/demo-draft

Three parts. `texts`: sets of prompts of real text, one stream, drafts as long as the engine finds that
they pay. `depths`: drafts of k tokens always, beside what acceptance and the cost table foretell. `streams`: several
at once, and one that copies beside seven that ask for no drafts. Greedy. On one thread of a CPU the clock is
that thread's own, which others on the machine do not disturb. Answers are compared, id for id.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from tokenizers import Tokenizer

from bench import workloads as texts
from bench.drafts import Arm, Beside, Wanted, beside, made_of, record
from bench.pace import quantile
from bench.result import device, revision
from bench.workloads import append
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.executor import Speculation
from engine.execution.speculation.proposer import MOST_DRAFTED
from engine.settings import Device

NAMES = ("device", "model", "proposer", "k", "prompts", "streams", "revision")  # of a record
PARTS = ("texts", "depths", "streams")
PROPOSERS = ("prompt_lookup", "draft_model", "both")
OTHERS = 7


def of_texts(arm: Arm, given: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """A record a set of prompts."""
    for name in given.sets:
        cases = [[Wanted(one, given.tokens)] for one in texts.prompts(name, tokenizer, given.prompts)]
        yield record(arm, beside(arm, cases, given.seconds), name, 1)


def of_streams(arm: Arm, given: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Two and four that copy, that write code and that chat; then one beside seven that ask for no drafts."""
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
    """What a token more costs those who share the step: each of them gets one a step."""
    if not on:
        return {"others_tpot_p95_ratio": 1.0}  # nothing was drafted: it would cost too much
    p95 = [quantile(each, 0.95) for each in (on, off)]
    return {
        "others_tpot_p95_us": [round(each * 1e6, 1) for each in p95],
        "others_tpot_p95_ratio": round(p95[0] / p95[1], 3),
    }


def told(one: dict[str, Any]) -> str:
    """A line of the table."""
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
    """All that was asked for."""
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
    """What was asked for."""
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
    """Measures and prints."""
    given = arguments(argv)
    about = {"device": device(), "revision": given.revision or revision(), "model": Path(given.model).name}
    records = []
    for one in measured(given):
        print(told(one), flush=True)
        records.append(about | one)
        if given.append is not None:
            append(given.append, records[-1:], NAMES)
    print(json.dumps(records))
    return 0


Table = Callable[[int], float]  # seconds of a step of one sequence, by the tokens drafted in it


def of_depths(
    given: argparse.Namespace, arm: Arm, rounds: Costs | None, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Drafts of k tokens always, and what the cost table foretells of the steps that came of it, beside those without
    drafts in the same run. `rounds`: what those of a GPU cost."""
    prompts = texts.prompts("edit", tokenizer, 2) + texts.prompts("code", tokenizer, 2)
    for k in range(1, 1 + MOST_DRAFTED):
        tables = [table(arm, rounds)]
        found = beside(arm, [[Wanted(one, given.tokens, k)] for one in prompts], given.seconds)
        before = found.turns * sum(beginning(arm, one, k) for one in prompts)
        tables.append(table(arm, rounds))
        foretold = [plain(found, rounds, each) / needed(found, k, before, each) for each in tables]
        yield record(arm, found, "edit and code", 1, k) | {"predicted_ratio": round(statistics.mean(foretold), 3)}


def beginning(arm: Arm, prompt: tuple[int, ...], k: int) -> float:
    """Seconds from a prompt's token to the next, by a round: the host's part before the first round among them, and a
    draft model's catching up. A GPU's are so short that it takes many."""
    times = 5 if arm.rounds is None else 25
    return statistics.median(arm.run(True, [Wanted(prompt, 2, k)]).seconds for _ in range(times))


def table(arm: Arm, rounds: Costs | None) -> Table:
    """A GPU's as it was made at the start. A CPU's as a start would make it now, since machines are slow at times."""
    if rounds is not None:
        return lambda drafted: rounds.seconds(1 + drafted)
    assert isinstance(arm.speculation, Speculation)
    costs, draft = arm.speculation.measured(), None if arm.name == "prompt_lookup" else arm.parts.draft
    drafts = [0.0 if draft is None else draft.seconds(1, depth) for depth in range(1 + MOST_DRAFTED)]
    return lambda drafted: costs.seconds(1 + drafted) + drafts[drafted]


def needed(found: Beside, k: int, beginnings: float, seconds: Table) -> float:
    """What a table foretells of the steps with drafts. What comes before first rounds is in no table: `beginnings` took
    so long in all, those rounds included."""
    # A round has rooms for more tokens than k, where k is no size of a round.
    steps = sum(count * seconds(min(drafted, k)) for one in found.on for count, drafted in one.steps)
    return steps + beginnings - len(found.on) * seconds(k)


def plain(found: Beside, rounds: Costs | None, seconds: Table) -> float:
    """Of those without: as they were, where they are another executor's, which no table knows."""
    if rounds is not None:
        return sum(one.seconds for one in found.off)
    return sum(count * seconds(drafted) for one in found.off for count, drafted in one.steps)


if __name__ == "__main__":
    sys.exit(main())
