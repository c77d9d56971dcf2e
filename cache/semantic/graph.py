"""Builds a BERT sentence encoder as an ONNX graph: one text at a time, no padding, hence no mask.

ids [1, n] → embeddings [n, d] → layers → mean over n → unit vector [d]. Query, key and value are one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

OPSET = 17
Array = npt.NDArray[np.float32]


class NotExportable(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class EncoderShape:
    layers: int
    heads: int
    width: int
    epsilon: float


def read_shape(described: Mapping[str, Any]) -> EncoderShape:
    config = described["config"]
    pooling = described["pooling"]
    wrong = [
        name
        for name, right in (
            ("architecture", described["architecture"] == "BertModel"),
            ("modules", described["modules"][:2] == ["Transformer", "Pooling"]),
            ("activation", config["hidden_act"] == "gelu"),
            ("pooling", pooling.get("pooling_mode_mean_tokens", pooling.get("pooling_mode") == "mean")),
            ("positions", config.get("position_embedding_type", "absolute") == "absolute"),
        )
        if not right
    ]
    if wrong:
        raise NotExportable(f"not a BERT sentence encoder with mean pooling: {', '.join(wrong)}")
    return EncoderShape(
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        width=int(config["hidden_size"]),
        epsilon=float(config["layer_norm_eps"]),
    )


@dataclass(slots=True)
class _Builder:
    shape: EncoderShape
    weights: Mapping[str, Array]
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)

    def constant(self, value: npt.NDArray[Any]) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"{kind}_{name}", **attributes))
        return name

    def linear(self, x: str, *names: str) -> str:
        weight = np.concatenate([self.weights[f"{name}.weight"] for name in names]).T
        bias = np.concatenate([self.weights[f"{name}.bias"] for name in names])
        return self.node("Add", self.node("MatMul", x, self.constant(weight.copy())), self.constant(bias))

    def norm(self, x: str, name: str) -> str:
        scale, bias = (self.constant(self.weights[f"{name}.{part}"]) for part in ("weight", "bias"))
        return self.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=self.shape.epsilon)

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def heads(self, x: str, order: Sequence[int]) -> str:
        """[n, d] → [heads, n, d / heads], axes in the given order."""
        split = self.ints(-1, self.shape.heads, self.shape.width // self.shape.heads)
        return self.node("Transpose", self.node("Reshape", x, split), perm=list(order))

    def attention(self, x: str, layer: str) -> str:
        mixed = self.linear(x, *(f"{layer}.attention.self.{part}" for part in ("query", "key", "value")))
        width = self.shape.width
        query, key, value = (
            self.node("Slice", mixed, self.ints(i * width), self.ints((i + 1) * width), self.ints(1)) for i in range(3)
        )
        scale = self.constant(np.array((width // self.shape.heads) ** -0.5, np.float32))
        scores = self.node("MatMul", self.heads(query, (1, 0, 2)), self.heads(key, (1, 2, 0)))
        shares = self.node("Softmax", self.node("Mul", scores, scale), axis=-1)
        seen = self.node("Transpose", self.node("MatMul", shares, self.heads(value, (1, 0, 2))), perm=[1, 0, 2])
        flat = self.node("Reshape", seen, self.ints(-1, width))
        out = self.linear(flat, f"{layer}.attention.output.dense")
        return self.norm(self.node("Add", out, x), f"{layer}.attention.output.LayerNorm")

    def gelu(self, x: str) -> str:
        root = self.constant(np.array(2**0.5, np.float32))
        one, half = (self.constant(np.array(value, np.float32)) for value in (1.0, 0.5))
        spread = self.node("Add", self.node("Erf", self.node("Div", x, root)), one)
        return self.node("Mul", self.node("Mul", x, spread), half)

    def layer(self, x: str, number: int) -> str:
        name = f"encoder.layer.{number}"
        x = self.attention(x, name)
        wide = self.gelu(self.linear(x, f"{name}.intermediate.dense"))
        return self.norm(self.node("Add", self.linear(wide, f"{name}.output.dense"), x), f"{name}.output.LayerNorm")

    def embeddings(self) -> str:
        ids = self.node("Squeeze", "ids", self.ints(0))
        words = self.node("Gather", self.constant(self.weights["embeddings.word_embeddings.weight"]), ids)
        kinds = self.weights["embeddings.token_type_embeddings.weight"][0]
        places = self.constant(self.weights["embeddings.position_embeddings.weight"] + kinds)
        here = self.node("Slice", places, self.ints(0), self.node("Shape", ids), self.ints(0))
        return self.norm(self.node("Add", words, here), "embeddings.LayerNorm")


def build(shape: EncoderShape, weights: Mapping[str, Array]) -> ModelProto:
    builder = _Builder(shape, weights)
    x = builder.embeddings()
    for number in range(shape.layers):
        x = builder.layer(x, number)
    mean = builder.node("ReduceMean", x, axes=[0], keepdims=0)
    length = builder.node("ReduceL2", mean, axes=[0], keepdims=1)
    builder.nodes.append(helper.make_node("Div", [mean, length], ["vector"], name="unit"))
    graph = helper.make_graph(
        builder.nodes,
        "sentence encoder",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "n"])],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, [shape.width])],
        builder.constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
