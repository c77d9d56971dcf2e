"""Wrappers of the kernels between the products of a chunk: residual stream and norms, heads, attention, gate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.kernels.attention import Embedding, Heads, LayerAttention
from engine.kernels.build import Kernels
from engine.kernels.exchange import Channels, defines_of, values_of
from engine.kernels.gpu import GpuShape, gpu_shape
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN
from engine.kernels.tokens import scale_defines
from engine.kernels.weights import Format

_THREADS = 256
_HEADS_TOGETHER, _MANY_TOKENS = 4, 512  # of a warp of `row_heads`, from this many tokens on
_QUERIES, _WIDE_QUERIES = 64, 128  # tokens of a block of attention
_WIDE_STAGES = 3  # tiles of keys, and of values, that a block has room for
_WIDE_DIMS = (64, 128)  # of a head, that products of warpgroups are written for
_MOST_SPLITS, _SPLITS_TOGETHER = 16, 2  # parts of a context, at most; by warps, where chunks are several
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Chunk:
    place: torch.Tensor  # int32; its first is the count of tokens
    tokens: torch.Tensor  # int32 [size]: their ids

    @property
    def size(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class ProductParts:
    """A product's result: bfloat16 [tokens, width] complete with its bias, or float32 [slices, tokens, width]."""

    data: torch.Tensor
    bias: torch.Tensor | None = None  # float32 [width], to be added; float32 slices only

    @property
    def split(self) -> bool:
        return self.data.dtype == torch.float32

    def values(self) -> dict[str, Argument]:
        if not self.split and self.bias is not None:
            raise ValueError("a product in bfloat16 has its bias already")
        return {"product": self.data, "bias": self.bias, "slices": self.data.shape[0] if self.split else 1}


@dataclass(frozen=True, slots=True)
class Stream:
    residual: torch.Tensor  # float32 [tokens, hidden]
    x: torch.Tensor  # bfloat16 [tokens, hidden]
    eps: float
    order: Format = Format.BF16  # of the columns of x: as `gemm.order` tells of the product that reads it


def embed(
    library: Kernels, chunk: Chunk, table: torch.Tensor, gain: torch.Tensor, stream: Stream, scale: float = 1.0
) -> Launch:
    """stream.residual = the tokens' rows of table bfloat16 [vocabulary, hidden], times scale; stream.x = its norm."""
    values: dict[str, Argument] = {
        "place": chunk.place,
        "tokens": chunk.tokens,
        "table": table,
        "gain": gain,
        "residual": stream.residual,
        "x": stream.x,
        "eps": stream.eps,
    }
    return _of_stream(library, "embed", stream, values, split=False, further=scale_defines(scale))


def add_norm(
    library: Kernels, product: ProductParts, gain: torch.Tensor, stream: Stream, channels: Channels | None = None
) -> Launch:
    """stream.residual += product; stream.x = its norm. `channels`: adds the products of all ranks."""
    tokens, hidden = stream.residual.shape
    values: dict[str, Argument] = {
        "gain": gain,
        "residual": stream.residual,
        "x": stream.x,
        "eps": stream.eps,
        **product.values(),
        **values_of(channels, tokens, norm_words(hidden)),
    }
    return _of_stream(library, "add_norm", stream, values, defines_of(channels), split=product.split)


def norm_words(hidden: int) -> int:
    """Returns the words of a channel that `add_norm` needs: a thread sends its pairs of values in fours."""
    return 4 * _THREADS * -(-hidden // (8 * _THREADS))


def _of_stream(
    library: Kernels,
    entry: str,
    stream: Stream,
    values: dict[str, Argument],
    further: dict[str, int] | None = None,
    *,
    split: bool,
) -> Launch:
    tokens, hidden = stream.residual.shape
    defines = {"OP_COLUMNS": hidden, "OP_SLICES": int(split), "OP_ORDER": int(stream.order), **(further or {})}
    kernel = library.kernel("prefill_stream", entry, defines)
    return prepare(kernel, Shape((tokens, 1, 1), _THREADS), {**values, **CHAIN})


@dataclass(frozen=True, slots=True)
class Carried:
    residual: torch.Tensor  # float32 [tokens, hidden]
    queries: torch.Tensor  # bfloat16 [tokens, heads, dim]


def keep_ends(library: Kernels, chunks: torch.Tensor, all_tokens: Carried, kept: Carried) -> Launch:
    """Copies each chunk's last token to `kept`, except for chunks without tokens. chunks: as `Chunks.table`."""
    most, columns = kept.residual.shape
    values: dict[str, Argument] = {
        "chunks": chunks,
        "residual": all_tokens.residual,
        "queries": all_tokens.queries,
        "kept_residual": kept.residual,
        "kept_queries": kept.queries,
    }
    defines = {"OP_COLUMNS": columns, "OP_QUERIES": kept.queries.shape[1] * kept.queries.shape[2]}
    kernel = library.kernel("prefill_ends", "keep_ends", defines)
    return prepare(kernel, Shape((most, 1, 1), _THREADS), {**values, **CHAIN})


def gate(library: Kernels, product: ProductParts, out: torch.Tensor, order: Format = Format.BF16) -> Launch:
    """out bfloat16 [tokens, half] = silu(gate) · up, columns in the given order."""
    tokens, half = out.shape
    defines = {"OP_HALF": half, "OP_SLICES": int(product.split), "OP_ORDER": int(order)}
    kernel = library.kernel("prefill_gate", "gate", defines)
    columns = 8 if not product.split and order is Format.BF16 and half % 8 == 0 else 2  # of a thread
    shape = Shape((-(-half // (columns * _THREADS)), tokens, 1), _THREADS)
    return prepare(kernel, shape, {"out": out, "tokens": tokens, **product.values(), **CHAIN})


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    positions: torch.Tensor  # int32 [tokens]; -1: no token
    pages: torch.Tensor  # int32 [rows, most pages of a row]
    rows: torch.Tensor | None = None  # int32 [tokens]: into `pages`; None: token m has row m


def row_heads(
    library: Kernels,
    layout: Heads,
    layer: LayerAttention,
    places: TokenPlaces,
    embedding: Embedding,
    product: ProductParts,
    queries: torch.Tensor,
) -> Launch:
    """queries bfloat16 [tokens, heads, dim] of a product [tokens, rows]; writes keys and values to their pages."""
    tokens = queries.shape[0]
    values: dict[str, Argument] = {
        "query_gain": layer.query_gain,
        "key_gain": layer.key_gain,
        "angles": embedding.angles,
        "positions": places.positions,
        "rows": places.rows,
        "page_table": places.pages,
        "table_stride": places.pages.stride(0),
        "queries": queries,
        "key_pool": layer.keys,
        "value_pool": layer.values,
        "tokens": tokens,
        "eps": embedding.eps,
        **product.values(),
    }
    # A warp waits for position, page and angles once: with many tokens, while more heads are under way.
    together = _HEADS_TOGETHER if tokens >= _MANY_TOKENS else 1
    blocks = -(-(layout.queries + 2 * layout.keys) // (_THREADS // 32 * together))
    shape = Shape((blocks, tokens, 1), _THREADS)
    defines = head_defines(layout) | {
        "OP_QK_NORM": int(layout.norm),
        "OP_SLICES": int(product.split),
        "OP_TOGETHER": together,
        "OP_KV_BYTES": layer.keys.element_size(),
    }
    return prepare(library.kernel("prefill_heads", "row_heads", defines), shape, {**values, **CHAIN})


def head_defines(layout: Heads) -> dict[str, int]:
    return {"OP_Q_HEADS": layout.queries, "OP_KV_HEADS": layout.keys, "OP_HEAD_DIM": layout.dim}


@dataclass(frozen=True, slots=True)
class Chunks:
    table: torch.Tensor  # int32 [chunks, 4]: first token in the pass, count, position of the first, row of `pages`
    pages: torch.Tensor  # int32 [rows, most pages of a row]


@dataclass(frozen=True, slots=True)
class Splits:
    """Partial results of blocks that share a long context, which the last one merges; shared by all layers and
    sizes."""

    out: torch.Tensor  # float32, for each split [tokens, heads, dim]
    sums: torch.Tensor  # float32, for each split [tokens, heads, 2]: maximum, and sum of exponents
    arrivals: torch.Tensor  # int32 [blocks of tokens, heads], zero between launches
    gpu: GpuShape


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    wide: bool  # by products of warpgroups
    tiles: int  # of tokens, at most
    splits: int  # parts of a context, at most
    most_blocks: int  # that a pass should have
    blocks: tuple[int, int, int]  # of the grid

    @property
    def queries(self) -> int:
        return _WIDE_QUERIES if self.wide else _QUERIES


def attention_grid(layout: Heads, tokens: int, gpu: GpuShape, chunks: int = 1) -> AttentionGrid:
    """Divides contexts of chunks until every multiprocessor is full."""
    wide = gpu.warpgroups and layout.dim in _WIDE_DIMS
    full = -(-tokens // (_WIDE_QUERIES if wide else _QUERIES))
    tiles, most = full + chunks - 1, gpu.multiprocessors * (1 if wide else 2)
    splits = max(1, min(_MOST_SPLITS, most // (full * layout.queries)))
    if wide:  # a block takes one item after the other, an item being a tile's part for one head
        items = most if chunks > 1 else full * splits * layout.queries
        return AttentionGrid(wide, tiles, splits, most, (min(most, items), 1, 1))
    if chunks > 1:  # a block that finds no tokens has a multiprocessor to itself for a moment
        splits = _SPLITS_TOGETHER
    return AttentionGrid(wide, tiles, splits, most, (layout.queries, tiles, splits))


def splits_of(
    layout: Heads, sizes: Iterable[int], device: torch.device, chunks: int = 1, gpu: GpuShape | None = None
) -> Splits:
    gpu = gpu or gpu_shape(device)
    grids = [(size, attention_grid(layout, size, gpu, most)) for size in sizes for most in (1, chunks)]
    rows = max(size * grid.splits for size, grid in grids) * layout.queries
    blocks = max(grid.tiles for _, grid in grids) * layout.queries
    return Splits(
        out=torch.zeros(rows * layout.dim, dtype=torch.float32, device=device),
        sums=torch.zeros(rows * 2, dtype=torch.float32, device=device),
        arrivals=torch.zeros(blocks, dtype=torch.int32, device=device),
        gpu=gpu,
    )


def attend_chunks(
    library: Kernels,
    layout: Heads,
    chunks: Chunks,
    splits: Splits,
    layer: LayerAttention,
    queries: torch.Tensor,
    out: torch.Tensor,
    order: Format = Format.BF16,
) -> Launch:
    """queries bfloat16 [tokens, heads, dim] → out bfloat16 [tokens, heads · dim], columns in the given order, over
    pages that have the chunks' own keys and values already. Leaves tokens outside any chunk alone."""
    tokens, most = queries.shape[0], chunks.table.shape[0]
    grid = attention_grid(layout, tokens, splits.gpu, most)
    if tokens * grid.splits * layout.queries * layout.dim > splits.out.numel():
        raise ValueError(f"no room for {grid.splits} parts of {tokens} tokens")
    values: dict[str, Argument] = {
        "queries": queries,
        "key_pool": layer.keys,
        "value_pool": layer.values,
        "where": chunks.table,
        "chunks": most,
        "page_table": chunks.pages,
        "table_stride": chunks.pages.stride(0),
        "split_out": splits.out,
        "split_sums": splits.sums,
        "arrivals": splits.arrivals,
        "out": out,
        "tokens": tokens,
        "scale": layout.dim**-0.5 * LOG2_E,
        "window": layer.window or 0,
        "most_splits": grid.splits,
        "most_blocks": grid.most_blocks,
    }
    if grid.wide:
        shared, threads = 2 * _WIDE_STAGES * 128 * layout.dim * 2, 384
    else:
        keys = 16 if layout.dim > 128 else 64
        shared, threads = (_QUERIES + 4 * keys) * (layout.dim + 8) * 2, 128
    defines = head_defines(layout) | {"OP_ORDER": int(order), "OP_KV_BYTES": layer.keys.element_size()}
    name = "prefill_attention_wide" if grid.wide else "prefill_attention"
    kernel = library.kernel(name, "prefill_attention", defines, shared)
    shape = Shape(grid.blocks, threads, shared)
    return prepare(kernel, shape, {**values, **CHAIN})
