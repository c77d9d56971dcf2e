"""Steps of up to eight rows as captured graphs, launched ahead of their tokens; up to sixteen rows are two such steps
in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace

import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.graphs.chains import REACHES, Chain, Chains, distinct, fitting, reaches
from engine.execution.graphs.row_state import PlainRows, write_pages
from engine.execution.masked_pipeline import MaskedPipeline
from engine.execution.needs import require_known
from engine.execution.pipeline import (
    BUCKETS,
    SIZES,
    Mask,
    MorePages,
    Pipeline,
    Rewrite,
    StepLaunch,
    bucket,
    in_flight,
    plain_lookahead,
    run_share,
)
from engine.execution.poller import RingPoller
from engine.execution.router import AHEAD, FEW, Capacity, StepOptions
from engine.execution.step_state import Parts, kernel_switches, making, why_no_kernels
from engine.kernels import sampling
from engine.kernels.build import Kernels
from engine.kernels.capture import device_seconds
from engine.kernels.launch import Launch
from engine.kernels.masks import TokenMasks
from engine.kernels.ring import RING, entry_of, words
from engine.kernels.sampling import Sampling
from engine.loading.progress import Progress
from engine.model.layers import few_rows, few_rows_weights, placement
from engine.scheduling.plan import Row, RowResult, Share
from engine.settings import PAGE_SIZE

MOST_PIPELINES = 2
Choice = tuple[bool, bool]  # whether rows need the sampling stages, and whether the head is read in two passes


@dataclass(frozen=True, slots=True)
class Bucket:
    buffers: few_rows.StepBuffers
    rows: PlainRows
    start: Launch
    sampling: Sampling
    ring: memoryview  # of 64-bit words [rows · RING]
    masks: TokenMasks | None
    steps: dict[Choice, tuple[Chain, ...]] = field(default_factory=dict)  # shortest first
    halves: dict[Choice | int, Chain] = field(default_factory=dict)  # the layers by `longest`, and ways to choose


class RowSteps:
    """Steps of few rows, whose states the host writes as one block. Calls go to torch's current stream."""

    masked = False  # whether a mask can be given for each row

    def __init__(self, library: Kernels, weights: few_rows.StepWeights, max_context: int, most_rows: int) -> None:
        self._library = library
        self._weights = weights
        self._two_pass = weights.coarse is not None
        self._max_context = max_context
        self._plan = few_rows.ChainPlan.of(library.gpu)
        vocabulary, device = weights.head.rows, weights.table.device
        self._chains = Chains(device)
        most = bucket(min(most_rows, BUCKETS[-1]))
        self._sampling = sampling.allocate(most, vocabulary, device)  # all buckets', one at a time
        self._most_top = sampling.most_top(library.gpu.multiprocessors)
        self._buckets: dict[int, Bucket] = {}
        self._here: Bucket | None = None
        self._draws = False  # whether the sampling stages are needed here
        self._within_top = False  # and need few logits
        self._poller = RingPoller()

    def _bucket(self, size: int) -> Bucket:
        found = self._buckets.get(size)
        if found is None:
            rows = PlainRows(size, self._weights.table.device)
            buffers = rows.placed(few_rows.allocate(self._weights, size, -(-self._max_context // PAGE_SIZE), RING))
            found = self._buckets[size] = self._made(buffers, rows)
        return found

    def _made(self, buffers: few_rows.StepBuffers, rows: PlainRows) -> Bucket:
        masks = None
        if self.masked:
            masks = TokenMasks(buffers.batch, self._weights.head.rows, self._weights.table.device)
            buffers = replace(buffers, choice=replace(buffers.choice, masks=masks.arrived))
        return Bucket(
            buffers=buffers,
            rows=rows,
            start=few_rows.prepare_start(self._library, self._weights, buffers),
            sampling=self._sampling.first(buffers.batch),
            ring=words(buffers.progress.ring),
            masks=masks,
        )

    @property
    def _current(self) -> Bucket:
        if self._here is None:
            raise EngineFailed("no rows were placed")
        return self._here

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
        here.rows.write(rows, update.number)
        needs = [sampled.sampled_row(row.sequence, len(row.unreported)) for row in rows]
        self._draws = any(need is not None for need in needs)
        self._within_top = all(need is not None and need.within_top(self._most_top) for need in needs)
        for index, row in enumerate(rows):
            self._add_pages(index, 0, row.pages)
            if self._draws:
                sampled.place(here.sampling, index, row.sequence, row.unreported)
        self._chains.launcher.enqueue([here.start])

    def _add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        write_pages(self._current.buffers.places.pages[index], first, pages)

    def poll(self, index: int, number: int) -> int | None:
        return entry_of(self._current.ring, index, number)

    def wait(self) -> None:
        self._poller.wait()

    def close(self) -> None:
        torch.cuda.synchronize()
        self._chains.graphs.clear()
        self._buckets.clear()
        self._here = None


class CapturedSteps(RowSteps):
    """Plain steps. All buckets are captured at the start."""

    def __init__(self, library: Kernels, weights: few_rows.StepWeights, max_context: int, max_rows: int) -> None:
        super().__init__(library, weights, max_context, max_rows)
        self.sizes = [size for size in BUCKETS if size <= bucket(min(max_rows, BUCKETS[-1]))]

    def build(self, sizes: Rows[int]) -> None:
        """Raises BuildError where a kernel cannot be had."""
        for size in sizes:
            self._bucket(size)

    def _made(self, buffers: few_rows.StepBuffers, rows: PlainRows) -> Bucket:
        made = super()._made(buffers, rows)
        lengths = reaches(self._max_context)
        plans = [replace(self._plan, longest=longest) for longest in lengths]
        layers = [few_rows.prepare_layers(self._library, self._weights, buffers, plan) for plan in plans]
        for two_pass in (False, True) if self._two_pass else (False,):
            for draws in (None, made.sampling):
                chains = []
                for longest, plan, common in zip(lengths, plans, layers, strict=True):
                    plan = replace(plan, two_pass=two_pass, within_top=two_pass)
                    chain = few_rows.prepare_step(self._library, self._weights, buffers, plan, draws, layers=common)
                    chains.append(Chain(longest, chain))
                made.steps[draws is not None, two_pass] = distinct(chains)
        return made

    def settle(self) -> None:
        """Moves the vectors of one row's step to where it is fastest. No page may be in use."""
        gc.collect()  # as for `warmup`
        size = self.sizes[0]
        here = self._bucket(size)
        timed = self._timed_layers()
        timed.place_row(here.buffers)
        buffers = placement.settled(here.buffers, timed)
        timed.take_away(buffers)
        self._buckets[size] = self._made(buffers, here.rows)

    def ask(self) -> None:
        """Lists the kernels of `settle` and `warmup`, where the library only notes them."""
        self.build(self.sizes)
        self._timed_layers().prepare(self._bucket(self.sizes[0]).buffers)

    def _timed_layers(self) -> placement.LayersTimed:
        plan = replace(self._plan, longest=min(REACHES[1], self._max_context))
        return placement.LayersTimed(self._library, self._chains.launcher, self._weights, plan)

    def warmup(self, progress: Progress) -> None:
        """Compiles and captures everything, and does each thing once: first times take milliseconds."""
        gc.collect()  # a graph that is dropped during a capture would spoil it
        progress("kernels", 0, len(self.sizes))
        self.build(self.sizes)
        progress("kernels", len(self.sizes), len(self.sizes))
        wanted = [
            (chain, size)
            for each in self._buckets.values()
            for (draws, two_pass), chains in each.steps.items()
            # Where there are two passes, one pass is captured when it is first wanted.
            if draws or two_pass == self._two_pass
            for chain in chains
            for size in SIZES
        ]
        for done, (chain, size) in enumerate(wanted):
            progress("graphs", done, len(wanted))
            self._chains.capture(chain, size).replay()
        for each in self._buckets.values():
            each.rows.write((), 0)
            self._here = each
            for pages in ((0,), (0, 0)):
                self._add_pages(0, 0, pages)
            self._chains.launcher.enqueue([each.start])
        self._sampling.rehearse()
        self._here = None
        torch.cuda.synchronize()
        progress("graphs", len(wanted), len(wanted))

    def seconds(self, rows: int) -> float:
        """Returns about how many seconds a step of this bucket takes. Its rows must be idle."""
        many = SIZES[0]
        graph = self._chains.capture(self._buckets[rows].steps[False, self._two_pass][0], many)
        graph.replay()  # while it runs, the host gets ahead
        return device_seconds(graph.replay) / many

    def launch(self, launch: StepLaunch) -> None:
        self._poller.launched()
        options = launch.options
        two_pass = options.two_pass_head and self._two_pass and self._within_top == self._draws
        chain = fitting(self._current.steps[self._draws, two_pass], launch.longest)
        self._chains.run(chain, captured=options.graphs, times=launch.steps)


class MaskedSteps(RowSteps):
    """Launches halves of steps: the layers, or, given masks, the choice of tokens. Graphs are captured when they are
    first wanted, in some ten milliseconds: most servers are never asked for a constraint."""

    masked = True

    def launch(self, launch: StepLaunch) -> None:
        here, options = self._current, launch.options
        if launch.half is not None and launch.half.masks is not None:
            assert here.masks is not None
            here.masks.send(launch.half.masks)
            self._poller.launched()
            two_pass = options.two_pass_head and self._two_pass and not self._draws
            chain = self._half(here, (self._draws, two_pass), lambda: self._choice(here, two_pass))
        else:
            longest = next(reach for reach in reaches(self._max_context) if reach >= launch.longest)
            chain = self._half(here, longest, lambda: self._layers(here, longest))
        self._chains.run(chain, captured=options.graphs)

    @staticmethod
    def _half(here: Bucket, key: tuple[bool, bool] | int, make: Callable[[], tuple[Launch, ...]]) -> Chain:
        found = here.halves.get(key)
        if found is None:
            found = here.halves[key] = Chain(0, make())
        return found

    def _layers(self, here: Bucket, longest: int) -> tuple[Launch, ...]:
        return few_rows.prepare_layers(self._library, self._weights, here.buffers, replace(self._plan, longest=longest))

    def _choice(self, here: Bucket, two_pass: bool) -> tuple[Launch, ...]:
        draws = here.sampling if self._draws else None
        return few_rows.prepare_choice(
            self._library, self._weights, here.buffers, replace(self._plan, two_pass=two_pass), draws
        )


def why_not(parts: Parts) -> str | None:
    return why_no_kernels(parts) or few_rows_weights.why_not(parts)


def ask(parts: Parts) -> None:
    device = CapturedSteps(parts.kernels, parts.step_weights[0], parts.max_context, parts.max_sequences)
    device.ask()


class GraphDecode:
    lookahead_tokens = 2 * AHEAD - 1
    max_tokens_per_row = 2 * AHEAD

    def __init__(self, parts: Parts) -> None:
        with making():
            read, why_one_pass = parts.step_weights
            self._devices = [
                CapturedSteps(parts.kernels, read, parts.max_context, parts.max_sequences - first)
                for first in range(0, min(parts.max_sequences, MOST_PIPELINES * FEW), FEW)
            ]
            self._devices[0].build(BUCKETS[:1])
        self._pipelines = [Pipeline(parts.led(one), parts.sequences, parts.max_context) for one in self._devices]
        self.capacity = Capacity(few=len(self._pipelines))
        self.switches = kernel_switches(why_one_pass)

    def warmup(self, progress: Progress) -> None:
        with torch.inference_mode():
            self._devices[0].settle()
            for device in self._devices:
                device.warmup(progress)
            for device, pipeline in zip(self._devices, self._pipelines, strict=True):
                pipeline.lookahead = {size: plain_lookahead(device.seconds(size)) for size in device.sizes}

    def in_flight(self, rows: tuple[Row, ...]) -> dict[int, int]:
        return in_flight(self._pipelines, rows)

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        return run_share(self._pipelines[share.pipeline], share, options)

    def close(self) -> None:
        for device in self._devices:
            device.close()


class Constrained:
    """Decodes up to eight rows of one token, of which some have a constraint."""

    lookahead_tokens = 2
    max_tokens_per_row = 1

    def __init__(self, parts: Parts) -> None:
        with making():
            read, why_one_pass = parts.step_weights
            self._steps = MaskedSteps(parts.kernels, read, parts.max_context, parts.max_sequences)
        self._sequences = parts.sequences
        self._constraints = parts.constraints
        self._pipeline = MaskedPipeline(parts.led(self._steps), parts.sequences, parts.max_context, self)
        self.capacity = Capacity(masked=BUCKETS[-1])
        self.switches = kernel_switches(why_one_pass)

    def warmup(self, progress: Progress) -> None:
        pass

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        return self._pipeline.masked_step(share.rows, options)

    def mask(self, key: int) -> Mask:
        return self._constraints.mask(key)

    def ready(self, key: int) -> bool:
        return self._constraints.ready(key)

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        found = self._constraints.ended(found, [self._sequences.of(row) for row in rows])
        return self._constraints.follow(rows, found)

    def close(self) -> None:
        self._steps.close()
