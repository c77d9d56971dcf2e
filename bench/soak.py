"""Decodes for a given time, alone, together, with sampling and with callers that leave, and compares every answer with
the first one to the same question: an answer that changes is an error, and so is memory that grows. Prompts are short
by default, so that each is fed whole, whatever runs beside it. With `--longest` above that they are cut into chunks by
the other requests, and bf16 rounds a chunk of another length otherwise: then a greedy answer may diverge from the first
one, but only where float32 finds two tokens nearly as good as each other.

    python -m bench.soak --model models/demo --seconds 600

Prints a line a minute and ends in one JSON line. Exit code 1 where something drifted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from bench.pace import CHUNK, asked, planner
from bench.result import device, revision
from engine.api import GREEDY, SamplingParams
from engine.execution.runner import ModelRunner
from engine.ipc.events import Event
from engine.kv.page_pool import PagePool
from engine.settings import EngineSettings
from engine.worker.build import build
from quant.decoder import Decoder

QUESTIONS = 16
TOGETHER = 8
LEAVING = 0.25  # of callers, where some leave
WHOLE = CHUNK // TOGETHER  # tokens of a prompt that is never cut
NEAR = 0.02  # of the largest logit: how far apart two tokens may be where answers part
SAMPLED = replace(GREEDY, temperature=0.8, top_k=50, top_p=0.95, repetition_penalty=1.1)


@dataclass(frozen=True, slots=True)
class SoakQuestion:
    """A prompt and how to continue it; always the same."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    tokens: int


@dataclass(frozen=True, slots=True)
class Divergence:
    text: tuple[int, ...]
    one: int
    other: int


@dataclass(slots=True)
class SoakRecord:
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the first to each question
    whole: int = 0  # whole answers
    left: int = 0
    tokens: int = 0
    changed: Counter[int] = field(default_factory=Counter)  # answers other than the first, by question
    forks: set[Divergence] = field(default_factory=set)  # of greedy answers

    def take(self, question: SoakQuestion, ids: Sequence[int]) -> None:
        self.whole += 1
        first = self.answers.setdefault(question.number, tuple(ids))
        if first == tuple(ids):
            return
        self.changed[question.number] += 1
        if question.sampling.temperature == 0.0:
            at = next(at for at, (one, other) in enumerate(zip(first, ids, strict=True)) if one != other)
            self.forks.add(Divergence((*question.prompt, *first[:at]), first[at], ids[at]))


def questions(vocabulary: int, tokens: int, longest: int) -> list[SoakQuestion]:
    """Makes half greedy questions, and half by every kind of sampling; prompts of 3 to `longest` tokens."""
    chance, found = random.Random(5), []
    for number in range(QUESTIONS):
        sampling = replace(GREEDY if number % 2 == 0 else SAMPLED, seed=number)
        prompt = tuple(chance.randrange(3, vocabulary) for _ in range(chance.randrange(3, longest)))
        found.append(SoakQuestion(number, prompt, sampling, tokens))
    return found


class SoakEngine:
    """Plans, runs and commits, without the socket and without shared prefixes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._pool = PagePool(runner.info.total_pages)
        self._scheduler = planner(runner, self._pool)
        self._key = 0

    def ask(self, some: Sequence[SoakQuestion], leaving: dict[int, int], record: SoakRecord) -> None:
        """Asks all at once; those in `leaving` (index → tokens) leave before the end."""
        first, ids = self._key, [list[int]() for _ in some]
        for question in some:
            self._key += 1
            self._scheduler.admit(asked(self._key, question.prompt, question.tokens, question.sampling))
        while (plan := self._scheduler.plan(0.0)) is not None:
            for event in self._scheduler.commit(plan, self._runner.run(plan), 0.0):
                self._heard(event, event.key - first - 1, some, ids, leaving, record)
        if self._pool.used:
            raise RuntimeError(f"{self._pool.used} pages were not given back")

    def _heard(
        self,
        event: Event,
        index: int,
        some: Sequence[SoakQuestion],
        ids: list[list[int]],
        leaving: dict[int, int],
        record: SoakRecord,
    ) -> None:
        if event.failure is not None:
            raise RuntimeError(f"an answer failed: {event.failure}")
        ids[index] += event.token_ids
        record.tokens += len(event.token_ids)
        if event.finish is not None:
            record.take(some[index], ids[index])
        elif len(ids[index]) >= leaving.get(index, sys.maxsize):
            record.left += 1
            self._scheduler.cancel(event.key)


def rounds(known: list[SoakQuestion]) -> Iterator[tuple[list[SoakQuestion], dict[int, int]]]:
    """Yields forever: one alone, eight together, eight of which some leave."""
    chance = random.Random(6)
    while True:
        yield [chance.choice(known)], {}
        yield chance.sample(known, TOGETHER), {}
        leaving = {at: chance.randrange(1, known[0].tokens) for at in range(TOGETHER) if chance.random() < LEAVING}
        yield chance.sample(known, TOGETHER), leaving


def soak(runner: ModelRunner, given: argparse.Namespace) -> dict[str, Any]:
    engine, record = SoakEngine(runner), SoakRecord()
    known = questions(runner.info.vocab_size, given.tokens, min(given.longest, runner.info.max_context - given.tokens))
    for question in known:
        engine.ask([question], {}, record)
    going = rounds(known)
    for some, leaving in itertools.islice(going, 3):  # one of each kind: libraries take what they need
        engine.ask(some, leaving, record)
    began, held, marks = time.monotonic(), memory(), [(time.monotonic(), record.tokens)]
    for some, leaving in going:
        engine.ask(some, leaving, record)
        now = time.monotonic()
        if now - marks[-1][0] >= given.interval or now - began >= given.seconds:
            rate = (record.tokens - marks[-1][1]) / (now - marks[-1][0])
            print(
                f"{now - began:6.0f} s  {record.whole} answers  {rate:9.1f} tokens/s  {record.changed.total()} changed",
                flush=True,
            )
            marks.append((now, record.tokens))
        if now - began >= given.seconds:
            break
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks)]
    return {
        "seconds": round(time.monotonic() - began, 1),
        "answers": record.whole,
        "left": record.left,
        "tokens": record.tokens,
        "changed": record.changed.total(),
        "changed_by_prompt": {
            len(one.prompt): record.changed[one.number] for one in known if record.changed[one.number]
        },
        "forks": len(record.forks),
        "widest_fork": widest(record.forks, given.model),
        "grown_bytes": memory() - held,
        "tokens_per_second": {"median": round(statistics.median(rates), 1), "last": round(rates[-1], 1)},
    }


def widest(forks: Iterable[Divergence], model: str) -> float:
    """Returns the largest distance between the two tokens of a fork, of the largest logit, in float32."""
    oracle, found = Decoder.open(Path(model)), 0.0
    for fork in forks:
        logits = oracle.logits(oracle.hidden(torch.tensor([fork.text]))[:, -1])[0]
        found = max(found, float((logits[fork.one] - logits[fork.other]).abs() / logits.abs().max()))
    return round(found, 5)


def memory() -> int:
    """Returns the bytes that the device holds for us."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between two lines")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--longest", type=int, default=WHOLE, help="prompt tokens")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    runner = build(EngineSettings(model=given.model, max_sequences=TOGETHER), lambda *_: None)
    about = {"bench": "soak", "revision": given.revision or revision(), "device": device(), "model": given.model}
    found = soak(runner, given)
    print(json.dumps(about | {"decoder": runner.info.decoder, "weights": runner.info.weight_format} | found))
    wrong = found["changed"] if given.longest <= WHOLE else found["widest_fork"] > NEAR
    return 1 if wrong or found["grown_bytes"] > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
