"""Measures attention by itself on a GPU: rows of one token over their pages, and chunks of prompts. Microseconds a
layer, beside what the device's memory or its tensor cores would allow.

    python -m bench.attention

Prints a table and ends in one JSON line. Each figure is the median of nine replays of a graph over layers whose pages
do not fit the L2 together.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.kernels import H100_BANDWIDTH, Spec, median_of_replays, median_us, random_weights, timers
from bench.result import device, revision, run_one_of, summary
from engine.kernels import batch_attention as many
from engine.kernels import prefill, sampling, tokens, two_pass
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import KernelLibrary, Kernels, open_library
from engine.kernels.gpu import GpuShape, gpu_shape
from engine.kernels.launch import Launch, Launcher
from engine.kernels.sampling import SampledRow
from engine.kernels.weights import Format
from engine.model.layers.few_rows import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    prepare_layers,
    prepare_start,
    prepare_step,
)
from engine.sampling.noise import seed_key

Record = dict[str, Any]
LAYOUTS = {"qwen3-0.6b": Heads(16, 8, 128, False), "mistral-7b": Heads(32, 8, 128, False)}
EVEN = [
    (16, 192),
    (16, 1024),
    (32, 1024),
    (64, 192),
    (64, 1024),
    (128, 192),
    (256, 192),
    (256, 840),
    (512, 192),
    (16, 8192),
]
CHUNKS = ((128, 0), (512, 0), (512, 3584), (1024, 0), (2048, 0), (4096, 0), (8192, 0))  # tokens, after others
L2_BYTES = 400e6  # what a replay reads at least, so that little of it is found in the L2
TENSOR_RATE = 989e12  # multiplications and additions a second, bfloat16, dense


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Rows of one token each, over layers whose pages do not fit the L2 together."""

    heads: Heads
    lengths: torch.Tensor  # int32 [rows]
    pages: torch.Tensor  # int32 [rows, pages]
    pool: torch.Tensor  # bfloat16 [layers, 2, pages, heads, 16, dim]
    queries: torch.Tensor
    out: torch.Tensor


def decode_case(heads: Heads, lengths: list[int]) -> DecodeCase:
    device = torch.device("cuda")
    held = [-(-length // 16) for length in lengths]
    pages = torch.zeros(len(lengths), max(held), dtype=torch.int32, device=device)
    free, at = torch.randperm(sum(held), device=device).to(torch.int32), 0
    for row, count in enumerate(held):
        pages[row, :count] = free[at : at + count]
        at += count
    layer_bytes = sum(held) * heads.keys * many.stage_bytes(heads, torch.bfloat16.itemsize)
    layers = int(min(32, max(2, -(-L2_BYTES // layer_bytes))))
    pool = torch.randn(layers, 2, sum(held), heads.keys, 16, heads.dim, device=device, dtype=torch.bfloat16)
    queries = torch.randn(len(lengths), heads.queries, heads.dim, device=device).bfloat16()
    rows = torch.tensor(lengths, dtype=torch.int32, device=device)
    return DecodeCase(heads, rows, pages, pool, queries, torch.zeros_like(queries))


def decode(library: KernelLibrary, launcher: Launcher, case: DecodeCase, shape: many.Grid) -> float:
    """Measures µs of one layer. Its results are left in case.out."""
    space = many.workspace(case.heads, len(case.lengths), shape, case.pages.device)
    rows = many.BatchRows(case.lengths, case.pages)
    attention = many.BatchAttention(library, case.heads, rows, shape, space)
    chain = [attention.attend(LayerAttention(one[0], one[1], None, None), case.queries, case.out) for one in case.pool]
    times = max(1, 64 // len(chain))
    return median_us(launcher, [attention.plan(), *chain * times], len(chain) * times)


@dataclass(frozen=True, slots=True)
class ChunkCase:
    """A chunk of one sequence: `count` tokens after `start` others."""

    heads: Heads
    count: int
    start: int
    pages: torch.Tensor  # int32 [pages]
    pool: torch.Tensor  # bfloat16 [2, pages, heads, 16, dim]
    queries: torch.Tensor
    out: torch.Tensor

    @property
    def operations(self) -> float:
        pairs = self.count * self.start + self.count * (self.count + 1) / 2
        return 4 * self.heads.queries * self.heads.dim * pairs


def chunk_case(heads: Heads, count: int, start: int) -> ChunkCase:
    device = torch.device("cuda")
    held = -(-(start + count) // 16)
    pages = torch.randperm(held, device=device).to(torch.int32)
    pool = torch.randn(2, held, heads.keys, 16, heads.dim, device=device).bfloat16()
    queries = torch.randn(count, heads.queries, heads.dim, device=device).bfloat16()
    return ChunkCase(heads, count, start, pages, pool, queries, torch.zeros_like(queries))


def chunk(library: KernelLibrary, launcher: Launcher, case: ChunkCase, gpu: GpuShape) -> float:
    """Measures µs of one layer. Its results are left in case.out."""
    device = case.pages.device
    table = torch.tensor([[0, case.count, case.start, 0]], dtype=torch.int32, device=device)
    splits = prefill.splits_of(case.heads, (case.count,), device, gpu=gpu)
    layer, chunks = (
        LayerAttention(case.pool[0], case.pool[1], None, None),
        prefill.Chunks(table, case.pages.view(1, -1)),
    )
    launch = prefill.attend_chunks(library, case.heads, chunks, splits, layer, case.queries, case.out)
    return median_us(launcher, [launch] * 10, 10)


def together(library: KernelLibrary, launcher: Launcher, heads: Heads, counts: list[int], most: int) -> float:
    """Measures µs of one layer of whole prompts side by side, in a pass for up to `most` chunks."""
    device, size = torch.device("cuda"), sum(counts)
    pages = torch.zeros(len(counts), -(-max(counts) // 16), dtype=torch.int32, device=device)
    table = torch.zeros(most, 4, dtype=torch.int32, device=device)
    first = used = 0
    for row, count in enumerate(counts):
        held = -(-count // 16)
        pages[row, :held] = torch.arange(used, used + held, device=device)
        table[row] = torch.tensor([first, count, 0, row])
        first, used = first + count, used + held
    pool = torch.randn(2, used, heads.keys, 16, heads.dim, device=device).bfloat16()
    queries = torch.randn(size, heads.queries, heads.dim, device=device).bfloat16()
    out = torch.zeros_like(queries)
    splits = prefill.splits_of(heads, (size,), device, chunks=most)
    layer, chunks = LayerAttention(pool[0], pool[1], None, None), prefill.Chunks(table, pages)
    launch = prefill.attend_chunks(library, heads, chunks, splits, layer, queries, out)
    return median_us(launcher, [launch] * 10, 10)


def measure_together(library: KernelLibrary, launcher: Launcher) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    for name, heads in LAYOUTS.items():
        for case, counts in (("16 × 128", [128] * 16), ("2 × 1024", [1024] * 2), ("1 × 2048", [2048])):
            work = 4 * heads.queries * heads.dim * sum(count * (count + 1) / 2 for count in counts)
            found = together(library, launcher, heads, counts, 32)
            rate = work / found / 1e6
            print(f"{name:12} {case} side by side: {found:8.1f} µs {rate:6.1f} TFLOP/s", flush=True)
            records.append(
                {
                    "kind": "chunks",
                    "model": name,
                    "case": case,
                    "us": round(found, 2),
                    "teraflops": round(rate, 1),
                }
            )
    return records


def measure_decode(library: KernelLibrary, launcher: Launcher, grids: list[many.Grid]) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    torch.manual_seed(0)
    mixed = (torch.rand(256) * 1400 + 100).int().tolist()
    for name, heads in LAYOUTS.items():
        cases = [(f"{rows} × {length}", [length] * rows) for rows, length in EVEN]
        cases.append(("256 mixed, 100 to 1,500", mixed))
        for case, lengths in cases:
            size = sum(lengths) * heads.keys * heads.dim * 4
            made = decode_case(heads, lengths)
            for shape in grids:
                found = decode(library, launcher, made, shape)
                rate = size / found / 1e6
                print(
                    f"{name:12} {case:24} {shape.warps}×{shape.stages} least {shape.least}: {found:8.1f} µs"
                    f" {rate:5.2f} TB/s, roofline {size / H100_BANDWIDTH / 1e6:7.1f}",
                    flush=True,
                )
                records.append(
                    {
                        "kind": "decode",
                        "model": name,
                        "case": case,
                        "warps": shape.warps,
                        "stages": shape.stages,
                        "least_pages": shape.least,
                        "us": round(found, 2),
                        "terabytes_per_second": round(rate, 3),
                    }
                )
    return records


def measure_chunks(library: KernelLibrary, launcher: Launcher) -> list[dict[str, object]]:
    records: list[dict[str, object]] = []
    gpu = gpu_shape(torch.device("cuda"))
    for name, heads in LAYOUTS.items():
        for count, start in CHUNKS:
            case = chunk_case(heads, count, start)
            work = case.operations
            for groups in (True, False):
                if groups and not gpu.warpgroups:
                    continue
                found = chunk(library, launcher, case, replace(gpu, warpgroups=groups))
                rate = work / found / 1e6
                by = "warpgroups" if groups else "warps"
                print(
                    f"{name:12} {count} after {start:5}, {by:10}: {found:8.1f} µs {rate:6.1f} TFLOP/s,"
                    f" roofline {work / TENSOR_RATE * 1e6:7.1f}",
                    flush=True,
                )
                records.append(
                    {
                        "kind": "chunk",
                        "model": name,
                        "tokens": count,
                        "after": start,
                        "by": by,
                        "us": round(found, 2),
                        "teraflops": round(rate, 1),
                    }
                )
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--grid", action="append", default=[], metavar="WARPS,STAGES,LEAST", help="another division than the default"
    )
    parser.add_argument("--only", choices=("decode", "chunk"))
    parser.add_argument("--revision", default=None, help="the commit to write down")
    given = parser.parse_args()
    launcher = Launcher()
    library = open_library(torch.cuda.get_device_capability())
    gpu = gpu_shape(torch.device("cuda"))
    grids = [many.grid(LAYOUTS["qwen3-0.6b"], gpu)]
    for one in given.grid:
        warps, stages, least = map(int, one.split(","))
        grids.append(many.Grid(gpu.multiprocessors, warps, stages, least))
    records: list[dict[str, object]] = []
    if given.only != "chunk":
        records += measure_decode(library, launcher, grids)
    if given.only != "decode":
        records += measure_chunks(library, launcher) + measure_together(library, launcher)
    print(
        json.dumps(
            {
                "bench": "attention",
                "revision": given.revision or revision(),
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "records": records,
            }
        )
    )
    return 0


BESIDE = {**LAYOUTS, "smollm2-135m": Heads(9, 3, 64, False), "gemma3-1b": Heads(4, 1, 256, False)}
BESIDE_ROWS, BESIDE_LENGTHS = (1, 8, 16, 64, 256), (128, 1024, 8192, 32768)
MOST_TOKENS = 256 * 1024  # of all rows
_WORKSPACE = 128 << 20  # bytes that FlashInfer is given


def flashinfer_decode(case: DecodeCase) -> float:
    """Measures µs of a layer by XQA: of FlashInfer's kernels for rows of one token, the one that reads lengths and page
    tables on the GPU, as a captured step must."""
    xqa: Any = importlib.import_module("flashinfer.xqa").xqa

    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    semaphores = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda").view(torch.uint32)
    lengths = case.lengths.view(torch.uint32).unsqueeze(1)
    queries, out = case.queries.unsqueeze(1), case.out.unsqueeze(1)
    times = max(1, 64 // len(case.pool))

    def enqueue() -> None:
        for one in [*case.pool] * times:
            memory = (queries, one[0], one[1], case.pages, lengths, out, workspace, semaphores)
            xqa(*memory, case.heads.keys, 16, kv_layout="HND", enable_pdl=False)  # layers share the workspace

    return median_of_replays(enqueue, len(case.pool) * times)


def flashinfer_chunk(case: ChunkCase) -> float:
    """Measures µs of a layer by FlashAttention 3 over pages. What the host plans before is not counted."""
    flashinfer: Any = importlib.import_module("flashinfer")

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3")
    last = (case.start + case.count - 1) % 16 + 1
    begins, held = integers(0, case.count), integers(0, len(case.pages))
    sizes = (case.heads.queries, case.heads.keys, case.heads.dim, 16)
    wrapper.plan(begins, held, case.pages, integers(last), *sizes, causal=True, q_data_type=torch.bfloat16)

    def enqueue() -> None:
        for _ in range(10):
            wrapper.run(case.queries, (case.pool[0], case.pool[1]), out=case.out)

    return median_of_replays(enqueue, 10)


def beside(name: str, work: str, out: torch.Tensor, own: Callable[[], float], peer: Callable[[], float]) -> Record:
    """Measures both kernels and how far their results are apart; a peer that fails is written down by its error."""
    own_us = own()
    kept = out.float().clone()
    record: Record = {"layout": name, "work": work, "own_us": round(own_us, 2)}
    try:
        record["flashinfer_us"] = round(peer(), 2)
        record["apart"] = round(float((out.float() - kept).norm() / kept.norm()), 4)
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"[:200]
    print(*record.values(), flush=True)
    return record


def peers_main(argv: Sequence[str] | None = None) -> int:
    """Measures our attention beside FlashInfer's, each layer by layer in a CUDA graph, on the same pages.

    python -m bench.attention peers --output bench/results/attention-peers-h200.json

    FlashInfer is a peer here: nothing that serves imports it.
    """
    parser = argparse.ArgumentParser(description=summary(peers_main))
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--revision", default=None, help="the commit to write down")
    given = parser.parse_args(argv)
    launcher, library = Launcher(), open_library(torch.cuda.get_device_capability())
    gpu = gpu_shape(torch.device("cuda"))
    records: list[Record] = []
    torch.manual_seed(0)
    for name, heads in BESIDE.items():
        shape = many.grid(heads, gpu)
        for rows, length in itertools.product(BESIDE_ROWS, BESIDE_LENGTHS):
            if rows * length > MOST_TOKENS:
                continue
            made = decode_case(heads, [length] * rows)
            own, peer = partial(decode, library, launcher, made, shape), partial(flashinfer_decode, made)
            records.append(beside(name, f"{rows} rows of {length}", made.out, own, peer))
    for name, heads in LAYOUTS.items():
        for count, start in CHUNKS:
            case = chunk_case(heads, count, start)
            own_chunk, peer_chunk = partial(chunk, library, launcher, case, gpu), partial(flashinfer_chunk, case)
            records.append(beside(name, f"{count} tokens after {start}", case.out, own_chunk, peer_chunk))
    found = {"bench": "attention peers", "revision": given.revision or revision(), "device": device()}
    line = json.dumps({**found, "records": records})
    if given.output is not None:
        given.output.write_text(f"{line}\n")
    print(line)
    return 0


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
    from engine.model.layers.few_rows_weights import step_weights
    from engine.settings import EngineSettings
    from engine.worker.build import prepare

    settings = EngineSettings(model=folder, device="cuda", dtype="bfloat16", kv_bytes=64 << 20, max_context=512)
    return step_weights(prepare(settings, lambda *progress: None).parts)


class Decode:
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
        if self.sampled is None:
            self.buffers.choice.noise_key.copy_(torch.tensor(keys))
            return
        for at, (row, key) in enumerate(zip(TOP, keys, strict=True)):
            self.sampled.place(at, replace(row, noise_key=key))

    def run(self, steps: int, generator: torch.Generator) -> dict[str, Any]:
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
    rows: int
    columns: int
    batch: int
    temperature: float


def heads(library: Kernels, launcher: Launcher, size: Size) -> dict[str, Any]:
    """Measures µs of a head and `advance`, each way, in turns."""
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
    """Returns the launches of a head, and what resets its result: `advance` of idle rows."""
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
    pages = ROWS * (ANEW // 16 + 1)
    found: dict[str, Callable[[], StepWeights]] = {
        name: partial(random_weights, spec, Format.BF16, pages, 2 * ANEW) for name, spec in MODELS.items()
    }
    return found | ({"demo": partial(demo, folder)} if folder else {})


def two_pass_main(argv: Sequence[str] | None = None) -> int:
    """Compares the head in two passes with the plain one on a GPU: keys, token and score in many decode steps, and the
    size of the head from which two passes are faster.

        python -m bench.attention two_pass --demo models/demo --steps 1000000

    A step here is one of a row: eight rows decode together, every token by both heads, and go on with it. The rows are
    two greedy ones and two at each of three temperatures, and in runs of their own (`top`) eight that draw within a
    top_k. Rows begin anew with random tokens every 256 steps. The random models have one layer. Prints tables and ends
    in one JSON line.
    """
    parser = argparse.ArgumentParser(description=summary(two_pass_main))
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
    sys.exit(run_one_of(main, two_pass=two_pass_main, peers=peers_main))
