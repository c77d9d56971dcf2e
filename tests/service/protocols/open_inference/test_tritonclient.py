"""The open inference protocol as the real tritonclient sees it, which runs in a process of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.pb.inference import grpc_service_pb2 as pb
from service.pb.inference import grpc_service_pb2_grpc
from tests.gateways import run
from tests.service.conftest import Server, ask, refused
from tests.waiting import wait_for

pytestmark = pytest.mark.product

Serve = Callable[..., contextlib.AbstractContextManager[Server]]
CLIENT = Path(__file__).with_name("client.py")
METHOD = "inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def seen(server: Server) -> Any:
    return json.loads(run(str(CLIENT), server.data, timeout=150))


@pytest.fixture(scope="module")
def answer(server: Server) -> str:
    """To the same question, by whippet.v1."""
    request = ask("hello", 8)
    request.sampling.temperature = 0
    return server.generation.Generate(request, timeout=60).text


def test_answers_keep_to_constraints(seen: Any) -> None:
    number, side, constant = seen["constrained"]
    assert number.isdecimal()
    assert len(number) == 3
    assert side in ("left", "right")
    assert constant == "12"


def test_it_tells_of_itself(seen: Any) -> None:
    assert seen["live"]
    assert seen["ready"] == [True, True, False]
    assert seen["server"]["name"] == "whippet"
    assert (seen["model"]["name"], seen["model"]["versions"]) == ("fake", ["1"])
    assert {"name": "text_input", "datatype": "BYTES", "shape": ["1"]} in seen["model"]["inputs"]
    assert {"name": "text_output", "datatype": "BYTES", "shape": ["1"]} in seen["model"]["outputs"]


def test_an_answer_is_the_same_as_by_the_other_protocol(seen: Any, answer: str) -> None:
    assert seen["text"] == answer
    assert seen["echoed"] == "hello" + answer  # unless the prompt is excluded, it comes first
    assert (seen["id"], seen["counts"], seen["reason"]) == ("seven", [5, 8], "length")
    assert seen["only"] == ["finish_reason"]


def test_several_answers_are_elements_of_one_tensor(seen: Any) -> None:
    assert seen["three"] == seen["alone"]
    assert len(set(seen["three"])) == 3


def test_a_stream_has_one_answer_after_the_other(seen: Any, answer: str) -> None:
    *pieces, whole = seen["stream"]["pieces"]
    assert "".join(text for _, text, _ in pieces) == answer
    assert [last for *_, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1
    assert whole == ["a", answer, True]
    (error,) = seen["stream"]["errors"]
    assert "sampling_parameters.top_p" in error


@pytest.mark.parametrize(
    ("case", "code", "named"),
    [
        ("model", "NOT_FOUND", "other"),
        ("version", "NOT_FOUND", "fake:7"),
        ("metadata", "NOT_FOUND", "other"),
        ("no text", "INVALID_ARGUMENT", "inputs[text_input]: is needed"),
        ("type", "INVALID_ARGUMENT", "inputs[text_input]: must be of type BYTES"),
        ("shape", "INVALID_ARGUMENT", "inputs[text_input]: must have the shape [1]"),
        ("tensor", "INVALID_ARGUMENT", "inputs[nonsense]"),
        ("lacking", "UNIMPLEMENTED", "inputs[return_logprobs]"),
        ("output", "INVALID_ARGUMENT", "return_finish_reason"),
        ("sampling", "INVALID_ARGUMENT", "sampling_parameters.temperature"),
        ("sampling", "INVALID_ARGUMENT", "sampling_parameters.top_k"),
        ("sampling", "INVALID_ARGUMENT", "sampling_parameters.min_tokens"),
        ("sampling", "INVALID_ARGUMENT", "sampling_parameters.stop"),
        ("option", "UNIMPLEMENTED", "sampling_parameters.guided_json"),
        ("constraint", "INVALID_ARGUMENT", "sampling_parameters.structured_outputs.regex"),
        ("constraints", "INVALID_ARGUMENT", "sampling_parameters.structured_outputs"),
        ("several", "INVALID_ARGUMENT", "sampling_parameters.n"),
        ("json", "INVALID_ARGUMENT", "inputs[sampling_parameters]"),
        ("both", "INVALID_ARGUMENT", "parameters.top_k"),
        ("streamed", "INVALID_ARGUMENT", "inputs[stream]"),
        ("config", "UNIMPLEMENTED", "Method not found"),
    ],
)
def test_what_is_wrong_has_its_code_and_name(seen: Any, case: str, code: str, named: str) -> None:
    status, message = seen["refusals"][case]
    assert status == f"StatusCode.{code}"
    assert named in message


def question(text: str, stream: bool = True, tokens: int = 4000) -> pb.ModelInferRequest:
    """With typed contents instead of raw ones."""
    request = pb.ModelInferRequest(model_name="fake")
    for name, value in (("text_input", text), ("sampling_parameters", json.dumps({"max_tokens": tokens}))):
        one = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        one.contents.bytes_contents.append(value.encode())
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(stream)
    return request


@pytest.fixture(scope="module")
def slow(serve: Serve) -> Iterator[Server]:
    """An answer of 4,000 tokens takes minutes."""
    with serve("--fake.step-time=0.05") as one:
        yield one


def test_a_cancelled_stream_leaves_nothing_and_each_request_has_a_record(slow: Server) -> None:
    stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(slow.channel)
    call = stub.ModelStreamInfer(iter([question("short", tokens=2), question("long")]), timeout=120)
    while not next(call).infer_response.parameters["triton_final_response"].bool_param:
        pass
    next(call)
    slow.until(lambda load: load.running == 1, 60)
    call.cancel()
    slow.idle(60)
    wait_for(lambda: slow.log.read_text().count(f"method={METHOD}") == 3)  # two requests and the stream
    lines = [line for line in slow.log.read_text().splitlines() if f"method={METHOD}" in line]
    assert "completion_tokens=2" in lines[0]
    assert "code=OK" in lines[0]
    assert all("code=CANCELLED" in line for line in lines[1:])


def test_bytes_that_are_no_request_are_told_in_the_stream(slow: Server) -> None:
    call = slow.channel.stream_stream(f"/{METHOD}", response_deserializer=pb.ModelStreamInferResponse.FromString)(
        iter([b"\xff", question("good", stream=False, tokens=1).SerializeToString()]), timeout=120
    )
    wrong, right = list(call)
    assert wrong.error_message == "the bytes are no inference.ModelInferRequest"
    assert right.infer_response.parameters["triton_final_response"].bool_param
    raw = question("x")
    raw.raw_input_contents.append(b"\x05\0\0\0abc")
    stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(slow.channel)
    assert refused(stub.ModelInfer, raw).code is grpc.StatusCode.INVALID_ARGUMENT
