"""The layouts that the kernels read, decoded value by value as a lane would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.weights import Format, pack_int4, to_matrix, why_not
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows


def int4(rows: int, columns: int, group: int, seed: int = 0) -> Int4Groups:
    made = torch.Generator().manual_seed(seed)
    return Int4Groups(
        torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=made),
        (torch.rand(rows, columns // group, generator=made) + 0.01).half(),
        torch.randint(0, 16, (rows, columns // group), dtype=torch.uint8, generator=made),
        group,
    )


def nibble(data: torch.Tensor, row: int, column: int) -> int:
    """Where a kernel finds q[row, column]: lane 4g + t of a unit has in word j the columns 32j + 8t + (0…7) of row g,
    column 2i of the eight at bit 4i, column 2i + 1 at bit 16 + 4i."""
    unit, within = divmod(column, 128)
    j, rest = divmod(within, 32)
    t, eighth = divmod(rest, 8)
    word = int(data[row // 8, unit, 4 * (row % 8) + t, j]) & 0xFFFFFFFF
    i, odd = divmod(eighth, 2)
    return word >> (16 * odd + 4 * i) & 15


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([32, 64, 128]),
    st.integers(0, 1 << 30),
)
def test_every_nibble_is_where_its_lane_looks(tiles: int, units: int, group: int, seed: int) -> None:
    weight = int4(8 * tiles, 128 * units, group, seed)
    packed = pack_int4(weight)
    pick = torch.Generator().manual_seed(seed)
    for _ in range(32):
        row = int(torch.randint(0, 8 * tiles, (), generator=pick))
        column = int(torch.randint(0, 128 * units, (), generator=pick))
        byte = int(weight.packed[row, column // 2])
        assert nibble(packed.data, row, column) == (byte >> 4 if column % 2 else byte & 15)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_scale_words(group: int) -> None:
    weight = int4(24, 256, group)
    words = pack_int4(weight).scales
    assert words is not None
    assert words.shape == (3, 256 // group, 8)
    for row in range(24):
        for place in range(256 // group):
            word = int(words[row // 8, place, row % 8]) & 0xFFFFFFFF
            low = torch.tensor(word & 0xFFFF, dtype=torch.int32).to(torch.int16).view(torch.float16)
            high = torch.tensor(word & ~0xFFFF, dtype=torch.int64).to(torch.int32).view(torch.float32)
            assert float(low) == float(weight.scale[row, place])
            assert float(high) == -(128 + int(weight.zero[row, place]))


def test_a_group_of_a_whole_row_becomes_several() -> None:
    weight = int4(8, 384, 384)
    packed = to_matrix(weight)
    assert packed.group == 128
    assert packed.scales is not None
    assert packed.scales.shape == (1, 3, 8)
    assert (packed.scales == packed.scales[:, :1]).all()


def test_packing_goes_beyond_one_slice() -> None:
    weight = int4(2056, 128, 128)  # slices are of 2048 rows
    packed = pack_int4(weight)
    for row in (0, 2047, 2048, 2055):
        byte = int(weight.packed[row, 5])
        assert (nibble(packed.data, row, 10), nibble(packed.data, row, 11)) == (byte & 15, byte >> 4)


def test_plain_and_int8_are_left_as_they_are() -> None:
    dense = torch.randn(8, 64).bfloat16()
    assert to_matrix(Dense(dense)).data.data_ptr() == dense.data_ptr()
    rows = Int8Rows(torch.ones(8, 64, dtype=torch.int8), torch.ones(8))
    made = to_matrix(rows)
    assert (made.format, made.data.data_ptr()) == (Format.INT8, rows.q.data_ptr())
    assert made.nbytes == 8 * 64 + 8 * 4


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (Dense(torch.zeros(8, 64)), "float32"),
        (Dense(torch.zeros(8, 48, dtype=torch.bfloat16)), "48 columns"),
        (Int8Rows(torch.zeros(8, 96, dtype=torch.int8), torch.zeros(8)), "96 columns"),
        (int4(8, 192, 64), "192 columns"),
        (int4(12, 128, 64), "12 rows"),
        (int4(8, 128, 16), "groups of 16"),
    ],
)
def test_objections(weight: Dense | Int8Rows | Int4Groups, words: str) -> None:
    reason = why_not(weight)
    assert reason is not None
    assert words in reason
    with pytest.raises(ValueError, match=words):
        to_matrix(weight)
