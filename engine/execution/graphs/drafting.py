"""A draft model on a GPU: its steps in front of the step that verifies what they guess, and the captured passes that
compute what it lacks of a sequence, the prompt and the tokens of plain steps, before it guesses for the first time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.api import GREEDY, Stopping
from engine.execution.graphs.passes import Pass, PromptChunk, cheapest, passes
from engine.execution.graphs.prefill import CapturedPasses
from engine.execution.graphs.row_state import DRAFT_ROWS, Draws
from engine.execution.speculation.verifying import DraftProgress
from engine.execution.step_state import Parts
from engine.kernels import speculation
from engine.kernels.attention import RowPages
from engine.kernels.build import Kernels
from engine.kernels.capture import Graphs
from engine.kernels.launch import Launch
from engine.kernels.speculation import Guessing, Verified
from engine.kernels.tokens import FirstNorm
from engine.loading.progress import Progress
from engine.model.layers.few_rows import (
    ChainPlan,
    StepBuffers,
    StepWeights,
    allocate,
    first_norm,
    prepare_layers,
    prepare_step,
)
from engine.scheduling.plan import Admitted, Row
from engine.scheduling.sequence_state import SequenceState
from engine.scheduling.sequence_state import begin as begin_sequence
from engine.settings import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A draft model that the device runs, with the target's pages by number."""

    weights: StepWeights
    compute: Callable[[SequenceState, int], None]  # keys and values of so many tokens of a sequence
    computed: Callable[[SequenceState, int], None]  # verifying launches have computed so many


class DraftSteps:
    """The launches, and what they live in."""

    def __init__(self, weights: StepWeights, state: Verified, draws: tuple[Draws, ...], pages: torch.Tensor) -> None:
        """`draws`: what the rows of each kind of step choose by. `pages`: the target's table, a line a sequence."""
        self._weights = weights
        self._state = state
        sequences = pages.shape[0]
        room = allocate(weights, sequences * DRAFT_ROWS[0], 1, 1)
        room = replace(room, places=RowPages(room.places.position, pages))
        self._rooms: dict[int, StepBuffers] = {}  # by rows of a sequence
        for rows, each in zip(DRAFT_ROWS, draws, strict=True):
            part = room.first(sequences * rows)
            choice = replace(part.choice, temperature=each.temperature, noise_key=each.noise_key)
            self._rooms[rows] = replace(part, choice=choice)
        guesses = torch.full((sequences, state.laid - 1), -1, dtype=torch.int32, device=pages.device)
        self._guessing = Guessing(room.choice, room.places, first_norm(weights, room), guesses)

    def launches(self, library: Kernels, how: ChainPlan, count: int, ending: Launch) -> list[Launch]:
        """`count` guesses; `ending` lays out the target's rows."""
        found = [speculation.follow(library, self._state, self._guessing)] if count else [ending]
        found = [one.with_trigger(how.trigger) for one in found]
        layers: dict[int, tuple[Launch, ...]] = {}  # by rows
        for number in range(1, count + 1):
            rows = self._rows(number)
            taken = ending
            if number < count:
                taken = speculation.guess(library, self._state, self._guessing, rows, number)
            plan = replace(how, group=rows, two_pass=self._weights.coarse is not None)
            room = self._rooms[rows]
            if rows not in layers:
                layers[rows] = prepare_layers(library, self._weights, room, plan)
            found += prepare_step(library, self._weights, room, plan, None, (taken,), layers[rows])
        return found if how.dependent else [one.alone() for one in found]

    def drafted(self, library: Kernels, places: RowPages, first: FirstNorm, count: int) -> Launch:
        """Lays out the target's rows: the newest token and `count` guesses."""
        return speculation.drafted(library, self._state, places, first, self._guessing, self._rows(count), count)

    @staticmethod
    def _rows(number: int) -> int:
        """Returns the rows of a sequence in the step that makes guess `number`: the two newest tokens, or the last
        guess."""
        return DRAFT_ROWS[number > 1]


SIZES = (32, 128, 512)  # tokens of a graph
_TIMINGS = 3  # of which the shortest counts


class DraftPrefill:
    """Passes over a draft model, and how far they have come with each sequence."""

    def __init__(self, draft: Parts) -> None:
        """`draft`: the draft model as if it were served, with the target's sequences."""
        self._parts = draft
        self._graphs = Graphs(draft.model.placement.device)
        self._passes = CapturedPasses(draft, self._graphs, SIZES, (1,))
        self.progress = DraftProgress()
        self._seconds = dict.fromkeys(SIZES, 0.0)  # of a pass

    def ask(self) -> None:
        """Asks for every kernel that there will be."""
        self._passes.ask()

    def warmup(self, progress: Progress) -> None:
        """Captures the passes and measures them. Overwrites the first pages."""
        self._passes.warmup(progress)
        for size in SIZES:
            count = min(size, self._parts.pool.pages * PAGE_SIZE, self._parts.max_context - 1)
            self._seconds[size] = min(self._timed(count) for _ in range(_TIMINGS))

    def _timed(self, count: int) -> float:
        """Times a pass of `count` tokens of no sequence."""
        stand_in = begin_sequence(Admitted(0, 0, (0,) * count, count, GREEDY, Stopping(max_tokens=1)))
        stand_in.set_pages(0, tuple(range(-(-count // PAGE_SIZE))))
        row = Row(0, 0, 0, count, False)
        began = time.perf_counter()
        self._passes.replay(Pass([PromptChunk(row, stand_in, 0, np.zeros(count, dtype=np.int32), 0)], count))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def seconds(self, sequence: SequenceState) -> float:
        """What `compute` of the whole sequence takes."""
        missing = len(sequence.token_ids) - self.progress.tokens(sequence)
        return cheapest(self._seconds, missing)[0] if missing > 0 else 0.0

    def compute(self, sequence: SequenceState, until: int) -> None:
        """Keys and values of its first `until` tokens, as far as they are not there. Where that fails, it has computed
        nothing."""
        begin = self.progress.tokens(sequence)
        if until <= begin:
            return
        row = Row(sequence.key, sequence.slot, begin, until - begin, False)
        self.progress.forget(sequence)
        for one in passes((row,), self._parts.sequences, self._seconds, self._parts.model.config.vocab_size):
            self._passes.replay(one)
        self.progress.computed(sequence, until)

    def close(self) -> None:
        self._graphs.clear()
