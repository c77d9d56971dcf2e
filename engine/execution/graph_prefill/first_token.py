"""The token after a prompt, chosen by the kernels that choose in decode steps: the same scores, the same noise. Rows
that want log-probabilities are the sampler's."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial

import torch

from engine.errors import EngineFailed
from engine.execution import device_sampling as sampled
from engine.execution.capture import Recorder
from engine.execution.graph_decode.pipeline import NO_TOKEN, RowState
from engine.execution.graph_decode.row_exchange import fill, idle, placed, words
from engine.execution.token_masks import Mask, TokenMasks
from engine.kernels import sampling
from engine.kernels.build import Kernels
from engine.kernels.launch import launcher_of
from engine.kernels.step import ChainPlan, StepWeights, allocate, prepare_first
from engine.kernels.tokens import Fed
from engine.sampling.noise import seed_key
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

_NEVER = 2**31 - 1  # a position
_LAST_NUMBER = 1 << 30  # of an entry; numbers begin anew above it


def can_draw(sequence: SequenceState) -> bool:
    """Whether the kernels choose its tokens."""
    return sequence.logprobs is None


class FirstTokens:
    """Draws for one prompt after another; no more than `most` may be unread."""

    def __init__(self, library: Kernels, weights: StepWeights, fed: Fed, most: int) -> None:
        device = weights.table.device
        plan = ChainPlan(library.gpu.multiprocessors, dependent=library.gpu.overlap)
        self._state = idle(1, device)
        self._masks = TokenMasks(1, weights.head.rows, device)
        buffers = placed(allocate(weights, 1, 1, most), self._state)
        buffers = replace(buffers, choice=replace(buffers.choice, masks=self._masks.arrived))
        self._ring = buffers.progress.ring
        self._sampling = sampling.allocate(1, weights.head.rows, device)
        self._chains = {
            draws: prepare_first(library, weights, buffers, fed, plan, self._sampling if draws else None)
            for draws in (False, True)
        }
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._launcher = launcher_of(device)
        self._number = 0  # of the last entry
        self.captured = True  # False: launches one by one

    def warmup(self, recorder: Recorder) -> None:
        """Captures, and does each thing once."""
        for draws, chain in self._chains.items():
            self._graphs[draws] = recorder.record(partial(self._launcher.enqueue, chain))
            self._graphs[draws].replay()  # an idle row
        self._sampling.rehearse()

    def draw(self, sequence: SequenceState, mask: Mask | None = None) -> int:
        """Behind the last chunk of all its tokens, of those that the mask allows; the number that the new token's entry
        will have."""
        one = sequence.sampling
        state = RowState(
            token=0,
            position=len(sequence.token_ids) - 1,
            last_position=_NEVER,
            stops=(),
            temperature=one.temperature,
            noise_key=seed_key(one.seed),
            pages=(),
            sequence=sequence,
            unreported=(),
        )
        self._number = self._number % _LAST_NUMBER + 1
        self._state.block.copy_(fill((state,), 1, self._number - 1), non_blocking=True)
        self._masks.tell({} if mask is None else {0: mask})
        draws = sampled.needed(sequence)
        if draws:
            sampled.place(self._sampling, 0, sequence)
        if self.captured and draws in self._graphs:
            self._graphs[draws].replay()
        else:
            self._launcher.enqueue(self._chains[draws])
        return self._number

    def read(self, numbers: Rows[int]) -> list[RowResult]:
        """An id for each, or none where the scores were no numbers. The device has ended."""
        entries = words(self._ring)
        return [result_of(entries[(number - 1) % len(entries)], number) for number in numbers]

    def close(self) -> None:
        """Drops the graphs."""
        self._graphs.clear()


def result_of(entry: int, number: int) -> RowResult:
    """What a 64-bit entry of a ring says, which must be that of this number."""
    if entry >> 32 & 0xFFFFFFFF != number & 0xFFFFFFFF:
        raise EngineFailed("the device chose no token after a prompt")
    return RowResult(() if entry >> 24 & NO_TOKEN else (entry & 0xFFFFFF,))
