"""Chooses the token after a prompt by the scores and noise of decode steps: for single prompts by kernels of few rows,
for several prompts of a pass by those of many. Rows that want log-probabilities are the sampler's."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial

import torch

from engine.execution import device_sampling as sampled
from engine.execution.batch_pipeline import BatchRow, Changes
from engine.execution.graphs.chains import Chain, Chains
from engine.execution.graphs.passes import MOST_CHUNKS
from engine.execution.graphs.row_state import PlainRows
from engine.execution.graphs.row_updates import RowUpdates
from engine.execution.pipeline import NO_TOKEN, Mask, RowState
from engine.execution.poller import IdleWork, RingPoller
from engine.execution.router import StepOptions
from engine.kernels import rows as states
from engine.kernels import sampling
from engine.kernels.build import Kernels
from engine.kernels.capture import Graphs, Mailbox
from engine.kernels.masks import TokenMasks
from engine.kernels.ring import all_entries, entry_of, words
from engine.kernels.tokens import Fed
from engine.model.layers.few_rows import ChainPlan, StepWeights, allocate, prepare_first
from engine.model.layers.many_tokens import ForwardPass
from engine.scheduling.plan import RowResult
from engine.scheduling.sequence_state import SequenceState

_NEVER = 2**31 - 1  # a position
_LAST_NUMBER = 1 << 30  # of an entry; numbers begin anew above it
_PASSES = 512  # whose entries are kept: of at most 1,024 sequences, at least three prompts end in each


def can_draw(sequence: SequenceState) -> bool:
    return sequence.logprobs is None


class FirstTokens:
    """Draws for one prompt at a time; at most `most` draws may be unread."""

    def __init__(self, library: Kernels, weights: StepWeights, fed: Fed, most: int, idle_work: IdleWork) -> None:
        device = weights.table.device
        self._rows = PlainRows(1, device)
        self._masks = TokenMasks(1, weights.head.rows, device)
        buffers = self._rows.placed(allocate(weights, 1, 1, most))
        buffers = replace(buffers, choice=replace(buffers.choice, masks=self._masks.arrived))
        self._entries, self._most = words(buffers.progress.ring), most
        self._sampling = sampling.allocate(1, weights.head.rows, device)
        self._chains = Chains(device)
        plan = ChainPlan.of(library.gpu)
        prepare = partial(prepare_first, library, weights, buffers, fed)
        self._greedy = Chain(0, prepare(plan, None))
        self._two_pass = None if weights.coarse is None else Chain(0, prepare(replace(plan, two_pass=True), None))
        self._drawing = Chain(0, prepare(plan, self._sampling))
        self._poller = RingPoller(nap=0.0, idle_work=idle_work)
        self._number = 0  # of the last entry

    def warmup(self) -> None:
        for chain in (self._greedy, self._two_pass, self._drawing):
            if chain is not None:
                self._chains.capture(chain).replay()  # an idle row
        self._sampling.rehearse()

    def draw(self, sequence: SequenceState, options: StepOptions, mask: Mask | None = None) -> int:
        """Draws behind the sequence's last chunk. Returns the number of the token's entry."""
        # The host looks for stop tokens: there may be more than a row's state holds.
        state = replace(RowState.of(sequence, len(sequence.token_ids) - 1, _NEVER), stops=())
        self._number = self._number % _LAST_NUMBER + 1
        self._rows.write((state,), self._number - 1)
        self._masks.send({} if mask is None else {0: mask})
        draws = sampled.needed(sequence)
        if draws:
            sampled.place(self._sampling, 0, sequence)
        two_pass = self._two_pass if options.two_pass_head else None
        self._poller.launched()
        self._chains.run(self._drawing if draws else two_pass or self._greedy, captured=options.graphs)
        return self._number

    def read(self, number: int) -> RowResult:
        """Returns no id where the scores were not numbers."""
        while (entry := entry_of(self._entries, 0, number, self._most)) is None:
            self._poller.wait()
        return result_of(entry)

    def close(self) -> None:
        self._chains.graphs.clear()


def result_of(entry: int) -> RowResult:
    return RowResult(() if entry >> 24 & NO_TOKEN else (entry & 0xFFFFFF,))


class ManyFirstTokens:
    """Draws for up to MOST_CHUNKS prompts at once, all of them `needs.chosen_by_kernels`."""

    def __init__(self, run: ForwardPass, vocabulary: int, graphs: Graphs, idle_work: IdleWork) -> None:
        self._run = run
        self._graphs = graphs
        device = run.ends.x.device
        self._rows = RowUpdates(run, vocabulary, MOST_CHUNKS, 1, device)
        ring = torch.zeros(_PASSES, MOST_CHUNKS, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._report = states.Report(torch.zeros(1, dtype=torch.int32, device=device), ring)
        self._ends = Mailbox(MOST_CHUNKS, device)
        self._logits = torch.zeros(MOST_CHUNKS, vocabulary, dtype=torch.float32, device=device)
        self._number = 0  # of the last draw
        self._poller = RingPoller(nap=0.0, idle_work=idle_work)

    def warmup(self) -> None:
        self._ends.send([0] * MOST_CHUNKS)
        self._graphs.capture(self, self._choose, rehearse=True).replay()
        self._rows.rehearse()
        torch.cuda.synchronize()
        self._number = int(self._report.number)

    def ask(self) -> None:
        self._choose()
        self._rows.ask()

    def _choose(self) -> None:
        run = self._run
        hidden = run.ends.x.index_select(0, self._ends.arrived)
        self._rows.choose(run.logits(hidden, self._logits), self._rows.states, sampled=True)
        run.go(states.finish(run.library, self._rows.states, self._report))

    def draw(self, sequences: Rows[SequenceState], ends: Rows[int], *, captured: bool) -> int:
        """`ends`: numbers of the pass's chunks that end the sequences."""
        self._ends.send([*ends, *[0] * (MOST_CHUNKS - len(ends))])
        self._rows.send(Changes(entered=tuple(first_token(at, sequence) for at, sequence in enumerate(sequences))))
        self._number += 1
        self._graphs.run(self, self._choose, captured=captured)
        self._rows.forget(len(sequences))
        self._poller.launched()
        return self._number

    def read(self, number: int, count: int) -> list[RowResult]:
        ring = self._report.ring[number % _PASSES, :count]
        while (entries := all_entries(ring, number)) is None:
            self._poller.wait()
        return [result_of(entry) for entry in entries]


def first_token(at: int, sequence: SequenceState) -> BatchRow:
    """Returns a row without pages, whose first step is its last."""
    place = len(sequence.token_ids)
    return BatchRow(sequence, at, place - 1, last=place, since=0, first=place - 1, pages=0, page_table_version=0)
