"""Measures our decode attention beside FlashInfer's XQA kernel, which also reads lengths and page tables on the device.

    python -m bench.attention_peers --append bench/results/attention-peers-h200.json

Both run over as many layers as the L2 does not hold, in one CUDA graph each; ours with its plan, once a step. A time is
one layer's, the median of --rounds graphs. With --merged ours alone runs, by other lengths of runs. FlashInfer is
a peer here: nothing that serves imports it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.result import Result, device, finish, revision
from bench.workloads import append
from engine.kernels import batch_attention as ops
from engine.kernels.attention import Heads, LayerAttention
from engine.kernels.build import open_library
from engine.kernels.capture import Graphs, device_seconds
from engine.kernels.gpu import gpu_shape
from engine.kernels.launch import Launcher

LAYOUTS = {
    "qwen3-0.6b": (Heads(16, 8, 128, False), None),
    "smollm2-135m": (Heads(9, 3, 64, False), None),
    "gemma3-1b": (Heads(4, 1, 256, False), None),
    "gemma3-1b, window 512": (Heads(4, 1, 256, False), 512),
}
ROWS, CONTEXTS = (1, 4, 16, 64), (128, 1024, 8192, 32768)
MOST_TOKENS = 64 * 1024  # of all rows
COLD = 200 << 20  # bytes of all layers' pages
NAMES = ("device", "layout", "rows", "context", "path")  # of a record
CUDA = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class AttentionCase:
    heads: Heads
    window: int | None
    rows: int
    context: int
    pools: list[torch.Tensor]  # of each layer: [2, pages, kv_heads, 16, dim]
    pages: torch.Tensor
    lengths: torch.Tensor
    queries: torch.Tensor
    out: torch.Tensor


def case(heads: Heads, window: int | None, rows: int, context: int) -> AttentionCase:
    held = -(-context // 16)
    each = 4 * rows * held * 16 * heads.keys * heads.dim
    layers = max(4, min(64, COLD // each))
    size = (2, rows * held, heads.keys, 16, heads.dim)
    pages = torch.randperm(rows * held, device=CUDA).to(torch.int32).view(rows, held)
    queries = torch.randn(rows, heads.queries, heads.dim, device=CUDA).bfloat16()
    return AttentionCase(
        heads,
        window,
        rows,
        context,
        [torch.randn(size, device=CUDA, dtype=torch.bfloat16) for _ in range(layers)],
        pages,
        torch.full((rows,), context, dtype=torch.int32, device=CUDA),
        queries,
        torch.zeros_like(queries),
    )


def ours(one: AttentionCase, merged: int | None = None) -> Callable[[], None]:
    gpu, library, launcher = gpu_shape(CUDA), open_library(torch.cuda.get_device_capability()), Launcher()
    grid = ops.grid(one.heads, gpu)
    grid = grid if merged is None else replace(grid, merged=merged)
    space = ops.workspace(one.heads, one.rows, grid, CUDA)
    held = ops.BatchRows(one.lengths, one.pages)
    attention = ops.BatchAttention(library, one.heads, held, grid, space, one.window)
    layers = [LayerAttention(pool[0], pool[1], None, None, one.window) for pool in one.pools]
    chain = [attention.plan(), *(attention.attend(layer, one.queries, one.out) for layer in layers)]
    chain = chain if gpu.overlap else [launch.alone() for launch in chain]
    return lambda: launcher.enqueue(chain)


def flashinfer(one: AttentionCase) -> Callable[[], None]:
    from flashinfer.xqa import xqa

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=CUDA)
    semaphores = torch.zeros(1 << 20, dtype=torch.uint8, device=CUDA).view(torch.uint32)
    lengths = one.lengths.view(torch.uint32).unsqueeze(1)
    queries, out = one.queries.unsqueeze(1), one.out.unsqueeze(1)

    def enqueue() -> None:
        for pool in one.pools:
            xqa(
                queries,
                pool[0],
                pool[1],
                one.pages,
                lengths,
                out,
                workspace,
                semaphores,
                one.heads.keys,
                16,
                sliding_win_size=one.window or 0,
                kv_layout="HND",
                enable_pdl=False,  # layers share the workspace
            )

    return enqueue


Paths = dict[str, Callable[[AttentionCase], Callable[[], None]]]


def measure(name: str, one: AttentionCase, paths: Paths, rounds: int) -> list[dict[str, object]]:
    graphs, found, outs = Graphs(CUDA), [], []
    made = {path: make(one) for path, make in paths.items()}  # held as long as graphs are replayed: they own memory
    for path, enqueue in made.items():
        graph = graphs.record(enqueue, rehearse=True)
        graph.replay()
        outs.append(one.out.float().clone())
        times = [device_seconds(graph.replay) for _ in range(rounds)]
        found.append(
            {
                "device": device(),
                "revision": revision(),
                "layout": name,
                "rows": one.rows,
                "context": one.context,
                "path": path,
                "us": round(1e6 * statistics.median(times) / len(one.pools), 2),
            }
        )
    apart = float((outs[0] - outs[1]).norm() / outs[0].norm())
    print(
        name, one.rows, one.context, *(f"{row['path']} {row['us']}" for row in found), f"apart {apart:.4f}", flush=True
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--merged", type=int, nargs="*", default=[], help="quarters of a page that merging a run takes")
    parser.add_argument("--append", type=Path, help="a JSON list that the records are added to")
    given = parser.parse_args(argv)
    paths: Paths = {f"merged {count}": partial(ours, merged=count) for count in given.merged}
    paths = paths or {"own": ours, "flashinfer": flashinfer}
    records: list[dict[str, Any]] = []
    for name in given.layouts:
        for rows in ROWS:
            for context in CONTEXTS:
                if rows * context <= MOST_TOKENS:
                    records += measure(name, case(*LAYOUTS[name], rows, context), paths, given.rounds)
    if given.append is not None:
        append(given.append, records, NAMES)
    return finish(Result("attention_peers", {"rounds": given.rounds}, {"records": records}))


if __name__ == "__main__":
    sys.exit(main())
