"""The head in two passes beside the plain one, on a GPU: that they find the same keys, token and score, in many decode
steps, and from which size of the head on two passes are faster.

    python -m bench.two_pass --demo models/demo --steps 1000000

A step here is one of a row: eight rows decode together, every token by both heads, and go on with it. The rows are two
greedy ones and two at each of three temperatures, and in runs of their own (`top`) eight that draw within a top_k.
Rows begin anew with random tokens every 256 steps. The random models have one layer.
Prints tables and ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.about import device, revision
from bench.kernels import Spec, random_weights, timers
from engine.kernels import sampling, tokens, two_pass
from engine.kernels.attention import Heads
from engine.kernels.build import Kernels, open_library
from engine.kernels.launch import Launch, Launcher
from engine.kernels.sampling import SampledRow
from engine.kernels.step import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    prepare_layers,
    prepare_start,
    prepare_step,
)
from engine.kernels.weights import Format
from engine.sampling.noise import seed_key

ROWS = 8
TEMPERATURES = (0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5)
TOP = (
    SampledRow(temperature=0.8, top_k=50, top_p=0.95),
    SampledRow(temperature=0.5, top_k=1),
    SampledRow(temperature=0.5, top_k=100),
    SampledRow(temperature=1.0, top_k=20, top_p=0.5),
    SampledRow(temperature=1.0, top_k=64, min_p=0.05),
    SampledRow(temperature=1.5, top_k=7, top_p=0.9, min_p=0.1),
    SampledRow(temperature=1.5, top_k=40),
    SampledRow(temperature=0.5, top_k=2, top_p=0.999),
)
ANEW = 256  # steps
TOGETHER = 32  # steps of a graph
ROWS_THAT = ("plain", "top")  # greedy and at temperatures, or draw within a top_k
SMALL = Heads(8, 2, 128, True)
MODELS = {
    "random, 151,936 words": Spec(1, 1024, 2048, SMALL, 151936),
    "random, 32,000 words": Spec(1, 4096, 4096, SMALL, 32000),
}
SIZES = [(16384, 1024), (24576, 1024), (32768, 1024), (49152, 1024), (151936, 1024), (128256, 2048), (32000, 4096)]
LARGE = 100_000_000  # values of a matrix that is timed with eight rows too
LAUNCHES = 24  # of a graph
CACHED = 256 << 20  # bytes of matrices that a timing goes through, so that none comes out of the L2


def plan() -> ChainPlan:
    return ChainPlan(torch.cuda.get_device_properties(0).multi_processor_count)


def with_copy(weights: StepWeights) -> StepWeights:
    how = plan().tiling("head", weights.head)
    return replace(weights, coarse=two_pass.coarse_copy(weights.head, how.warps))


def demo(folder: str) -> StepWeights:
    """A trained model's weights."""
    from engine.execution.graph_decode.weights import step_weights
    from engine.settings import EngineSettings
    from engine.worker.build import prepare

    settings = EngineSettings(model=folder, device="cuda", dtype="bfloat16", kv_bytes=64 << 20, max_context=512)
    return step_weights(prepare(settings, lambda *progress: None).parts)


class Decode:
    """Rows whose every token both heads choose."""

    def __init__(self, library: Kernels, launcher: Launcher, weights: StepWeights, *, top: bool = False) -> None:
        """`top`: rows that draw within a top_k."""
        self.weights, self.launcher = weights, launcher
        self.sampled = sampling.allocate(ROWS, weights.head.rows, torch.device("cuda")) if top else None
        self.pages = ANEW // 16 + 1
        self.buffers = allocate(weights, ROWS, self.pages, 64)
        held = weights.layers[0].attention.keys.shape[0]
        table = torch.arange(ROWS * self.pages, device="cuda", dtype=torch.int32) % held
        self.buffers.places.pages.copy_(table.view(ROWS, self.pages))
        self.buffers.choice.temperature.copy_(torch.tensor(TEMPERATURES))
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.start = prepare_start(library, weights, self.buffers)
        self.graph = self._graph(library)

    def _graph(self, library: Kernels) -> torch.cuda.CUDAGraph:
        choice, weights, buffers = self.buffers.choice, self.weights, self.buffers
        layers = prepare_layers(library, weights, buffers, plan())
        both = replace(plan(), two_pass=True, within_top=True)
        # The head, the stages that draw, where there are any, and `advance`.
        *plain, advance = prepare_step(library, weights, buffers, plan(), self.sampled)[len(layers) :]
        *passes, _ = prepare_step(library, weights, buffers, both, self.sampled)[len(layers) :]
        found = torch.zeros_like(choice.best)
        graph = torch.cuda.CUDAGraph()
        self.launcher.enqueue([*layers, *plain, advance])  # loads what torch would load in the capture
        self.wrong += (found != choice.best).sum()
        with torch.cuda.graph(graph):
            for _ in range(TOGETHER):
                self.launcher.enqueue([*layers, *passes])
                found.copy_(choice.best)
                choice.best.zero_()
                self.launcher.enqueue([one.alone() for one in plain])
                self.wrong += (found != choice.best).sum()
                self.launcher.enqueue([advance.alone()])
        return graph

    def _draw_anew(self, keys: Sequence[int]) -> None:
        """The rows' noise."""
        if self.sampled is None:
            self.buffers.choice.noise_key.copy_(torch.tensor(keys))
            return
        for at, (row, key) in enumerate(zip(TOP, keys, strict=True)):
            self.sampled.place(at, replace(row, noise_key=key))

    def run(self, steps: int, generator: torch.Generator) -> dict[str, Any]:
        """`steps` of single rows."""
        progress, vocabulary = self.buffers.progress, self.weights.head.rows
        self.wrong.zero_()
        began, done = time.monotonic(), 0
        seen: set[int] = set()
        while done < steps:
            progress.token.copy_(torch.randint(vocabulary, (ROWS,), generator=generator, dtype=torch.int32))
            self.buffers.places.position.zero_()
            keys = [seed_key(int(seed)) for seed in torch.randint(1 << 40, (ROWS,), generator=generator)]
            self._draw_anew(keys)
            self.launcher.enqueue([self.start])
            for _ in range(ANEW // TOGETHER):
                self.graph.replay()
                seen.update(progress.token.tolist())
            done += ROWS * ANEW
        return {
            "steps": done,
            "different": int(self.wrong),
            "tokens_seen": len(seen),
            "seconds": round(time.monotonic() - began, 1),
        }


@dataclass(frozen=True, slots=True)
class Size:
    """What a timing is of."""

    rows: int
    columns: int
    batch: int
    temperature: float


def heads(library: Kernels, launcher: Launcher, size: Size) -> dict[str, Any]:
    """µs of a head and `advance`, each way, in turns."""
    copies = max(1, CACHED // (size.rows * size.columns * 2))
    spec = Spec(1, size.columns, 64, Heads(2, 1, 32, False), size.rows)
    models = [with_copy(random_weights(spec, Format.BF16, 2, 8)) for _ in range(copies)]
    buffers = allocate(models[0], size.batch, 1, 64)
    buffers.choice.temperature.fill_(size.temperature)
    buffers.places.position.fill_(3)
    stream = buffers.stream
    stream.residual.normal_()
    stream.scaled.copy_(stream.residual)
    stream.squares.copy_(stream.residual.square().view(size.batch, -1, 8).sum(-1))
    graphs = {}
    for name in ("plain", "two"):
        chains = [choosing(library, one, buffers, two_passes=name == "two") for one in models]
        launcher.enqueue(chains[0])
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for at in range(LAUNCHES):
                launcher.enqueue(chains[at % copies])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(9):
        for name, graph in graphs.items():
            begin, end = timers()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return {**asdict(size), **{name: round(statistics.median(several), 2) for name, several in times.items()}}


def choosing(library: Kernels, weights: StepWeights, buffers: StepBuffers, *, two_passes: bool) -> list[Launch]:
    """A head, and what puts its result back to zero: `advance` of idle rows."""
    how, choice, places = plan().tiling("head", weights.head), buffers.choice, buffers.places
    if two_passes and weights.coarse is not None:
        both = plan().two_passes(weights.head, weights.coarse)
        head = tokens.two_pass_head(library, buffers.stream, both, choice, places)
    else:
        head = tokens.head(library, buffers.stream, weights.head, choice, places, how)
    aside = allocate(weights, buffers.batch, 1, 64)
    first = tokens.FirstNorm(weights.table, weights.final_gain, aside.stream)
    return [head, tokens.advance(library, choice, aside.progress, aside.places, first)]


def models(folder: str | None) -> dict[str, Callable[[], StepWeights]]:
    """That decode, by name."""
    pages = ROWS * (ANEW // 16 + 1)
    found: dict[str, Callable[[], StepWeights]] = {
        name: partial(random_weights, spec, Format.BF16, pages, 2 * ANEW) for name, spec in MODELS.items()
    }
    return found | ({"demo": partial(demo, folder)} if folder else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--demo", help="a folder of a trained model")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of single rows, of each model; 0: timing alone")
    parser.add_argument("--rows", nargs="+", choices=ROWS_THAT, default=ROWS_THAT, help="that decode")
    parser.add_argument("--only", nargs="+", default=[""], help="models whose names begin so")
    parser.add_argument("--no-timing", action="store_true", help="steps alone")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    library, launcher = open_library(torch.cuda.get_device_capability()), Launcher()
    record: dict[str, Any] = {"bench": "two_pass", "revision": given.revision or revision(), "device": device()}
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        record["heads"] = []
        for rows, columns in () if given.no_timing else SIZES:
            for batch, temperature in ((1, 0.0), (8, 0.0), (8, 0.8)) if rows * columns >= LARGE else ((1, 0.0),):
                size = Size(rows, columns, batch, temperature)
                record["heads"].append(found := heads(library, launcher, size))
                print(*found.values(), flush=True)
        record["decode"] = {}
        for name, make in models(given.demo).items() if given.steps else ():
            if not name.startswith(tuple(given.only)):
                continue
            weights = with_copy(make())
            for top in (rows == "top" for rows in given.rows):
                found = Decode(library, launcher, weights, top=top).run(given.steps, generator)
                record["decode"][name + ", within a top_k" * top] = found
                print(name + ", within a top_k" * top, found, flush=True)
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
