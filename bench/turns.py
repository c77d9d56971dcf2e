"""Runs rounds of the engine's own loop, one a line of stdin: what `whippet bench compare` interleaves.

    python bench/turns.py --model models/demo

Runs over the engine of whatever tree is first in PYTHONPATH, an older commit's too, so it imports nothing of `bench`
and of the engine only what has long been there.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_PROMPT = 32  # tokens
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Figures of one round. A step's time is the first quartile of its steps: other load on the machine slows some
    steps only, while a change of the code slows all."""

    step_us: float
    tokens_per_second: float
    first_ms: float


def round_of(
    scheduler: Any, runner: Any, admit: Callable[[], None], tokens: int, rows: int, clock: Clock
) -> RoundFigures:
    """Runs what `admit` hands over, to its end. `clock` in seconds."""
    began = clock()
    admit()
    steps: list[float] = []
    first, count = 0.0, 0
    while (plan := scheduler.plan(0.0)) is not None:
        before = clock()
        events = scheduler.commit(plan, runner.run(plan), 0.0)
        after = clock()
        made = sum(len(event.token_ids) for event in events)
        count += made
        if made and not first:
            first = after - began
        if len(plan.rows) == rows and all(row.count == 1 for row in plan.rows) and made:
            steps.append((after - before) * rows / made)
    if count != rows * tokens:
        raise RuntimeError(f"{count} of {rows * tokens} tokens came")
    whole = clock() - began
    quartile = statistics.quantiles(steps, n=4)[0] if len(steps) > 1 else steps[0]
    return RoundFigures(round(quartile * 1e6, 3), round(count / whole, 2), round(first * 1e3, 3))


class LocalModel:
    def __init__(
        self, model: str, rows: int, tokens: int, load_format: str = "auto", threads: int | None = None
    ) -> None:
        from engine.settings import PAGE_SIZE, EngineSettings
        from engine.worker.build import build

        context = -(-(_PROMPT + tokens) // PAGE_SIZE) * PAGE_SIZE + 4 * PAGE_SIZE
        given: Any = {"load_format": load_format, "threads": threads}
        settings = EngineSettings(model=model, max_sequences=rows, max_context=context, **given)
        self.runner: Any = build(settings, lambda stage, done, total: None)
        self._rows, self._tokens, self._keys = rows, tokens, 0
        gc.collect()
        gc.freeze()  # as an engine process does

    def round(self, clock: Clock = time.perf_counter) -> RoundFigures:
        scheduler = self.scheduler()
        return round_of(scheduler, self.runner, lambda: self.admit(scheduler), self._tokens, self._rows, clock)

    def scheduler(self) -> Any:
        from engine.kv.page_pool import PagePool
        from engine.scheduling.limits import Limits
        from engine.scheduling.scheduler import Scheduler

        info = self.runner.info
        limits = Limits(
            max_sequences=info.max_sequences,
            max_batch_tokens=512,
            max_context=info.max_context,
            lookahead_tokens=info.lookahead_tokens,
            max_tokens_per_row=info.max_tokens_per_row,
        )
        return Scheduler(limits, PagePool(info.total_pages))

    def admit(self, scheduler: Any) -> None:
        from engine.api import GREEDY, GenerationRequest, Stopping
        from engine.scheduling.sequence import Sequence as EngineSequence

        for row in range(self._rows):
            self._keys += 1
            vocabulary = self.runner.info.vocab_size - 3
            prompt = [3 + (row * 7919 + place * 104_729) % vocabulary for place in range(_PROMPT)]
            request = GenerationRequest(
                request_id=str(self._keys),
                token_ids=tuple(prompt),
                sampling=GREEDY,
                stopping=Stopping(max_tokens=self._tokens),
                arrived_at=0.0,
            )
            scheduler.admit(EngineSequence(request, prompt, key=self._keys))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints `ready`, then answers every line with a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(argv)
    loop = LocalModel(given.model, given.rows, given.tokens, given.load_format, given.threads)
    loop.round()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(asdict(loop.round())), flush=True)
    loop.runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
