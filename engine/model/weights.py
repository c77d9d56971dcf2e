"""The weights of the transformer, and how the tensors of a checkpoint become layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear import DenseLinear, Linear, LinearLoader, Placement, Projection
from engine.model.norm import RmsNorm
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.source import TensorSource, finite
from quant.checkpoint.tensors import EMBEDDING, FINAL_NORM, HEAD, has_bias, layer_linears, layer_prefix, mlp_norm


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
    output_norm: RmsNorm | None = None  # of what attention computes
    down_norm: RmsNorm | None = None  # of what the MLP computes

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        found = (self.input_norm, self.head_norm, self.output_norm, self.mlp_norm, self.down_norm)
        return tuple(norm for norm in found if norm is not None)


@dataclass(frozen=True, slots=True)
class Weights:
    """All that is read to make one token."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: RmsNorm
    head: Linear

    def in_order(self) -> list[Linear]:
        """All linears, as a step reads them."""
        layers = [one for layer in self.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return [*layers, self.head]

    @property
    def nbytes(self) -> int:
        """Bytes held; a tied head counts once."""
        linears = self.in_order()[:-1]
        norms = [norm for layer in self.layers for norm in layer.norms] + [self.norm]
        tied = isinstance(self.head, DenseLinear) and self.head.weight is self.embedding
        head = 0 if tied else self.head.nbytes
        return self.embedding.nbytes + head + sum(part.nbytes for part in [*linears, *norms])


def layer_projections(config: ModelConfig, index: int) -> LayerProjections:
    """Which linears of a layer are read as one."""
    shapes = layer_linears(config)

    def joined(*names: str) -> Projection:
        """Linears of one input, one under another; all have a bias or none."""
        prefixes = tuple(f"{layer_prefix(index)}.{name}" for name in names)
        return Projection(
            prefixes, tuple(shapes[name][1] for name in names), shapes[names[0]][0], has_bias(config, names[0])
        )

    return LayerProjections(
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=joined("self_attn.o_proj"),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )


def head_projection(config: ModelConfig) -> Projection:
    """Name and shape of an untied head."""
    return Projection((HEAD,), (config.vocab_size,), config.hidden_size)


def load_weights(config: ModelConfig, source: TensorSource, load_linear: LinearLoader, placement: Placement) -> Weights:
    """Reads the checkpoint tensor by tensor, in order, each into its final place."""
    embedding = placement.matrix(config.vocab_size, config.hidden_size)
    embedding.copy_(finite(source.tensor(EMBEDDING), EMBEDDING))
    layers = tuple(_load_layer(config, index, source, load_linear, placement) for index in range(config.layers))
    norm = RmsNorm(_gains(config, source, FINAL_NORM, placement), config.norm_eps)
    tied = DenseLinear(embedding, products=placement.products)
    head = tied if config.tied_head else load_linear(source, head_projection(config), placement)
    return Weights(embedding=embedding, layers=layers, norm=norm, head=head)


def _load_layer(
    config: ModelConfig, index: int, source: TensorSource, load_linear: LinearLoader, placement: Placement
) -> Layer:
    prefix, parts = layer_prefix(index), layer_projections(config, index)

    def gains(name: str) -> torch.Tensor:
        return _gains(config, source, f"{prefix}.{name}.weight", placement)

    def norm(name: str) -> RmsNorm:
        return RmsNorm(gains(name), config.norm_eps)

    head_norm = None
    if config.qk_norm:
        # The scale of attention is a factor on queries, and rotation keeps it.
        queries = gains("self_attn.q_norm").mul_(config.query_scale).expand(config.heads, -1)
        keys = gains("self_attn.k_norm").expand(config.kv_heads, -1)
        head_norm = RmsNorm(torch.cat((queries, keys)), config.norm_eps)
    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=load_linear(source, parts.qkv, placement),
        head_norm=head_norm,
        output=load_linear(source, parts.output, placement),
        mlp_norm=norm(mlp_norm(config)),
        gate_up=load_linear(source, parts.gate_up, placement),
        down=load_linear(source, parts.down, placement),
        window=config.windows[index],
        output_norm=norm("post_attention_layernorm") if config.output_norms else None,
        down_norm=norm("post_feedforward_layernorm") if config.output_norms else None,
    )


def _gains(config: ModelConfig, source: TensorSource, name: str, placement: Placement) -> torch.Tensor:
    """Reads what a norm multiplies by, float32. Some families store it less one."""
    found = torch.empty(source.shape(name), dtype=torch.float32, device=placement.device)
    found.copy_(finite(source.tensor(name), name))
    return found.add_(config.norm_offset) if config.norm_offset else found
