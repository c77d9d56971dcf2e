"""Every config dialect, every refusal, and configs made of anything."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quant.checkpoint.detect import detect
from quant.checkpoint.errors import BadConfig, CheckpointError, UnsupportedFormat
from quant.checkpoint.spec import AwqSpec, Int8Spec, PackedScheme, PackedSpec
from tests.properties import example_count

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def of(section, **rest):
    return detect({"model_type": "llama", "quantization_config": section, **rest})


def packed(weights, **rest):
    body = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": body}, **rest}


def test_a_model_without_a_section_is_not_quantized():
    assert detect({"model_type": "llama"}) is None
    assert detect({"quantization_config": None}, names=["model.norm.weight"]) is None


@pytest.mark.parametrize("name", ["a.qweight", "a.weight_packed", "a.SCB"])
def test_packed_tensors_without_a_section_are_refused(name):
    with pytest.raises(BadConfig, match=name):
        detect({"model_type": "llama"}, names=["a.weight", name])


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (AWQ, AwqSpec("gemm", 128)),
        ({**AWQ, "version": "GEMM", "modules_to_not_convert": None}, AwqSpec("gemm", 128)),
        ({**AWQ, "version": "GEMV", "group_size": 64}, AwqSpec("gemv", 64)),
        ({**AWQ, "group_size": -1}, AwqSpec("gemm", -1)),
        ({**AWQ, "modules_to_not_convert": ["lm_head", "k_proj"]}, AwqSpec("gemm", 128, ("lm_head", "k_proj"))),
        ({"quant_method": "AWQ", "bits": 4, "group_size": 32, "format": "gemm"}, AwqSpec("gemm", 32)),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "checkpoint_format": "gemv"}, AwqSpec("gemv", 32)),
        ({**AWQ, "version": "exllama"}, AwqSpec("gemm", 128)),
        ({**AWQ, "version": "ipex", "backend": "autoawq"}, AwqSpec("gemm", 128)),
        ({"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, AwqSpec("gemm", 64)),
    ],
)
def test_awq_dialects(section, expected):
    assert of(section) == expected


def test_quant_config_json_is_read_where_config_json_says_nothing():
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    assert detect({"model_type": "llama"}, old) == AwqSpec("gemm", 64)
    assert detect({"quantization_config": AWQ}, old) == AwqSpec("gemm", 128)


def test_stored_configs(stored):
    def spec(name):
        return detect(json.loads((stored / name / "config.json").read_text()))

    assert spec("awq-tiny") == AwqSpec("gemm", 128)
    assert spec("bnb-int8-tiny") == Int8Spec()


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Int8Spec(("lm_head",))),
        ({"quant_method": "bitsandbytes", "_load_in_8bit": True, "_load_in_4bit": False}, Int8Spec(("lm_head",))),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "o_proj"]}, Int8Spec(("lm_head", "o_proj"))),
    ],
)
def test_bitsandbytes_dialects(section, expected):
    assert of(section) == expected


@pytest.mark.parametrize(
    ("section", "bits", "group", "symmetric"),
    [
        (packed(W4), 4, 128, True),
        (packed({**W4, "symmetric": False, "group_size": 32, "actorder": "weight"}), 4, 32, False),
        (packed({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}), 4, -1, True),
        (packed({"num_bits": 4, "group_size": 64}), 4, 64, True),
        (packed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}), 8, -1, True),
        (packed({"num_bits": 8, "type": "INT", "strategy": "channel", "group_size": -1}), 8, -1, True),
    ],
)
def test_compressed_tensors_schemes(section, bits, group, symmetric):
    assert of(section) == PackedSpec((PackedScheme(("Linear",), bits, group, symmetric),))


def test_compressed_tensors_details():
    section = packed(W4, ignore=["lm_head", "re:.*gate$"], quantization_status="compressed", kv_cache_scheme=None)
    section["sparsity_config"] = {"format": "dense"}
    assert detect({"compression_config": section}).ignore == ("lm_head", "re:.*gate$")
    del section["quant_method"]
    section["config_groups"]["g"]["format"] = "pack-quantized"
    section["format"] = "mixed-precision"
    assert of(section).schemes[0].group == 128


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "auto-round"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({**AWQ, "version": "gemv_fast"}, "gemv-fast"),
        ({**AWQ, "version": "Marlin", "zero_point": False}, "marlin"),
        ({**AWQ, "format": "llm-awq", "version": None}, "llm-awq"),
        ({**AWQ, "backend": "llm-awq"}, "llm-awq"),
        ({**AWQ, "bits": 3}, "3 bits"),
        ({**AWQ, "zero_point": False}, "zero points"),
        (packed(W4, format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (packed(W4, format="int-quantized"), "int-quantized"),
        (packed({**W4, "num_bits": 8, "type": "float", "strategy": "channel"}, format="float-quantized"), "float8"),
        (packed({**W4, "num_bits": 3}), "int3"),
        (packed({**W4, "num_bits": 8}), "int8"),
        (packed({"num_bits": 8, "strategy": "channel", "symmetric": False}), "zero points"),
        (packed({**W4, "strategy": "tensor"}), "tensor"),
        (packed({**W4, "actorder": "group"}), "activation order"),
        (packed(W4, quantization_status="frozen"), "frozen"),
        (packed(W4, kv_cache_scheme={"num_bits": 8}), "key-value"),
        (packed(W4, transform_config={"config_groups": {"u": {}}}), "rotations"),
        (packed(W4, sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_with_a_remedy(section, said):
    with pytest.raises(UnsupportedFormat, match=said) as caught:
        of(section)
    assert caught.value.remedy
    assert caught.value.remedy in str(caught.value)


def test_quantized_activations_are_refused():
    section = packed(W4)
    section["config_groups"]["g"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(UnsupportedFormat, match="16 bits"):
        of(section)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ([], "quantization_config"),
        ("awq", "quantization_config"),
        ({}, "quant_method"),
        ({"quant_method": 4}, "quant_method"),
        ({**AWQ, "bits": "4"}, "bits"),
        ({**AWQ, "bits": True}, "bits"),
        ({**AWQ, "group_size": 0}, "group_size"),
        ({**AWQ, "group_size": 12}, "group_size"),
        ({**AWQ, "group_size": 10**30}, "group_size"),
        ({**AWQ, "zero_point": 1}, "zero_point"),
        ({**AWQ, "version": 7}, "version"),
        ({**AWQ, "version": "gemx"}, "version"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (packed(None), "config_groups.g.weights"),
        (packed({**W4, "group_size": None}), "config_groups.g.weights.group_size"),
        (packed(W4, ignore=["re:(a+)+$"]), "ignore or targets"),
        (packed(W4, ignore=["re:" + ".*x" * 7]), "ignore or targets"),
        (packed(W4, ignore=["re:(unclosed"]), "ignore or targets"),
    ],
)
def test_a_wrong_field_is_named(section, field):
    with pytest.raises(BadConfig) as caught:
        of(section)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


WORDS = st.sampled_from(
    ["awq", "gptq", "compressed-tensors", "bitsandbytes", "gemm", "gemv", "pack-quantized", "Linear", "re:.*", "int"]
)
KEYS = st.sampled_from(
    (
        *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "backend"),
        *(
            "modules_to_not_convert",
            "load_in_8bit",
            "load_in_4bit",
            "llm_int8_skip_modules",
            "config_groups",
            "weights",
        ),
        *(
            "targets",
            "num_bits",
            "type",
            "strategy",
            "symmetric",
            "input_activations",
            "ignore",
            "actorder",
            "desc_act",
        ),
        *("quantization_status", "sparsity_config", "kv_cache_scheme"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5),
    max_leaves=15,
)


OPEN_GROUPS = {
    "quant_method": "compressed-tensors",
    "config_groups": {"g": {"weights": W4, "targets": ["re:" + "(" * 400]}},
}


@pytest.mark.product
@settings(max_examples=example_count(120), deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=8), st.booleans())
@example(OPEN_GROUPS, True)
def test_anything_gives_a_spec_or_a_refusal(section, beside):
    said = ""
    try:
        found = detect({}, section) if beside else of(section)
        assert isinstance(found, AwqSpec | Int8Spec | PackedSpec)
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
