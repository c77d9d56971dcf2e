"""Steps of up to eight rows as captured graphs that copy nothing, launched ahead of their tokens. Up to sixteen rows
are two such steps in turns."""

from __future__ import annotations

import gc
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.driver import Recorder, RingPoller
from engine.execution.graphs import placement, weights
from engine.execution.graphs.row_state import RING, StateBlock, entry_of, fill, idle, placed, words
from engine.execution.needs import require_known
from engine.execution.pipeline import (
    BUCKETS,
    SIZES,
    MorePages,
    Pipeline,
    Rewrite,
    StepLaunch,
    bucket,
    in_flight,
    plain_lookahead,
    run_share,
)
from engine.execution.router import AHEAD, FEW, Capacity, StepOptions
from engine.execution.step_state import Parts, Unfit, no_gpu
from engine.kernels import sampling
from engine.kernels.attention import MANY_TOKENS
from engine.kernels.build import BuildError, Kernels
from engine.kernels.launch import Launch, launcher_of
from engine.kernels.sampling import Sampling
from engine.loading.progress import Progress
from engine.model.layers.few_rows import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    prepare_layers,
    prepare_start,
    prepare_step,
)
from engine.scheduling.plan import Row, RowResult, Share
from engine.settings import PAGE_SIZE

# Tokens; attention is launched no wider than the longest row needs, which costs a little, and beyond the last of these
# another way.
REACHES = (512, 1024, MANY_TOKENS)
MOST_PIPELINES = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """The step of a batch bucket whose rows are no longer than `longest`."""

    longest: int
    chain: tuple[Launch, ...]
    graphs: dict[int, torch.cuda.CUDAGraph]  # by their number of steps


def distinct(steps: Rows[Steps]) -> tuple[Steps, ...]:
    """Those that the next longer one does not launch in the same way."""
    longer = [*steps[1:], None]
    return tuple(one for one, other in zip(steps, longer, strict=True) if other is None or not _same(one, other))


def _same(one: Steps, other: Steps) -> bool:
    return all(a.kernel is b.kernel and a.shape == b.shape for a, b in zip(one.chain, other.chain, strict=True))


@dataclass(frozen=True, slots=True)
class BatchBucket:
    """The steps of a bucket's rows side by side, and their memory."""

    buffers: StepBuffers
    state: StateBlock
    start: Launch
    reaches: tuple[Steps, ...]  # shortest first
    two_pass: tuple[Steps, ...]  # as `reaches`, with the head in two passes; none without its coarse copy
    sampling: Sampling
    sampled: tuple[Steps, ...]  # as `reaches`, for rows of which some need the sampling stages
    within_top: tuple[Steps, ...]  # as both: for rows that all are drawn from their likeliest tokens
    ring: memoryview  # of 64-bit words [rows · RING]


class RowMemory(Protocol):
    """The memory of a bucket's rows."""

    @property
    def buffers(self) -> StepBuffers: ...
    @property
    def state(self) -> StateBlock: ...
    @property
    def start(self) -> Launch: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def ring(self) -> memoryview:
        """64-bit words [rows · RING]."""


Memory = TypeVar("Memory", bound=RowMemory)


class RowSteps(ABC, Generic[Memory]):
    """Steps of few rows, whose states the host writes as one block. Calls go to torch's current stream."""

    def __init__(self, library: Kernels, weights: StepWeights, max_context: int, most_rows: int) -> None:
        self._library = library
        self._weights = weights
        self._max_context = max_context
        self._lengths = [*(reach for reach in REACHES if reach < max_context), max_context]
        self._plan = ChainPlan(library.gpu.multiprocessors, dependent=library.gpu.overlap)
        vocabulary, device = weights.head.rows, weights.table.device
        self._launcher = launcher_of(device)
        self._recorder = Recorder(device)
        most = bucket(min(most_rows, BUCKETS[-1]))
        self._sampling = sampling.allocate(most, vocabulary, device)  # all buckets', one at a time
        self._most_top = sampling.most_top(library.gpu.multiprocessors)
        self._buckets: dict[int, Memory] = {}
        self._here: Memory | None = None
        self._draws = False  # whether the sampling stages are needed here
        self._within_top = False  # and need few logits
        self._poller = RingPoller()

    @abstractmethod
    def _made(self, size: int) -> Memory:
        """Makes the memory and the steps of `size` rows. Raises BuildError."""

    def _bucket(self, size: int) -> Memory:
        found = self._buckets.get(size)
        if found is None:
            found = self._buckets[size] = self._made(size)
        return found

    @property
    def _current(self) -> Memory:
        if self._here is None:
            raise EngineFailed("no rows were placed")
        return self._here

    def _room(self, size: int) -> tuple[StepBuffers, StateBlock]:
        """Returns the memory of `size` rows, all of them idle."""
        state = idle(size, self._weights.table.device)
        return placed(allocate(self._weights, size, -(-self._max_context // PAGE_SIZE), RING), state), state

    def update(self, update: Rewrite | MorePages) -> None:
        if isinstance(update, MorePages):
            self._add_pages(update.index, update.first, update.pages)
            return
        rows = update.rows
        here = self._here = self._bucket(bucket(len(rows)))
        require_known((row.token for row in rows), self._weights.table.shape[0])
        if update.number == 0:
            torch.cuda.synchronize()
            for each in self._buckets.values():
                each.buffers.progress.ring.zero_()
        here.state.block.copy_(fill(rows, here.buffers.batch, update.number), non_blocking=True)
        needs = [sampled.sampled_row(row.sequence, len(row.unreported)) for row in rows]
        self._draws = any(need is not None for need in needs)
        self._within_top = all(need is not None and need.within_top(self._most_top) for need in needs)
        for index, row in enumerate(rows):
            self._add_pages(index, 0, row.pages)
            if self._draws:
                sampled.place(here.sampling, index, row.sequence, row.unreported)
        self._launcher.enqueue([here.start])

    def _add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        row = self._current.buffers.places.pages[index]
        if len(pages) == 1:
            row[first].fill_(pages[0])
            return
        row[first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def poll(self, index: int, number: int) -> int | None:
        return entry_of(self._current.ring, index, number)

    def wait(self) -> None:
        self._poller.wait()

    def close(self) -> None:
        """Gives the graphs back."""
        torch.cuda.synchronize()
        self._buckets.clear()
        self._here = None


class CapturedSteps(RowSteps[BatchBucket]):
    """Plain steps. All buckets are captured at the start."""

    def __init__(self, library: Kernels, weights: StepWeights, max_context: int, max_rows: int) -> None:
        super().__init__(library, weights, max_context, max_rows)
        self.sizes = [size for size in BUCKETS if size <= bucket(min(max_rows, BUCKETS[-1]))]

    def build(self, sizes: Rows[int]) -> None:
        """Makes the steps of these buckets. Raises BuildError."""
        for size in sizes:
            self._bucket(size)

    def _made(self, size: int) -> BatchBucket:
        return self._steps(*self._room(size))

    def _steps(self, buffers: StepBuffers, state: StateBlock) -> BatchBucket:
        library = self._library
        draws = self._sampling.first(buffers.batch)
        plans = [replace(self._plan, longest=longest) for longest in self._lengths]
        layers = [prepare_layers(library, self._weights, buffers, each) for each in plans]

        def reaches(how: Sampling | None, *, two_pass: bool = False) -> tuple[Steps, ...]:
            found = []
            for longest, each, common in zip(self._lengths, plans, layers, strict=True):
                each = replace(each, two_pass=two_pass, within_top=two_pass)
                chain = prepare_step(library, self._weights, buffers, each, how, layers=common)
                found.append(Steps(longest, chain, {}))
            return distinct(found)

        return BatchBucket(
            buffers=buffers,
            state=state,
            start=prepare_start(library, self._weights, buffers),
            reaches=reaches(None),
            two_pass=() if self._weights.coarse is None else reaches(None, two_pass=True),
            sampling=draws,
            sampled=reaches(draws),
            within_top=() if self._weights.coarse is None else reaches(draws, two_pass=True),
            ring=words(buffers.progress.ring),
        )

    def settle(self) -> None:
        """Has the vectors of one row's step lie where it is fastest; while no page is in use. Raises BuildError."""
        gc.collect()  # as for `warmup`
        size = self.sizes[0]
        self.build((size,))
        here = self._buckets[size]
        plan = replace(self._plan, longest=min(REACHES[1], self._max_context))
        timed = placement.LayersTimed(self._library, self._launcher, self._weights, plan)
        timed.place_row(here.buffers)
        buffers = placement.settled(here.buffers, timed)
        timed.take_away(buffers)
        self._buckets[size] = self._steps(buffers, here.state)

    def warmup(self, progress: Progress) -> None:
        """Compiles and captures everything, and does each thing once: first times take milliseconds."""
        gc.collect()  # a graph that is dropped during a capture would spoil it
        progress("kernels", 0, len(self.sizes))
        self.build(self.sizes)
        progress("kernels", len(self.sizes), len(self.sizes))
        wanted = [
            (steps, size)
            for each in self._buckets.values()
            # All `reaches` too would be captured for nothing: where there are two passes, they are when first wanted.
            for steps in (*(each.two_pass or each.reaches), *each.sampled, *each.within_top)
            for size in SIZES
        ]
        for done, (steps, size) in enumerate(wanted):
            progress("graphs", done, len(wanted))
            self._graph(steps, size).replay()
        for each in self._buckets.values():
            each.state.block.copy_(fill((), each.buffers.batch, 0), non_blocking=True)
            self._here = each
            for pages in ((0,), (0, 0)):
                self._add_pages(0, 0, pages)
            self._launcher.enqueue([each.start])
        self._sampling.rehearse()
        self._here = None
        torch.cuda.synchronize()
        progress("graphs", len(wanted), len(wanted))

    def seconds(self, rows: int) -> float:
        """Returns about how many seconds a step of this bucket takes. Its rows must be idle."""
        event: type[torch.cuda.Event] = torch.cuda.Event
        here, many = self._buckets[rows], SIZES[0]
        graph = self._graph((here.two_pass or here.reaches)[0], many)
        graph.replay()  # while it runs, the host gets ahead
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / many

    def _graph(self, steps: Steps, size: int) -> torch.cuda.CUDAGraph:
        found = steps.graphs.get(size)
        if found is None:

            def enqueue() -> None:
                for _ in range(size):
                    self._launcher.enqueue(steps.chain)

            found = steps.graphs[size] = self._recorder.record(enqueue)
        return found

    def launch(self, launch: StepLaunch) -> None:
        """Enqueues steps of all rows."""
        self._poller.launched()
        here, options = self._current, launch.options
        if options.two_pass_head and here.two_pass and self._within_top == self._draws:
            reaches = here.within_top if self._draws else here.two_pass
        else:
            reaches = here.sampled if self._draws else here.reaches
        reach = next(reach for reach in reaches if reach.longest >= launch.longest)
        if options.graphs:
            self._graph(reach, launch.steps).replay()
            return
        for _ in range(launch.steps):
            self._launcher.enqueue(reach.chain)


def why_not(parts: Parts) -> str | None:
    """Why it cannot serve this model here, or None."""
    objection = no_gpu(parts)
    if objection is not None:
        return objection
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda.core is not installed"
    return weights.why_not(parts)


def ask(parts: Parts) -> None:
    """Asks for every kernel that it will have; of shapes alone."""
    read, _ = weights.shared(parts)
    device = CapturedSteps(parts.kernels, read, parts.max_context, parts.max_sequences)
    device.build(device.sizes)


class GraphDecode:
    """Decodes rows of one token. An `Executor`."""

    lookahead_tokens = 2 * AHEAD - 1
    max_tokens_per_row = 2 * AHEAD

    def __init__(self, parts: Parts) -> None:
        firsts = range(0, min(parts.max_sequences, MOST_PIPELINES * FEW), FEW)
        with torch.inference_mode():
            try:
                read, self._why_one_pass = weights.shared(parts)
                self._devices = [
                    CapturedSteps(parts.kernels, read, parts.max_context, parts.max_sequences - first)
                    for first in firsts
                ]
                self._devices[0].build(BUCKETS[:1])
            except BuildError as failure:
                raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._pipelines = [Pipeline(device, parts.sequences, parts.max_context) for device in self._devices]

    @property
    def capacity(self) -> Capacity:
        """Returns the number of its pipelines."""
        return Capacity(few=len(self._pipelines))

    @property
    def switches(self) -> Mapping[str, str | None]:
        """Returns the options that it obeys: a step as a graph, kernels of our own, and a coarse copy of the head."""
        return {"graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def warmup(self, progress: Progress) -> None:
        """Compiles, captures, and measures what a step costs."""
        with torch.inference_mode():
            self._devices[0].settle()
            for device in self._devices:
                device.warmup(progress)
            for device, pipeline in zip(self._devices, self._pipelines, strict=True):
                pipeline.lookahead = {size: plain_lookahead(device.seconds(size)) for size in device.sizes}

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight(self._pipelines, rows)

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        """Returns one token or several for each row."""
        return run_share(self._pipelines[share.pipeline], share, options)

    def close(self) -> None:
        """Gives the graphs back."""
        for device in self._devices:
            device.close()
