"""Records steps for `engine.worker.replay`: the plans that a runner receives and the results that it returns.

    python -m bench.recorded_plans --model models/demo --device cpu --out plans.msgpack
    python -m engine.worker.replay plans.msgpack --model models/demo --device cpu

Requests with every kind of sampling arrive one after another and end at different times. The steps therefore have few
and many rows, chunks of prompts beside rows that decode, log-probabilities, and rows that are preempted and lose their
pages. Two trees that return the same token ids can replay each other's recordings.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import get_args

from msgspec.structs import replace

from bench.driven import asked
from engine.api import GREEDY
from engine.errors import EngineFailed
from engine.kv.page_pool import PagePool
from engine.scheduling.limits import Limits
from engine.scheduling.plan import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.settings import PAGE_SIZE, DecoderChoice, Device, EngineSettings, LoadFormat
from engine.worker.build import build
from engine.worker.recording import MOST_STEPS, StepRecorder

KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1),
    GREEDY,
    replace(GREEDY, temperature=0.7, top_k=40, top_p=0.9, seed=2),
    replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3),
    replace(GREEDY, logit_bias=((7, 2.0), (9, -50.0))),
)
_PROMPTS = (1, 15, 16, 17, 40, 200)  # tokens
_CONTEXT = 512


def arrivals(vocabulary: int, greedy: bool) -> Iterator[tuple[int, Sequence]]:
    """Yields the step of each arrival and its sequence: at first one sequence runs, then many, at the end one again."""
    chance = random.Random(7)
    for key in range(40):
        step = 0 if key == 0 else 20 + 2 * key if key < 4 else 60 + key if key < 30 else 150 + 4 * (key - 30)
        prompt = tuple(chance.randrange(3, vocabulary) for _ in range(_PROMPTS[key % len(_PROMPTS)]))
        one = asked(key, prompt, 20 + 5 * (key % 17), GREEDY if greedy else KINDS[key % len(KINDS)])
        if key % 11 == 5:
            one.request = replace(one.request, logprobs=2)
        if key % 13 == 6:
            one.request = replace(one.request, prompt_logprobs=1)
        yield step, one


def record(runner: Runner, recorder: StepRecorder, steps: int, *, greedy: bool) -> Path | None:
    """Runs up to `steps` steps and returns the path of their recording."""
    info = runner.info
    pages = min(info.total_pages, 160)  # few enough that some sequences are preempted
    limits = Limits(
        max_sequences=info.max_sequences,
        max_batch_tokens=64,
        max_context=min(info.max_context, _CONTEXT),
        lookahead_tokens=info.lookahead_tokens,
        max_tokens_per_row=info.max_tokens_per_row,
    )
    scheduler, waiting = Scheduler(limits, PagePool(pages)), list(arrivals(info.vocab_size, greedy))
    for number in range(steps):
        while waiting and waiting[0][0] <= number:
            scheduler.admit(waiting.pop(0)[1])
        plan = scheduler.plan(0.0)
        if plan is None:
            continue
        result = runner.run(plan)
        scheduler.commit(plan, result, 0.0)
        recorder.add(plan, result)
    return recorder.write(EngineFailed("recorded to be done again"))


def main(argv: Items[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", choices=get_args(LoadFormat), default="auto")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--decoder", choices=get_args(DecoderChoice), default="auto")
    parser.add_argument("--steps", type=int, default=MOST_STEPS)
    parser.add_argument("--greedy", action="store_true", help="every request, whatever else it asks for")
    parser.add_argument("--out", type=Path, required=True, help="the file")
    given = parser.parse_args(argv)
    settings = EngineSettings(
        model=given.model,
        load_format=given.load_format,
        device=given.device,
        decoder=given.decoder,
        max_sequences=24,
        max_context=_CONTEXT,
        threads=1,
    )
    runner = build(settings, lambda stage, done, total: None)
    recorder = StepRecorder(settings, runner.info, runner.pages.layout.token_bytes * PAGE_SIZE, given.out.parent)
    path = record(runner, recorder, given.steps, greedy=given.greedy)
    runner.close()
    if path is None:
        return 1
    path.rename(given.out)
    print(f"{given.steps} steps at most in {given.out}, {given.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
