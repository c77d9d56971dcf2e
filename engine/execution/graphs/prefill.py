"""Computes prompts by captured graphs, one for each size. Chunks of many sequences lie side by side in a pass. Their
positions, lengths and pages lie in device memory, so that one graph serves every prompt: whole, in chunks, or behind a
cached prefix."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from engine.api import GREEDY, Stopping
from engine.execution.graphs.first_tokens import FirstTokens, ManyFirstTokens, can_draw
from engine.execution.graphs.passes import MOST_CHUNKS, TABLE, Pass, PassLayout, PromptChunk, cheapest, passes
from engine.execution.needs import chosen_by_kernels
from engine.execution.router import ALL_OPTIONS, Capacity, StepOptions
from engine.execution.speculation.verifying import DraftProgress
from engine.execution.step_state import Parts, Unfit, kernel_switches, making
from engine.kernels import prefill as ops
from engine.kernels.capture import Graphs, Mailbox, device_seconds
from engine.kernels.tokens import Fed
from engine.loading.progress import Progress
from engine.model.layers import few_rows_weights
from engine.model.layers.few_rows import StepWeights
from engine.model.layers.many_tokens import Ends, ForwardPass
from engine.model.layers.token_attention import PassAttention
from engine.scheduling.plan import Admitted, Row, RowResult, Share
from engine.scheduling.sequence_state import SequenceState
from engine.scheduling.sequence_state import begin as begin_sequence
from engine.settings import PAGE_SIZE

SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # tokens of a graph
DRAFT_SIZES = (32, 128, 512)  # likewise, of a draft model
_TIMINGS = 3  # of a draft model's pass; the shortest counts
_FEW = 2  # first tokens that are drawn one by one: each reads the head, all together are slower for one
_ROUNDS = 2  # of timing all sizes; the least counts


class CapturedPasses:
    """Leaves the state of each chunk's last token in `run.ends`."""

    def __init__(self, parts: Parts, graphs: Graphs, sizes: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        """`sizes`: tokens of a graph, smallest first. `chunks`: sequences of a graph, most first."""
        self.sizes, self._chunks, self._graphs = sizes, chunks, graphs
        device = parts.model.placement.device
        self.run = ForwardPass(parts, sizes, chunks[0])
        pages = -(-parts.max_context // PAGE_SIZE)
        self._mailbox = Mailbox(PassLayout(sizes[-1], chunks[0]).pages + chunks[0] * pages, device)
        self._splits = ops.splits_of(self.run.layout, (*sizes, *chunks), device, chunks[0], self.run.gpu)
        self.costs: Mapping[int, float] = {size: size for size in sizes}  # by size; seconds, once they are measured

    @property
    def arrived(self) -> torch.Tensor:
        """Holds the last pass's message, laid out by `PassLayout`."""
        return self._mailbox.arrived

    def warmup(self, progress: Progress) -> None:
        layouts = [PassLayout(size, chunks) for size in reversed(self.sizes) for chunks in self._chunks]
        rehearsed: set[int] = set()  # numbers of tokens that products have
        for done, layout in enumerate(layouts):
            progress("prefill", done, len(layouts))
            self._send_nothing(layout)
            tokens = {layout.size, layout.chunks}
            self._graphs.capture(layout, partial(self._forward, layout), rehearse=not tokens <= rehearsed)
            rehearsed |= tokens
        self.costs = self._measured()
        progress("prefill", len(layouts), len(layouts))

    def _send_nothing(self, layout: PassLayout) -> None:
        """Sends a pass of no tokens, which writes to no page."""
        empty = np.zeros(layout.pages, dtype=np.int32)
        empty[layout.positions : layout.owners] = -1
        self._mailbox.send(empty)

    def _measured(self) -> dict[int, float]:
        rounds = [[self._seconds(PassLayout(size, self._chunks[-1])) for size in self.sizes] for _ in range(_ROUNDS)]
        return dict(zip(self.sizes, map(min, *rounds), strict=True))

    def _seconds(self, layout: PassLayout) -> float:
        """Leaves out attention, which takes as long however tokens are shared out."""
        self._send_nothing(layout)
        return device_seconds(partial(self._graphs.run, layout, partial(self._forward, layout)))

    def ask(self) -> None:
        for size in self.sizes:
            for chunks in self._chunks:
                self._forward(PassLayout(size, chunks))

    def replay(self, one: Pass, options: StepOptions = ALL_OPTIONS) -> None:
        size = next(size for size in self.sizes if one.tokens <= size)
        layout = PassLayout(size, min(chunks for chunks in self._chunks if len(one.chunks) <= chunks))
        self._mailbox.send(layout.words(one))
        self._graphs.run(layout, partial(self._forward, layout), captured=options.graphs)

    def _forward(self, layout: PassLayout) -> None:
        arrived, run = self._mailbox.arrived, self.run
        table, ends = arrived[TABLE : layout.ends].view(-1, 4), arrived[layout.ends : layout.ids].view(-1, 4)
        pages = arrived[layout.pages :].view(-1, 1)
        places = ops.TokenPlaces(
            arrived[layout.positions : layout.owners], pages, arrived[layout.owners : layout.pages]
        )
        fed = ops.Chunk(place=arrived, tokens=arrived[layout.ids : layout.positions])
        attention = PassAttention(run, places, ops.Chunks(table, pages), self._splits)
        alone = replace(attention, chunks=ops.Chunks(ends, pages))
        run.enqueue(fed, attention, Ends(table, alone))


class GraphPrefill:
    """An `Executor` that feeds prompts and draws the tokens behind them."""

    lookahead_tokens = 0
    max_tokens_per_row = 1

    def __init__(self, parts: Parts, sizes: tuple[int, ...] = SIZES) -> None:
        """Leaves out `sizes` that no step fills."""
        self._parts = parts
        with making():
            self._graphs = Graphs(parts.model.placement.device)
            sizes = filled(sizes, parts.max_batch_tokens)
            self.passes = CapturedPasses(parts, self._graphs, sizes, (MOST_CHUNKS, 1))
            self._one: FirstTokens | None = None  # where the kernels of decode steps read this model
            why_one_pass = few_rows_weights.why_not(parts)
            if why_one_pass is None:
                read, why_one_pass = parts.step_weights
                fed = Fed(self.passes.run.ends.residual, self.passes.arrived[1:])
                self._one = FirstTokens(parts.kernels, read, fed, parts.max_sequences, parts.idle_work)
            vocabulary = parts.model.config.vocab_size
            self._many = ManyFirstTokens(self.passes.run, vocabulary, self._graphs, parts.idle_work)
        self.capacity = Capacity(prompts=True)
        self.switches = kernel_switches(why_one_pass)

    def warmup(self, progress: Progress) -> None:
        """Raises Unfit where a size cannot be captured."""
        try:
            with making():
                self.passes.warmup(progress)
                if self._one is not None:
                    self._one.warmup()
                self._many.warmup()
                torch.cuda.synchronize()
        except Unfit:
            self.close()
            raise

    def ask(self) -> None:
        self.passes.ask()
        self._many.ask()

    def run(self, share: Share, options: StepOptions) -> dict[int, RowResult]:
        drawn: list[tuple[Row, int]] = []
        together: list[tuple[list[Row], int]] = []
        kept: list[tuple[Row, torch.Tensor]] = []  # with the last token's hidden state, normed
        vocabulary = self._parts.model.config.vocab_size
        for one in passes(share.rows, self._parts.sequences, self.passes.costs, vocabulary):
            self.passes.replay(one, options)
            ended = [(at, chunk) for at, chunk in enumerate(one.chunks) if chunk.whole and chunk.row.sample]
            alike = [(at, chunk) for at, chunk in ended if chosen_by_kernels(chunk.sequence)]
            if len(alike) > _FEW:
                number = self._many.draw(
                    [chunk.sequence for _, chunk in alike], [at for at, _ in alike], captured=options.graphs
                )
                together.append(([chunk.row for _, chunk in alike], number))
                ended = [(at, chunk) for at, chunk in ended if not chosen_by_kernels(chunk.sequence)]
            last = len(one.chunks) - 1
            drawn += self._drawn([end for end in ended if self._draws(end[1])], last, options)
            kept += [
                (chunk.row, self.passes.run.ends.x[at : at + 1].clone())
                for at, chunk in ended
                if not self._draws(chunk)
            ]
        return self._sampled(kept) | self._read(drawn, together)

    def _draws(self, chunk: PromptChunk) -> bool:
        """Returns whether kernels of few rows choose the token behind the chunk."""
        return self._one is not None and can_draw(chunk.sequence)

    def _drawn(self, ended: Rows[tuple[int, PromptChunk]], last: int, options: StepOptions) -> list[tuple[Row, int]]:
        """`ended`: chunks by their numbers in the pass, whose last is `last`. Returns the number of each draw."""
        found: list[tuple[Row, int]] = []
        constraints, known = self._parts.constraints, last  # what `draw` reads, unless told otherwise
        for at, chunk in ended:
            assert self._one is not None
            if at != known:
                self.passes.arrived[1].fill_(at + 1)
                known = at
            key = chunk.row.key
            mask = constraints.mask(key) if constraints.constrained(key) else None
            found.append((chunk.row, self._one.draw(chunk.sequence, options, mask)))
        return found

    def _sampled(self, kept: Rows[tuple[Row, torch.Tensor]]) -> dict[int, RowResult]:
        if not kept:
            return {}
        of = self._parts.sequences.of
        logits = self._parts.model.weights.head(torch.cat([hidden for _, hidden in kept])).float()
        found = self._parts.sampler.sample([of(row) for row, _ in kept], logits)
        return {row.key: result for (row, _), result in zip(kept, found, strict=True)}

    def _read(self, drawn: Rows[tuple[Row, int]], together: Rows[tuple[list[Row], int]]) -> dict[int, RowResult]:
        results: dict[int, RowResult] = {}
        if drawn and self._one is not None:
            found = {row.key: self._one.read(number) for row, number in drawn}
            results |= self._parts.constraints.ended(found, [self._parts.sequences.of(row) for row, _ in drawn])
        for rows, number in together:
            read = self._many.read(number, len(rows))
            results |= {row.key: result for row, result in zip(rows, read, strict=True)}
        return results

    def close(self) -> None:
        self._graphs.clear()
        if self._one is not None:
            self._one.close()


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A draft model whose pages have the numbers of the target's."""

    weights: StepWeights
    compute: Callable[[SequenceState, int], None]  # keys and values of so many tokens of a sequence
    computed: Callable[[SequenceState, int], None]  # verifying launches have computed so many


class DraftPrefill:
    """Feeds sequences to a draft model, and keeps how far each has come."""

    def __init__(self, draft: Parts) -> None:
        """`draft`: the draft model as if it were served, with the target's sequences."""
        self._parts = draft
        self._graphs = Graphs(draft.model.placement.device)
        self._passes = CapturedPasses(draft, self._graphs, DRAFT_SIZES, (1,))
        self.progress = DraftProgress()
        self._seconds = dict.fromkeys(DRAFT_SIZES, 0.0)  # of a pass

    def ask(self) -> None:
        self._passes.ask()

    def warmup(self, progress: Progress) -> None:
        """Overwrites the first pages."""
        self._passes.warmup(progress)
        for size in DRAFT_SIZES:
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


def filled(sizes: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Returns the sizes up to the least that holds `tokens` tokens."""
    return tuple(size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < tokens)
