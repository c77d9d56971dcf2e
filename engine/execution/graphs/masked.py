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

from engine.execution.graphs import decode, weights
from engine.execution.graphs.decode import RowSteps
from engine.execution.graphs.row_state import StateBlock, TokenMasks, words
from engine.execution.pipeline import BUCKETS, Mask, MaskedPipeline, StepLaunch
from engine.execution.router import Capacity, StepOptions
from engine.execution.step_state import Parts, Unfit
from engine.kernels.build import BuildError
from engine.kernels.launch import Launch
from engine.kernels.sampling import Sampling
from engine.loading.progress import Progress
from engine.model.layers.few_rows import (
    StepBuffers,
    prepare_choice,
    prepare_layers,
    prepare_start,
)
from engine.scheduling.plan import Row, RowResult, Share

MOST_ROWS = BUCKETS[-1]
why_not = decode.why_not


@dataclass(slots=True)
class MaskedChain:
    """Launches of kernels, captured when they are first wanted."""

    launches: tuple[Launch, ...]
    graph: torch.cuda.CUDAGraph | None = None


@dataclass(frozen=True, slots=True)
class MaskedBucket:
    """The halves of a step of a bucket's rows, and their memory."""

    buffers: StepBuffers
    state: StateBlock
    start: Launch
    sampling: Sampling
    masks: TokenMasks
    ring: memoryview  # of 64-bit words [rows · RING]
    feeding: dict[int, MaskedChain] = field(default_factory=dict)  # by the longest row
    choosing: dict[str, MaskedChain] = field(default_factory=dict)  # plain, two passes, sampled


class MaskedSteps(RowSteps[MaskedBucket]):
    """Masked steps. Buckets are made and captured when they are first wanted."""

    def _made(self, size: int) -> MaskedBucket:
        masks = TokenMasks(size, self._weights.head.rows, self._weights.table.device)
        buffers, state = self._room(size)
        buffers = replace(buffers, choice=replace(buffers.choice, masks=masks.arrived))
        return MaskedBucket(
            buffers=buffers,
            state=state,
            start=prepare_start(self._library, self._weights, buffers),
            sampling=self._sampling.first(size),
            masks=masks,
            ring=words(buffers.progress.ring),
        )

    def launch(self, launch: StepLaunch) -> None:
        """Enqueues the layers of the next step, or, given masks, the choice of its tokens."""
        here, masks = self._current, None if launch.half is None else launch.half.masks
        if masks is None:
            self._go(self._layers(here, launch.longest), launch.options)
            return
        here.masks.tell(masks)
        self._poller.launched()
        self._go(self._choice(here, launch.options), launch.options)

    def _layers(self, here: MaskedBucket, longest: int) -> MaskedChain:
        reach = next(length for length in self._lengths if length >= longest)
        found = here.feeding.get(reach)
        if found is None:
            plan = replace(self._plan, longest=reach)
            found = here.feeding[reach] = MaskedChain(prepare_layers(self._library, self._weights, here.buffers, plan))
        return found

    def _choice(self, here: MaskedBucket, options: StepOptions) -> MaskedChain:
        two_pass = options.two_pass_head and self._weights.coarse is not None
        kind = "sampled" if self._draws else "two passes" if two_pass else "plain"
        found = here.choosing.get(kind)
        if found is None:
            plan = replace(self._plan, two_pass=kind == "two passes")
            draws = here.sampling if self._draws else None
            found = MaskedChain(prepare_choice(self._library, self._weights, here.buffers, plan, draws))
            here.choosing[kind] = found
        return found

    def _go(self, chain: MaskedChain, options: StepOptions) -> None:
        if not options.graphs:
            self._launcher.enqueue(chain.launches)
            return
        if chain.graph is None:
            chain.graph = self._recorder.record(partial(self._launcher.enqueue, chain.launches))
        chain.graph.replay()


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
        return self._constraints.mask(key)

    def ready(self, key: int) -> bool:
        return self._constraints.ready(key)

    def take(self, rows: Rows[Row], found: dict[int, RowResult]) -> dict[int, RowResult]:
        found = self._constraints.ended(found, [self._sequences.of(row) for row in rows])
        return self._constraints.follow(rows, found)

    def close(self) -> None:
        """Gives the graphs back."""
        self._steps.close()
