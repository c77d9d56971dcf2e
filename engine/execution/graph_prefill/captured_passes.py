"""The forward pass of chunks as captured graphs, one a size, over the pages of their sequences.

Chunks of many sequences lie side by side in a pass, which is padded to the next size. Where each stands, how long
it is and which pages it has lie in device memory, so one graph serves every prompt, whole, continued after a cached
prefix, or in chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from engine.execution.capture import Recorder
from engine.execution.graph_prefill.passes import TABLE, Layout, Pass
from engine.execution.mailbox import Mailbox
from engine.execution.step_state import Parts
from engine.kernels import prefill as ops
from engine.kernels.attention import LayerAttention
from engine.kernels.launch import Launch
from engine.kernels.weights import Format
from engine.loading.progress import Progress
from engine.model.layers.many_tokens import Ends, ForwardPass
from engine.settings import PAGE_SIZE

_ROUNDS = 2  # of timing all sizes; the least counts


class CapturedPasses:
    """Passes over one model. What they leave of the last token of each chunk is in `run.ends`."""

    def __init__(self, parts: Parts, sizes: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        """`sizes`: tokens of a graph, smallest first. `chunks`: sequences of a graph, most first."""
        self.sizes, self._chunks = sizes, chunks
        device = parts.model.placement.device
        self.run = ForwardPass(parts, sizes, chunks[0])
        pages = -(-parts.max_context // PAGE_SIZE)
        self._mail = Mailbox(Layout(sizes[-1], chunks[0]).pages + chunks[0] * pages, device)
        self._splits = ops.splits_of(self.run.layout, (*sizes, *chunks), device, chunks[0], self.run.gpu)
        self._graphs: dict[Layout, torch.cuda.CUDAGraph] = {}
        self.costs: Mapping[int, float] = {size: size for size in sizes}  # by size; seconds, once they are measured
        self.captured = True  # False: launches one by one

    @property
    def arrived(self) -> torch.Tensor:
        """What the device was sent of the last pass, as `Layout` has it."""
        return self._mail.arrived

    def warmup(self, recorder: Recorder, progress: Progress) -> None:
        """Compiles and captures every size, and measures what it costs."""
        layouts = [Layout(size, chunks) for size in reversed(self.sizes) for chunks in self._chunks]
        rehearsed: set[int] = set()  # numbers of tokens that products have
        for done, layout in enumerate(layouts):
            progress("prefill", done, len(layouts))
            self._send_nothing(layout)
            tokens = {layout.size, layout.chunks}
            self._graphs[layout] = recorder.record(partial(self._forward, layout), rehearse=not tokens <= rehearsed)
            rehearsed |= tokens
        self.costs = self._measured()
        progress("prefill", len(layouts), len(layouts))

    def _send_nothing(self, layout: Layout) -> None:
        """No pages are known yet, so a pass of no tokens must do: it writes none."""
        empty = np.zeros(layout.pages, dtype=np.int32)
        empty[layout.positions : layout.owners] = -1
        self._mail.send(empty)

    def _measured(self) -> dict[int, float]:
        rounds = [[self._seconds(Layout(size, self._chunks[-1])) for size in self.sizes] for _ in range(_ROUNDS)]
        return dict(zip(self.sizes, map(min, *rounds), strict=True))

    def _seconds(self, layout: Layout) -> float:
        """Of a pass, all but attention, which takes as long however tokens are shared out."""
        event: type[torch.cuda.Event] = torch.cuda.Event
        self._send_nothing(layout)
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        self._graphs[layout].replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def ask(self) -> None:
        """Asks for every kernel that there will be."""
        for size in self.sizes:
            for chunks in self._chunks:
                self._forward(Layout(size, chunks))

    def replay(self, one: Pass) -> None:
        """Enqueues a pass."""
        size = next(size for size in self.sizes if one.tokens <= size)
        layout = Layout(size, min(chunks for chunks in self._chunks if len(one.chunks) <= chunks))
        self._mail.send(layout.words(one))
        if self.captured:
            self._graphs[layout].replay()
        else:
            self._forward(layout)

    def close(self) -> None:
        """Drops the graphs."""
        self._graphs.clear()

    def _forward(self, layout: Layout) -> None:
        mail, run = self._mail.arrived, self.run
        table, ends = mail[TABLE : layout.ends].view(-1, 4), mail[layout.ends : layout.ids].view(-1, 4)
        pages = mail[layout.pages :].view(-1, 1)
        places = ops.TokenPlaces(mail[layout.positions : layout.owners], pages, mail[layout.owners : layout.pages])
        fed = ops.Chunk(place=mail, tokens=mail[layout.ids : layout.positions])
        attention = PassAttention(run, places, ops.Chunks(table, pages), self._splits)
        alone = replace(attention, chunks=ops.Chunks(ends, pages))
        run.enqueue(fed, attention, Ends(table, alone))


@dataclass(frozen=True, slots=True)
class PassAttention:
    """A `many_tokens.TokenAttention` of chunks."""

    run: ForwardPass
    places: ops.TokenPlaces
    chunks: ops.Chunks
    splits: ops.Splits

    def heads(self, layer: LayerAttention, product: ops.Parts, queries: torch.Tensor) -> Launch:
        """Queries, keys and values of every token."""
        run = self.run
        return ops.row_heads(run.library, run.layout, layer, self.places, run.embedding, product, queries)

    def attend(self, layer: LayerAttention, queries: torch.Tensor, out: torch.Tensor, order: Format) -> Launch:
        """Each chunk over its sequence's pages."""
        run = self.run
        return ops.attend_chunks(run.library, run.layout, self.chunks, self.splits, layer, queries, out, order)
