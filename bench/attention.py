"""Attention by itself on a GPU: rows of one token over their pages, and chunks of prompts. Microseconds a layer, beside
what the device's memory or its tensor cores would allow.

    python -m bench.attention

Prints a table and ends in one JSON line. Each figure is the median of nine replays of a graph over layers whose pages
do not fit the L2 together.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

import torch

from bench.about import revision
from bench.kernels import H100_BANDWIDTH, median_us
from engine.kernels import batch_attention as many
from engine.kernels import prefill
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import KernelLibrary, open_library
from engine.kernels.gpu import GpuShape, gpu_shape
from engine.kernels.launch import Launcher

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
L2_BYTES = 400e6  # what a replay reads at least, so that little of it is found in the L2
TENSOR_RATE = 989e12  # multiplications and additions a second, bfloat16, dense


def decode(library: KernelLibrary, launcher: Launcher, heads: Heads, lengths: list[int], shape: many.Grid) -> float:
    """µs of one layer."""
    device = torch.device("cuda")
    held = [-(-length // 16) for length in lengths]
    pages = torch.zeros(len(lengths), max(held), dtype=torch.int32, device=device)
    free, at = torch.randperm(sum(held), device=device).to(torch.int32), 0
    for row, count in enumerate(held):
        pages[row, :count] = free[at : at + count]
        at += count
    rows = many.BatchRows(torch.tensor(lengths, dtype=torch.int32, device=device), pages)
    attention = many.BatchAttention(library, heads, rows, shape, many.workspace(heads, len(lengths), shape, device))
    layer_bytes = sum(held) * heads.keys * many.stage_bytes(heads, torch.bfloat16.itemsize)
    layers = int(min(32, max(2, -(-L2_BYTES // layer_bytes))))
    pool = torch.randn(layers, 2, sum(held), heads.keys, 16, heads.dim, device=device, dtype=torch.bfloat16)
    queries = torch.randn(len(lengths), heads.queries, heads.dim, device=device).bfloat16()
    out = torch.zeros_like(queries)
    chain = [attention.attend(LayerAttention(one[0], one[1], None, None), queries, out) for one in pool]
    times = max(1, 64 // layers)
    return median_us(launcher, [attention.plan(), *chain * times], layers * times)


def chunk(library: KernelLibrary, launcher: Launcher, heads: Heads, place_of: tuple[int, int], gpu: GpuShape) -> float:
    """µs of one layer of a chunk of one sequence: so many tokens after so many."""
    count, start = place_of
    device, end = torch.device("cuda"), start + count
    held = -(-end // 16)
    pages = torch.randperm(held, device=device).to(torch.int32)
    chunks = prefill.Chunks(torch.tensor([[0, count, start, 0]], dtype=torch.int32, device=device), pages.view(1, -1))
    pool = torch.randn(2, held, heads.keys, 16, heads.dim, device=device).bfloat16()
    queries = torch.randn(count, heads.queries, heads.dim, device=device).bfloat16()
    out = torch.zeros_like(queries)
    splits = prefill.splits_of(heads, (count,), device, gpu=gpu)
    layer = LayerAttention(pool[0], pool[1], None, None)
    launch = prefill.attend_chunks(library, heads, chunks, splits, layer, queries, out)
    return median_us(launcher, [launch] * 10, 10)


def together(library: KernelLibrary, launcher: Launcher, heads: Heads, counts: list[int], most: int) -> float:
    """µs of one layer of whole prompts side by side, in a pass for up to `most` chunks."""
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
    """One record a case."""
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
    """One record a case."""
    records: list[dict[str, object]] = []
    torch.manual_seed(0)
    mixed = (torch.rand(256) * 1400 + 100).int().tolist()
    for name, heads in LAYOUTS.items():
        cases = [(f"{rows} × {length}", [length] * rows) for rows, length in EVEN]
        cases.append(("256 mixed, 100 to 1,500", mixed))
        for case, lengths in cases:
            size = sum(lengths) * heads.keys * heads.dim * 4
            for shape in grids:
                found = decode(library, launcher, heads, lengths, shape)
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
    """One record a case."""
    records: list[dict[str, object]] = []
    gpu = gpu_shape(torch.device("cuda"))
    for name, heads in LAYOUTS.items():
        for count, start in ((128, 0), (512, 0), (512, 3584), (1024, 0), (2048, 0), (4096, 0), (8192, 0)):
            work = 4 * heads.queries * heads.dim * (count * start + count * (count + 1) / 2)
            for groups in (True, False):
                if groups and not gpu.warpgroups:
                    continue
                found = chunk(library, launcher, heads, (count, start), replace(gpu, warpgroups=groups))
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
    """Measures what was asked for."""
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


if __name__ == "__main__":
    sys.exit(main())
