"""Runs a draft model on a GPU. Its steps precede the step that verifies its guesses; captured passes compute what it
lacks of a sequence before its first guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.api import GREEDY, Stopping
from engine.execution.graphs.passes import Pass, PromptChunk, cheapest, passes
from engine.execution.graphs.prefill import CapturedPasses
from engine.execution.speculation.verifying import DraftProgress
from engine.execution.step_state import Parts
from engine.kernels.capture import Graphs
from engine.loading.progress import Progress
from engine.model.layers.few_rows import (
    StepWeights,
)
from engine.scheduling.plan import Admitted, Row
from engine.scheduling.sequence_state import SequenceState
from engine.scheduling.sequence_state import begin as begin_sequence
from engine.settings import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A draft model whose pages have the numbers of the target's."""

    weights: StepWeights
    compute: Callable[[SequenceState, int], None]  # keys and values of so many tokens of a sequence
    computed: Callable[[SequenceState, int], None]  # verifying launches have computed so many


SIZES = (32, 128, 512)  # tokens of a graph
_TIMINGS = 3  # of which the shortest counts


class DraftPrefill:
    """Feeds sequences to a draft model, and keeps how far each has come."""

    def __init__(self, draft: Parts) -> None:
        """`draft`: the draft model as if it were served, with the target's sequences."""
        self._parts = draft
        self._graphs = Graphs(draft.model.placement.device)
        self._passes = CapturedPasses(draft, self._graphs, SIZES, (1,))
        self.progress = DraftProgress()
        self._seconds = dict.fromkeys(SIZES, 0.0)  # of a pass

    def ask(self) -> None:
        self._passes.ask()

    def warmup(self, progress: Progress) -> None:
        """Overwrites the first pages."""
        self._passes.warmup(progress)
        for size in SIZES:
            count = min(size, self._parts.pool.pages * PAGE_SIZE, self._parts.max_context - 1)
            self._seconds[size] = min(self._timed(count) for _ in range(_TIMINGS))

    def _timed(self, count: int) -> float:
        stand_in = begin_sequence(Admitted(0, 0, (0,) * count, count, GREEDY, Stopping(max_tokens=1)))
        stand_in.set_pages(0, tuple(range(-(-count // PAGE_SIZE))))
        row = Row(0, 0, 0, count, False)
        began = time.perf_counter()
        self._passes.replay(Pass([PromptChunk(row, stand_in, 0, np.zeros(count, dtype=np.int32), 0)], count))
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def seconds(self, sequence: SequenceState) -> float:
        missing = len(sequence.token_ids) - self.progress.tokens(sequence)
        return cheapest(self._seconds, missing)[0] if missing > 0 else 0.0

    def compute(self, sequence: SequenceState, until: int) -> None:
        """A failure discards all that was computed of the sequence."""
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
