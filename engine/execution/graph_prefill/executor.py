"""Prompts on a GPU: the forward pass of one chunk as a captured graph, one a size, over the pages of its sequence.

A chunk is padded to the next size; where it starts, how long it is and which pages it has lie in device memory, so one
graph serves every prompt, whole, continued after a cached prefix, or in chunks. Several rows go one after another.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial

import torch

from engine.errors import EngineFailed, Unsupported
from engine.execution.capture import Recorder
from engine.execution.graph_decode import weights as step_weights
from engine.execution.graph_prefill import products
from engine.execution.graph_prefill.first_token import FirstTokens, can_draw
from engine.execution.graph_prefill.mailbox import Mailbox
from engine.execution.graph_prefill.products import Products
from engine.execution.step_state import Parts, Unfit
from engine.kernels import prefill as ops
from engine.kernels.attention import Embedding, Heads, LayerAttention
from engine.kernels.build import MINIMUM_CAPABILITY, OVERLAP_CAPABILITY, BuildError, KernelLibrary, open_library
from engine.kernels.launch import Launch, Launcher
from engine.kernels.tokens import Fed
from engine.kernels.weights import Format
from engine.linear import Linear
from engine.loading.progress import Progress
from engine.model.weights import Layer
from engine.scheduling.plan import Row, RowResult
from engine.scheduling.sequence_state import refuse_drafts
from engine.settings import PAGE_SIZE

SIZES = (16, 32, 64, 128, 256, 512)  # tokens of a graph


def why_not(parts: Parts) -> str | None:
    """Why this model's prompts are left to the eager executor, or None."""
    model = parts.model
    config, placement = model.config, model.placement
    if placement.device.type != "cuda":
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(placement.device)
    if capability < MINIMUM_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if placement.dtype != torch.bfloat16:
        return f"activations are {placement.dtype}, the kernels read bfloat16"
    if config.hidden_size % 8 or config.intermediate_size % 2:
        return f"a hidden size of {config.hidden_size} is no multiple of 8"
    return _heads(parts).why_not() or next((found for found in map(products.why_not, _linears(parts)) if found), None)


def _heads(parts: Parts) -> Heads:
    config = parts.model.config
    return Heads(config.heads, config.kv_heads, config.head_dim, config.qk_norm)


def _linears(parts: Parts) -> list[Linear]:
    layers = parts.model.weights.layers
    return [one for layer in layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a chunk of the largest size lives in; smaller ones have the front of it."""

    residual: torch.Tensor  # float32 [tokens, hidden]
    x: torch.Tensor  # bfloat16 [tokens, hidden]
    queries: torch.Tensor  # bfloat16 [tokens, heads, dim]
    attended: torch.Tensor  # bfloat16 [tokens, heads · dim]
    inner: torch.Tensor  # bfloat16 [tokens, inner]
    product: torch.Tensor  # bytes: one product at a time

    def first(self, size: int) -> Buffers:
        """Of a chunk of `size` tokens."""
        return Buffers(
            self.residual[:size],
            self.x[:size],
            self.queries[:size],
            self.attended[:size],
            self.inner[:size],
            self.product,
        )


class GraphPrefill:
    """Feeds chunks of several tokens, and draws the token that follows where a row samples. An `Executor`."""

    lookahead_tokens = 0
    max_tokens_per_row = 1

    def __init__(self, parts: Parts, sizes: tuple[int, ...] = SIZES) -> None:
        self._parts = parts
        self._sizes = sizes
        config, device = parts.model.config, parts.model.placement.device
        self._layout = _heads(parts)
        self._library: KernelLibrary = open_library(torch.cuda.get_device_capability(device))
        self._launcher = Launcher()
        self._overlap = torch.cuda.get_device_capability(device) >= OVERLAP_CAPABILITY
        self._products = Products(self._library, self._launcher, device, self._overlap)
        self._pages = -(-parts.max_context // PAGE_SIZE)
        # Count, start, ids, pages: what is used of it is the front of it.
        self._mail = Mailbox(2 + sizes[-1] + self._pages, device)
        self._buffers = self._allocate(sizes[-1])
        self._splits = ops.splits_of(self._layout, sizes, device)
        self._attention = tuple(self._layer_attention(index) for index in range(config.layers))
        self._recorder = Recorder(device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._captured = self._fused = True
        self._first = self._first_tokens()

    def _first_tokens(self) -> FirstTokens | None:
        """None where the kernels of decode steps do not read this model."""
        parts = self._parts
        if step_weights.why_not(parts) is not None:
            return None
        fed = Fed(self._buffers.residual, self._mail.arrived)
        return FirstTokens(self._library, step_weights.step_weights(parts), fed, parts.max_sequences)

    def _allocate(self, tokens: int) -> Buffers:
        config, device = self._parts.model.config, self._parts.model.placement.device
        linears = _linears(self._parts)
        room = max(self._products.bytes_of(one, size) for one in linears for size in self._sizes)

        def rows(*width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(tokens, *width, dtype=dtype, device=device)

        return Buffers(
            residual=rows(config.hidden_size, dtype=torch.float32),
            x=rows(config.hidden_size),
            queries=rows(config.heads, config.head_dim),
            attended=rows(config.heads * config.head_dim),
            inner=rows(config.intermediate_size),
            product=torch.zeros(room, dtype=torch.uint8, device=device),
        )

    def _layer_attention(self, index: int) -> LayerAttention:
        config, layer = self._parts.model.config, self._parts.model.weights.layers[index]
        keys, values = self._parts.pool.layer(index).unbind(0)
        gains = None if layer.head_norm is None else layer.head_norm.weight
        return LayerAttention(
            keys,
            values,
            None if gains is None else gains[0],
            None if gains is None else gains[config.heads],
            layer.window,
        )

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
                kept.append((row, self._buffers.x[last : last + 1].clone()))
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

    def _go(self, launch: Launch) -> None:
        self._launcher.enqueue((launch if self._overlap else launch.alone(),))

    def _forward(self, size: int) -> None:
        """Enqueues the pass of a chunk of up to `size` tokens."""
        model, mail, library = self._parts.model, self._mail.arrived, self._library
        buffers, weights, largest = self._buffers.first(size), model.weights, self._sizes[-1]
        chunk = ops.Chunk(place=mail[:2], pages=mail[2 + largest :], tokens=mail[2 : 2 + size])
        embedding = Embedding(model.rope, model.config.norm_eps)
        attention = ops.ChunkAttention(library, self._layout, chunk, embedding, self._splits)
        gains = [layer.input_norm.weight for layer in weights.layers] + [weights.norm.weight]
        readers: list[Linear | None] = [layer.qkv for layer in weights.layers[1:]] + [None]
        self._go(ops.embed(library, chunk, weights.embedding, gains[0], self._stream(buffers, weights.layers[0].qkv)))
        for index, (layer, reader) in enumerate(zip(weights.layers, readers, strict=True)):
            self._layer(layer, self._attention[index], attention, buffers)
            down = self._products(layer.down, buffers.inner, buffers.product)
            self._go(ops.add_norm(library, down, gains[index + 1], self._stream(buffers, reader)))

    def _stream(self, buffers: Buffers, reader: Linear | None) -> ops.Stream:
        """As the linear that reads its norm wants it; None: plain."""
        tokens, eps = buffers.x.shape[0], self._parts.model.config.norm_eps
        order = Format.BF16 if reader is None else self._products.order(reader, tokens)
        return ops.Stream(buffers.residual, buffers.x, eps, order)

    def _layer(self, layer: Layer, own: LayerAttention, attention: ops.ChunkAttention, buffers: Buffers) -> None:
        """All of a layer but its last product."""
        library, products, room = self._library, self._products, buffers.product
        tokens = buffers.x.shape[0]
        self._go(attention.heads(own, products(layer.qkv, buffers.x, room), buffers.queries))
        self._go(attention.attend(own, buffers.queries, buffers.attended, products.order(layer.output, tokens)))
        output = products(layer.output, buffers.attended, room)
        self._go(ops.add_norm(library, output, layer.mlp_norm.weight, self._stream(buffers, layer.gate_up)))
        wide = products(layer.gate_up, buffers.x, room)
        self._go(ops.gate(library, wide, buffers.inner, products.order(layer.down, tokens)))


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
