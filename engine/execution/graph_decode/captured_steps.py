"""The captured steps of each batch bucket, and the device memory that they live in. A `pipeline.StepDevice`."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace

import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.capture import Recorder
from engine.execution.graph_decode import placement
from engine.execution.graph_decode.pipeline import BUCKETS, SIZES, RowState, bucket
from engine.execution.graph_decode.row_exchange import RING, State, fill, idle, placed, told, words
from engine.execution.needs import require_known
from engine.execution.patience import Patience
from engine.kernels import sampling
from engine.kernels.attention import MANY_TOKENS
from engine.kernels.build import Kernels
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
from engine.settings import PAGE_SIZE

# Tokens; attention is launched no wider than the longest row needs, which costs a little, and beyond the last of these
# another way.
REACHES = (512, 1024, MANY_TOKENS)


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
    """The steps of so many rows side by side, and their memory."""

    buffers: StepBuffers
    state: State
    start: Launch
    reaches: tuple[Steps, ...]  # shortest first
    two_pass: tuple[Steps, ...]  # as `reaches`, with the head in two passes; none without its coarse copy
    sampling: Sampling
    sampled: tuple[Steps, ...]  # as `reaches`, for rows of which some need the sampling stages
    within_top: tuple[Steps, ...]  # as both: for rows that all are drawn from their likeliest tokens
    ring: memoryview  # of 64-bit words [rows · RING]


class CapturedSteps:
    """All batch buckets. Calls go to torch's current stream."""

    def __init__(self, library: Kernels, weights: StepWeights, max_context: int, max_rows: int) -> None:
        self._library = library
        self._weights = weights
        self._max_context = max_context
        self.sizes = [size for size in BUCKETS if size <= bucket(min(max_rows, BUCKETS[-1]))]
        self._launcher = launcher_of(weights.table.device)
        self._recorder = Recorder(weights.table.device)
        self._buckets: dict[int, BatchBucket] = {}
        self._here: BatchBucket | None = None
        vocabulary, device = weights.head.rows, weights.table.device
        self._sampling = sampling.allocate(self.sizes[-1], vocabulary, device)  # all buckets', one at a time
        self._draws = False  # whether the sampling stages are needed here
        self._within_top = False  # and need few logits
        self._most_top = sampling.most_top(library.gpu.multiprocessors)
        self._patience = Patience()
        self.graphs = True  # False: launches one by one
        self.two_pass = weights.coarse is not None  # where no row needs the sampling stages; the tokens are the same

    def build(self, sizes: Rows[int]) -> None:
        """Makes the steps of so many rows each. Raises BuildError."""
        for size in sizes:
            if size not in self._buckets:
                self._buckets[size] = self._bucket(*self._room(size))

    def _room(self, size: int) -> tuple[StepBuffers, State]:
        """What so many rows live in, all of them idle."""
        state = idle(size, self._weights.table.device)
        return placed(allocate(self._weights, size, -(-self._max_context // PAGE_SIZE), RING), state), state

    def _bucket(self, buffers: StepBuffers, state: State) -> BatchBucket:
        library = self._library
        plan = ChainPlan(library.gpu.multiprocessors, dependent=library.gpu.overlap)
        lengths = [reach for reach in REACHES if reach < self._max_context] + [self._max_context]
        draws = self._sampling.first(buffers.batch)

        plans = [replace(plan, longest=longest) for longest in lengths]
        layers = [prepare_layers(library, self._weights, buffers, each) for each in plans]

        def reaches(how: Sampling | None, *, two_pass: bool = False) -> tuple[Steps, ...]:
            found = []
            for longest, each, common in zip(lengths, plans, layers, strict=True):
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
        gpu = self._library.gpu
        plan = ChainPlan(gpu.multiprocessors, dependent=gpu.overlap, longest=min(REACHES[1], self._max_context))
        timed = placement.LayersTimed(self._library, self._launcher, self._weights, plan)
        timed.place_row(here.buffers)
        buffers = placement.settled(here.buffers, timed)
        timed.take_away(buffers)
        self._buckets[size] = self._bucket(buffers, here.state)

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
                self.add_pages(0, 0, pages)
            self._launcher.enqueue([each.start])
        self._sampling.rehearse()
        self._here = None
        torch.cuda.synchronize()
        progress("graphs", len(wanted), len(wanted))

    def seconds(self, rows: int) -> float:
        """What a step of this bucket takes, about: while nobody is in it."""
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

    def write(self, states: Rows[RowState], number: int) -> None:
        """These rows and no others."""
        here = self._here = self._buckets[bucket(len(states))]
        require_known((row.token for row in states), self._weights.table.shape[0])
        if number == 0:
            torch.cuda.synchronize()
            for each in self._buckets.values():
                each.buffers.progress.ring.zero_()
        here.state.block.copy_(fill(states, here.buffers.batch, number), non_blocking=True)
        needs = [sampled.sampled_row(row.sequence, len(row.unreported)) for row in states]
        self._draws = any(need is not None for need in needs)
        self._within_top = all(need is not None and need.within_top(self._most_top) for need in needs)
        for index, row in enumerate(states):
            self.add_pages(index, 0, row.pages)
            if self._draws:
                sampled.place(here.sampling, index, row.sequence, row.unreported)
        self._launcher.enqueue([here.start])

    def add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        """Pages [first, …) of a row."""
        row = self._current.buffers.places.pages[index]
        if len(pages) == 1:
            row[first].fill_(pages[0])
            return
        row[first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def launch(self, steps: int, longest: int) -> None:
        """Steps of all rows."""
        self._patience.launched()
        here = self._current
        if self.two_pass and here.two_pass and self._within_top == self._draws:
            reaches = here.within_top if self._draws else here.two_pass
        else:
            reaches = here.sampled if self._draws else here.reaches
        reach = next(reach for reach in reaches if reach.longest >= longest)
        if self.graphs:
            self._graph(reach, steps).replay()
            return
        for _ in range(steps):
            self._launcher.enqueue(reach.chain)

    def poll(self, index: int, number: int) -> int | None:
        """flags << 24 | token of the entry, None where it has not come."""
        return told(self._current.ring, index, number)

    def wait(self) -> None:
        """A moment. Raises where nothing is under way."""
        self._patience.wait()

    def close(self) -> None:
        """Gives the graphs back."""
        torch.cuda.synchronize()
        self._buckets.clear()
        self._here = None

    @property
    def _current(self) -> BatchBucket:
        if self._here is None:
            raise EngineFailed("no rows were placed")
        return self._here
