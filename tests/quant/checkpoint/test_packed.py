"""compressed-tensors: layers that its own package packed, older zero points, and damaged ones."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Int4Groups, Int8Rows
from quant.checkpoint.packed import read_packed, write_packed
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.spec import PackedScheme, PackedSpec
from quant.rounding import round_groups
from tests.properties import example_count

NAMES = ("w4.sym.g128", "w4.sym.g32", "w4.sym.row", "w4.asym.g128", "w4.asym.g64", "w4.asym.row", "w8.row", "w8.odd")


def spec_of(bits=4, group=32, symmetric=True) -> PackedSpec:
    return PackedSpec((PackedScheme(("Linear",), bits, group, symmetric),))


@pytest.fixture(scope="module")
def units(stored):
    return load_file(stored / "packed_units.safetensors")


@pytest.fixture(scope="module")
def cases(stored):
    with safe_open(stored / "packed_units.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["cases"])


def test_every_stored_case_is_tested(cases):
    assert set(cases) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_compressed_tensors_packed_decode_exactly(units, cases, make_source, name):
    case = cases[name]
    spec = spec_of(case["bits"], case["group"], case["symmetric"])
    weight = read_packed(make_source(units), name, spec, case["inputs"], case["outputs"])
    assert isinstance(weight, Int4Groups if case["bits"] == 4 else Int8Rows)
    dense = units[f"{name}.dense"]
    assert torch.equal(weight.dequantize(dense.dtype), dense)


@settings(max_examples=example_count(60), deadline=None)
@given(st.data())
def test_any_layer_decodes_to_what_was_encoded(make_source, data):
    bits = data.draw(st.sampled_from([4, 8]))
    group = data.draw(st.sampled_from([8, 24, 32])) if bits == 4 else -1
    inputs = group * data.draw(st.integers(1, 3)) if bits == 4 else 2 * data.draw(st.integers(1, 20))
    outputs = data.draw(st.integers(1, 20))
    width = inputs if group == -1 else group
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (outputs, inputs), generator=seed)
    zero = torch.randint(-8, 8, (outputs, inputs // width), generator=seed) if bits == 4 else torch.zeros(outputs, 1)
    scale = torch.rand(outputs, inputs // width, generator=seed)
    tensors = {
        "a.weight_packed": by_integer(q + half, bits),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([outputs, inputs]),
    }
    if bits == 4:
        tensors["a.weight_zero_point"] = by_integer(zero.T + 8, 4).T.contiguous()
    weight = read_packed(make_source(tensors), "a", spec_of(bits, group, bits == 8), inputs, outputs)
    expected = (q - zero.repeat_interleave(width, 1)) * scale.repeat_interleave(width, 1)
    assert torch.equal(weight.dequantize(torch.float32), expected)


@settings(max_examples=example_count(60), deadline=None)
@given(st.data())
def test_what_is_written_is_read_back(make_source, data):
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    outputs, inputs = data.draw(st.integers(1, 40)), 32 * data.draw(st.integers(1, 4))
    weight = torch.randn(outputs, inputs, generator=seed) * 10.0 ** data.draw(st.integers(-4, 2))
    group = data.draw(st.sampled_from([32, None]))
    rounded = round_rows(weight) if group is None else round_groups(weight, group)
    tensors = {f"a.{stem}": tensor for stem, tensor in write_packed(rounded).items()}
    spec = spec_of(8, -1) if group is None else spec_of(4, group, symmetric=False)
    again = read_packed(make_source(tensors), "a", spec, inputs, outputs)
    assert torch.equal(again.dequantize(torch.float32), rounded.dequantize(torch.float32))


def test_the_package_would_write_the_same_words(units, cases, make_source):
    for name in NAMES:
        case = cases[name]
        if (case["symmetric"] and case["bits"] == 4) or name == "w8.odd":
            continue  # those are written without zero points, and with inputs that fill no word
        spec = spec_of(case["bits"], case["group"], case["symmetric"])
        written = write_packed(read_packed(make_source(units), name, spec, case["inputs"], case["outputs"]))
        for stem in ("weight_packed", "weight_zero_point", "weight_shape"):
            assert (f"{name}.{stem}" in units) == (stem in written)
            if stem in written:
                assert torch.equal(written[stem], units[f"{name}.{stem}"].to(written[stem].dtype))
        assert torch.equal(written["weight_scale"].float(), units[f"{name}.weight_scale"].float())


def test_what_fills_no_word_is_not_written():
    with pytest.raises(BadTensor, match="multiples of 4"):
        write_packed(round_rows(torch.ones(2, 6)))
    with pytest.raises(BadTensor, match="multiples of 8"):
        write_packed(round_groups(torch.ones(8, 12), 12))


def by_integer(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row as one long integer, cut into 32-bit words."""
    rows = []
    for row in values.int().tolist():
        whole = sum(value << (bits * place) for place, value in enumerate(row))
        words = [(whole >> at) & 0xFFFFFFFF for at in range(0, bits * len(row), 32)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def layer(symmetric: bool = True) -> dict[str, torch.Tensor]:
    tensors = {
        "a.weight_packed": torch.zeros(12, 8, dtype=torch.int32),
        "a.weight_scale": torch.ones(12, 2),
        "a.weight_shape": torch.tensor([12, 64]),
    }
    return tensors if symmetric else {**tensors, "a.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)}


def test_zero_points_of_older_writers_are_plain_int8(make_source):
    plain = torch.arange(-8, 8, dtype=torch.int8).repeat(2)[:24].view(12, 2)
    tensors = {**layer(), "a.weight_zero_point": plain}
    weight = read_packed(make_source(tensors), "a", spec_of(symmetric=False), 64, 12)
    assert torch.equal(weight.zero.int() - 8, plain.int())
    for outside in (-9, 8):
        plain[11, 1] = outside
        with pytest.raises(BadTensor, match=r"-8\.\.7"):
            read_packed(make_source(tensors), "a", spec_of(symmetric=False), 64, 12)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("a.weight_packed", torch.zeros(12, 7, dtype=torch.int32)),
        ("a.weight_packed", torch.zeros(12, 8, dtype=torch.int64)),
        ("a.weight_scale", torch.ones(12, 1)),
        ("a.weight_scale", torch.full((12, 2), float("inf"))),
        ("a.weight_shape", torch.tensor([64, 12])),
        ("a.weight_shape", torch.tensor([12, 64, 1])),
        ("a.weight_zero_point", torch.zeros(12, 2, dtype=torch.int32)),
        ("a.weight_zero_point", torch.zeros(2, 2, dtype=torch.int16)),
        ("a.weight_g_idx", torch.arange(64, dtype=torch.int32) % 2),
        ("a.weight_g_idx", torch.zeros(63, dtype=torch.int32)),
    ],
)
def test_a_wrong_tensor_is_named(make_source, name, wrong):
    with pytest.raises(BadTensor) as caught:
        read_packed(make_source({**layer(False), name: wrong}), "a", spec_of(symmetric=False), 64, 12)
    assert caught.value.tensor == name


@pytest.mark.parametrize("index", [torch.full((64,), -1, dtype=torch.int32), torch.arange(64, dtype=torch.int32) // 32])
def test_an_index_that_changes_nothing_is_taken(make_source, index):
    read_packed(make_source({**layer(), "a.weight_g_idx": index}), "a", spec_of(), 64, 12)


def test_a_packed_layer_that_no_group_targets_is_refused(make_source):
    spec = PackedSpec((PackedScheme(("re:.*mlp.*",), 4, 32, True),))
    with pytest.raises(BadTensor, match="config group"):
        read_packed(make_source(layer()), "a", spec, 64, 12)
