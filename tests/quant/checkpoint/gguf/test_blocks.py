"""Blocks bit for bit. The oracle is the `gguf` package's own dequantizer."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Int4Groups, Int4Minima, Int8Rows, stack_rows
from quant.checkpoint.gguf.blocks import StorageCosts, dequantize, read_gguf, widened
from quant.checkpoint.gguf.kinds import KINDS, OTHERS
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.spec import GgufForm, GgufSpec
from tests.quant.gguf_files import HALVES, blocks

ROWS, COLUMNS = 530, 512  # more rows than are read at once
FORMS: dict[str, type] = {
    "Q4_0": Int4Groups,
    "Q4_1": Int4Minima,
    "Q4_K": Int4Minima,
    "Q6_K": Int8Rows,
    "Q8_0": Int8Rows,
}


@dataclass
class Raw:
    """A source of one tensor."""

    name: str
    data: torch.Tensor

    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.data.dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self.data


def bits(numbers: np.ndarray | torch.Tensor) -> np.ndarray:
    return np.asarray(numbers, dtype=np.float32).view(np.uint32)


def read(
    kind: str, raw: np.ndarray, exact: bool = True, costs: StorageCosts | None = None
) -> Int4Groups | Int4Minima | Int8Rows:
    source = Raw(f"layer.{kind.lower()}", torch.from_numpy(raw))
    return read_gguf(source, "layer", GgufSpec({"layer": kind}, exact), COLUMNS, len(raw), costs)


def test_sizes_are_those_of_the_package() -> None:
    for number, kind in KINDS.items():
        assert GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (kind.values, kind.nbytes)
    assert all(GGMLQuantizationType(number).name == name for number, name in OTHERS.items())


@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("spread", [1.0, 1e-7, 1e4])  # subnormal and very large scales as well
def test_every_kind_is_the_same_bit_for_bit(kind: str, spread: float) -> None:
    raw = blocks(kind, (ROWS, COLUMNS), 1, spread)
    expected = gguf.dequantize(raw, GGMLQuantizationType[kind])
    assert np.array_equal(bits(dequantize(kind, torch.from_numpy(raw), COLUMNS)), bits(expected))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_four_bits_lose_nothing(kind: str) -> None:
    raw = blocks(kind, (ROWS, COLUMNS), 2)
    weight = read(kind, raw)
    assert type(weight) is FORMS[kind]
    assert np.array_equal(
        bits(weight.dequantize(torch.float32)), bits(gguf.dequantize(raw, GGMLQuantizationType[kind]))
    )


@pytest.mark.parametrize("kind", ["Q6_K", "Q8_0"])
def test_eight_bits_are_those_of_the_numbers_and_say_what_was_lost(kind: str) -> None:
    raw, costs = blocks(kind, (ROWS, COLUMNS), 3), StorageCosts()
    weight = read(kind, raw, costs=costs)
    plain = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType[kind]))
    expected = round_rows(plain)
    assert isinstance(weight, Int8Rows)
    assert torch.equal(weight.q, expected.q)
    assert torch.equal(weight.scale, expected.scale)
    lost = float(((expected.dequantize(torch.float32) - plain).norm() / plain.norm()).item())
    assert f"1 in {kind} as int8 rows" in str(costs)
    assert f"{100 * lost:.2f} % of their size lost" in str(costs)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_where_minima_are_not_read_eight_bits_stand_for_four(kind: str) -> None:
    raw = blocks(kind, (ROWS, COLUMNS), 4)
    weight = read(kind, raw, exact=False)
    plain = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType[kind]))
    assert isinstance(weight, Int8Rows)
    assert torch.equal(weight.q, round_rows(plain).q)


def test_forms_by_kind() -> None:
    exact: dict[str, GgufForm] = {"Q4_0": "int4", "Q4_1": "minima", "Q4_K": "minima", "Q6_K": "int8", "Q8_0": "int8"}
    for kind, form in exact.items():
        assert GgufSpec({"l": kind}).form("l") == form
        assert GgufSpec({"l": kind}, exact=False).form("l") == ("int8" if form == "minima" else form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_widened_numbers_are_rounded_once(dtype: torch.dtype) -> None:
    raw = blocks("Q8_0", (ROWS, COLUMNS), 5)
    plain = torch.from_numpy(gguf.dequantize(raw, GGMLQuantizationType.Q8_0))
    costs = StorageCosts()
    found = widened("Q8_0", torch.from_numpy(raw), COLUMNS, dtype, costs)
    assert torch.equal(found, plain.to(dtype))
    assert str(costs).endswith(" MiB, 0.00 % of their size lost)") == (dtype == torch.float32)


@pytest.mark.parametrize("kind", HALVES)
def test_a_scale_that_is_no_number_is_refused_by_name(kind: str) -> None:
    raw = blocks(kind, (ROWS, COLUMNS), 6).reshape(ROWS, -1, KINDS[GGMLQuantizationType[kind].value].nbytes)
    at = HALVES[kind][0]
    raw[ROWS - 1, 0, at : at + 2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    with pytest.raises(BadTensor, match=rf"layer\.{kind.lower()}: expected finite numbers"):
        read(kind, raw.reshape(ROWS, -1))


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_weights_with_minima_are_stacked(kind: str) -> None:
    parts = [read(kind, blocks(kind, (rows, COLUMNS), rows)) for rows in (8, 24)]
    stacked = stack_rows(parts)
    assert isinstance(stacked, Int4Minima)
    whole = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(stacked.dequantize(torch.float32), whole)
    assert stack_rows([parts[0], read("Q4_0", blocks("Q4_0", (8, COLUMNS), 1))]) is None
