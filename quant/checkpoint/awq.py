"""AutoAWQ's two four-bit layouts, to and from Int4Groups. K: inputs, N: outputs, g: group.

GEMM  qweight int32 [K, N/8], qzeros int32 [K/g, N/8], scales float [K/g, N]; eight outputs a word, interleaved
GEMV  qweight int32 [N, K/8], qzeros int32 [N, Z], scales float [N, 8Z]; eight inputs a word, in order; Z is padded
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from quant.checkpoint.errors import BadTensor
from quant.checkpoint.forms import Int4Groups
from quant.checkpoint.nibbles import bytes_of, in_groups, pack_nibbles, unpack_nibbles, words_of
from quant.checkpoint.source import TensorSource, check, fetch, fetch_floats
from quant.checkpoint.spec import WHOLE_ROW, AwqSpec

_NIBBLE_OF: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # output j of a GEMM word lies in this nibble
_COLUMNS_AT_ONCE: Final = 1024  # bounds the unpacked copy; a multiple of 8


def read_awq(source: TensorSource, layer: str, spec: AwqSpec, in_features: int, out_features: int) -> Int4Groups:
    group = in_features if spec.group == WHOLE_ROW else spec.group
    if in_features % 8 or in_features % group:
        raise BadTensor(f"{layer}.qweight", f"inputs in whole groups of {group}", f"{in_features} inputs")
    read = _read_gemm if spec.layout == "gemm" else _read_gemv
    return read(source, layer, group, in_features, out_features)


def write_gemm(weight: Int4Groups) -> Mapping[str, torch.Tensor]:
    """qweight, qzeros and scales of one layer, as AutoAWQ names and packs them."""
    outputs, inputs = weight.shape
    if outputs % 8:
        raise BadTensor("qweight", "outputs in multiples of 8", f"{outputs} outputs")
    qweight = torch.empty(inputs, outputs // 8, dtype=torch.int32)
    for first in range(0, outputs, _COLUMNS_AT_ONCE):
        rows = slice(first, first + _COLUMNS_AT_ONCE)
        unpacked = unpack_nibbles(weight.packed[rows])
        qweight[:, first // 8 : (first + unpacked.shape[0]) // 8] = _interleave(unpacked.T)
    return {
        "qweight": qweight,
        "qzeros": _interleave(weight.zero.T),
        "scales": weight.scale.T.to(torch.float16).contiguous(),
    }


def _read_gemm(source: TensorSource, layer: str, group: int, inputs: int, outputs: int) -> Int4Groups:
    if outputs % 8:
        raise BadTensor(f"{layer}.qweight", "outputs in multiples of 8", f"{outputs} outputs")
    groups = inputs // group
    check(source, f"{layer}.qweight", (inputs, outputs // 8), (torch.int32,))
    scales = fetch_floats(source, f"{layer}.scales", (groups, outputs)).T.clone(memory_format=torch.contiguous_format)
    zeros = _deinterleave(fetch(source, f"{layer}.qzeros", (groups, outputs // 8), (torch.int32,)))
    words = fetch(source, f"{layer}.qweight", (inputs, outputs // 8), (torch.int32,))
    packed = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=words.device)
    for first in range(0, outputs, _COLUMNS_AT_ONCE):
        _by_outputs(words[:, first // 8 : (first + _COLUMNS_AT_ONCE) // 8], packed[first : first + _COLUMNS_AT_ONCE])
    return Int4Groups(packed, scales, zeros.T.contiguous(), group)


def _read_gemv(source: TensorSource, layer: str, group: int, inputs: int, outputs: int) -> Int4Groups:
    groups = inputs // group
    width = _zeros_width(f"{layer}.qzeros", groups, group)
    check(source, f"{layer}.qweight", (outputs, inputs // 8), (torch.int32,))
    scales = fetch_floats(source, f"{layer}.scales", (outputs, width * 8))[:, :groups].clone()
    zeros = unpack_nibbles(bytes_of(fetch(source, f"{layer}.qzeros", (outputs, width), (torch.int32,))))
    words = fetch(source, f"{layer}.qweight", (outputs, inputs // 8), (torch.int32,))
    # eight inputs in order, low bits first, is the packed form itself
    return Int4Groups(bytes_of(words).clone(), scales, zeros[:, :groups].contiguous(), group)


def _zeros_width(tensor: str, groups: int, group: int) -> int:
    """Words of zero points a row: padded so that a GEMV thread block reads whole words."""
    if group < 128 and group not in (32, 64):
        raise BadTensor(tensor, "GEMV groups of 32, 64, 128 or more", f"groups of {group}")
    multiple = {32: 4, 64: 2}.get(group, 1)
    words = -(-groups // 8)
    return -(-words // multiple) * multiple


def _by_outputs(words: torch.Tensor, packed: torch.Tensor) -> None:
    """int32 [K, W] -> uint8 [8W, K/2], two inputs a byte, without taking the nibbles apart: of two rows of words, the
    low halves of their bytes make one byte and the high halves another."""
    pairs = bytes_of(words).view(words.shape[0] // 2, 2, -1, 4)
    even, odd = pairs.unbind(1)
    low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
    outputs = packed.view(words.shape[1], 8, -1)
    for byte in range(4):
        outputs[:, _NIBBLE_OF.index(2 * byte)] = low[:, :, byte].T
        outputs[:, _NIBBLE_OF.index(2 * byte + 1)] = high[:, :, byte].T


def _deinterleave(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, W] -> uint8 [R, 8W] in the order of the outputs."""
    nibbles = in_groups(unpack_nibbles(bytes_of(words)), 8)
    return nibbles[..., list(_NIBBLE_OF)].flatten(1)


def _interleave(values: torch.Tensor) -> torch.Tensor:
    """uint8 [R, 8W] in the order of the outputs -> int32 [R, W]."""
    words = in_groups(values, 8)
    order = [_NIBBLE_OF.index(nibble) for nibble in range(8)]
    return words_of(pack_nibbles(words[..., order].flatten(1)))
