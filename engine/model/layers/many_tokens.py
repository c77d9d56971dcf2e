"""The forward pass of many tokens on a GPU as launches: products by cuBLAS or by our own kernel, and between them the
kernels of `engine.kernels.prefill`. The caller decides what its tokens attend to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kernels import gemm
from engine.kernels import prefill as ops
from engine.kernels.attention import Embedding, Heads, LayerAttention
from engine.kernels.build import Kernels, why_no_gpu
from engine.kernels.exchange import RankSums
from engine.kernels.launch import Enqueues, Launch, launcher_of
from engine.kernels.weights import Format
from engine.kv.kv_cache import KvCache
from engine.linear import DenseLinear, Linear
from engine.linear.chosen import ChosenProducts
from engine.linear.plain_copies import PlainCopies
from engine.model import features
from engine.model.layers import products
from engine.model.layers.products import Products
from engine.model.transformer import Transformer
from engine.model.weights import Layer


class Loaded(Protocol):
    """Parts of `engine.execution`'s `Parts` that the walk reads."""

    @property
    def model(self) -> Transformer: ...

    @property
    def pool(self) -> KvCache: ...

    @property
    def plain(self) -> PlainCopies: ...

    @property
    def chosen(self) -> ChosenProducts: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def sums(self) -> RankSums | None:
        """Returns what the ranks of a split model add up by; None: the model is whole."""


def why_not(parts: Loaded) -> str | None:
    """Why this model cannot be computed so on this machine."""
    model = parts.model
    config, placement = model.config, model.placement
    objection = why_no_gpu(placement.device)
    if objection is not None:
        return objection
    objection = features.why_not(config)
    if objection is not None:
        return objection
    if placement.dtype != torch.bfloat16:
        return f"activations are {placement.dtype}, the kernels read bfloat16"
    if config.hidden_size % 8 or config.intermediate_size % 2:
        return f"a hidden size of {config.hidden_size} is no multiple of 8"
    linears = model.weights.in_order()[:-1]
    return heads_of(parts).why_not() or next((found for found in map(products.why_not, linears) if found), None)


def heads_of(parts: Loaded) -> Heads:
    config = parts.model.config
    return Heads(config.heads, config.kv_heads, config.head_dim, config.qk_norm)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of a pass; fewer tokens have the front of it."""

    residual: torch.Tensor  # float32 [tokens, hidden]
    x: torch.Tensor  # bfloat16 [tokens, hidden]
    queries: torch.Tensor  # bfloat16 [tokens, heads, dim]
    attended: torch.Tensor  # bfloat16 [tokens, heads · dim]
    inner: torch.Tensor  # bfloat16 [tokens, inner]
    product: torch.Tensor  # bytes: one product at a time

    @property
    def carried(self) -> ops.Carried:
        return ops.Carried(self.residual, self.queries)

    def first(self, size: int) -> Buffers:
        """The front, for `size` tokens."""
        return Buffers(
            self.residual[:size],
            self.x[:size],
            self.queries[:size],
            self.attended[:size],
            self.inner[:size],
            self.product,
        )


class TokenAttention(Protocol):
    """Puts keys and values into their pages, and attends."""

    def heads(self, layer: LayerAttention, product: ops.ProductParts, queries: torch.Tensor) -> Launch:
        """queries bfloat16 [tokens, heads, dim] of a product [tokens, rows]."""

    def attend(self, layer: LayerAttention, queries: torch.Tensor, out: torch.Tensor, order: Format) -> Launch:
        """out bfloat16 [tokens, heads · dim], columns in the order named."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The last token of each chunk, where no other's hidden state is read."""

    chunks: torch.Tensor  # int32 [chunks, 4], as `ops.Chunks.table`
    attention: TokenAttention  # of a pass that has these tokens alone


class ForwardPass:
    """The pass of one model, for these sizes, with their buffers."""

    def __init__(self, parts: Loaded, sizes: Iterable[int], ends: int = 0) -> None:
        """`ends`: the most chunks of a pass whose last tokens alone are wanted."""
        self._parts = parts
        self.library: Kernels = parts.kernels
        self.gpu = self.library.gpu
        self.overlap = self.gpu.overlap
        self.launcher: Enqueues = launcher_of(parts.model.placement.device)
        self.products = Products(self.library, self.launcher, self.gpu, self.overlap, parts.plain, parts.chosen)
        self.layout = heads_of(parts)
        self._channels = None if parts.sums is None else parts.sums.many
        self.embedding = Embedding(parts.model.rope, parts.model.config.norm_eps)
        sizes = tuple(sizes)
        room = self._room((*sizes, ends))
        self.buffers = self._allocate(max(sizes), room)
        self.ends = self._allocate(ends, room)  # of the last layer
        self._attention = tuple(self._layer_attention(index) for index in range(parts.model.config.layers))

    def _room(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Memory for any product of these numbers of tokens."""
        layers = self._parts.model.weights.layers
        most = max(self.products.layer_bytes(layer, size) for size in sizes if size for layer in layers)
        return torch.zeros(most, dtype=torch.uint8, device=self._parts.model.placement.device)

    def _allocate(self, tokens: int, room: torch.Tensor) -> Buffers:
        config, device = self._parts.model.config, self._parts.model.placement.device

        def rows(*width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(tokens, *width, dtype=dtype, device=device)

        return Buffers(
            residual=rows(config.hidden_size, dtype=torch.float32),
            x=rows(config.hidden_size),
            queries=rows(config.heads, config.head_dim),
            attended=rows(config.heads * config.head_dim),
            inner=rows(config.intermediate_size),
            product=room,
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

    def go(self, launch: Launch) -> None:
        """The launch starts while its predecessor ends, where the GPU can do that."""
        self.launcher.enqueue((launch if self.overlap else launch.alone(),))

    def enqueue(self, chunk: ops.Chunk, attention: TokenAttention, ends: Ends | None = None) -> torch.Tensor:
        """Normed hidden states bfloat16 [tokens, hidden], or of `ends` alone, for which the last layer computes only
        keys and values of the other tokens."""
        weights, buffers = self._parts.model.weights, self.buffers.first(chunk.size)
        gains = [layer.input_norm.weight for layer in weights.layers] + [weights.norm.weight]
        readers: list[Linear | None] = [layer.qkv for layer in weights.layers[1:]] + [None]
        first = self._stream(buffers, weights.layers[0].qkv)
        scale = self._parts.model.embedding_scale
        self.go(ops.embed(self.library, chunk, weights.embedding, gains[0], first, scale))
        for index, (layer, reader) in enumerate(zip(weights.layers, readers, strict=True)):
            own = self._attention[index]
            self.go(attention.heads(own, self.products(layer.qkv, buffers.x, buffers.product), buffers.queries))
            if ends is not None and reader is None:
                kept = self.ends.first(ends.chunks.shape[0])
                self.go(ops.keep_ends(self.library, ends.chunks, buffers.carried, kept.carried))
                attention, buffers = ends.attention, kept
            self._attend_and_gate(layer, own, attention, buffers)
            down = self.products(layer.down, buffers.inner, buffers.product)
            self.go(ops.add_norm(self.library, down, gains[index + 1], self._stream(buffers, reader), self._channels))
        return buffers.x

    def logits(self, hidden: torch.Tensor, room: torch.Tensor) -> ops.ProductParts:
        head = self._parts.model.weights.head
        if not isinstance(head, DenseLinear):
            ordered = gemm.ordered(hidden, self.products.order(head, hidden.shape[0]))
            return self.products(head, ordered, room.view(-1).view(torch.uint8), most_slices=1)
        if not hidden.is_meta:
            torch.mm(hidden, head.weight.t(), out_dtype=torch.float32, out=room)
        return ops.ProductParts(room.unsqueeze(0))

    def _stream(self, buffers: Buffers, reader: Linear | None) -> ops.Stream:
        """In the order of the linear that reads its norm; None: plain."""
        tokens, eps = buffers.x.shape[0], self.embedding.eps
        order = Format.BF16 if reader is None else self.products.order(reader, tokens)
        return ops.Stream(buffers.residual, buffers.x, eps, order)

    def _attend_and_gate(self, layer: Layer, own: LayerAttention, attention: TokenAttention, buffers: Buffers) -> None:
        """From a layer's queries to what its last product reads."""
        library, products, room = self.library, self.products, buffers.product
        tokens = buffers.x.shape[0]
        self.go(attention.attend(own, buffers.queries, buffers.attended, products.order(layer.output, tokens)))
        output = products(layer.output, buffers.attended, room)
        self.go(
            ops.add_norm(library, output, layer.mlp_norm.weight, self._stream(buffers, layer.gate_up), self._channels)
        )
        products.gated(layer.gate_up, buffers.x, room, buffers.inner, products.order(layer.down, tokens))
