"""A loaded model as the kernels read it, without a copy of its matrices but a coarse one of the head; or why they
cannot."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from engine.kernels import two_pass
from engine.kernels import weights as forms
from engine.kernels.attention import LayerAttention
from engine.kernels.gpu import GpuShape
from engine.linear import DenseLinear, Linear
from engine.linear.canonical import CanonicalLinear
from engine.linear.cuda import CudaLinear
from engine.model import features
from engine.model.layers.few_rows import MOST_ROWS, ChainPlan, LayerWeights, StepProduct, StepWeights
from engine.model.layers.many_tokens import Loaded, heads_of
from engine.model.weights import Layer
from quant.checkpoint.forms import Dense, Int4Minima

MOST_TOKENS = 1 << 24  # ids that an entry of the ring can name
STATIC = 44 << 10  # bytes of shared memory that the kernels of two passes declare themselves, at most
KEPT = 1 << 30  # bytes of the GPU that a coarse copy of the head must leave free


def why_not(parts: Loaded) -> str | None:
    """Why the kernels cannot read this model. Does not depend on the device."""
    model, pool = parts.model, parts.pool
    if model.placement.dtype != torch.bfloat16:
        return f"the model is {model.placement.dtype}, the kernels compute in bfloat16".replace("torch.", "")
    if pool.heads_outside:
        return "the page pool is laid out for a CPU"
    if model.config.vocab_size > MOST_TOKENS:
        return f"a vocabulary of {model.config.vocab_size}, the kernels know up to {MOST_TOKENS}"
    objection = heads_of(parts).why_not() or features.why_not(model.config)
    if objection is not None:
        return objection
    for layer in model.weights.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            objection = _objection(linear)
            if objection is not None:
                return objection
    return _objection(model.weights.head)


def _objection(linear: Linear) -> str | None:
    if isinstance(linear, CudaLinear):
        return None
    if isinstance(linear, DenseLinear):
        return forms.why_not(Dense(linear.weight))
    if isinstance(linear, CanonicalLinear) and not isinstance(linear.weight, Int4Minima):
        objection = forms.why_not(linear.weight)
        return objection and f"packed weights: {objection}"
    return f"the kernels do not read weights of {type(linear).__name__}"


def step_weights(parts: Loaded) -> StepWeights:
    """Valid where `why_not` has no objection."""
    model, weights = parts.model, parts.model.weights
    head = _product(weights.head)
    return StepWeights(
        table=weights.embedding,
        layers=[_layer(parts, index, layer) for index, layer in enumerate(weights.layers)],
        final_gain=weights.norm.weight,
        head=head.matrix,
        heads=heads_of(parts),
        eps=model.config.norm_eps,
        angles=model.rope,
        channels=None if parts.sums is None else parts.sums.few,
        embedding_scale=model.embedding_scale,
    )


def why_one_pass(parts: Loaded) -> str | None:
    """Why the head is read in one pass. Does not depend on the device."""
    return why_not(parts) or two_pass.why_not(_product(parts.model.weights.head).matrix)


def read(parts: Loaded) -> tuple[StepWeights, str | None]:
    """Adds a coarse copy of the head where that is of use and fits, else why there is none."""
    plain = step_weights(parts)
    reason = why_one_pass(parts)
    if reason is not None:
        return plain, reason
    device = parts.model.placement.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize  # shapes alone take none
    reason = _why_no_room(plain, free)
    if reason is not None:
        return plain, reason
    try:
        return _with_coarse_copy(plain, parts.kernels.gpu)
    except torch.OutOfMemoryError as failure:
        return plain, " ".join(str(failure).split())[:300]


def _why_no_room(weights: StepWeights, free: int) -> str | None:
    needed = two_pass.copy_bytes(weights.head)
    if free - needed >= KEPT:
        return None
    have, need, keep = (size >> 20 for size in (free, needed, KEPT))
    return f"a copy of the head takes {need} MiB, {have} are free, and {keep} of them must stay free"


def _with_coarse_copy(weights: StepWeights, gpu: GpuShape) -> tuple[StepWeights, str | None]:
    plan = ChainPlan.of(gpu)
    coarse = two_pass.coarse_copy(weights.head, plan.tiling("head", weights.head).warps)
    shared = plan.two_passes(weights.head, coarse).shared_bytes(MOST_ROWS) + STATIC
    if shared > gpu.shared:
        return weights, f"a block takes {shared >> 10} KiB of shared memory, this GPU has less"
    return replace(weights, coarse=coarse), None


def _layer(parts: Loaded, index: int, layer: Layer) -> LayerWeights:
    keys, values = parts.pool.layer(index).unbind(0)
    query_gain = key_gain = None
    if layer.head_norm is not None:
        heads = parts.model.config.heads
        query_gain, key_gain = (layer.head_norm.weight[at].contiguous() for at in (0, heads))
    return LayerWeights(
        input_gain=layer.input_norm.weight,
        qkv=_product(layer.qkv),
        attention=LayerAttention(keys, values, query_gain, key_gain, layer.window),
        output=_product(layer.output),
        mlp_gain=layer.mlp_norm.weight,
        gate_up=_product(layer.gate_up),
        down=_product(layer.down),
    )


def _product(linear: Linear) -> StepProduct:
    if isinstance(linear, CudaLinear):
        return StepProduct(linear.matrix, _bias(linear.bias))
    if not isinstance(linear, DenseLinear):
        raise TypeError(f"no matrix in a {type(linear).__name__}")
    return StepProduct(forms.to_matrix(Dense(linear.weight)), _bias(linear.bias))


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float().contiguous()
