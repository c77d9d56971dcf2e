"""Whatever JSON says, a request is read or refused, and numbers may be texts."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.core.errors import InvalidRequest, Unimplemented
from service.core.model import resolve_defaults
from service.core.request import ModelFacts, Request
from service.core.text import SamplingDefaults
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.open_inference.parse import read_infer
from tests.properties import example_count

FACTS = ModelFacts(
    name="m",
    vocab_size=1000,
    max_context=64,
    chat=True,
    eos_token_ids=(2,),
    defaults=resolve_defaults(SamplingDefaults()),
)
NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "top_k", "seed"),
    *("max_tokens", "min_tokens", "ignore_eos", "include_stop_str_in_output", "stop", "stop_token_ids", "logit_bias"),
    *("n", "other"),
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["1", "0.5"])
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


def read(sampling: bytes) -> Request:
    message = pb.ModelInferRequest(model_name="m")
    for name, value in (("text_input", b"x"), ("sampling_parameters", sampling)):
        message.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value)
    return read_infer(message, FACTS, streams=False).request


@pytest.mark.product
@settings(max_examples=example_count(150))
@given(st.dictionaries(st.sampled_from(NAMES), _VALUES, max_size=4))
@example({"stop": ["\ud800"]})
@example({"\ud800": 1})
@example({"top_k": 1 << 40})
@example({"max_tokens": "9" * 400, "seed": 1 << 400})
def test_any_object_is_read_or_refused(wishes: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest, Unimplemented):
        request = read(json.dumps(wishes).encode())
        str(request.sampling.seed).encode()
        assert 0 <= request.sampling.top_k < 1 << 31


@pytest.mark.parametrize(
    "data",
    [b"[" * 60_000, b"{", b"1", b'{"stop": "\\ud800"}', b'{"\\ud800": 1}', b"\xff", b" " * 70_000],
    ids=["deep", "cut", "number", "half a character", "named so", "no UTF-8", "large"],
)
def test_what_is_no_object_of_text_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(data)
    assert [one.field for one in caught.value.violations] == ["inputs[sampling_parameters]"]
    str(caught.value).encode()


def test_numbers_may_be_texts() -> None:
    request = read(b'{"temperature": "0.5", "top_k": "-1", "max_tokens": "7", "seed": "12345678901234567890"}')
    assert (request.sampling.temperature, request.sampling.top_k, request.stops.max_tokens) == (0.5, 0, 7)
    assert request.sampling.seed == 12345678901234567890
    assert request.seeded
