"""Divisions of a matrix product: every row and column once, and what a block needs fits a multiprocessor."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import tiling
from engine.kernels.gpu import LARGEST_SHARED, SHARED
from engine.kernels.weights import Format, Matrix

FIXED = 34 << 10  # bytes of shared memory that a kernel declares itself, at most (tests/proofs/engine/kernels)


def matrix(form: Format, rows: int, units: int, group: int = 128) -> Matrix:
    return Matrix(form, rows, units * form.span, torch.empty(0), group=group)


@given(
    st.sampled_from(list(Format)),
    st.integers(1, 4000).map(lambda n: 8 * n),
    st.integers(1, 900),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([1, 8, 46, 108, 132, 144]),
    st.booleans(),
    st.sampled_from([None, 1, 4, 8, 16]),
    st.sampled_from(sorted(set(SHARED.values()))),
)
def test_any_product_is_divided_whole(
    form: Format, rows: int, units: int, group: int, multiprocessors: int, pairs: bool, warps: int | None, shared: int
) -> None:
    rows = rows * 2 if pairs else rows
    what = matrix(form, rows, units, group)
    how = tiling.choose(what, multiprocessors, pairs=pairs, warps=warps, shared=shared)
    # Rows: whole blocks of whole groups, one wave.
    assert how.block_tiles % how.tiles == 0
    assert how.tiles % (2 if pairs else 1) == 0
    assert tiling.blocks(what, how) <= multiprocessors
    assert tiling.blocks(what, how) * how.block_tiles * 8 >= rows
    assert (tiling.blocks(what, how) - 1) * how.block_tiles * 8 < rows
    # Columns: no warp has units of a segment more than the kernels have registers for, nor more than there are.
    assert how.warps == warps or (warps is None and 8 <= how.warps <= 16)
    assert 1 <= how.depth <= units
    assert how.depth * {Format.BF16: 1, Format.INT4: 4}.get(form, 2) <= 16
    # Segments are equal where they can be.
    span = how.warps * how.depth
    if span < units and form is not Format.INT4 and any(units % (how.warps * n) == 0 for n in (2, 3, 4)):
        assert units % span == 0
    # Shared memory, barriers, and enough stages under way.
    assert 1 <= how.ring <= 31
    assert tiling.shared_bytes(what, how) + FIXED <= shared
    sums = how.warps * 8 * how.tiles * 8 * 4 * (1 if how.tiles == how.block_tiles else 2)
    assert sums + 2 * 8 * how.ring + 64 <= FIXED
    assert how.window >= 1
    # Sums keep their order whatever room there is.
    most = tiling.choose(what, multiprocessors, pairs=pairs, warps=warps)
    assert replace(most, ring=how.ring, window=how.window, whole=how.whole) == how


@pytest.mark.parametrize(
    ("form", "units", "pairs", "divided"),
    [
        (Format.BF16, 152, False, (8, 4)),  # Qwen2.5-0.5B's down projection: the last of five segments is shorter
        (Format.INT8, 40, False, (8, 3)),
        (Format.INT4, 16, False, (8, 2)),
        (Format.INT8, 112, False, (8, 2)),
        (Format.INT4, 8, False, (8, 1)),
        (Format.INT4, 28, True, (14, 2)),  # Qwen2.5-7B
        (Format.INT4, 32, True, (8, 4)),
        (Format.INT4, 32, False, (16, 2)),
        (Format.INT4, 56, False, (14, 2)),  # Mistral's down projection, of two ranks
        (Format.INT4, 86, False, (15, 2)),  # Llama-2-7B's
        (Format.INT4, 64, True, (16, 2)),  # a 70B's gate and up
        (Format.INT4, 224, False, (14, 2)),  # and its down projection
    ],
)
def test_columns_of_known_shapes(form: Format, units: int, pairs: bool, divided: tuple[int, int]) -> None:
    assert tiling.divide(matrix(form, 4096, units), pairs=pairs) == divided


@given(st.sampled_from([Format.BF16, Format.INT8_TILES]), st.integers(1, 900), st.sampled_from([1, 4, 8]))
def test_the_largest_share_of_a_warp_is_counted(form: Format, units: int, warps: int) -> None:
    what = matrix(form, 4096, units)
    _, depth = tiling.divide(what, warps)
    shares = Counter(unit % (warps * depth) // depth for unit in range(units))
    assert tiling.most_units(what, warps) == max(shares.values())


def test_the_batch_is_no_argument() -> None:
    """The order of sums must not depend on it: see the kernels' docstring."""
    assert "batch" not in tiling.choose.__annotations__


@pytest.mark.parametrize(
    ("form", "rows", "units", "pairs", "blocks"),
    [
        (Format.BF16, 4096, 32, False, 128),
        (Format.BF16, 1024, 64, False, 128),
        (Format.BF16, 6144, 32, True, 128),
        (Format.BF16, 151936, 32, False, 132),
        (Format.INT4, 28672, 32, True, 128),
        (Format.INT4, 14336, 32, True, 128),  # of two ranks
    ],
)
def test_known_shapes_fill_the_card(form: Format, rows: int, units: int, pairs: bool, blocks: int) -> None:
    what = matrix(form, rows, units)
    assert tiling.blocks(what, tiling.choose(what, 132, pairs=pairs)) == blocks


@given(st.integers(1, 40_000), st.integers(1, 256), st.integers(20, 140))
def test_a_copy_of_a_head_is_divided_whole(tiles: int, units: int, multiprocessors: int) -> None:
    copy = matrix(Format.INT8_TILES, 8 * tiles, units)
    how = tiling.choose_copy(copy, multiprocessors, tiling.WARPS)
    blocks = tiling.blocks(copy, how)
    assert blocks <= multiprocessors
    assert (blocks - 1) * how.block_tiles < tiles <= blocks * how.block_tiles
    assert how.block_tiles % how.tiles == 0
    assert tiling.shared_bytes(copy, how) + FIXED <= LARGEST_SHARED
    if not how.whole:
        assert how.tiles == 1 or how.tiles * 8 * copy.columns <= 128 << 10
        assert how.block_tiles <= 1.02 * -(-tiles // multiprocessors) + 4
        assert how.ring >= 2


@pytest.mark.parametrize(
    ("rows", "units", "tiles", "block_tiles"),
    [
        (151936, 16, 8, 144),  # Qwen3-0.6B
        (32000, 64, 4, 32),  # Mistral
        (16000, 64, 4, 16),  # of two ranks
        (128256, 64, 4, 124),  # Llama-3.1-8B
        (64128, 64, 2, 62),
        (128256, 128, 2, 122),  # a 70B
    ],
)
def test_copies_of_known_heads(rows: int, units: int, tiles: int, block_tiles: int) -> None:
    how = tiling.choose_copy(matrix(Format.INT8_TILES, rows, units), 132, tiling.WARPS)
    assert (how.tiles, how.block_tiles) == (tiles, block_tiles)
