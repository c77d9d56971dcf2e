"""Who asks what and when."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.replay.traces import read_blocks
from bench.serving.jobs import Wish
from bench.workloads import workload


@dataclass(frozen=True, slots=True)
class Source:
    """Requests without times: all of one size, or those of a file over and over."""

    prompt: int
    tokens: int
    read: tuple[Wish, ...] = ()

    def take(self, count: int) -> list[Wish]:
        """So many, numbered."""
        if not self.read:
            return [Wish(number, self.prompt, self.tokens) for number in range(count)]
        return [msgspec.structs.replace(self.read[at % len(self.read)], number=at) for at in range(count)]


def read_prompts(path: Path, tokens: int) -> tuple[Wish, ...]:
    """A text a line, or an object with `text` and, if it wants, `max_tokens`. Raises ValueError."""
    found: list[Wish] = []
    for line in path.read_text().splitlines():
        if line.strip():
            said: Any = json.loads(line) if line.lstrip().startswith("{") else {"text": line}
            if not isinstance(said.get("text"), str):
                raise ValueError(f"{path}: a prompt has no text")
            found.append(Wish(len(found), 0, int(said.get("max_tokens", tokens)), text=said["text"]))
    if not found:
        raise ValueError(f"{path}: no prompts")
    return tuple(found)


def of_workload(name: str, prompt: int, tokens: int) -> list[Wish]:
    """All at once."""
    return [Wish(at, *sizes) for at, sizes in enumerate(workload(name, prompt, tokens))]


def poisson(rate: float, seconds: float, source: Source, seed: int) -> list[Wish]:
    """Arrivals that do not wait for each other, so many a second on average."""
    generator, at, times = random.Random(seed), 0.0, list[float]()
    while (at := at + generator.expovariate(rate)) < seconds:
        times.append(at)
    return [msgspec.structs.replace(wish, at=at) for wish, at in zip(source.take(len(times)), times, strict=True)]


def of_trace(path: Path, speed: float, limit: int | None, max_context: int) -> tuple[list[Wish], int]:
    """A block trace at its own times, so many times as fast, and how many of its requests are too long for the model.
    Raises ValueError."""
    requests = read_blocks(path)[:limit]
    fit = [one for one in requests if one.answer and one.tokens + one.answer <= max_context]
    if not fit:
        raise ValueError(f"{path}: no request fits into {max_context} tokens")
    wishes = [Wish(at, one.tokens, one.answer, one.at / speed, blocks=one.blocks) for at, one in enumerate(fit)]
    return wishes, len(requests) - len(fit)


def rates(text: str) -> Sequence[float]:
    """`1,2.5,4`, all above zero. Raises ValueError."""
    found = [float(part) for part in text.split(",")]
    if min(found) <= 0:
        raise ValueError
    return found


def counts(text: str) -> Sequence[int]:
    """`1,2,4`, all above zero. Raises ValueError."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found
