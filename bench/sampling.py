"""What the sampling stages add to a decode step, on a GPU: microseconds of the chain, and up to each stage.

    python -m bench.sampling --vocabulary 151936 --batch 1 8

Prints a table and ends in one JSON line. Each figure is the median of nine replays of a graph of fifty chains. Logits
are like a model's (a few likely tokens over a wide floor) or flat (random weights' way: nearly all tokens alike). Then
whole steps of a model with random weights, one row.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

import torch

from bench.about import revision
from bench.kernels import FORMATS, H100_BANDWIDTH, SPECS, STEPS, Bench, median_us, random_weights
from engine.kernels import batch_sampling as many_rows
from engine.kernels.attention import RowPages
from engine.kernels.build import KernelLibrary, open_library
from engine.kernels.launch import Launch, Launcher
from engine.kernels.prefill import Parts
from engine.kernels.sampling import SampledRow, Sampling, allocate, sampling, write_marks
from engine.kernels.step import ChainPlan
from engine.kernels.tokens import Choice

TIMES = 50
PLAIN = SampledRow(temperature=1.0, noise_key=12345)
ROWS = {
    "top-k 50, top-p 0.95": replace(PLAIN, top_k=50, top_p=0.95),
    "top-k 50": replace(PLAIN, top_k=50),
    "top-p 0.95": replace(PLAIN, top_p=0.95),
    "min-p 0.05": replace(PLAIN, min_p=0.05),
    "penalties, greedy": replace(PLAIN, temperature=0.0, marked=True, repetition=1.1, frequency=0.2),
    "penalties, bias, top-k 50, top-p 0.95": replace(
        PLAIN, marked=True, biased=True, repetition=1.1, presence=0.1, top_k=50, top_p=0.95
    ),
}


def make_logits(kind: str, batch: int, vocabulary: int) -> torch.Tensor:
    """float32 [batch, vocabulary]."""
    noise = torch.randn(batch, vocabulary, device="cuda")
    if kind == "flat":
        return noise * 0.5
    return noise * 2 - 8 + 18 * torch.rand(batch, vocabulary, device="cuda") ** 200


def prepared(library: KernelLibrary, row: SampledRow, logits: torch.Tensor) -> tuple[Sampling, tuple[Launch, ...]]:
    """The stages for a batch of rows that are all alike."""
    batch, vocabulary = logits.shape
    state = allocate(batch, vocabulary, logits.device)
    state.logits.copy_(logits)
    for at in range(batch):
        state.place(at, row)
        state.set_marks(at, list(range(100)), list(range(50, 200)), [])
    wide = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    choice = Choice(torch.ones(batch, device=logits.device), wide, wide.clone())
    place = torch.full((batch,), 500, dtype=torch.int32, device=logits.device)
    return state, sampling(library, state, choice, RowPages(place, place.view(batch, 1)))


def measure(library: KernelLibrary, launcher: Launcher, batches: list[int], vocabulary: int) -> list[dict[str, object]]:
    """One record a case."""
    records: list[dict[str, object]] = []
    for batch in batches:
        for kind in ("model", "flat"):
            logits = make_logits(kind, batch, vocabulary)
            for name, row in ROWS.items():
                _, chain = prepared(library, row, logits)
                upto = {
                    one.kernel.name: round(median_us(launcher, chain[: at + 1] * TIMES, TIMES), 2)
                    for at, one in enumerate(chain)
                }
                told = "  ".join(f"{stage} {time:.1f}" for stage, time in upto.items())
                print(f"{batch:3} {kind:6} {name:38} µs up to {told}", flush=True)
                records.append({"batch": batch, "logits": kind, "row": name, "us_upto": upto})
    return records


def measure_many(
    library: KernelLibrary, launcher: Launcher, batches: list[int], vocabulary: int
) -> list[dict[str, object]]:
    """One record a case: all rows alike, by the kernel of many rows."""
    records: list[dict[str, object]] = []
    for batch in batches:
        for kind in ("model", "flat"):
            logits = make_logits(kind, batch, vocabulary)
            device = logits.device
            for name, row in ROWS.items():
                bias = torch.zeros(vocabulary, device=device)
                marks = torch.zeros(vocabulary, dtype=torch.int32, device=device)
                write_marks(marks, list(range(100)), list(range(50, 200)), [])
                packed = row.packed(bias.data_ptr(), marks.data_ptr())
                state = torch.frombuffer(bytearray(packed * batch), dtype=torch.int32).view(batch, -1).to(device)
                place = torch.full((batch,), 500, dtype=torch.int32, device=device)
                best = torch.zeros(batch, dtype=torch.int64, device=device)
                one = many_rows.sample(library, state, Parts(logits), place, best)
                found = round(median_us(launcher, [one] * TIMES, TIMES), 1)
                print(f"{batch:3} {kind:6} {name:38} {found:8.1f} µs", flush=True)
                records.append({"batch": batch, "logits": kind, "row": name, "us": found})
    return records


def in_steps(library: KernelLibrary, launcher: Launcher, model: str, context: int) -> dict[str, float]:
    """Microseconds of a step, by what its one row asks for."""
    longest = context + STEPS + 16
    weights = random_weights(SPECS[model], FORMATS["bf16"], -(-longest // 16), longest)
    bench = Bench(library, launcher, weights, -(-longest // 16), H100_BANDWIDTH)
    plan = ChainPlan(bench.multiprocessors, longest=context + STEPS)
    found = {}
    for name, row in {"greedy": None, **ROWS}.items():
        state = None
        if row is not None:
            state = allocate(1, weights.head.rows, weights.table.device)
            state.place(0, row)
        found[name] = round(bench.decode(plan, context, 1, sampled=state).microseconds, 1)
        print(f"{model}, ctx {context}: {name:38} {found[name]:7.1f} µs a step", flush=True)
    return found


def main() -> int:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--many", type=int, nargs="+", default=[16, 64, 256], help="rows of a launch of many")
    parser.add_argument("--model", choices=SPECS, default="qwen3-0.6b")
    parser.add_argument("--revision", default=None, help="the commit to write down")
    given = parser.parse_args()
    launcher = Launcher()
    library = open_library(torch.cuda.get_device_capability())
    record = {
        "bench": "sampling",
        "revision": given.revision or revision(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vocabulary": given.vocabulary,
        "rows": measure(library, launcher, given.batch, given.vocabulary),
        "many_rows": measure_many(library, launcher, given.many, given.vocabulary),
        "steps": {"model": given.model, "context": 128, "us": in_steps(library, launcher, given.model, 128)},
    }
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
