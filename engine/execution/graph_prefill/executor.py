"""Prompts on a GPU: the forward pass of one chunk as a captured graph, one a size, over the pages of its sequence.

A chunk is padded to the next size; where it starts, how long it is and which pages it has lie in device memory, so one
graph serves every prompt, whole, continued after a cached prefix, or in chunks. Several rows go one after another.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import partial

import torch

from engine.errors import EngineFailed, Unsupported
from engine.execution.capture import Recorder
from engine.execution.forward_pass import ForwardPass, why_not
from engine.execution.graph_decode import weights as step_weights
from engine.execution.graph_prefill.first_token import FirstTokens, can_draw
from engine.execution.mailbox import Mailbox
from engine.execution.step_state import Parts, Unfit
from engine.kernels import prefill as ops
from engine.kernels.build import BuildError
from engine.kernels.tokens import Fed
from engine.loading.progress import Progress
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import refuse_drafts
from engine.settings import PAGE_SIZE

SIZES = (16, 32, 64, 128, 256, 512)  # tokens of a graph


class GraphPrefill:
    """Feeds chunks of several tokens, and draws the token that follows where a row samples. An `Executor`."""

    lookahead_tokens = 0
    max_tokens_per_row = 1

    def __init__(self, parts: Parts, sizes: tuple[int, ...] = SIZES) -> None:
        self._parts = parts
        self._sizes = sizes
        device = parts.model.placement.device
        self._pass = ForwardPass(parts, sizes)
        self._pages = -(-parts.max_context // PAGE_SIZE)
        # Count, start, ids, pages: what is used of it is the front of it.
        self._mail = Mailbox(2 + sizes[-1] + self._pages, device)
        self._splits = ops.splits_of(self._pass.layout, sizes, device)
        self._recorder = Recorder(device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._captured = self._fused = True
        self._first = self._first_tokens()

    def _first_tokens(self) -> FirstTokens | None:
        """None where the kernels of decode steps do not read this model."""
        parts = self._parts
        if step_weights.why_not(parts) is not None:
            return None
        fed = Fed(self._pass.buffers.residual, self._mail.arrived)
        return FirstTokens(self._pass.library, step_weights.step_weights(parts), fed, parts.max_sequences)

    def warmup(self, progress: Progress) -> None:
        """Compiles and captures every size. Raises Unfit where that cannot be."""
        try:
            with torch.inference_mode():
                self._capture(progress)
        except (BuildError, torch.OutOfMemoryError) as failure:
            self.close()
            raise Unfit(_one_line(failure)) from failure

    def _capture(self, progress: Progress) -> None:
        # No pages are known yet, so a chunk of no tokens must do: it writes none.
        self._mail.send([0, 0])
        for done, size in enumerate(reversed(self._sizes)):
            progress("prefill", done, len(self._sizes))
            self._graphs[size] = self._recorder.record(partial(self._forward, size), rehearse=True)
        if self._first is not None:
            self._first.warmup(self._recorder)
        torch.cuda.synchronize()
        progress("prefill", len(self._sizes), len(self._sizes))

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows of several tokens: a row of one belongs to a step of decoding."""
        return tuple(row for row in rows if row.count > 1 and not row.draft) if self._fused else ()

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """Row by row."""
        refuse_drafts(rows)
        of, first = self._parts.sequences.of, self._first
        drawn: list[tuple[Row, int]] = []
        kept: list[tuple[Row, torch.Tensor]] = []  # with the last token's hidden state, normed
        for row in rows:
            last = self._feed(row)
            if row.sample and first is not None and can_draw(of(row)):
                drawn.append((row, first.draw(of(row))))
            elif row.sample:
                kept.append((row, self._pass.buffers.x[last : last + 1].clone()))
        results: dict[int, RowResult] = {}
        if kept:
            logits = self._parts.model.weights.head(torch.cat([hidden for _, hidden in kept])).float()
            found = self._parts.sampler.sample([of(row) for row, _ in kept], logits)
            results |= {row.key: result for (row, _), result in zip(kept, found, strict=True)}
        if drawn and first is not None:
            read = first.read([number for _, number in drawn])
            results |= {row.key: result for (row, _), result in zip(drawn, read, strict=True)}
        return results

    def switch(self, name: str, enabled: bool) -> None:
        """`graphs`: off, the kernels are launched one by one. `fused_kernels`: off, it does nothing."""
        if name == "graphs":
            self._captured = enabled
            if self._first is not None:
                self._first.captured = enabled
        elif name == "fused_kernels":
            self._fused = enabled
        else:
            raise Unsupported(f"the engine has no optimization {name!r}")

    def close(self) -> None:
        """Drops the graphs."""
        self._graphs.clear()
        if self._first is not None:
            self._first.close()

    def _feed(self, row: Row) -> int:
        """A row's tokens, piece by piece; which of the last piece's is the last."""
        sequence = self._parts.sequences.of(row)
        ids = sequence.token_ids
        end, piece = row.start + row.count, 0
        if not 0 <= min(ids[row.start : end]) <= max(ids[row.start : end]) < self._parts.model.config.vocab_size:
            # On a GPU the lookup itself would take the whole process down.
            raise EngineFailed("a token id lies outside the vocabulary")
        for first in range(row.start, end, self._sizes[-1]):
            piece = min(self._sizes[-1], end - first)
            self._replay(ids[first : first + piece], first, sequence.pages)
        return piece - 1

    def _replay(self, ids: Rows[int], start: int, pages: Rows[int]) -> None:
        count, held = len(ids), -(-(start + len(ids)) // PAGE_SIZE)
        padding = [0] * (self._sizes[-1] - count)
        self._mail.send([count, start, *ids, *padding, *pages[:held]])
        size = next(size for size in self._sizes if count <= size)
        if self._captured:
            self._graphs[size].replay()
        else:
            self._forward(size)

    def _forward(self, size: int) -> None:
        """Enqueues the pass of a chunk of up to `size` tokens."""
        mail, run, largest = self._mail.arrived, self._pass, self._sizes[-1]
        chunk = ops.Chunk(place=mail[:2], pages=mail[2 + largest :], tokens=mail[2 : 2 + size])
        run.enqueue(chunk, ops.ChunkAttention(run.library, run.layout, chunk, run.embedding, self._splits))


def make(parts: Parts) -> GraphPrefill:
    """The stage. Raises Unfit with the reason where there can be none."""
    reason = why_not(parts)
    if reason is not None:
        raise Unfit(reason)
    try:
        with torch.inference_mode():
            return GraphPrefill(parts)
    except (BuildError, ImportError, ValueError, torch.OutOfMemoryError) as failure:
        raise Unfit(_one_line(failure)) from failure


def _one_line(failure: BaseException) -> str:
    return " ".join(str(failure).split())[:300]
