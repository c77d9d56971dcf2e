"""Values in groups, and four- and eight-bit values inside bytes and int32 words, little end first."""

from __future__ import annotations

import torch


def in_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """[..., K] -> [..., K/group, group]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of 0..15 -> uint8 [..., K/2], the even place in the low four bits."""
    pairs = in_groups(values, 2)
    packed: torch.Tensor = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] -> uint8 [..., 2B], the low four bits first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., W] -> uint8 [..., 4W], the lowest byte of each word first."""
    return words.contiguous().view(torch.uint8)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4W] -> int32 [..., W]."""
    return values.contiguous().view(torch.int32)
