"""Describes the layers of a model of one config, and the tensors that hold them, as Hugging Face names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from quant.checkpoint.config import ModelConfig

EMBEDDING: Final = "model.embed_tokens.weight"
FINAL_NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head"

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}"


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of a layer, by its name within the layer."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Product:
    """Linears that read the same input, by their names within the layer."""

    linears: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]  # one a linear
    bias: bool  # all have one, or none has
    follows: str | None  # the norm or linear whose channels are the inputs, so that a scale can move between the two


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """Describes a decoder layer; fields are in the order of the forward pass. Whoever loads a layer, predicts its
    kernels or quantizes it reads this description, in which a family has the norms that are not None:

    x += output_norm(output(attend(query_norm, key_norm of qkv(input_norm(x)))))
    x += down_norm(down(gate(gate_up(mlp_norm(x)))))
    """

    input_norm: Norm | None
    qkv: Product
    query_norm: Norm | None  # of each head, or of all heads as one; its size says which
    key_norm: Norm | None
    output: Product
    output_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Product
    down: Product
    down_norm: Norm | None

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Norm, ...]:
        heads = self.query_norm, self.key_norm
        found = (self.input_norm, *heads, self.output_norm, self.mlp_norm, self.down_norm)
        return tuple(norm for norm in found if norm is not None)


def layer_form(config: ModelConfig) -> LayerForm:
    """Describes the layers of a model, which differ in their windows alone."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    ends, wide = config.output_norms, config.wide_qk_norm

    def norm(name: str, needed: bool, size: int = hidden) -> Norm | None:
        return Norm(name, size) if needed else None

    def product(reads: Norm | str | None, inputs: int, outputs: dict[str, int], bias: bool) -> Product:
        follows = reads.name if isinstance(reads, Norm) else reads
        return Product(tuple(outputs), inputs, tuple(outputs.values()), bias, follows)

    first = norm("input_layernorm", config.input_norms)
    second = norm("pre_feedforward_layernorm" if ends else "post_attention_layernorm", config.input_norms)
    return LayerForm(
        input_norm=first,
        qkv=product(first, hidden, {q: queries, k: keys, v: keys}, config.qkv_bias),
        query_norm=norm("self_attn.q_norm", config.qk_norm, queries if wide else config.head_dim),
        key_norm=norm("self_attn.k_norm", config.qk_norm, keys if wide else config.head_dim),
        output=product(v, queries, {o: hidden}, config.output_bias),
        output_norm=norm("post_attention_layernorm", ends),
        mlp_norm=second,
        gate_up=product(second, hidden, {gate: inner, up: inner}, config.mlp_bias),
        down=product(up, inner, {down: hidden}, config.mlp_bias),
        down_norm=norm("post_feedforward_layernorm", ends),
    )


def layer_linears(config: ModelConfig) -> Mapping[str, tuple[int, int]]:
    """The linears of a layer in the order of the forward pass: name -> (inputs, outputs)."""
    return {name: shape for name, shape, _ in _layer_linears(config)}


def _layer_linears(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int], bool]]:
    for product in layer_form(config).products:
        for name, outputs in zip(product.linears, product.outputs, strict=True):
            yield name, (product.inputs, outputs), product.bias


def layer_norms(config: ModelConfig) -> Mapping[str, int]:
    """The norms of a layer: name -> size."""
    return {norm.name: norm.size for norm in layer_form(config).norms}


def linears(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Every linear, an untied head last: full name, (inputs, outputs), whether it has a bias."""
    for index in range(config.layers):
        for name, shape, bias in _layer_linears(config):
            yield f"{layer_prefix(index)}.{name}", shape, bias
    if not config.tied_head:
        yield HEAD, (config.hidden_size, config.vocab_size), False


def plain_tensors(config: ModelConfig) -> Shapes:
    """Names what no format quantizes: embedding and norms."""
    found: Shapes = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.layers):
        found |= {f"{layer_prefix(index)}.{name}.weight": (size,) for name, size in layer_norms(config).items()}
    found[FINAL_NORM] = (config.hidden_size,)
    return found


def dense_tensors(config: ModelConfig) -> Shapes:
    found = plain_tensors(config)
    for name, (inputs, outputs), bias in linears(config):
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)
    return found
