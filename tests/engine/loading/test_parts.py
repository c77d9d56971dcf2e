"""A part of a linear is that part of the whole linear, bit for bit, in every format; and reads no more than its part
where the format allows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pytest
import torch

from engine.linear.quantized import quantized_reader
from engine.loading.parts import of_part
from engine.model.split import Part
from quant.checkpoint.awq import write_gemm
from quant.checkpoint.bnb import write_int8
from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Dense, Int4Groups
from quant.checkpoint.nibbles import pack_nibbles, words_of
from quant.checkpoint.packed import write_packed
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.slices import LinearSlice, SlicedTensors, Span, narrowed, why_not
from quant.checkpoint.spec import AwqSpec, Int8Spec, PackedScheme, PackedSpec, QuantSpec

INPUTS, OUTPUTS, GROUP = 128, 48, 32
NAME = "model.layers.0.mlp.down_proj"


@dataclass
class Source:
    """A `TensorSource`."""

    held: Mapping[str, torch.Tensor]

    def names(self) -> Collection[str]:
        return self.held.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.held[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.held[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        return self.held[name]


def int4(group: int = GROUP) -> Int4Groups:
    seed = torch.Generator().manual_seed(5)
    packed = torch.randint(0, 256, (OUTPUTS, INPUTS // 2), dtype=torch.uint8, generator=seed)
    scale = torch.rand(OUTPUTS, INPUTS // group, generator=seed).half()
    zero = torch.randint(0, 16, (OUTPUTS, INPUTS // group), dtype=torch.uint8, generator=seed)
    return Int4Groups(packed, scale, zero, group)


def gemv() -> dict[str, torch.Tensor]:
    """GEMV pads zeros and scales of four groups a row to four words."""
    weight = int4()
    zeros = torch.zeros(OUTPUTS, 32, dtype=torch.uint8)
    scales = torch.zeros(OUTPUTS, 32, dtype=torch.float16)
    zeros[:, :4], scales[:, :4] = weight.zero, weight.scale
    return {"qweight": words_of(weight.packed), "qzeros": words_of(pack_nibbles(zeros)), "scales": scales}


def dense() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(6))


def scheme(bits: int, group: int, symmetric: bool) -> PackedSpec:
    return PackedSpec((PackedScheme(("Linear",), 4 if bits == 4 else 8, group, symmetric),))


CASES: dict[str, tuple[QuantSpec, Mapping[str, torch.Tensor]]] = {
    "awq": (AwqSpec("gemm", GROUP), write_gemm(int4())),
    "awq-gemv": (AwqSpec("gemv", GROUP), gemv()),
    "awq-row": (AwqSpec("gemm", -1), write_gemm(int4(INPUTS))),
    "packed": (scheme(4, GROUP, False), write_packed(int4())),
    "packed-row": (scheme(4, -1, False), write_packed(int4(INPUTS))),
    "packed-int8": (scheme(8, -1, True), write_packed(round_rows(dense()))),
    "bitsandbytes": (Int8Spec(), write_int8(round_rows(dense()))),
    "rounded": (Int8Spec(), {"weight": dense()}),
    "plain": (AwqSpec("gemm", GROUP, skip=("down_proj",)), {"weight": dense()}),
}
SPANS = {
    "outputs": [LinearSlice(Part(rank, 2).span(OUTPUTS), Span(0, INPUTS, INPUTS)) for rank in (0, 1)],
    "inputs": [LinearSlice(Span(0, OUTPUTS, OUTPUTS), Part(rank, 2).span(INPUTS), rank == 0) for rank in (0, 1)],
}


@pytest.mark.parametrize("axis", SPANS)
@pytest.mark.parametrize("case", CASES)
def test_a_part_is_that_part_of_the_whole(case: str, axis: str) -> None:
    spec, held = CASES[case]
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(7))
    whole = Source({f"{NAME}.{kind}": tensor for kind, tensor in held.items()} | {f"{NAME}.bias": bias})
    read = quantized_reader(spec, None)
    assert read is not None
    expected = read(whole, NAME, INPUTS, OUTPUTS)
    for cut in SPANS[axis]:
        assert why_not(NAME, cut, spec) is None
        own = SlicedTensors(whole, {NAME: cut}, spec)
        found = of_part(read, whole, {NAME: cut}, spec)(own, NAME, cut.inputs.size, cut.outputs.size)
        rows, columns = (slice(one.first, one.last) for one in (cut.outputs, cut.inputs))
        assert torch.equal(
            found.weight.dequantize(torch.float32), expected.weight.dequantize(torch.float32)[rows, columns]
        )
        assert type(found.weight) is type(expected.weight)
        assert found.bias is not None
        assert torch.equal(found.bias, bias[rows] if cut.adds_bias else torch.zeros(cut.outputs.size))
        assert torch.equal(
            narrowed(expected, cut).weight.dequantize(torch.float32), found.weight.dequantize(torch.float32)
        )


def test_groups_in_the_order_of_the_inputs_stay_so() -> None:
    """A part's own groups begin at 0."""
    spec = scheme(4, GROUP, False)
    held = {f"{NAME}.{kind}": tensor for kind, tensor in write_packed(int4()).items()}
    whole = Source(held | {f"{NAME}.weight_g_idx": torch.arange(INPUTS) // GROUP})
    read = quantized_reader(spec, None)
    assert read is not None
    cut = SPANS["inputs"][1]
    found = read(SlicedTensors(whole, {NAME: cut}, spec), NAME, cut.inputs.size, OUTPUTS)
    assert torch.equal(found.weight.dequantize(torch.float32), int4().dequantize(torch.float32)[:, INPUTS // 2 :])


def test_a_plain_part_is_a_view_of_its_part_of_the_file() -> None:
    spec, held = CASES["plain"]
    whole = Source({f"{NAME}.weight": held["weight"]})
    read = quantized_reader(spec, None)
    assert read is not None
    cut = SPANS["outputs"][1]
    found = of_part(read, whole, {NAME: cut}, spec)(
        SlicedTensors(whole, {NAME: cut}, spec), NAME, INPUTS, cut.outputs.size
    )
    assert isinstance(found.weight, Dense)
    assert found.weight.weight.data_ptr() == held["weight"][cut.outputs.first].data_ptr()


@pytest.mark.parametrize(
    ("spec", "cut", "words"),
    [
        (AwqSpec("gemm", 64), LinearSlice(Span(0, 48, 48), Span(32, 64, 128)), "groups of 64"),
        (AwqSpec("gemm", 32), LinearSlice(Span(12, 24, 48), Span(0, 128, 128)), "words of 8"),
        (scheme(4, 64, False), LinearSlice(Span(0, 48, 48), Span(0, 32, 128)), "groups of 64"),
        (scheme(4, 32, False), LinearSlice(Span(12, 24, 48), Span(0, 128, 128)), "words of 8"),
    ],
)
def test_what_a_format_packs_together_is_not_cut(spec: QuantSpec, cut: LinearSlice, words: str) -> None:
    assert words in str(why_not(NAME, cut, spec))


def test_a_border_within_a_word_is_named() -> None:
    spec, held = CASES["awq"]
    whole = Source({f"{NAME}.{kind}": tensor for kind, tensor in held.items()})
    cut = LinearSlice(Span(0, 12, OUTPUTS), Span(0, INPUTS, INPUTS))
    with pytest.raises(BadTensor, match="whole groups"):
        SlicedTensors(whole, {NAME: cut}, spec).tensor(f"{NAME}.qweight")
