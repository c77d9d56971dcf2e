"""Converts plain data to messages."""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import FinishReason
from service.core.answers.delivery import AnswerMessage
from service.core.request import ModelFacts
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.open_inference.parse import VERSION, ParsedInference
from service.protocols.open_inference.tensors import INPUTS, OUTPUTS, add_output

_REASONS = {FinishReason.STOP: "stop", FinishReason.STOP_STRING: "stop", FinishReason.LENGTH: "length"}


def whole(messages: Sequence[AnswerMessage], question: ParsedInference) -> pb.ModelInferResponse:
    """The response has an element for each answer."""
    return _response(sorted(messages, key=lambda one: one.number), question)


def piece(message: AnswerMessage, question: ParsedInference) -> pb.ModelStreamInferResponse:
    response = _response([message], question)
    response.parameters["triton_final_response"].bool_param = message.ending is not None
    return pb.ModelStreamInferResponse(infer_response=response)


def _response(messages: Sequence[AnswerMessage], question: ParsedInference) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=question.model, model_version=VERSION, id=question.id)
    endings = [message.ending for message in messages if message.ending is not None]
    values: dict[str, Sequence[str | int]] = {
        "text_output": [question.before + message.text for message in messages],
        "finish_reason": [_REASONS[one.reason] for one in endings],
        "num_input_tokens": [one.prompt_tokens for one in endings[:1]],
        "num_output_tokens": [one.completion_tokens for one in endings],
    }
    for name, elements in values.items():
        if name in question.outputs and elements:
            add_output(response, name, elements)
    return response


def failed(request_id: str, message: str) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(error_message=message, infer_response=pb.ModelInferResponse(id=request_id))


def model_metadata(facts: ModelFacts) -> pb.ModelMetadataResponse:
    kind = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=facts.name,
        versions=[VERSION],
        platform="whippet",
        inputs=[kind(name=name, datatype=datatype, shape=[1]) for name, datatype in INPUTS.items()],
        outputs=[kind(name=name, datatype=datatype, shape=[1]) for name, datatype in OUTPUTS.items()],
    )
