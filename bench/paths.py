"""Measures one model by several decoders, or split over several GPUs beside one GPU, in the engine's own loop.

    python -m bench.paths decoders --models gemma3-1b smollm2-135m --decoders portable auto --append out.json
    python -m bench.paths gpus --model bench/models/mistral-7b-awq --gpus 2 --append bench/results/two-gpus.json

`decoders`: rows are greedy and begin with --prompt random ids each. A rate counts the tokens from when all rows have
their first to the end of the first row, so that prompts are left out; the median of --rounds. The share of the
bandwidth is what a step must read (weights once, keys and values of all rows) at the rate of a large read on this GPU.

`gpus`: `user128`, one stream of 128 tokens in and 512 out; `n64`, 64 of 128 in and out at once; `first4096`, a prompt
of 4,096. Random ids, greedy, dummy weights. `exchange_share` is the share of a stream's step in which its GPU waits for
the others: what the step takes beyond the same launches without exchanges, by the device's own clock, on one rank
alone. Launches start their successors as those that exchange do: after their wait.
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
from typing import Any, get_args

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
from engine.kernels.launch import Trigger, launcher_of
from engine.kernels.ring import RING
from engine.kv.page_pool import PagePool
from engine.model.layers import few_rows
from engine.settings import PAGE_SIZE, DecoderChoice, Dtype, EngineSettings
from engine.worker.build import make_runner, prepare

_MODELS = Path(__file__).parent / "models"
_READ = 1 << 30  # bytes of the large read
_PATHS = {"graph": "fused"}  # by decoder; others keep their names
_DECODER_NAMES = ("device", "model", "dtype", "path", "rows", "context")  # of a record


def bandwidth() -> float:
    """Bytes a second of one large read, the best of five."""
    block, total = torch.ones(_READ // 4, device="cuda"), torch.empty((), device="cuda")

    def read() -> None:
        torch.sum(block, dim=0, out=total)

    return _READ / min(device_seconds(read) for _ in range(5))


def rate(runner: ModelRunner, rows: int, prompt: int, tokens: int, turn: int) -> float:
    """Tokens a second of all rows together, while all of them decode."""
    info, generator = runner.info, torch.Generator().manual_seed(rows + turn)
    scheduler, begun, made, first = planner(runner, PagePool(info.total_pages), rows * prompt), 0.0, 0, set[int]()
    for key in range(rows):
        ids = torch.randint(3, info.vocab_size, (prompt,), generator=generator).tolist()
        scheduler.admit(asked(key, tuple(ids), tokens))
    while (plan := scheduler.plan(0.0)) is not None:
        events = scheduler.commit(plan, runner.run(plan), 0.0)
        now, came = time.monotonic(), sum(len(event.token_ids) for event in events)
        if begun:
            made += came
        first.update(event.key for event in events if event.token_ids)
        if not begun and len(first) == rows:
            begun = now
        if any(event.finish is not None for event in events):
            break
    seconds = time.monotonic() - begun
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(plan, runner.run(plan), 0.0)
    return made / seconds


def read_bytes(parts: Parts, rows: int, context: float) -> int:
    """Counts the bytes that a step of `rows` rows must read."""
    model, shape = parts.model, parts.pool.shape
    table = 0 if model.config.tied_head else model.weights.embedding.nbytes
    held = sum(min(context, window or context) for window in model.config.windows)
    each = 2 * shape.kv_heads * shape.head_dim * parts.pool.stored.itemsize
    return int(model.weights.nbytes - table + rows * each * held)


def measure(given: argparse.Namespace, name: str, decoder: DecoderChoice, reading: float) -> list[dict[str, object]]:
    settings = EngineSettings(
        model=str(_MODELS / name),
        load_format="dummy",
        device="cuda",
        decoder=decoder,
        dtype=given.dtype,
        max_sequences=max(given.rows),
        max_context=-(-(given.prompt + given.tokens) // 16) * 16 + 32,
    )
    prepared = prepare(settings, _silent)
    runner = make_runner(settings, prepared, _silent)
    info, found = runner.info, []
    for rows in given.rows:
        rates = [rate(runner, rows, given.prompt, given.tokens, turn) for turn in range(given.rounds + 1)][1:]
        middle = statistics.median(rates)
        read = read_bytes(prepared.parts, rows, given.prompt + given.tokens / 2)
        record: dict[str, object] = {
            "device": device(),
            "revision": given.revision or revision(),
            "model": name,
            "format": info.weight_format,
            "dtype": info.dtype,
            "path": _PATHS.get(info.decoder, info.decoder),
            "rows": rows,
            "context": given.prompt,
            "output_tokens_per_second": round(middle, 1),
            "share_of_bandwidth": round(read * middle / rows / reading, 3),
            "bandwidth_tb": round(reading / 1e12, 2),
        }
        print({key: record[key] for key in list(record)[2:]}, flush=True)
        found.append(record)
    runner.close()
    return found


def _silent(stage: str, done: int, total: int) -> None:
    pass


def decoders(argv: Sequence[str]) -> Result:
    parser = argparse.ArgumentParser(prog="bench.paths decoders")
    parser.add_argument("--models", nargs="+", required=True, help="folders of bench/models")
    parser.add_argument("--decoders", nargs="+", choices=get_args(DecoderChoice), default=["portable"])
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append", type=Path, help="a JSON list that the records are added to")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    reading, records = bandwidth(), list[dict[str, Any]]()
    for name in given.models:
        for decoder in given.decoders:
            records += measure(given, name, decoder, reading)
            gc.collect()
            torch.cuda.empty_cache()
            if given.append is not None:
                append(given.append, records, _DECODER_NAMES)
    settings = {name: value for name, value in vars(given).items() if name not in ("append", "revision")}
    return Result("portable", settings, {"records": records}, revision=given.revision or "")


WORKLOADS = ["user128", "n64", "first4096"]
_GPU_NAMES = ("device", "model", "gpus", "workload")
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
    """Returns the seconds of a step of one row on this rank, without exchanges; its launches start their successors as
    if they exchanged."""
    read, gpu = parts.step_weights[0], parts.kernels.gpu
    weights = replace(read, channels=None)
    plan = few_rows.ChainPlan(
        gpu.multiprocessors, dependent=gpu.overlap, longest=512, two_pass=weights.coarse is not None
    )
    if read.coarse is not None:  # of the head, too, a rank reads its part
        own = plan.two_passes(read.head, read.coarse, read.channels)
        weights = replace(weights, head=own.plain, coarse=own.coarse)
    target = weights.table.device
    pages = -(-(_USER + _TOKENS) // PAGE_SIZE)
    buffers = few_rows.allocate(weights, 1, pages, RING)
    buffers.places.pages.copy_(torch.arange(pages, dtype=torch.int32).unsqueeze(0))
    launcher = launcher_of(target)
    chain = [
        one.with_trigger(Trigger.AFTER_WAIT) if one.kernel.name == "linear_residual" else one
        for one in few_rows.prepare_step(parts.kernels, weights, buffers, plan)
    ]

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


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.paths gpus")
    parser.add_argument("--model", required=True, help="a folder with a config.json")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decoder", default="auto")
    parser.add_argument("--append", type=Path, help="a JSON list that gets a record a workload")
    parser.add_argument("--revision", help="the commit, where git is not")
    return parser.parse_args(argv)


def gpus(argv: Sequence[str]) -> Result:
    given = _arguments(argv)
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
    prepared = prepare(settings, _silent)
    arm = MeasuredEngine(prepared.parts, make_runner(settings, prepared, _silent))
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
        append(given.append, records, _GPU_NAMES)
    arm.runner.close()
    samples = {
        one["workload"]: Samples("ms", (one["ttft_ms"],))
        if "output_tokens_per_second" not in one
        else Samples("tokens/s", (one["output_tokens_per_second"],))
        for one in records
    }
    return Result("two_gpus", {**vars(given), "append": None}, {"loads": records}, samples, given.revision or "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("decoders", "gpus"))
    given = sys.argv[1:] if argv is None else list(argv)
    what = parser.parse_args(given[:1]).what
    return finish((decoders if what == "decoders" else gpus)(given[1:]))


if __name__ == "__main__":
    sys.exit(main())
