"""The token after a prompt, chosen by the kernels that choose in decode steps: the same scores, the same noise. Rows
that want log-probabilities are the sampler's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.execution import device_sampling as sampled
from engine.execution.capture import Recorder
from engine.execution.graph_decode.pipeline import NO_TOKEN, RowState
from engine.execution.graph_decode.row_exchange import fill, idle, placed, told, words
from engine.execution.meanwhile import Meanwhile
from engine.execution.patience import Patience
from engine.execution.token_masks import Mask, TokenMasks
from engine.kernels import sampling
from engine.kernels.build import Kernels
from engine.kernels.launch import Launch, launcher_of
from engine.kernels.tokens import Fed
from engine.model.layers.few_rows import ChainPlan, StepWeights, allocate, prepare_first
from engine.sampling.noise import seed_key
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

_NEVER = 2**31 - 1  # a position
_LAST_NUMBER = 1 << 30  # of an entry; numbers begin anew above it


def can_draw(sequence: SequenceState) -> bool:
    """Whether the kernels choose its tokens."""
    return sequence.logprobs is None


@dataclass(slots=True)
class Chain:
    """One way of choosing."""

    launches: tuple[Launch, ...]
    graph: torch.cuda.CUDAGraph | None = None  # the same, captured


class FirstTokens:
    """Draws for one prompt after another; no more than `most` may be unread."""

    def __init__(self, library: Kernels, weights: StepWeights, fed: Fed, most: int, meanwhile: Meanwhile) -> None:
        device = weights.table.device
        self._state = idle(1, device)
        self._masks = TokenMasks(1, weights.head.rows, device)
        buffers = placed(allocate(weights, 1, 1, most), self._state)
        buffers = replace(buffers, choice=replace(buffers.choice, masks=self._masks.arrived))
        self._entries, self._most = words(buffers.progress.ring), most
        self._sampling = sampling.allocate(1, weights.head.rows, device)
        plain = ChainPlan(library.gpu.multiprocessors, dependent=library.gpu.overlap)

        def chain(plan: ChainPlan, how: sampling.Sampling | None = None) -> Chain:
            return Chain(prepare_first(library, weights, buffers, fed, plan, how))

        self._greedy = chain(plain)
        self._two_pass = None if weights.coarse is None else chain(replace(plain, two_pass=True))
        self._drawing = chain(plain, self._sampling)
        self._launcher = launcher_of(device)
        self._patience = Patience(nap=0.0, meanwhile=meanwhile)
        self._number = 0  # of the last entry
        self.captured = True  # False: launches one by one
        self.two_pass = True  # False: the whole head is read

    def warmup(self, recorder: Recorder) -> None:
        """Captures, and does each thing once."""
        for chain in (self._greedy, self._two_pass, self._drawing):
            if chain is not None:
                chain.graph = recorder.record(partial(self._launcher.enqueue, chain.launches))
                chain.graph.replay()  # an idle row
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
        self._launch(self._drawing if draws else (self._two_pass if self.two_pass else None) or self._greedy)
        return self._number

    def _launch(self, chain: Chain) -> None:
        self._patience.launched()
        if self.captured and chain.graph is not None:
            chain.graph.replay()
        else:
            self._launcher.enqueue(chain.launches)

    def read(self, number: int) -> RowResult:
        """An id, or none where the scores were no numbers. Waits for it."""
        while (entry := told(self._entries, 0, number, self._most)) is None:
            self._patience.wait()
        return result_of(entry)

    def close(self) -> None:
        """Drops the graphs."""
        for chain in (self._greedy, self._two_pass, self._drawing):
            if chain is not None:
                chain.graph = None


def result_of(entry: int) -> RowResult:
    """What flags << 24 | token says."""
    return RowResult(() if entry >> 24 & NO_TOKEN else (entry & 0xFFFFFF,))
