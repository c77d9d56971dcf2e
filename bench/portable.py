"""Measures the decoders of models that the fused kernels may not take, one beside the other in the engine's own loop.

    python -m bench.portable --models gemma3-1b smollm2-135m --decoders portable auto --rows 1 64 --append out.json

Rows are greedy and begin with --prompt random ids each. A rate counts the tokens from when all rows have their first to
the end of the first row, so that prompts are left out; the median of --rounds. The share of the bandwidth is what a
step must read (weights once, keys and values of all rows) at the rate of one large read on this GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from bench.pace import asked, planner
from bench.result import Result, device, finish, revision
from bench.workloads import append
from engine.execution.runner import ModelRunner
from engine.execution.step_state import Parts
from engine.kernels.capture import device_seconds
from engine.kv.page_pool import PagePool
from engine.settings import DecoderChoice, Dtype, EngineSettings
from engine.worker.build import make_runner, prepare

_MODELS = Path(__file__).parent / "models"
_READ = 1 << 30  # bytes of the large read
_PATHS = {"graph": "fused"}  # by decoder; others keep their names
NAMES = ("device", "model", "dtype", "path", "rows", "context")  # of a record


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
    """What a step of `rows` rows must read."""
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
                append(given.append, records, NAMES)
    settings = {name: value for name, value in vars(given).items() if name not in ("append", "revision")}
    return finish(Result("portable", settings, {"records": records}, revision=given.revision or ""))


if __name__ == "__main__":
    sys.exit(main())
