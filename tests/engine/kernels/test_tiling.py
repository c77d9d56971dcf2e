"""Divisions of a matrix product: every row and column once, and what a block needs fits a multiprocessor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import tiling
from engine.kernels.gpu import SHARED
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
    st.sampled_from([1, 4, 8, 16]),
    st.sampled_from(sorted(set(SHARED.values()))),
)
def test_any_product_is_divided_whole(
    form: Format, rows: int, units: int, group: int, multiprocessors: int, pairs: bool, warps: int, shared: int
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
    # Columns: one segment that may be uneven, or equal ones.
    span = how.warps * how.depth
    assert span >= units or units % span == 0
    # Shared memory, barriers, and enough stages under way.
    assert 1 <= how.ring <= 31
    assert tiling.shared_bytes(what, how) + FIXED <= shared
    assert how.window >= 1
    # Sums keep their order whatever room there is.
    most = tiling.choose(what, multiprocessors, pairs=pairs, warps=warps)
    assert replace(most, ring=how.ring, window=how.window, whole=how.whole) == how


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
