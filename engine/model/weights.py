"""The tensors of the transformer: what a checkpoint must hold, and how it becomes layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear import DenseLinear, Linear, LinearLoader, Placement, Projection, TensorSource
from engine.model.config import ModelConfig
from engine.model.norm import RmsNorm

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LayerProjections:
    """The four linears of a layer."""

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    input_norm: RmsNorm
    qkv: Linear
    head_norm: RmsNorm | None  # over queries and keys, heads side by side
    output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All that is read to make one token."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear

    @property
    def nbytes(self) -> int:
        """Bytes held; a tied head counts once."""
        linears = [linear for layer in self.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        norms = [layer.input_norm for layer in self.layers] + [layer.mlp_norm for layer in self.layers] + [self.norm]
        norms += [layer.head_norm for layer in self.layers if layer.head_norm is not None]
        tied = isinstance(self.head, DenseLinear) and self.head.weight is self.embedding
        head = 0 if tied else self.head.nbytes
        return self.embedding.nbytes + head + sum(part.nbytes for part in [*linears, *norms])


def layer_prefix(index: int) -> str:
    """As Hugging Face names layers."""
    return f"model.layers.{index}"


def layer_projections(config: ModelConfig, index: int) -> LayerProjections:
    """Names and shapes of a layer's linears."""
    attention, mlp = f"{layer_prefix(index)}.self_attn", f"{layer_prefix(index)}.mlp"
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    names = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
    return LayerProjections(
        qkv=Projection(names, (queries, keys, keys), hidden, config.qkv_bias),
        output=Projection((f"{attention}.o_proj",), (hidden,), queries, config.output_bias),
        gate_up=Projection((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, config.mlp_bias),
        down=Projection((f"{mlp}.down_proj",), (hidden,), inner, config.mlp_bias),
    )


def head_projection(config: ModelConfig) -> Projection:
    """Name and shape of an untied head."""
    return Projection((HEAD,), (config.vocab_size,), config.hidden_size)


def plain_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is never quantized: embedding and norms."""
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.layers):
        prefix = layer_prefix(index)
        found[f"{prefix}.input_layernorm.weight"] = (config.hidden_size,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (config.hidden_size,)
        if config.qk_norm:
            found[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            found[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    found[FINAL_NORM] = (config.hidden_size,)
    return found


def projections(config: ModelConfig) -> list[Projection]:
    """All linears, an untied head included."""
    found: list[Projection] = []
    for index in range(config.layers):
        layer = layer_projections(config, index)
        found += [layer.qkv, layer.output, layer.gate_up, layer.down]
    return found if config.tied_head else [*found, head_projection(config)]


def dense_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of an unquantized checkpoint."""
    found = plain_tensors(config)
    for projection in projections(config):
        found.update(projection.tensors())
    return found


def load_weights(config: ModelConfig, source: TensorSource, load_linear: LinearLoader, placement: Placement) -> Weights:
    """Reads the checkpoint tensor by tensor, in order, each into its final place."""
    embedding = placement.matrix(config.vocab_size, config.hidden_size).copy_(source.tensor(EMBEDDING))
    layers = tuple(_load_layer(config, index, source, load_linear, placement) for index in range(config.layers))
    norm = RmsNorm(_copy32(source, FINAL_NORM, placement), config.norm_eps)
    head = DenseLinear(embedding) if config.tied_head else load_linear(source, head_projection(config), placement)
    return Weights(embedding=embedding, layers=layers, norm=norm, head=head)


def _load_layer(
    config: ModelConfig, index: int, source: TensorSource, load_linear: LinearLoader, placement: Placement
) -> Layer:
    prefix, parts = layer_prefix(index), layer_projections(config, index)
    head_norm = None
    if config.qk_norm:
        queries = _copy32(source, f"{prefix}.self_attn.q_norm.weight", placement).expand(config.heads, -1)
        keys = _copy32(source, f"{prefix}.self_attn.k_norm.weight", placement).expand(config.kv_heads, -1)
        head_norm = RmsNorm(torch.cat((queries, keys)), config.norm_eps)
    return Layer(
        input_norm=RmsNorm(_copy32(source, f"{prefix}.input_layernorm.weight", placement), config.norm_eps),
        qkv=load_linear(source, parts.qkv, placement),
        head_norm=head_norm,
        output=load_linear(source, parts.output, placement),
        mlp_norm=RmsNorm(_copy32(source, f"{prefix}.post_attention_layernorm.weight", placement), config.norm_eps),
        gate_up=load_linear(source, parts.gate_up, placement),
        down=load_linear(source, parts.down, placement),
        window=config.windows[index],
    )


def _copy32(source: TensorSource, name: str, placement: Placement) -> torch.Tensor:
    found = torch.empty(source.shape(name), dtype=torch.float32, device=placement.device)
    return found.copy_(source.tensor(name))
