"""Steps in which some row has a constraint, as captured graphs of two halves: a mask comes between them.

Buckets are made and graphs captured when they are first wanted, in some ten milliseconds each: most servers are never
asked for a constraint.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

from engine.execution.graphs import decode
from engine.execution.graphs.chains import Chain, reaches
from engine.execution.graphs.decode import Bucket, RowSteps
from engine.execution.pipeline import BUCKETS, Mask, MaskedPipeline, StepLaunch
from engine.execution.router import Capacity, StepOptions
from engine.execution.step_state import Parts, kernel_switches, making
from engine.kernels.launch import Launch
from engine.loading.progress import Progress
from engine.model.layers.few_rows import prepare_choice, prepare_layers
from engine.scheduling.plan import Row, RowResult, Share

why_not = decode.why_not


class MaskedSteps(RowSteps):
    """Launches halves of steps: the layers, or, given masks, the choice of tokens."""

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
        return prepare_layers(self._library, self._weights, here.buffers, replace(self._plan, longest=longest))

    def _choice(self, here: Bucket, two_pass: bool) -> tuple[Launch, ...]:
        draws = here.sampling if self._draws else None
        return prepare_choice(self._library, self._weights, here.buffers, replace(self._plan, two_pass=two_pass), draws)


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
        self._pipeline = MaskedPipeline(self._steps, parts.sequences, parts.max_context, self)
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
