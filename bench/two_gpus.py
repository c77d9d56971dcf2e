"""Measures a model that is split over GPUs beside the same model on one, in the engine's own loop.

    python -m bench.two_gpus --model bench/models/mistral-7b-awq --gpus 2 --append bench/results/two-gpus.json

Workloads: `user128`, one stream of 128 tokens in and 512 out; `n64`, 64 of 128 in and out at once; `first4096`, a
prompt of 4,096. Random ids, greedy, dummy weights. `exchange_share` is the share of a stream's step in which its GPU
waits for the others: what the step takes beyond the same launches without exchanges, on one rank alone. It can come out
below zero, since launches without exchanges start their successors earlier, which is not always faster.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.decode import prompts
from bench.offline import run
from bench.pace import PacedAnswer, asked, planner
from bench.result import Result, Samples, device, finish, revision
from bench.workloads import append
from engine.api import GREEDY
from engine.execution.runner import ModelRunner
from engine.execution.step_state import Parts
from engine.kernels.capture import Graphs, device_seconds
from engine.kernels.launch import launcher_of
from engine.kernels.ring import RING
from engine.kv.page_pool import PagePool
from engine.model.layers import few_rows
from engine.settings import PAGE_SIZE, EngineSettings
from engine.worker.build import make_runner, prepare

WORKLOADS = ["user128", "n64", "first4096"]
NAMES = ("device", "model", "gpus", "workload")
_USER, _TOKENS = 128, 512  # in and out of one stream
_LONG = 4096
_STEPS, _TIMES = 4, 12  # of a graph that is timed, and how often


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    parts: Parts
    runner: ModelRunner


def answer(runner: ModelRunner, key: int, prompt: Sequence[int], tokens: int) -> PacedAnswer:
    scheduler = planner(runner, PagePool(runner.info.total_pages), 2 * _LONG)
    found = PacedAnswer(time.monotonic())
    scheduler.admit(asked(key, tuple(prompt), tokens, GREEDY))
    while (plan := scheduler.plan(0.0)) is not None:
        count = sum(len(event.token_ids) for event in scheduler.commit(plan, runner.run(plan), 0.0))
        if count:
            found.arrivals.append((time.monotonic(), count))
    return found


def own_step_seconds(parts: Parts) -> float:
    """Returns the seconds of a step of one row on this rank, without exchanges."""
    weights = replace(parts.step_weights[0], channels=None)
    target = weights.table.device
    pages = -(-(_USER + _TOKENS) // PAGE_SIZE)
    buffers = few_rows.allocate(weights, 1, pages, RING)
    buffers.places.pages.copy_(torch.arange(pages, dtype=torch.int32).unsqueeze(0))
    gpu = parts.kernels.gpu
    plan = few_rows.ChainPlan(
        gpu.multiprocessors, dependent=gpu.overlap, longest=512, two_pass=weights.coarse is not None
    )
    chain, launcher = few_rows.prepare_step(parts.kernels, weights, buffers, plan), launcher_of(target)

    def enqueue() -> None:
        for _ in range(_STEPS):
            launcher.enqueue(chain)

    graph = Graphs(target).record(enqueue)
    buffers.places.position.fill_(_USER + _TOKENS // 2 - _STEPS * _TIMES)  # on average where a stream is
    graph.replay()
    found = []
    for _ in range(_TIMES):
        graph.replay()  # while it runs, the host gets ahead
        found.append(device_seconds(graph.replay))
    return statistics.median(found) / _STEPS


def measured(arm: MeasuredEngine, workload: str, rounds: int) -> dict[str, Any]:
    if workload == "user128":
        return _stream(arm, rounds)
    info = arm.runner.info
    if workload == "n64":
        many = [run(arm.runner, [(_USER, _USER)] * 64, info.max_batch_tokens) for _ in range(rounds)]
        best = max(many, key=lambda one: one.output_tokens_per_second)
        return {"output_tokens_per_second": best.output_tokens_per_second, "ttft_ms": best.ttft_ms_p95}
    warm, *others = prompts(rounds + 1, _LONG, info.vocab_size)
    answer(arm.runner, 90, warm, 2)
    firsts = [answer(arm.runner, 91 + at, prompt, 2).first for at, prompt in enumerate(others)]
    return {"ttft_ms": round(statistics.median(firsts) * 1e3, 2)}


def _stream(arm: MeasuredEngine, rounds: int) -> dict[str, Any]:
    warm, *others = prompts(rounds + 1, _USER, arm.runner.info.vocab_size)
    answer(arm.runner, 1, warm, _TOKENS)
    answers = [answer(arm.runner, 2 + at, prompt, _TOKENS) for at, prompt in enumerate(others)]
    rate, first = (statistics.median(getattr(one, name) for one in answers) for name in ("rate", "first"))
    found = {"output_tokens_per_second": round(rate, 1), "ttft_ms": round(first * 1e3, 2)}
    if arm.parts.sums is not None and arm.runner.info.decoder == "graph":
        with torch.inference_mode():
            found["exchange_share"] = round(1 - own_step_seconds(arm.parts) * rate, 3)
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a folder with a config.json")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decoder", default="auto")
    parser.add_argument("--append", type=Path, help="a JSON list that gets a record a workload")
    parser.add_argument("--revision", help="the commit, where git is not")
    return parser.parse_args(argv)


def command(argv: Sequence[str] | None = None) -> Result:
    given = arguments(argv)
    settings = EngineSettings(
        model=given.model,
        device="cuda",
        load_format="dummy",
        decoder=given.decoder,
        max_sequences=64,
        max_context=_LONG + 8 * PAGE_SIZE,
        tensor_parallel=given.gpus,
        speculation=False,  # random ids: nothing that was drafted would be right
    )
    began = time.monotonic()
    prepared = prepare(settings, lambda stage, done, total: None)
    arm = MeasuredEngine(prepared.parts, make_runner(settings, prepared, lambda stage, done, total: None))
    gc.collect()
    gc.freeze()  # as an engine process does
    decoder, seconds = arm.runner.info.decoder, time.monotonic() - began
    print(f"{Path(given.model).name} on {given.gpus}: {decoder}, started in {seconds:.1f} s", flush=True)
    about = {
        "device": device(),
        "revision": given.revision or revision(),
        "model": Path(given.model).name,
        "gpus": given.gpus,
        "decoder": decoder,
    }
    records = []
    for workload in given.workloads:
        records.append({**about, "workload": workload, **measured(arm, workload, given.rounds)})
        print(records[-1], flush=True)
    if given.append is not None:
        append(given.append, records, NAMES)
    arm.runner.close()
    samples = {
        one["workload"]: Samples("ms", (one["ttft_ms"],))
        if "output_tokens_per_second" not in one
        else Samples("tokens/s", (one["output_tokens_per_second"],))
        for one in records
    }
    return Result("two_gpus", {**vars(given), "append": None}, {"loads": records}, samples, given.revision or "")


def main(argv: Sequence[str] | None = None) -> int:
    return finish(command(argv))


if __name__ == "__main__":
    sys.exit(main())
