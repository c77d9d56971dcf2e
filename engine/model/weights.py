"""The weights of the transformer, and how the tensors of a checkpoint become layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.linear import DenseLinear, Linear, LinearLoader, Placement, Projection
from engine.model.norm import NoNorm, RmsNorm, WideNorm
from quant.checkpoint.config import ModelConfig
from quant.checkpoint.source import TensorSource, finite
from quant.checkpoint.tensors import EMBEDDING, FINAL_NORM, HEAD, Norm, Product, layer_form, layer_prefix


@dataclass(frozen=True, slots=True)
class Layer:
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
        """A tied head counts once."""
        linears = self.in_order()[:-1]
        norms = [norm for layer in self.layers for norm in layer.norms] + [self.norm]
        tied = isinstance(self.head, DenseLinear) and self.head.weight is self.embedding
        head = 0 if tied else self.head.nbytes
        return self.embedding.nbytes + head + sum(part.nbytes for part in [*linears, *norms])


def load_weights(config: ModelConfig, source: TensorSource, load_linear: LinearLoader, placement: Placement) -> Weights:
    """Reads the checkpoint tensor by tensor, in order, each into its final place. Of a split model the source has as
    many tokens of the vocabulary as this rank holds."""
    vocabulary = source.shape(EMBEDDING)[0]
    embedding = placement.matrix(vocabulary, config.hidden_size)
    embedding.copy_(finite(source.tensor(EMBEDDING), EMBEDDING))
    layers = tuple(_load_layer(config, index, source, load_linear, placement) for index in range(config.layers))
    norm = RmsNorm(_gains(config, source, FINAL_NORM, placement).mul_(config.logit_scale), config.norm_eps)
    tied = DenseLinear(embedding, products=placement.products)
    head = tied if config.tied_head else load_linear(source, _head(config, vocabulary), placement)
    return Weights(embedding=embedding, layers=layers, norm=norm, head=head)


def _head(config: ModelConfig, vocabulary: int) -> Projection:
    return Projection((HEAD,), (vocabulary,), config.hidden_size)


def _load_layer(
    config: ModelConfig, index: int, source: TensorSource, load_linear: LinearLoader, placement: Placement
) -> Layer:
    form, prefix = layer_form(config), layer_prefix(index)

    def linear(product: Product) -> Linear:
        names = tuple(f"{prefix}.{name}" for name in product.linears)
        return load_linear(source, Projection(names, product.outputs, product.inputs, product.bias), placement)

    def gains(norm: Norm) -> torch.Tensor:
        return _gains(config, source, f"{prefix}.{norm.name}.weight", placement)

    def norm(described: Norm | None) -> RmsNorm | None:
        return None if described is None else RmsNorm(gains(described), config.norm_eps)

    head_norm = None
    if form.query_norm is not None and form.key_norm is not None:
        both = torch.empty(config.heads + config.kv_heads, config.head_dim, device=placement.device)
        # The scale of attention is a factor on queries, and rotation keeps it.
        both[: config.heads].copy_(gains(form.query_norm).mul_(config.query_scale).view(-1, config.head_dim))
        both[config.heads :].copy_(gains(form.key_norm).view(-1, config.head_dim))
        wide = form.query_norm.size > config.head_dim
        head_norm = WideNorm(both, config.norm_eps, config.heads) if wide else RmsNorm(both, config.norm_eps)
    return Layer(
        input_norm=norm(form.input_norm) or NoNorm(),
        qkv=linear(form.qkv),
        head_norm=head_norm,
        output=linear(form.output),
        mlp_norm=norm(form.mlp_norm) or NoNorm(),
        gate_up=linear(form.gate_up),
        down=linear(form.down),
        window=config.windows[index],
        output_norm=norm(form.output_norm),
        down_norm=norm(form.down_norm),
    )


def _gains(config: ModelConfig, source: TensorSource, name: str, placement: Placement) -> torch.Tensor:
    """A norm's float32 factors, which some families store less one."""
    found = torch.empty(source.shape(name), dtype=torch.float32, device=placement.device)
    found.copy_(finite(source.tensor(name), name))
    return found.add_(config.norm_offset) if config.norm_offset else found
