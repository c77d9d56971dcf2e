"""compressed-tensors `pack-quantized`, W4A16 and W8A16. K: inputs, N: outputs, G: groups a row.

weight_packed      int32 [N, ceil(K*bits/32)], values in order along K, stored plus 2**(bits-1)
weight_scale       float [N, G]
weight_zero_point  asymmetric only: int32 [ceil(N/8), G] packed along N, or int8 [N, G] from older writers
weight_shape       int [2]: N, K
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Int4Groups, Int8Rows
from quant.checkpoint.nibbles import bytes_of, pack_nibbles, unpack_nibbles, words_of
from quant.checkpoint.source import TensorSource, check, fetch, fetch_floats
from quant.checkpoint.spec import WHOLE_ROW, PackedScheme, PackedSpec


def read_packed(
    source: TensorSource, layer: str, spec: PackedSpec, in_features: int, out_features: int
) -> Int4Groups | Int8Rows:
    scheme = spec.scheme(layer)
    name = f"{layer}.weight_packed"
    if scheme is None:
        raise BadTensor(name, "a config group that targets this layer", "none")
    group = in_features if scheme.group == WHOLE_ROW else scheme.group
    if in_features % 2 or in_features % group:
        raise BadTensor(name, f"inputs in whole groups of {group}", f"{in_features} inputs")
    _check_shape(source, layer, in_features, out_features)
    if f"{layer}.weight_g_idx" in source.names():
        _check_order(source, f"{layer}.weight_g_idx", in_features, group)
    words = (out_features, -(-in_features * scheme.bits // 32))
    check(source, name, words, (torch.int32,))
    scale = fetch_floats(source, f"{layer}.weight_scale", (out_features, in_features // group)).clone()
    if scheme.bits == 8:
        # stored plus 128: flipping the top bit is the same as subtracting it
        q = bytes_of(fetch(source, name, words, (torch.int32,)))[:, :in_features] ^ 0x80
        return Int8Rows(q.view(torch.int8), scale[:, 0].float())
    zero = _zeros(source, layer, scheme, out_features, in_features // group).to(scale.device)
    packed = bytes_of(fetch(source, name, words, (torch.int32,)))[:, : in_features // 2].clone()
    return Int4Groups(packed, scale, zero, group)


def write_packed(weight: Int4Groups | Int8Rows) -> Mapping[str, torch.Tensor]:
    """The tensors of one layer, as compressed-tensors names and packs them. Eight bits have a bfloat16 scale, which
    holds what `round_rows` makes without loss."""
    outputs, inputs = weight.shape
    shape = torch.tensor([outputs, inputs], dtype=torch.int64)
    if isinstance(weight, Int8Rows):
        if inputs % 4:
            raise BadTensor("weight_packed", "inputs in multiples of 4", f"{inputs} inputs")
        words = words_of(weight.q.view(torch.uint8) ^ 0x80)
        scale = weight.scale.unsqueeze(1).to(torch.bfloat16)
        return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape}
    if inputs % 8:
        raise BadTensor("weight_packed", "inputs in multiples of 8", f"{inputs} inputs")
    zeros = functional.pad(weight.zero.T, (0, -outputs % 8))
    return {
        "weight_packed": words_of(weight.packed),
        "weight_scale": weight.scale.to(torch.float16).contiguous(),
        "weight_zero_point": words_of(pack_nibbles(zeros)).T.contiguous(),
        "weight_shape": shape,
    }


def _zeros(source: TensorSource, layer: str, scheme: PackedScheme, outputs: int, groups: int) -> torch.Tensor:
    name = f"{layer}.weight_zero_point"
    if scheme.symmetric:
        return torch.full((outputs, groups), 8, dtype=torch.uint8)
    if name in source.names() and source.dtype(name) == torch.int8:
        plain = fetch(source, name, (outputs, groups), (torch.int8,))
        if int(plain.min()) < -8 or int(plain.max()) > 7:
            raise BadTensor(name, "values in -8..7", f"{int(plain.min())}..{int(plain.max())}")
        return (plain + 8).to(torch.uint8)
    words = fetch(source, name, (-(-outputs // 8), groups), (torch.int32,))
    return unpack_nibbles(bytes_of(words.T)).T[:outputs].contiguous()


def _check_shape(source: TensorSource, layer: str, inputs: int, outputs: int) -> None:
    name = f"{layer}.weight_shape"
    shape = fetch(source, name, (2,), (torch.int64, torch.int32))
    if shape.tolist() != [outputs, inputs]:
        raise BadTensor(name, str([outputs, inputs]), str(shape.tolist()))


def _check_order(source: TensorSource, name: str, inputs: int, group: int) -> None:
    """Activation order permutes the groups. An index that is unset or in order changes nothing."""
    index = fetch(source, name, (inputs,), (torch.int32, torch.int64))
    in_order = torch.arange(inputs, device=index.device) // group
    if not bool((index == -1).all()) and not torch.equal(index.long(), in_order):
        raise BadTensor(name, "groups in the order of the inputs (actorder 'weight' or none)", "another order")
