"""Whatever comes in, the server answers with a status that fits, never INTERNAL or UNKNOWN, and stays up."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.pb.whippet.v1 import generation_pb2 as pb
from tests.properties import example_count
from tests.service.conftest import Server, ask

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
_GENERATION = "/whippet.v1.GenerationService/"
_CODE = grpc.StatusCode
FITTING = {_CODE.OK, _CODE.INVALID_ARGUMENT, _CODE.NOT_FOUND, _CODE.UNIMPLEMENTED}

INTS = st.sampled_from([0, 1, -1, 2, 20, 21, 255, 256, 1024, 1025, 2**31 - 1, -(2**31)]) | st.integers(-5, 300)
FLOATS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-6, 100.0, 3.4e38, -3.4e38, math.inf, -math.inf, math.nan]
)
FLOATS |= st.floats(width=32)
LONGS = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=30) | st.sampled_from(["x" * 200, "\0", "\ud7ff", "<|im_end|>", "{{ 7 * 7 }}"])
IDS = st.lists(INTS, max_size=12) | st.sampled_from([[65] * 200, [-1] * 5000, list(range(256))])
DURATIONS = st.builds(
    Duration,
    seconds=st.sampled_from([0, 1, -1, 60, 61, 2**63 - 1, -(2**63), 315_576_000_000]),
    nanos=st.sampled_from([0, 1, -1, 999_999_999, 1_000_000_000, -(2**31), 2**31 - 1]),
)
ENUMS = st.integers(0, 4) | st.sampled_from([-1, 99, 2**31 - 1])


def message(kind: type, **fields: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """`kind` with any of the fields set or not."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: kind(**chosen))


JSON = st.sampled_from(["", "{}", '{"a": [1.5, null]}', "[]", "[{}]", '[{"name": "f"}]', '{"a": NaN}', "{" * 5000])
JSON |= st.recursive(
    st.none() | st.booleans() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
).map(json.dumps)
VALUES = st.recursive(
    st.builds(Value, string_value=TEXTS) | st.builds(Value, number_value=FLOATS) | st.just(Value()),
    lambda inner: (
        st.builds(Value, struct_value=st.builds(Struct, fields=st.dictionaries(TEXTS, inner, max_size=3)))
        | st.builds(Value, list_value=st.builds(ListValue, values=st.lists(inner, max_size=3)))
    ),
    max_leaves=8,
)
STRUCTS = st.builds(Struct, fields=st.dictionaries(TEXTS | st.just("enable_thinking"), VALUES, max_size=4))
PARTS = st.builds(pb.ContentPart, text=TEXTS) | st.just(pb.ContentPart()) | st.just(pb.ContentPart(image=pb.Image()))
CHAT_MESSAGES = message(
    pb.ChatMessage,
    role=TEXTS | st.sampled_from(["user", "assistant", "tool"]),
    content=TEXTS,
    parts=st.lists(PARTS, max_size=3),
    name=TEXTS,
    tool_calls=st.lists(message(pb.ToolCall, id=TEXTS, name=TEXTS, arguments=JSON | TEXTS), max_size=3),
    tool_call_id=TEXTS,
    reasoning=TEXTS,
)
CHATS = message(
    pb.Chat,
    messages=st.lists(CHAT_MESSAGES, max_size=4),
    tools=st.lists(STRUCTS, max_size=3),
    tools_json=JSON | TEXTS,
    template_arguments=STRUCTS,
    add_generation_prompt=st.booleans(),
    continue_final_message=st.booleans(),
)
REQUESTS = message(
    pb.GenerateRequest,
    request_id=st.text(max_size=140) | st.just("ok"),
    model=st.sampled_from(["", "fake", "fake", "other"]) | TEXTS,
    sampling=message(
        pb.SamplingOptions,
        temperature=FLOATS,
        top_k=INTS,
        top_p=FLOATS,
        min_p=FLOATS,
        repetition_penalty=FLOATS,
        presence_penalty=FLOATS,
        frequency_penalty=FLOATS,
        seed=LONGS,
        logit_bias=st.dictionaries(INTS, FLOATS, max_size=5) | st.just({n: 1.0 for n in range(1025)}),
    ),
    stopping=message(
        pb.StoppingOptions,
        max_tokens=INTS,
        min_tokens=INTS,
        stop_strings=st.lists(TEXTS, max_size=18),
        stop_token_ids=IDS,
        ignore_eos=st.booleans(),
        include_stop=st.booleans(),
    ),
    output=message(pb.OutputOptions, text=st.booleans(), token_ids=st.booleans(), logprobs=INTS),
    cache=message(pb.CacheOptions, response=ENUMS, semantic=ENUMS, bypass_prefix=st.booleans(), max_age=DURATIONS),
    speculation=message(pb.SpeculationOptions, disable=st.booleans(), max_draft_tokens=INTS),
    priority=ENUMS,
    time_budget=DURATIONS,
    delivery=message(pb.DeliveryOptions, max_tokens_per_message=INTS, max_delay=DURATIONS),
).flatmap(
    lambda request: st.one_of(
        st.just({}),
        st.fixed_dictionaries({"text": TEXTS}),
        st.fixed_dictionaries({"token_ids": IDS.map(lambda ids: pb.TokenIds(ids=ids))}),
        st.fixed_dictionaries({"chat": CHATS}),
    ).map(lambda prompt: _with(request, prompt))
)


def _with(request: object, prompt: dict[str, object]) -> pb.GenerateRequest:
    assert isinstance(request, pb.GenerateRequest)
    whole = pb.GenerateRequest(**prompt)  # type: ignore[arg-type]
    whole.MergeFrom(request)
    return whole


@pytest.fixture(scope="module")
def small(serve: Serve) -> Iterator[Server]:
    """A short context, so that unlimited answers are short too. The engine must outlive the module."""
    with serve("--fake.max-context=160", "--log-level=warning") as one:
        pid = one.engine_pid()
        yield one
        load = one.idle()
        assert (load.restarts, one.engine_pid()) == (0, pid)
        assert one.generation.Generate(ask("alive", 3), timeout=60).text
        log = one.log.read_text()
        assert "INTERNAL" not in log
        assert "Traceback" not in log


def send(server: Server, method: str, data: bytes) -> grpc.StatusCode:
    """The status of raw bytes, unary or streamed."""
    if method.endswith("GenerateStream"):
        call = server.channel.unary_stream(method)(data, timeout=60)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        code: grpc.StatusCode = call.code()
        return code
    channel = server.admin_channel if "Admin" in method else server.channel
    try:
        channel.unary_unary(method)(data, timeout=60)
    except grpc.RpcError as error:
        code = error.code()
        return code
    return _CODE.OK


@settings(max_examples=example_count(250), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(REQUESTS, st.booleans())
def test_any_request(small: Server, request_: pb.GenerateRequest, stream: bool) -> None:
    method = _GENERATION + ("GenerateStream" if stream else "Generate")
    assert send(small, method, request_.SerializeToString()) in FITTING


METHODS = [
    *(_GENERATION + name for name in ("Generate", "GenerateStream", "Tokenize", "Detokenize")),
    *(f"/whippet.v1.ModelService/{name}" for name in ("ListModels", "GetModel")),
    *(
        f"/whippet.v1.AdminService/{name}"
        for name in ("AbortGeneration", "GetLoad", "FlushCache", "ListOptimizations", "SetOptimization")
    ),
    "/grpc.health.v1.Health/Check",
]


@settings(max_examples=example_count(200), deadline=None)
@given(st.sampled_from(METHODS), st.binary(max_size=60))
def test_any_bytes(small: Server, method: str, data: bytes) -> None:
    assert send(small, method, data) in FITTING


@settings(max_examples=example_count(100), deadline=None)
@given(REQUESTS, st.data())
def test_damaged_requests(small: Server, request_: pb.GenerateRequest, data: st.DataObject) -> None:
    damaged = bytearray(request_.SerializeToString() or b"\x1a\x01x")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    assert send(small, _GENERATION + "Generate", bytes(damaged)) in FITTING


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a\x02\xff\xfe",  # request_id, not UTF-8
        b"\x12\x01\xc0",  # model
        b"\x1a\x03\xed\xa0\x80",  # text: a lone surrogate
        b"\x3a\x03\x1a\x01\xff",  # stopping.stop_strings
        b"\x2a\x05\x0a\x03\x0a\x01\xff",  # chat.messages.role
        b"\x22\x03\x0a\x01\xff",  # token_ids.ids, cut
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_what_is_not_utf8_is_invalid(small: Server, data: bytes) -> None:
    for method in ("Generate", "GenerateStream"):
        assert send(small, _GENERATION + method, data) is _CODE.INVALID_ARGUMENT


def test_giants(small: Server) -> None:
    """Refused for their length, before anything looks at each element."""
    for request in (
        pb.GenerateRequest(text="x" * 4_000_000),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1_000_000)),
        pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * 20_000)),
        ask("x", 1, stopping=pb.StoppingOptions(stop_strings=["y"] * 100_000)),
        ask("x", 1, stopping=pb.StoppingOptions(stop_strings=["y" * 4_000_000])),
    ):
        assert send(small, _GENERATION + "Generate", request.SerializeToString()) is _CODE.INVALID_ARGUMENT
    many = pb.DetokenizeRequest(token_ids=[1] * 1_000_000)
    assert send(small, _GENERATION + "Detokenize", many.SerializeToString()) is _CODE.INVALID_ARGUMENT
