"""Converts messages to plain data. Refuses by name what is not served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.api import Priority
from service.core.errors import Unimplemented, UnknownModel
from service.core.request import COALESCING_DELAY, CacheUse, Delivery, ModelFacts, Output, Request, TextPrompt
from service.core.validation import Violations
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.open_inference.sampling import Parameters, from_json, from_parameters
from service.protocols.open_inference.tensors import LACKING, OUTPUTS, TEXT, Value, read_inputs
from service.protocols.sampling_fields import read_answers, read_request_id, read_sampling, read_stops

VERSION = "1"
_SAMPLING = "sampling_parameters"
# Fields of the use cases, as this protocol calls them.
NAMES = {
    TextPrompt.field: TEXT,
    "stopping.max_tokens": f"{_SAMPLING}.max_tokens",
    "stopping.min_tokens": f"{_SAMPLING}.min_tokens",
    "n": f"{_SAMPLING}.n",
}
_EMPTY_FINAL = "triton_enable_empty_final_response"  # a parameter: in a stream the last response says so anyhow


@dataclass(frozen=True, slots=True)
class ParsedInference:
    request: Request
    id: str  # the caller's
    model: str
    streamed: bool
    before: str  # put before the answer's text
    outputs: frozenset[str]  # tensors to send


def check_model(name: str, version: str, facts: ModelFacts) -> None:
    if name != facts.name or version not in ("", VERSION):
        raise UnknownModel(f"{name}:{version}" if version else name, facts.name)


def read_infer(message: pb.ModelInferRequest, facts: ModelFacts, streams: bool) -> ParsedInference:
    """`streams`: the RPC can send an answer in pieces. Raises UnknownModel, InvalidRequest or Unimplemented."""
    check_model(message.model_name, message.model_version, facts)
    for tensor in message.inputs:
        if tensor.name in LACKING:
            raise Unimplemented(tensor.name, f"inputs[{tensor.name}]: this server does not serve it")
    found = Violations()
    inputs = read_inputs(message, found)
    if not any(tensor.name == TEXT for tensor in message.inputs):
        found.add(f"inputs[{TEXT}]", "is needed")
    text = _text(inputs.get(TEXT), found)
    streamed = bool(inputs.get("stream", False))
    if streamed and not streams:
        found.add("inputs[stream]", "must be false in ModelInfer: ModelStreamInfer sends an answer in pieces")
    without_prompt = bool(inputs.get("exclude_input_in_output", streamed))
    if streamed and not without_prompt:
        found.add("inputs[exclude_input_in_output]", "must be true where the answer is streamed")
    parameters = _parameters(message, inputs, found)
    request = Request(
        request_id=read_request_id("", found),  # ids of this protocol need not differ, those of live requests must
        prompt=TextPrompt(text),
        sampling=read_sampling(parameters.sampling(), facts, found, f"{_SAMPLING}."),
        stops=read_stops(parameters.stops(), facts, found, f"{_SAMPLING}."),
        output=Output(True, False, None, skip_special=parameters.skip_special),
        priority=Priority.NORMAL,
        time_budget=None,
        delivery=Delivery(1, 0.0, COALESCING_DELAY),
        cache=CacheUse(),
        seeded=parameters.seeded,
        constraint=parameters.constraint(),
        answers=read_answers(parameters.answers, None, found, f"{_SAMPLING}.n"),
    )
    if streams and request.answers > 1:
        found.add(f"{_SAMPLING}.n", "must be 1 in ModelStreamInfer: ModelInfer gives several answers")
    outputs = _outputs(message, inputs, found)
    found.raise_any()
    return ParsedInference(request, message.id, facts.name, streamed, "" if without_prompt else text, outputs)


def _text(value: Value | None, found: Violations) -> str:
    if not isinstance(value, bytes):
        return ""
    try:
        return value.decode()
    except UnicodeDecodeError:
        found.add(f"inputs[{TEXT}]", "is not UTF-8 text")
        return ""


def _parameters(message: pb.ModelInferRequest, inputs: Mapping[str, Value], found: Violations) -> Parameters:
    given = {name: value for name, value in from_parameters(message.parameters).items() if name != _EMPTY_FINAL}
    data = inputs.get(_SAMPLING)
    if not isinstance(data, bytes):
        return Parameters(given, found, "parameters.")
    for name in given:
        found.add(f"parameters.{name[:64]}", f"must not be there beside {_SAMPLING}")
    return Parameters(from_json(data, found, f"inputs[{_SAMPLING}]"), found, f"{_SAMPLING}.")


def _outputs(message: pb.ModelInferRequest, inputs: Mapping[str, Value], found: Violations) -> frozenset[str]:
    there = {"text_output", *(name for name in OUTPUTS if inputs.get(f"return_{name}"))}
    for tensor in message.outputs:
        if tensor.name not in there:
            asked = f"; ask for it with the input return_{tensor.name}" if tensor.name in OUTPUTS else ""
            found.add(f"outputs[{tensor.name[:64]}]", f"is no tensor of this answer{asked}")
        if tensor.parameters:
            found.add(f"outputs[{tensor.name[:64]}].parameters", "must be empty")
    requested = {tensor.name for tensor in message.outputs}
    return frozenset(there & requested if requested else there)
