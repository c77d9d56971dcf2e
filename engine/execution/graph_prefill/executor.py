"""Prompts on a GPU: chunks of many sequences side by side in captured passes, and the tokens that follow them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import torch

from engine.execution.capture import Recorder
from engine.execution.graph_decode import weights as step_weights
from engine.execution.graph_prefill.captured_passes import CapturedPasses
from engine.execution.graph_prefill.first_token import FirstTokens, can_draw
from engine.execution.graph_prefill.many_first_tokens import ManyFirstTokens
from engine.execution.graph_prefill.passes import MOST_CHUNKS, passes
from engine.execution.needs import chosen_by_kernels
from engine.execution.step_state import Parts, Unfit
from engine.kernels.build import BuildError
from engine.kernels.tokens import Fed
from engine.loading.progress import Progress
from engine.model.layers.many_tokens import why_not
from engine.scheduling.plan import Row, RowResult

SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # tokens of a graph
_FEW = 2  # first tokens that are drawn one by one: each reads the head, all together are slower for one


class GraphPrefill:
    """Feeds chunks of several tokens, and draws the token that follows where a row samples. An `Executor`."""

    lookahead_tokens = 0
    max_tokens_per_row = 1

    def __init__(self, parts: Parts, sizes: tuple[int, ...] = SIZES) -> None:
        """`sizes`: those that no step fills are left out."""
        self._parts = parts
        self._passes = CapturedPasses(parts, filled(sizes, parts.max_batch_tokens), (MOST_CHUNKS, 1))
        self._recorder = Recorder(parts.model.placement.device)
        self._fused = True
        self._why_one_pass: str | None = None
        self._one = self._first_tokens()
        vocabulary, device = parts.model.config.vocab_size, parts.model.placement.device
        self._many = ManyFirstTokens(self._passes.run, vocabulary, device, parts.meanwhile)

    def _first_tokens(self) -> FirstTokens | None:
        """None where the kernels of decode steps do not read this model."""
        parts = self._parts
        self._why_one_pass = step_weights.why_not(parts)
        if self._why_one_pass is not None:
            return None
        read, self._why_one_pass = step_weights.shared(parts)
        fed = Fed(self._passes.run.ends.residual, self._passes.arrived[1:])
        return FirstTokens(self._passes.run.library, read, fed, parts.max_sequences, parts.meanwhile)

    def warmup(self, progress: Progress) -> None:
        """Compiles and captures every size. Raises Unfit where that cannot be."""
        try:
            with torch.inference_mode():
                self._capture(progress)
        except (BuildError, torch.OutOfMemoryError) as failure:
            self.close()
            raise Unfit(_one_line(failure)) from failure

    def _capture(self, progress: Progress) -> None:
        self._passes.warmup(self._recorder, progress)
        if self._one is not None:
            self._one.warmup(self._recorder)
        self._many.warmup(self._recorder)
        torch.cuda.synchronize()

    def ask(self) -> None:
        """Asks for every kernel that there will be."""
        self._passes.ask()
        self._many.ask()

    def claims(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Rows of several tokens that want logits behind the last alone: a row of one belongs to a step of
        decoding, unless it has a constraint, for which its token has to be known before the next step."""
        if not self._fused:
            return ()
        alone = self._parts.constraints.constrained
        return tuple(row for row in rows if (row.count > 1 or alone(row.key)) and not row.score)

    def run(self, rows: tuple[Row, ...]) -> dict[int, RowResult]:
        """All rows, side by side."""
        drawn: list[tuple[Row, int]] = []
        together: list[tuple[list[Row], int]] = []
        kept: list[tuple[Row, torch.Tensor]] = []  # with the last token's hidden state, normed
        vocabulary, alone = self._parts.model.config.vocab_size, self._parts.constraints.constrained
        for one in passes(rows, self._parts.sequences, self._passes.costs, vocabulary):
            self._passes.replay(one)
            ended = [(at, chunk) for at, chunk in enumerate(one.chunks) if chunk.whole and chunk.row.sample]
            alike = [(at, chunk) for at, chunk in ended if chosen_by_kernels(chunk.sequence)]
            if len(alike) > _FEW:
                number = self._many.draw(
                    [chunk.sequence for _, chunk in alike], [at for at, _ in alike], captured=self._passes.captured
                )
                together.append(([chunk.row for _, chunk in alike], number))
                ended = [(at, chunk) for at, chunk in ended if not chosen_by_kernels(chunk.sequence)]
            known = len(one.chunks) - 1  # what `take` reads, unless told otherwise
            for at, chunk in ended:
                if self._one is None or not can_draw(chunk.sequence):
                    kept.append((chunk.row, self._passes.run.ends.x[at : at + 1].clone()))
                    continue
                if at != known:
                    self._passes.arrived[1].fill_(at + 1)
                    known = at
                key = chunk.row.key
                mask = self._parts.constraints.mask(key) if alone(key) else None
                drawn.append((chunk.row, self._one.draw(chunk.sequence, mask)))
        return self._sampled(kept) | self._read(drawn, together)

    def _sampled(self, kept: Rows[tuple[Row, torch.Tensor]]) -> dict[int, RowResult]:
        """By the sampler."""
        if not kept:
            return {}
        of = self._parts.sequences.of
        logits = self._parts.model.weights.head(torch.cat([hidden for _, hidden in kept])).float()
        found = self._parts.sampler.sample([of(row) for row, _ in kept], logits)
        return {row.key: result for (row, _), result in zip(kept, found, strict=True)}

    def _read(self, drawn: Rows[tuple[Row, int]], together: Rows[tuple[list[Row], int]]) -> dict[int, RowResult]:
        """What the kernels drew. Waits for it."""
        results: dict[int, RowResult] = {}
        if drawn and self._one is not None:
            found = {row.key: self._one.read(number) for row, number in drawn}
            results |= self._parts.constraints.ended(found, [self._parts.sequences.of(row) for row, _ in drawn])
        for rows, number in together:
            read = self._many.read(number, len(rows))
            results |= {row.key: result for row, result in zip(rows, read, strict=True)}
        return results

    @property
    def switches(self) -> Mapping[str, str | None]:
        """As `GraphDecode` has them."""
        return {"graphs": None, "fused_kernels": None, "two_pass_head": self._why_one_pass}

    def switch(self, name: str, enabled: bool) -> None:
        """`graphs`: off, the kernels are launched one by one. `fused_kernels`: off, it does nothing. `two_pass_head`:
        off, the whole head is read."""
        if name == "graphs":
            self._passes.captured = enabled
            if self._one is not None:
                self._one.captured = enabled
        elif name == "two_pass_head":
            if self._one is not None:
                self._one.two_pass = enabled
        elif name == "fused_kernels":
            self._fused = enabled

    def close(self) -> None:
        """Drops the graphs."""
        self._passes.close()
        self._many.close()
        if self._one is not None:
            self._one.close()


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


def ask(parts: Parts) -> None:
    """Asks for every kernel that it will have; of shapes alone."""
    GraphPrefill(parts).ask()


def filled(sizes: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Sizes that so many tokens fill, or the least of those that hold them."""
    return tuple(size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] < tokens)


def _one_line(failure: BaseException) -> str:
    return " ".join(str(failure).split())[:300]
