"""What the real tritonclient sees of the server at argv[1]: JSON on stdout. Run by test_tritonclient.py."""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL, PATIENCE = "fake", 60
client = triton.InferenceServerClient(sys.argv[1])


def tensor(name: str, value: object, kind: str = "BYTES", shape: tuple[int, ...] = (1,)) -> Any:
    one = triton.InferInput(name, shape, kind)
    types = {"BYTES": object, "BOOL": bool, "INT32": numpy.int32}
    one.set_data_from_numpy(numpy.full(shape, value, dtype=types[kind]))
    return one


def inputs(text: str, flags: dict[str, bool] | None = None, **sampling: object) -> list[Any]:
    given = [tensor("text_input", text.encode()), tensor("sampling_parameters", json.dumps(sampling).encode())]
    return given + [tensor(name, value, "BOOL") for name, value in (flags or {}).items()]


def text(result: Any) -> str:
    found: str = result.as_numpy("text_output")[0].decode()
    return found


def refusal(call: Any, *arguments: Any, **options: Any) -> list[str | None]:
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        return [error.status(), error.message()]
    return ["no refusal", ""]


def infer(given: list[Any], model: str = MODEL, **options: Any) -> Any:
    return client.infer(model, given, client_timeout=PATIENCE, **options)


def stream() -> dict[str, Any]:
    """Three requests in one stream, the second of them wrong."""
    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: came.put((result, error)), stream_timeout=PATIENCE)
    flags = {"stream": True}
    wishes = {"temperature": "0", "max_tokens": "8"}
    client.async_stream_infer(MODEL, inputs("hello", flags, **wishes), request_id="a", enable_empty_final_response=True)
    client.async_stream_infer(MODEL, inputs("hello", flags, top_p=2), request_id="b")
    client.async_stream_infer(MODEL, inputs("hello", {"exclude_input_in_output": True}, **wishes), request_id="a")
    pieces: list[list[Any]] = []
    errors: list[str] = []
    while len(errors) < 1 or sum(last for *_, last in pieces) < 2:
        result, error = came.get(timeout=PATIENCE)
        if error is not None:
            errors.append(error.message())
        else:
            response = result.get_response()
            pieces.append([response.id, text(result), response.parameters["triton_final_response"].bool_param])
    client.stop_stream()
    return {"pieces": pieces, "errors": errors}


wish = {"temperature": 0, "max_tokens": 8}
known = {"exclude_input_in_output": True}
counting = {**known, **{f"return_{name}": True for name in ("finish_reason", "num_input_tokens", "num_output_tokens")}}
drawn = {"max_tokens": 8, "temperature": 1}
three = infer(inputs("hello", known, n=3, seed=5, **drawn)).as_numpy("text_output")
counted = infer(inputs("hello", counting, **wish), request_id="seven")
json.dump(
    {
        "live": client.is_server_live(),
        "ready": [client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("other")],
        "server": client.get_server_metadata(as_json=True),
        "model": client.get_model_metadata(MODEL, as_json=True),
        "text": text(infer(inputs("hello", known, **wish))),
        "echoed": text(infer([tensor("text_input", b"hello", shape=(1, 1))], parameters={"max_tokens": 8, "top_k": 1})),
        "id": counted.get_response().id,
        "counts": [counted.as_numpy(name)[0].item() for name in ("num_input_tokens", "num_output_tokens")],
        "reason": counted.as_numpy("finish_reason")[0].decode(),
        "only": [
            one.name
            for one in infer(inputs("hello", counting, **wish), outputs=[triton.InferRequestedOutput("finish_reason")])
            .get_response()
            .outputs
        ],
        "three": [one.decode() for one in three],
        "alone": [text(infer(inputs("hello", known, seed=seed, **drawn))) for seed in (5, 6, 7)],
        "stream": stream(),
        "constrained": [
            text(infer(inputs("x", known, **{name: shape, "max_tokens": 8})))
            for name, shape in (
                ("structured_outputs", {"regex": "[0-9]{3}"}),
                ("guided_decoding", json.dumps({"choice": ["left", "right"]})),
                ("structured_outputs", {"json": {"const": 12}}),
            )
        ],
        "refusals": {
            "constraint": refusal(infer, inputs("x", structured_outputs={"regex": "(", "json": None})),
            "constraints": refusal(infer, inputs("x", structured_outputs={"regex": "a", "choice": ["b"]})),
            "model": refusal(infer, inputs("x"), model="other"),
            "version": refusal(infer, inputs("x"), model_version="7"),
            "metadata": refusal(client.get_model_metadata, "other"),
            "no text": refusal(infer, [tensor("stream", False, "BOOL")]),
            "type": refusal(infer, [tensor("text_input", 1, "INT32")]),
            "shape": refusal(infer, [tensor("text_input", b"x", shape=(2,))]),
            "tensor": refusal(infer, [*inputs("x"), tensor("nonsense", b"x")]),
            "lacking": refusal(infer, [*inputs("x"), tensor("return_logprobs", True, "BOOL")]),
            "output": refusal(infer, inputs("x"), outputs=[triton.InferRequestedOutput("finish_reason")]),
            "sampling": refusal(infer, inputs("x", temperature=-1, top_k=1.5, min_tokens=True, stop=[1])),
            "option": refusal(infer, inputs("x", guided_json="{}")),
            "several": refusal(infer, inputs("x", n=17)),
            "json": refusal(infer, [tensor("text_input", b"x"), tensor("sampling_parameters", b"[1]")]),
            "both": refusal(infer, inputs("x"), parameters={"top_k": 1}),
            "streamed": refusal(infer, inputs("x", {"stream": True})),
            "config": refusal(client.get_model_config, MODEL),
        },
    },
    sys.stdout,
)
