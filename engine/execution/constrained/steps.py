"""Both halves of a step for each batch bucket, and the device memory that they live in. A `pipeline.HalvesDevice`.

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
from engine.execution.constrained.pipeline import MOST_ROWS
from engine.execution.graph_decode.captured_steps import REACHES
from engine.execution.graph_decode.pipeline import RowState, bucket
from engine.execution.graph_decode.row_exchange import RING, State, fill, idle, placed, told, words
from engine.execution.needs import require_known
from engine.execution.patience import Patience
from engine.execution.token_masks import Mask, TokenMasks
from engine.kernels import sampling
from engine.kernels.build import Kernels
from engine.kernels.launch import Launch, launcher_of
from engine.kernels.sampling import Sampling
from engine.model.layers.few_rows import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    prepare_choice,
    prepare_layers,
    prepare_start,
)
from engine.settings import PAGE_SIZE


@dataclass(slots=True)
class Half:
    """One chain of launches."""

    chain: tuple[Launch, ...]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True, slots=True)
class Halves:
    """The steps of so many rows side by side, and their memory."""

    buffers: StepBuffers
    state: State
    start: Launch
    sampling: Sampling
    masks: TokenMasks
    ring: memoryview  # of 64-bit words [rows · RING]
    feeding: dict[int, Half] = field(default_factory=dict)  # by the longest row
    choosing: dict[str, Half] = field(default_factory=dict)  # plain, two passes, sampled


class HalvedSteps:
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
        self._buckets: dict[int, Halves] = {}
        self._here: Halves | None = None
        self._rows = 0  # that were written
        self._draws = False  # whether the sampling stages are needed here
        self._patience = Patience()
        self.graphs = True  # False: launches one by one
        self.two_pass = weights.coarse is not None  # where no row needs the sampling stages; the tokens are the same

    def _bucket(self, size: int) -> Halves:
        found = self._buckets.get(size)
        if found is None:
            found = self._buckets[size] = self._made(size)
        return found

    def _made(self, size: int) -> Halves:
        device = self._weights.table.device
        masks = TokenMasks(size, self._weights.head.rows, device)
        state = idle(size, device)
        buffers = placed(allocate(self._weights, size, self._pages, RING), state)
        buffers = replace(buffers, choice=replace(buffers.choice, masks=masks.arrived))
        return Halves(
            buffers=buffers,
            state=state,
            start=prepare_start(self._library, self._weights, buffers),
            sampling=self._sampling.first(size),
            masks=masks,
            ring=words(buffers.progress.ring),
        )

    def write(self, states: Rows[RowState], number: int) -> None:
        """These rows and no others."""
        here = self._here = self._bucket(bucket(len(states)))
        require_known((row.token for row in states), self._weights.table.shape[0])
        if number == 0:
            torch.cuda.synchronize()
            for each in self._buckets.values():
                each.buffers.progress.ring.zero_()
        here.state.block.copy_(fill(states, here.buffers.batch, number), non_blocking=True)
        self._rows = len(states)
        self._draws = any(sampled.needed(row.sequence) for row in states)
        for index, row in enumerate(states):
            self.add_pages(index, 0, row.pages)
            if self._draws:
                sampled.place(here.sampling, index, row.sequence)
        self._launcher.enqueue([here.start])

    def add_pages(self, index: int, first: int, pages: Rows[int]) -> None:
        """Pages [first, …) of a row."""
        row = self._current.buffers.places.pages[index]
        row[first : first + len(pages)].copy_(torch.tensor(pages, dtype=torch.int32), non_blocking=True)

    def feed(self, longest: int) -> None:
        """The layers of the next step."""
        here = self._current
        reach = next(length for length in self._lengths if length >= longest)
        half = here.feeding.get(reach)
        if half is None:
            plan = replace(self._plan, longest=reach)
            chain = prepare_layers(self._library, self._weights, here.buffers, plan)
            half = here.feeding[reach] = Half(chain)
        self._go(half)

    def draw(self, masks: Mapping[int, Mask]) -> None:
        """Its choice."""
        here = self._current
        here.masks.tell(masks)
        self._patience.launched()
        self._go(self._choice(here))

    def _choice(self, here: Halves) -> Half:
        two_pass = self.two_pass and self._weights.coarse is not None
        kind = "sampled" if self._draws else "two passes" if two_pass else "plain"
        half = here.choosing.get(kind)
        if half is None:
            plan = replace(self._plan, two_pass=kind == "two passes")
            draws = here.sampling if self._draws else None
            half = Half(prepare_choice(self._library, self._weights, here.buffers, plan, draws))
            here.choosing[kind] = half
        return half

    def _go(self, half: Half) -> None:
        if not self.graphs:
            self._launcher.enqueue(half.chain)
            return
        if half.graph is None:
            half.graph = self._recorder.record(partial(self._launcher.enqueue, half.chain))
        half.graph.replay()

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
    def _current(self) -> Halves:
        if self._here is None:
            raise EngineFailed("no rows were placed")
        return self._here
