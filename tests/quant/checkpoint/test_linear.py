"""One layer of any format: what its tensors say, and folders in which anything may be wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.checkpoint.errors import BadTensor, CheckpointError
from quant.checkpoint.forms import Dense, Int4Groups, Int8Rows
from quant.checkpoint.linear import read_linear, tensor_names
from quant.checkpoint.rounding import round_rows
from quant.checkpoint.spec import AwqSpec, Int8Spec, PackedScheme, PackedSpec
from tests.properties import example_count

NAME = "model.layers.0.mlp.up_proj"
AWQ = AwqSpec("gemm", 32)
PACKED = PackedSpec((PackedScheme(("Linear",), 4, 32, True),), ("lm_head",))


def awq(inputs=64, outputs=16):
    return {
        f"{NAME}.qweight": torch.zeros(inputs, outputs // 8, dtype=torch.int32),
        f"{NAME}.qzeros": torch.zeros(inputs // 32, outputs // 8, dtype=torch.int32),
        f"{NAME}.scales": torch.ones(inputs // 32, outputs, dtype=torch.float16),
    }


@pytest.mark.parametrize("spec", [None, AWQ, AwqSpec("gemv", 64), PACKED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_float_weight_is_dense_in_every_format(make_source, spec, dtype):
    tensors = {f"{NAME}.weight": torch.ones(16, 64, dtype=dtype), f"{NAME}.bias": torch.ones(16, dtype=dtype)}
    linear = read_linear(make_source(tensors), NAME, spec, 64, 16)
    assert isinstance(linear.weight, Dense)
    assert linear.weight.weight.dtype == dtype
    assert linear.bias is not None


def test_each_format_reads_its_own(make_source):
    assert isinstance(read_linear(make_source(awq()), NAME, AWQ, 64, 16).weight, Int4Groups)
    int8 = {f"{NAME}.weight": torch.zeros(16, 64, dtype=torch.int8), f"{NAME}.SCB": torch.ones(16)}
    assert isinstance(read_linear(make_source(int8), NAME, Int8Spec(), 64, 16).weight, Int8Rows)


def test_eight_bits_are_made_where_the_config_asks_and_the_file_has_floats(make_source, random):
    weight = torch.randn(16, 64, generator=random)
    found = read_linear(make_source({f"{NAME}.weight": weight}), NAME, Int8Spec(), 64, 16).weight
    assert isinstance(found, Int8Rows)
    assert torch.equal(found.q, round_rows(weight).q)
    skipped = read_linear(make_source({f"{NAME}.weight": weight}), NAME, Int8Spec(("up_proj",)), 64, 16).weight
    assert isinstance(skipped, Dense)


def test_both_forms_at_once_are_refused(make_source):
    tensors = {**awq(), f"{NAME}.weight": torch.ones(16, 64)}
    with pytest.raises(BadTensor, match="both"):
        read_linear(make_source(tensors), NAME, AWQ, 64, 16)


@pytest.mark.parametrize(
    ("spec", "tensors", "named"),
    [
        (AWQ, {}, "qweight"),
        (PACKED, {}, "weight_packed"),
        (None, {}, "weight"),
        (Int8Spec(), {}, "weight"),
        (Int8Spec(), {f"{NAME}.weight": torch.zeros(16, 64, dtype=torch.int8)}, "SCB"),
        (None, {f"{NAME}.weight": torch.zeros(16, 64, dtype=torch.int8)}, "weight"),
        (None, {f"{NAME}.weight": torch.zeros(64, 16)}, "weight"),
        (None, {f"{NAME}.weight": torch.zeros(16, 64), f"{NAME}.bias": torch.zeros(15)}, "bias"),
        (AWQ, {**awq(), f"{NAME}.bias": torch.full((16,), float("nan"))}, "bias"),
    ],
)
def test_what_is_missing_or_wrong_is_named(make_source, spec, tensors, named):
    with pytest.raises(BadTensor) as caught:
        read_linear(make_source(tensors), NAME, spec, 64, 16)
    assert caught.value.tensor == f"{NAME}.{named}"


def test_tensor_names_cover_what_each_reader_reads(make_source):
    source = make_source(awq())
    read_linear(source, NAME, AWQ, 64, 16)
    assert set(source.read) <= set(tensor_names(NAME, AWQ))


DTYPES = [torch.int32, torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.bool]
SPECS = [
    None,
    AWQ,
    AwqSpec("gemm", -1),
    AwqSpec("gemv", 32),
    AwqSpec("gemv", 64, ("up_proj",)),
    PACKED,
    PackedSpec((PackedScheme(("Linear",), 4, -1, False),)),
    PackedSpec((PackedScheme(("Linear",), 8, -1, True),)),
    PackedSpec((PackedScheme(("nothing",), 8, -1, True),)),
    Int8Spec(),
]
STEMS = sorted({name for spec in SPECS for name in tensor_names(NAME, spec)} | {f"{NAME}.bias"})
SIZES = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 32, 64, 65])


@st.composite
def tensor(draw):
    """Any small tensor of any type; bits at random, so that floats are often NaN or infinite."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(SIZES, max_size=3))
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    count = size * torch.Size(shape).numel()
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(0, 256, (count,), generator=seed, dtype=torch.uint8).view(dtype).reshape(shape)


@settings(max_examples=example_count(200), deadline=None)
@given(
    st.sampled_from(SPECS),
    st.dictionaries(st.sampled_from(STEMS), tensor(), max_size=5),
    st.sampled_from([0, 1, 2, 7, 8, 32, 64, 65]),
    st.sampled_from([0, 1, 8, 15, 16, 64]),
)
def test_anything_gives_a_layer_or_a_refusal(make_source, spec, tensors, inputs, outputs):
    said = ""
    try:
        linear = read_linear(make_source(tensors), NAME, spec, inputs, outputs)
        assert linear.weight.shape == (outputs, inputs)
        assert linear.weight.dequantize(torch.float32).shape == (outputs, inputs)
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said


@settings(max_examples=example_count(150), deadline=None)
@given(st.sampled_from(sorted(awq())), tensor())
def test_one_damaged_tensor_in_a_whole_layer(make_source, name, damaged):
    named = name
    try:
        linear = read_linear(make_source({**awq(), name: damaged}), NAME, AWQ, 64, 16)
        assert linear.weight.dequantize(torch.bfloat16).shape == (16, 64)
    except BadTensor as error:
        named = error.tensor
    assert named == name
