"""Tensors of one element, out of messages and into them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from service.core.validation import Violations
from service.pb.inference import grpc_service_pb2 as pb

Value = bytes | bool

TEXT = "text_input"
INPUTS = {  # type by name
    TEXT: "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
LACKING = ("image", "return_cumulative_logprob", "return_logprobs")  # what Triton's vLLM backend has as well
_LENGTH = struct.Struct("<I")
_SHAPES = ([1], [1, 1])


def read_inputs(message: pb.ModelInferRequest, found: Violations) -> Mapping[str, Value]:
    """Elements by the tensor's name; wrong ones are left out."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        found.add("raw_input_contents", f"must be one for each of the {len(message.inputs)} inputs, or none")
        return {}
    values: dict[str, Value] = {}
    for index, tensor in enumerate(message.inputs):
        field, datatype = f"inputs[{tensor.name[:64]}]", INPUTS.get(tensor.name)
        if datatype is None:
            found.add(field, f"is no tensor of this model; there are {', '.join(INPUTS)}")
        elif tensor.name in values:
            found.add(field, "is there twice")
        elif tensor.datatype != datatype:
            found.add(field, f"must be of type {datatype}")
        elif list(tensor.shape) not in _SHAPES:
            found.add(field, "must have the shape [1]")
        elif tensor.parameters:
            found.add(f"{field}.parameters", "must be empty: this server has no shared memory")
        else:
            value = _raw(raw[index], datatype) if raw else _typed(tensor.contents, datatype)
            if value is None:
                found.add(field, "must have one element")
            else:
                values[tensor.name] = value
    return values


def _raw(data: bytes, datatype: str) -> Value | None:
    if datatype == "BOOL":
        return data != b"\0" if len(data) == 1 else None
    if len(data) < _LENGTH.size or _LENGTH.unpack_from(data)[0] != len(data) - _LENGTH.size:
        return None
    return data[_LENGTH.size :]


def _typed(contents: pb.InferTensorContents, datatype: str) -> Value | None:
    elements = contents.bool_contents if datatype == "BOOL" else contents.bytes_contents
    return elements[0] if len(elements) == 1 else None


def add_output(response: pb.ModelInferResponse, name: str, values: Sequence[str | int]) -> None:
    response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[len(values)])
    raw = [value if isinstance(value, int) else value.encode() for value in values]
    response.raw_output_contents.append(
        b"".join(_LENGTH.pack(one) if isinstance(one, int) else _LENGTH.pack(len(one)) + one for one in raw)
    )
