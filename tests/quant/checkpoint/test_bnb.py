"""bitsandbytes int8: a layer that its own package wrote, the way back, and damaged ones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from quant.checkpoint.bnb import read_int8, write_int8
from quant.checkpoint.errors import BadTensor
from quant.checkpoint.rounding import round_rows


@pytest.fixture(scope="module")
def units(stored):
    return load_file(stored / "bnb_units.safetensors")


def test_a_layer_that_bitsandbytes_wrote_decodes(units, make_source):
    weight = read_int8(make_source(units), "unit", 72, 20)
    found = weight.dequantize(torch.float32)
    assert torch.allclose(found, units["dense"], rtol=1e-6, atol=0)
    assert not found[3].any()  # a row of zeros
    assert torch.equal(weight.q, units["unit.weight"])


def test_written_layers_read_back(make_source, random):
    weight = round_rows(torch.randn(20, 72, generator=random))
    tensors = {f"a.{name}": tensor for name, tensor in write_int8(weight).items()}
    assert tensors["a.weight"].dtype == torch.int8
    assert tensors["a.SCB"].dtype == torch.float32
    again = read_int8(make_source(tensors), "a", 72, 20)
    assert torch.equal(again.q, weight.q)
    assert torch.allclose(again.scale, weight.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("unit.weight", torch.zeros(72, 20, dtype=torch.int8)),
        ("unit.weight", torch.zeros(20, 72, dtype=torch.uint8)),
        ("unit.SCB", torch.ones(1, 20)),
        ("unit.SCB", torch.full((20,), float("nan"))),
        ("unit.weight_format", torch.tensor(2, dtype=torch.uint8)),
        ("unit.weight_format", torch.tensor([0], dtype=torch.uint8)),
    ],
)
def test_a_wrong_tensor_is_named(units, make_source, name, wrong):
    with pytest.raises(BadTensor) as caught:
        read_int8(make_source({**units, name: wrong}), "unit", 72, 20)
    assert caught.value.tensor == name
