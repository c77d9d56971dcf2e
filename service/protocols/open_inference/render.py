"""Plain data to messages."""

from __future__ import annotations

from engine.api import FinishReason
from service.core.delivery import AnswerMessage
from service.core.request import Ending, ModelFacts
from service.pb.inference import grpc_service_pb2 as pb
from service.protocols.open_inference.parse import VERSION, Question
from service.protocols.open_inference.tensors import INPUTS, OUTPUTS, add_output

_REASONS = {FinishReason.STOP: "stop", FinishReason.STOP_STRING: "stop", FinishReason.LENGTH: "length"}


def whole(message: AnswerMessage, question: Question) -> pb.ModelInferResponse:
    """An answer that is not streamed."""
    return _response(question.before + message.text, message, question)


def piece(message: AnswerMessage, question: Question) -> pb.ModelStreamInferResponse:
    """In a stream: of an answer, or all of it."""
    response = _response(question.before + message.text, message, question)
    response.parameters["triton_final_response"].bool_param = message.ending is not None
    return pb.ModelStreamInferResponse(infer_response=response)


def _response(text: str, message: AnswerMessage, question: Question) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=question.model, model_version=VERSION, id=question.id)
    values: dict[str, str | int] = {"text_output": text}
    if message.ending is not None:
        values |= _counts(message.ending)
    for name, value in values.items():
        if name in question.outputs:
            add_output(response, name, value)
    return response


def _counts(ending: Ending) -> dict[str, str | int]:
    return {
        "finish_reason": _REASONS[ending.reason],
        "num_input_tokens": ending.prompt_tokens,
        "num_output_tokens": ending.completion_tokens,
    }


def failed(request_id: str, message: str) -> pb.ModelStreamInferResponse:
    """In a stream: nothing more comes for this request."""
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
