"""AutoAWQ's layouts: layers that AutoAWQ packed, and an encoder of our own written from the format's bit positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from quant.checkpoint.awq import read_awq, write_gemm
from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Int4Groups
from quant.checkpoint.nibbles import pack_nibbles
from quant.checkpoint.spec import AwqSpec
from tests.properties import example_count

GEMM_BITS = (0, 16, 4, 20, 8, 24, 12, 28)  # where a word keeps output j of its eight
CASES = [(f"k256.{kind}.g{g}", f"k256.g{g}", kind, g, 256, 64) for kind in ("gemm", "gemv") for g in (128, 64, 32)] + [
    (name, name, kind, g, k, n)
    for kind in ("gemm", "gemv")
    for k, n, g in ((192, 32, -1), (384, 64, 128), (320, 32, 64))
    for name in (f"shapes.{kind}.k{k}.n{n}.g{g}",)
]


@pytest.fixture(scope="module")
def units(stored):
    return load_file(stored / "awq_units.safetensors")


@pytest.mark.parametrize(("stem", "dense", "layout", "group", "inputs", "outputs"), CASES)
def test_layers_that_autoawq_packed_decode_exactly(units, make_source, stem, dense, layout, group, inputs, outputs):
    weight = read_awq(make_source(units), stem, AwqSpec(layout, group), inputs, outputs)
    expected = units[f"{dense}.dense"]
    found = weight.dequantize(torch.float32)
    assert found.shape == (outputs, inputs)
    if expected.dtype == torch.float16:
        assert torch.equal(found.half(), expected)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("group", [128, 64, 32])
def test_gemm_and_gemv_are_one_form(units, make_source, group):
    source = make_source(units)
    gemm = read_awq(source, f"k256.gemm.g{group}", AwqSpec("gemm", group), 256, 64)
    gemv = read_awq(source, f"k256.gemv.g{group}", AwqSpec("gemv", group), 256, 64)
    assert torch.equal(gemm.packed, gemv.packed)
    assert torch.equal(gemm.zero, gemv.zero)
    assert torch.equal(gemm.scale, gemv.scale)


def words_by_bits(values: list[list[int]], bits: tuple[int, ...]) -> torch.Tensor:
    """Rows of 0..15, eight a word, value j of a word at bits[j]."""
    rows = []
    for row in values:
        words = [
            sum(value << bit for value, bit in zip(row[at : at + 8], bits, strict=True)) for at in range(0, len(row), 8)
        ]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@settings(max_examples=example_count(60), deadline=None)
@given(st.data())
def test_any_gemm_layer_decodes_to_what_was_encoded(make_source, data):
    group = data.draw(st.sampled_from([8, 16, 32, 64]))
    inputs, outputs = group * data.draw(st.integers(1, 3)), 8 * data.draw(st.integers(1, 4))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    q = torch.randint(0, 16, (outputs, inputs), generator=seed)
    zero = torch.randint(0, 16, (outputs, inputs // group), generator=seed)
    scale = (torch.rand(outputs, inputs // group, generator=seed) - 0.3).half()
    source = make_source(
        {
            "a.qweight": words_by_bits(q.T.tolist(), GEMM_BITS),
            "a.qzeros": words_by_bits(zero.T.tolist(), GEMM_BITS),
            "a.scales": scale.T.contiguous(),
        }
    )
    weight = read_awq(source, "a", AwqSpec("gemm", group), inputs, outputs)
    expected = (q - zero.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    written = write_gemm(weight)
    assert all(torch.equal(written[name], source.tensor(f"a.{name}")) for name in ("qweight", "qzeros", "scales"))


def test_more_outputs_than_one_chunk_are_read_and_written(make_source, random):
    q = torch.randint(0, 16, (2056, 32), generator=random, dtype=torch.uint8)
    weight = Int4Groups(
        pack_nibbles(q),
        torch.rand(2056, 1, generator=random).half(),
        torch.randint(0, 16, (2056, 1), generator=random, dtype=torch.uint8),
        32,
    )
    written = {f"a.{name}": tensor for name, tensor in write_gemm(weight).items()}
    again = read_awq(make_source(written), "a", AwqSpec("gemm", 32), 32, 2056)
    assert torch.equal(again.packed, weight.packed)
    assert torch.equal(again.zero, weight.zero)
    assert torch.equal(again.scale, weight.scale)


def layer(inputs: int = 64, outputs: int = 16, group: int = 32) -> dict[str, torch.Tensor]:
    return {
        "a.qweight": torch.zeros(inputs, outputs // 8, dtype=torch.int32),
        "a.qzeros": torch.zeros(inputs // group, outputs // 8, dtype=torch.int32),
        "a.scales": torch.ones(inputs // group, outputs, dtype=torch.float16),
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("a.qweight", torch.zeros(64, 3, dtype=torch.int32)),
        ("a.qweight", torch.zeros(64, 2, dtype=torch.int16)),
        ("a.qweight", torch.zeros(8, 16, dtype=torch.int32)),
        ("a.qzeros", torch.zeros(1, 2, dtype=torch.int32)),
        ("a.scales", torch.ones(2, 15, dtype=torch.float16)),
        ("a.scales", torch.ones(2, 16, dtype=torch.int32)),
        ("a.scales", torch.full((2, 16), float("nan"), dtype=torch.float16)),
        ("a.scales", torch.full((2, 16), float("inf"), dtype=torch.float16)),
    ],
)
def test_a_wrong_tensor_is_named(make_source, name, wrong):
    with pytest.raises(BadTensor) as caught:
        read_awq(make_source({**layer(), name: wrong}), "a", AwqSpec("gemm", 32), 64, 16)
    assert caught.value.tensor == name
    assert name in str(caught.value)
    assert "expected" in str(caught.value)
    assert "found" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["a.qweight", "a.qzeros", "a.scales"])
def test_a_missing_tensor_is_named(make_source, missing):
    tensors = layer()
    del tensors[missing]
    with pytest.raises(BadTensor, match="no such tensor") as caught:
        read_awq(make_source(tensors), "a", AwqSpec("gemm", 32), 64, 16)
    assert caught.value.tensor == missing


def test_a_wrong_header_is_refused_before_data_is_read(make_source):
    huge = torch.empty(1 << 20, 1 << 20, dtype=torch.int32, device="meta")
    source = make_source(layer(), {"a.qweight": huge})
    with pytest.raises(BadTensor):
        read_awq(source, "a", AwqSpec("gemm", 32), 64, 16)
    assert source.read == []


@pytest.mark.parametrize(("layout", "group", "inputs", "outputs"), [("gemm", 48, 64, 16), ("gemm", 32, 64, 12)])
def test_sizes_that_do_not_divide_are_refused(make_source, layout, group, inputs, outputs):
    with pytest.raises(BadTensor):
        read_awq(make_source(layer()), "a", AwqSpec(layout, group), inputs, outputs)


def test_gemv_refuses_groups_whose_padding_is_unknown(make_source):
    with pytest.raises(BadTensor, match="GEMV groups"):
        read_awq(make_source({}), "a", AwqSpec("gemv", 16), 64, 16)


def test_gemm_cannot_be_written_for_outputs_that_do_not_fill_words(random):
    weight = Int4Groups(
        torch.zeros(12, 16, dtype=torch.uint8), torch.ones(12, 1).half(), torch.zeros(12, 1, dtype=torch.uint8), 32
    )
    with pytest.raises(BadTensor, match="multiples of 8"):
        write_gemm(weight)
