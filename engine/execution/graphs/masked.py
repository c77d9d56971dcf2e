"""Steps in which some row has a constraint, as captured graphs of two halves: a mask comes between them.

Its kernels are those of `graph_decode`, which has compiled them. Graphs are captured when they are first wanted, in
some ten milliseconds each, so that a start does not take longer for what may never be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.capture import Recorder
from engine.execution.graphs import decode, weights
from engine.execution.graphs.decode import REACHES
from engine.execution.graphs.row_state import RING, State, entry_of, fill, idle, placed, words
from engine.execution.needs import require_known
from engine.execution.pipeline import BUCKETS, Launch, Mask, MaskedPipeline, MorePages, Rewrite, bucket
from engine.execution.polling import RingPoller
from engine.execution.router import Capacity, StepOptions
from engine.execution.step_state import Parts, Unfit
from engine.execution.token_masks import TokenMasks
from engine.kernels import sampling
from engine.kernels.build import BuildError, Kernels
from engine.kernels.launch import Launch as KernelLaunch
from engine.kernels.launch import launcher_of
from engine.kernels.sampling import Sampling
from engine.kernels.step import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    prepare_choice,
    prepare_layers,
    prepare_start,
)
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult, Share
from engine.settings import PAGE_SIZE

MOST_ROWS = BUCKETS[-1]
why_not = decode.why_not


@dataclass(slots=True)
class Chain:
    """Launches of kernels, captured when they are first wanted."""

    launches: tuple[KernelLaunch, ...]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True, slots=True)
class MaskedBucket:
    """The halves of a step of so many rows, and their memory."""

    buffers: StepBuffers
    state: State
    start: KernelLaunch
    sampling: Sampling
    masks: TokenMasks
    ring: memoryview  # of 64-bit words [rows · RING]
    feeding: dict[int, Chain] = field(default_factory=dict)  # by the longest row
    choosing: dict[str, Chain] = field(default_factory=dict)  # plain, two passes, sampled


class MaskedSteps:
    """All batch buckets. Calls go to torch's current stream."""

    def __init__(self, library: Kernels, weights: StepWeights, max_context: int, most_rows: int) -> None:
        self._library = library
        self._weights = weights
        self._pages = -(-max_context // PAGE_SIZE)
        self._lengths = [*(reach for reach in REACHES if reach < max_context), max_context]
        device = weights.table.device
        self._plan = ChainPlan(library.gpu.multiprocessors, dependent=library.gpu.overlap)
        self._launcher = launcher_of(device)
        self._recorder = Recorder(device)
        # All buckets', one at a time.
        self._sampling = sampling.allocate(bucket(min(most_rows, MOST_ROWS)), weights.head.rows, device)
        self._buckets: dict[int, MaskedBucket] = {}
        self._here: MaskedBucket | None = None
        self._draws = False  # whether the sampling stages are needed here
        self._poller = RingPoller()

    def _bucket(self, size: int) -> MaskedBucket:
        found = self._buckets.get(size)
        if found is None:
            found = self._buckets[size] = self._made(size)
        return found

    def _made(self, size: int) -> MaskedBucket:
        device = self._weights.table.device
        masks = TokenMasks(size, self._weights.head.rows, device)
        state = idle(size, device)
        buffers = placed(allocate(self._weights, size, self._pages, RING), state)
        buffers = replace(buffers, choice=replace(buffers.choice, masks=masks.arrived))
        return MaskedBucket(
            buffers=buffers,
            state=state,
            start=prepare_start(self._library, self._weights, buffers),
            sampling=self._sampling.first(size),
            masks=masks,
            ring=words(buffers.progress.ring),
        )

    def update(self, update: Rewrite | MorePages) -> None:
        """Writes these rows and no others, or tells a row of more pages."""
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
        self._draws = any(sampled.needed(row.sequence) for row in rows)
        for index, row in enumerate(rows):
            self._add_pages(index, 0, row.pages)
            if self._draws:
                sampled.place(here.sampling, index, row.sequence)
        self._launcher.enqueue([here.start])

    def _add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        row = self._current.buffers.places.pages[index]
        row[first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def launch(self, launch: Launch) -> None:
        """Enqueues the layers of the next step, or, given masks, the choice of its tokens."""
        here, masks = self._current, None if launch.half is None else launch.half.masks
        if masks is None:
            self._go(self._layers(here, launch.longest), launch.options)
            return
        here.masks.tell(masks)
        self._poller.launched()
        self._go(self._choice(here, launch.options), launch.options)

    def _layers(self, here: MaskedBucket, longest: int) -> Chain:
        reach = next(length for length in self._lengths if length >= longest)
        found = here.feeding.get(reach)
        if found is None:
            plan = replace(self._plan, longest=reach)
            found = here.feeding[reach] = Chain(prepare_layers(self._library, self._weights, here.buffers, plan))
        return found

    def _choice(self, here: MaskedBucket, options: StepOptions) -> Chain:
        two_pass = options.two_pass_head and self._weights.coarse is not None
        kind = "sampled" if self._draws else "two passes" if two_pass else "plain"
        found = here.choosing.get(kind)
        if found is None:
            plan = replace(self._plan, two_pass=kind == "two passes")
            draws = here.sampling if self._draws else None
            found = Chain(prepare_choice(self._library, self._weights, here.buffers, plan, draws))
            here.choosing[kind] = found
        return found

    def _go(self, chain: Chain, options: StepOptions) -> None:
        if not options.graphs:
            self._launcher.enqueue(chain.launches)
            return
        if chain.graph is None:
            chain.graph = self._recorder.record(partial(self._launcher.enqueue, chain.launches))
        chain.graph.replay()

    def poll(self, index: int, number: int) -> int | None:
        """See `pipeline.RowDevice`."""
        return entry_of(self._current.ring, index, number)

    def wait(self) -> None:
        """See `pipeline.RowDevice`."""
        self._poller.wait()

    def close(self) -> None:
        """Gives the graphs back."""
        torch.cuda.synchronize()
        self._buckets.clear()
        self._here = None

    @property
    def _current(self) -> MaskedBucket:
        if self._here is None:
            raise EngineFailed("no rows were placed")
        return self._here


class Constrained:
    """Decodes up to eight rows of one token, where one has a constraint: those without one among them. An
    `Executor`."""

    lookahead_tokens = 2
    max_tokens_per_row = 1

    def __init__(self, parts: Parts) -> None:
        with torch.inference_mode():
            try:
                read, self._why_one_pass = weights.shared(parts)
                self._steps = MaskedSteps(parts.kernels, read, parts.max_context, parts.max_sequences)
            except BuildError as failure:
                raise Unfit(" ".join(str(failure).split())[:300]) from failure
        self._sequences = parts.sequences
        self._constraints = parts.constraints
        self._pipeline = MaskedPipeline(self._steps, parts.sequences, parts.max_context, self)

    @property
    def capacity(self) -> Capacity:
        """Returns the most rows of a step."""
        return Capacity(masked=MOST_ROWS)

    @property
    def switches(self) -> Mapping[str, str | None]:
        """Returns the options that it obeys, as `GraphDecode` does."""
        return {"graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def warmup(self, progress: Progress) -> None:
        """Prepares nothing: most servers are never asked for a constraint."""

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        """Returns one token for each row."""
        return self._pipeline.masked_step(share.rows, options)

    def mask(self, key: int) -> Mask:
        """See `pipeline.Grammar`."""
        return self._constraints.mask(key)

    def ready(self, key: int) -> bool:
        """See `pipeline.Grammar`."""
        return self._constraints.ready(key)

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        """See `pipeline.Grammar`."""
        found = self._constraints.ended(found, [self._sequences.of(row) for row in rows])
        return self._constraints.follow(rows, found)

    def close(self) -> None:
        """Gives the graphs back."""
        self._steps.close()
