"""Which layers a spec covers, in each dialect's own rules."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quant.checkpoint.spec import AwqSpec, Int8Spec, PackedScheme, PackedSpec, costly
from tests.properties import example_count

UP = "model.layers.3.mlp.up_proj"


@pytest.mark.parametrize(
    ("skip", "layer", "covered"),
    [
        ((), UP, True),
        ((), "lm_head", False),
        ((), "model.embed_tokens", False),
        (("up_proj",), UP, False),
        (("layers.3.",), UP, False),
        (("layers.33.",), UP, True),
        (("gate",), "model.layers.3.mlp.gate_proj", False),
    ],
)
def test_awq_skips_by_substring(skip, layer, covered):
    assert AwqSpec("gemm", 128, skip).covers(layer) is covered


@pytest.mark.parametrize(
    ("skip", "layer", "covered"),
    [
        (("lm_head",), "lm_head", False),
        (("lm_head",), UP, True),
        (("up_proj",), UP, False),
        (("up",), UP, True),
        (("model.layers.3",), UP, False),
        (("model.layers.3",), "model.layers.31.mlp.up_proj", True),
    ],
)
def test_bitsandbytes_skips_by_whole_components(skip, layer, covered):
    assert Int8Spec(skip).covers(layer) is covered


def test_the_most_specific_target_wins():
    spec = PackedSpec(
        (
            PackedScheme(("Linear",), 4, 128, True),
            PackedScheme(("re:.*mlp.*",), 4, 64, True),
            PackedScheme((UP,), 8, -1, True),
        ),
        ("lm_head", "re:.*layers\\.0\\..*"),
    )
    assert spec.scheme(UP).bits == 8
    assert spec.scheme("model.layers.3.mlp.down_proj").group == 64
    assert spec.scheme("model.layers.3.self_attn.q_proj").group == 128
    assert spec.scheme("lm_head") is None
    assert spec.scheme("model.layers.0.mlp.up_proj") is None
    assert spec.covers("model.layers.10.mlp.up_proj")


def test_patterns_are_anchored_at_the_start_only():
    spec = PackedSpec((PackedScheme(("re:model.layers.3",), 4, 32, True),))
    assert spec.covers(UP)
    assert not spec.covers("x." + UP)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*", "(a|aa)+b", "(x{2,}){3,}", ".*" * 7, "a" * 600, "(a+) *"])
def test_patterns_that_could_hang_are_costly(pattern):
    assert costly(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head",
        "model\\.layers\\.\\d+\\.mlp\\..*",
        ".*(q|k|v)_proj$",
        "^(?!.*layers\\.[0-9]+\\.).*$",
        "[()*+]+x",
        "vision.*",
    ],
)
def test_patterns_that_people_write_are_not(pattern):
    assert not costly(pattern)


def compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, FutureWarning):
        return False
    return True


@pytest.mark.product
@settings(max_examples=example_count(200), deadline=None)
@given(st.text(alphabet="ab.*+?()[]|\\{}1,^$", max_size=24))
def test_what_is_not_costly_matches_soon(pattern):
    assume(not costly(pattern) and compiles(pattern))
    spec = PackedSpec((PackedScheme((f"re:{pattern}",), 4, 32, True),))
    start = time.process_time()
    spec.covers("a" * 30 + ".layers.10.self_attn.q_proj")
    assert time.process_time() - start < 2
