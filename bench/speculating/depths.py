"""Drafts of k tokens always, beside what acceptance and the cost table foretell."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from bench import texts
from bench.speculating.arms import Arm, Beside, Wanted, beside, record
from engine.execution.speculation.costs import Costs
from engine.execution.speculation.executor import Speculation
from engine.execution.speculation.proposer import MOST_DRAFTED

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
