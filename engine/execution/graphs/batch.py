"""Computes steps of many rows by captured graphs, one for each bucket of up to 512 rows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from functools import partial
from typing import Any

import torch

from engine.execution.batch_pipeline import MOST_BATCH_AHEAD, BatchPipeline, Changes
from engine.execution.graphs.row_updates import RowUpdates
from engine.execution.needs import require_known
from engine.execution.pipeline import StepLaunch
from engine.execution.poller import RingPoller
from engine.execution.router import FEW, Capacity, StepOptions
from engine.execution.step_state import Parts, making, why_no_kernels
from engine.kernels import batch_attention
from engine.kernels import rows as states
from engine.kernels.capture import Graphs
from engine.kernels.ring import all_entries
from engine.loading.progress import Progress
from engine.model.layers import many_tokens
from engine.model.layers.token_attention import FusedRows, RowWalk
from engine.scheduling.plan import RowResult, Share
from engine.settings import PAGE_SIZE

BUCKETS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)  # rows
RING = 2 * MOST_BATCH_AHEAD  # steps whose entries are kept


class BatchedSteps:
    """A `BatchDevice` whose buckets share one set of row states. Calls go to torch's current stream."""

    def __init__(self, parts: Parts, walk: RowWalk, buckets: tuple[int, ...]) -> None:
        self._walk = walk
        self.buckets = buckets
        device, most = parts.model.placement.device, buckets[-1]
        pages = -(-parts.max_context // PAGE_SIZE)
        self._vocabulary = parts.model.config.vocab_size
        self._rows = RowUpdates(walk, self._vocabulary, most, pages, device)
        ring = torch.zeros(RING, most, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._report = states.Report(torch.zeros(1, dtype=torch.int32, device=device), ring)
        self._ring: Any = ring.numpy()
        self._graphs = Graphs(device)  # by rows, and whether some ask for the sampling stages
        self._poller = RingPoller()

    def warmup(self, progress: Progress) -> None:
        gc.collect()  # a graph that is dropped during a capture would spoil it
        for done, rows in enumerate(reversed(self.buckets)):
            progress("batches", done, len(self.buckets))
            for sampled in (False, True):
                # The sampling stages are ours, and need no rehearsal beside the products of as many rows.
                step = partial(self._step, rows, sampled)
                self._graphs.capture((rows, sampled), step, rehearse=not sampled).replay()
        self._rows.rehearse()
        torch.cuda.synchronize()
        self._report.number.zero_()
        self._report.ring.zero_()
        torch.cuda.synchronize()
        progress("batches", len(self.buckets), len(self.buckets))

    def ask(self) -> None:
        for rows in self.buckets:
            for sampled in (False, True):
                self._step(rows, sampled)
        self._rows.ask()

    def _step(self, rows: int, sampled: bool) -> None:
        """`sampled`: some of these row states ask for the sampling stages."""
        walk, own = self._walk, self._rows.states.first(rows)
        self._rows.choose(walk.logits(own), own, sampled=sampled)
        walk.go(states.finish(walk.library, own, self._report))

    def update(self, update: Changes) -> None:
        require_known((own.sequence.token_ids[own.first] for own in update.entered), self._vocabulary)
        self._rows.send(update)

    def launch(self, launch: StepLaunch) -> None:
        self._poller.launched()
        kind = launch.rows, self._rows.sampled(launch.rows)
        self._graphs.run(kind, partial(self._step, *kind), captured=launch.options.graphs)

    def poll(self, number: int, rows: int) -> Rows[int] | None:
        return all_entries(self._ring[number % RING, :rows], number)

    def wait(self) -> None:
        self._poller.wait()

    def close(self) -> None:
        torch.cuda.synchronize()
        self._graphs.clear()


def why_not(parts: Parts) -> str | None:
    if parts.max_sequences <= FEW:
        return f"no more than {FEW} sequences run at once, which graph_decode takes"
    heads = many_tokens.heads_of(parts)
    return why_no_kernels(parts) or many_tokens.why_not(parts) or batch_attention.why_not(heads)


def steps(
    parts: Parts, walk: Callable[[Parts, tuple[int, ...]], RowWalk] = FusedRows, sizes: tuple[int, ...] = BUCKETS
) -> BatchedSteps:
    most = next((size for size in sizes if size >= parts.max_sequences), sizes[-1])
    sizes = tuple(size for size in sizes if size <= most)
    return BatchedSteps(parts, walk(parts, sizes), sizes)


class Batched:
    """An `Executor` that decodes many rows."""

    lookahead_tokens = 2 * MOST_BATCH_AHEAD + 1
    max_tokens_per_row = MOST_BATCH_AHEAD

    def __init__(self, parts: Parts, make: Callable[[Parts], BatchedSteps] = steps) -> None:
        with making():
            self._steps = make(parts)
        buckets = self._steps.buckets
        self._pipeline = BatchPipeline(parts.led(self._steps), parts.sequences, parts.max_context, buckets)
        self.capacity = Capacity(many=buckets[-1])
        self.switches: Mapping[str, str | None] = {"graphs": None, "fused_kernels": None}

    def warmup(self, progress: Progress) -> None:
        with torch.inference_mode():
            self._steps.warmup(progress)

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        return self._pipeline.step(share.rows, options)

    def close(self) -> None:
        self._steps.close()
