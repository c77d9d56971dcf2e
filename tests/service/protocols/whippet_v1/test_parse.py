"""Requests to plain data: bounds are exact, defaults resolve, and what is valid is read as it was written."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Priority, SamplingParams
from service.core.errors import InvalidRequest
from service.core.model import resolve_defaults
from service.core.request import COALESCING_DELAY, ChatPrompt, Delivery, ModelFacts, Request, TextPrompt, TokenPrompt
from service.core.text import ChatMessage, SamplingDefaults
from service.pb.whippet.v1 import generation_pb2 as pb
from service.protocols.bodies import decode
from service.protocols.sampling_fields import SamplingFields
from service.protocols.whippet_v1.parse import read_generation
from service.protocols.whippet_v1.render import put_sampling

DEFAULTS = SamplingParams(
    temperature=0.6,
    top_k=20,
    top_p=0.95,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
)
FACTS = ModelFacts(name="m", vocab_size=1000, max_context=64, chat=True, eos_token_ids=(2, 3), defaults=DEFAULTS)


def read(request: pb.GenerateRequest) -> Request:
    if request.WhichOneof("input") is None:
        request.text = "x"
    return read_generation(request, FACTS, semantic=True)


def fields(request: pb.GenerateRequest) -> set[str]:
    try:
        read(request)
    except InvalidRequest as error:
        return {violation.field for violation in error.violations}
    return set()


def nested(path: str, value: Any) -> pb.GenerateRequest:
    """A request with one field set."""
    request = pb.GenerateRequest()
    target: Any = request
    *parents, leaf = path.split(".")
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(value, list):
        getattr(target, leaf).extend(value)
    else:
        setattr(target, leaf, value)
    return request


BOUNDS = {  # what is just right, and what is just wrong
    "sampling.temperature": ([0.0, 1e-45, 100.0], [-1e-45, 100.01, math.nan, math.inf, -math.inf]),
    "sampling.top_k": ([0, 1, 2**31 - 1], [-1, -(2**31)]),
    "sampling.top_p": ([1e-45, 1.0], [0.0, -0.1, 1.0001, math.nan, math.inf]),
    "sampling.min_p": ([0.0, 1.0], [-1e-45, 1.0001, math.nan]),
    "sampling.repetition_penalty": ([0.01, 1.0, 100.0], [0.0, 0.0099, -1.0, 100.01, math.nan, math.inf]),
    "sampling.presence_penalty": ([-2.0, 0.0, 2.0], [-2.001, 2.001, math.nan]),
    "sampling.frequency_penalty": ([-2.0, 0.0, 2.0], [-2.001, 2.001, math.nan]),
    "sampling.seed": ([-(2**63), -1, 0, 2**63 - 1], []),
    "stopping.max_tokens": ([1, 2**31 - 1], [0, -1, -(2**31)]),
    "stopping.min_tokens": ([0, 5], [-1]),
    "output.logprobs": ([0, 20], [-1, 21]),
    "delivery.max_tokens_per_message": ([1, 1024], [0, -1, 1025]),
    "speculation.max_draft_tokens": ([0], [-1]),
    "priority": ([0, 1, 2, 3], [4, -1, 99]),
    "request_id": (["a", "a b", "~" * 128], ["~" * 129, " a", "a ", "a\nb", "ä", "\x7f"]),
    "stopping.stop_strings": ([["a"] * 16, ["x" * 256], ["é" * 128]], [["a"] * 17]),
    "stopping.stop_token_ids": ([[0, 999], [1] * 64], [[1] * 65]),
}


@pytest.mark.parametrize("path", BOUNDS)
def test_bounds_are_exact(path: str) -> None:
    right, wrong = BOUNDS[path]
    for value in right:
        assert fields(nested(path, value)) == set(), value
    for value in wrong:
        assert fields(nested(path, value)) == {path}, value


@pytest.mark.parametrize(
    ("strings", "wrong"), [([""], {0}), (["a", "", "b"], {1}), (["x" * 257], {0}), (["é" * 129, "ok"], {0})]
)
def test_each_stop_string_is_named(strings: list[str], wrong: set[int]) -> None:
    assert fields(nested("stopping.stop_strings", strings)) == {f"stopping.stop_strings[{n}]" for n in wrong}


@pytest.mark.parametrize(
    ("duration", "right"),
    [
        (Duration(nanos=1), True),
        (Duration(seconds=60), True),
        (Duration(), False),  # a budget of nothing
        (Duration(nanos=-1), False),
        (Duration(seconds=1, nanos=-1), False),
        (Duration(nanos=1_000_000_000), False),
        (Duration(seconds=2**62), False),
    ],
)
def test_time_budgets(duration: Duration, right: bool) -> None:
    request = pb.GenerateRequest(time_budget=duration)
    assert fields(request) == (set() if right else {"time_budget"})


def test_unset_is_the_models_own_and_zero_is_zero() -> None:
    unset = read(pb.GenerateRequest()).sampling
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(unset, name) == getattr(DEFAULTS, name)
    zero = pb.SamplingOptions(temperature=0, top_k=0, min_p=0, seed=0)
    read_zero = read(pb.GenerateRequest(sampling=zero)).sampling
    assert (read_zero.temperature, read_zero.top_k, read_zero.min_p, read_zero.seed) == (0.0, 0, 0.0, 0)
    assert read_zero.top_p == DEFAULTS.top_p


def test_fresh_seeds_differ() -> None:
    seeds = {read(pb.GenerateRequest()).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_seed_is_64_bits_inside_and_comes_back_as_it_was(seed: int) -> None:
    params = read(pb.GenerateRequest(sampling=pb.SamplingOptions(seed=seed))).sampling
    assert 0 <= params.seed < 2**64
    message = pb.SamplingOptions()
    put_sampling(message, params)
    assert message.seed == seed


def test_stop_tokens_include_the_models_own_unless_ignored() -> None:
    stopping = pb.StoppingOptions(stop_token_ids=[7, 2])
    assert read(pb.GenerateRequest(stopping=stopping)).stops.token_ids == (7, 2, 3)
    stopping.ignore_eos = True
    assert read(pb.GenerateRequest(stopping=stopping)).stops.token_ids == (7, 2)
    assert read(pb.GenerateRequest()).stops.token_ids == (2, 3)


def test_delivery_defaults() -> None:
    assert read(pb.GenerateRequest()).delivery == Delivery(1, 0.0, coalescing_delay=COALESCING_DELAY)
    one = pb.DeliveryOptions(max_tokens_per_message=1)
    assert read(pb.GenerateRequest(delivery=one)).delivery == Delivery(1, 0.0)
    late = pb.DeliveryOptions(max_delay=Duration(seconds=1))
    assert read(pb.GenerateRequest(delivery=late)).delivery == Delivery(1, 1.0, coalescing_delay=COALESCING_DELAY)
    late.max_delay.FromMilliseconds(10)
    assert read(pb.GenerateRequest(delivery=late)).delivery == Delivery(1, 0.01, coalescing_delay=0.01), (
        "who sets a delay gets it"
    )
    many = pb.DeliveryOptions(max_tokens_per_message=8)
    assert read(pb.GenerateRequest(delivery=many)).delivery == Delivery(8, 0.05)
    many.max_delay.CopyFrom(Duration())
    assert read(pb.GenerateRequest(delivery=many)).delivery == Delivery(8, 0.0)


def test_output_defaults() -> None:
    output = read(pb.GenerateRequest()).output
    assert (output.text, output.token_ids, output.logprobs) == (True, False, None)
    output = read(pb.GenerateRequest(output=pb.OutputOptions(text=False, logprobs=0))).output
    assert (output.text, output.token_ids, output.logprobs) == (False, False, 0)


def test_prompts() -> None:
    assert read(pb.GenerateRequest(text="hi")).prompt == TextPrompt("hi")
    assert read(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]))).prompt == TokenPrompt((5, 6))
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert read(pb.GenerateRequest(chat=chat)).prompt == ChatPrompt((ChatMessage("user", "hi"),))
    assert read(pb.GenerateRequest(priority=pb.PRIORITY_BACKGROUND)).priority is Priority.BACKGROUND


def test_unary_and_streamed_requests_have_the_same_fields() -> None:
    def shape(kind: Any) -> dict[str, tuple[int, int, str | None]]:
        return {
            field.name: (field.number, field.type, field.message_type and field.message_type.full_name)
            for field in kind.DESCRIPTOR.fields
        }

    assert shape(pb.GenerateRequest) == shape(pb.GenerateStreamRequest)


@given(st.binary(max_size=200))
def test_bytes_become_a_message_or_a_violation(data: bytes) -> None:
    expected = pb.GenerateRequest()
    try:
        expected.ParseFromString(data)
    except DecodeError:
        with pytest.raises(InvalidRequest) as caught:
            decode(pb.GenerateRequest, data)
        assert [violation.field for violation in caught.value.violations] == [""]
    else:
        assert decode(pb.GenerateRequest, data).SerializeToString() == expected.SerializeToString()


@pytest.mark.parametrize(
    ("given_", "temperature"),
    [
        (SamplingDefaults(), 0.0),
        (SamplingDefaults(do_sample=False, temperature=0.7), 0.0),
        (SamplingDefaults(do_sample=True), 1.0),
        (SamplingDefaults(do_sample=True, temperature=0.7), 0.7),
        (SamplingDefaults(temperature=0.7), 0.7),
    ],
)
def test_what_a_models_folder_says_of_sampling(given_: SamplingDefaults, temperature: float) -> None:
    resolved = resolve_defaults(given_)
    assert resolved.temperature == temperature
    assert (resolved.top_k, resolved.top_p, resolved.min_p, resolved.repetition_penalty) == (0, 1.0, 0.0, 1.0)
    named = resolve_defaults(SamplingDefaults(top_k=5, top_p=0.5, min_p=0.2, repetition_penalty=1.3))
    assert (named.top_k, named.top_p, named.min_p, named.repetition_penalty) == (5, 0.5, 0.2, 1.3)


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert read(pb.GenerateRequest(sampling=pb.SamplingOptions(temperature=1e-6))).sampling.temperature == 0.0
    kept = read(pb.GenerateRequest(sampling=pb.SamplingOptions(temperature=1e-4))).sampling.temperature
    assert kept == pytest.approx(1e-4)


def test_a_wish_has_the_fields_of_its_message() -> None:
    """It is made of whatever is set there."""
    assert set(SamplingFields.__struct_fields__) == set(pb.SamplingOptions.DESCRIPTOR.fields_by_name)
