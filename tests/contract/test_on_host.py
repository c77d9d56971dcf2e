"""torch on the host in place of the device, with the CPU as that device: each operation gets copies, and what it made
or changed is sent back."""

from __future__ import annotations

import ctypes

import pytest
import torch

from scripts.on_host import OnHost


class Copies:
    """Counts them."""

    def __init__(self) -> None:
        self.fetched = self.sent = 0

    def fetch(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)
        self.fetched += 1

    def send(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)
        self.sent += 1


def made() -> list[torch.Tensor]:
    """Views, types, writes in place and through views, indexes, reductions."""
    torch.manual_seed(3)
    x, order = torch.randn(6, 8, device="cpu"), torch.tensor([4, 1, 5, 0, 3, 2])
    turned = x[order].t()
    turned[2:4, 1] = 7.0
    pool = torch.full((2, 5, 3, 4), float("nan"), device="cpu").bfloat16()
    pool[:, order[:3] % 5, :, 1:3] = x[0, :2].bfloat16()
    weights = (x.double() @ turned.double()).softmax(-1)
    words = torch.zeros(4, dtype=torch.int32, device="cpu")
    words[1:3].copy_(torch.tensor([4, 5], dtype=torch.int32))
    words[0] += 2
    narrow = x.to(torch.float8_e4m3fn).view(torch.uint8)
    joined = torch.cat((x, x), 1).view(6, 2, 8).transpose(0, 1).flatten(1)
    total = torch.tensor(float(weights.sum()))
    return [x, turned, pool.nan_to_num(9), weights, words, narrow, joined, total, x.new_zeros(3), x.norm()]


@pytest.mark.filterwarnings("error")
def test_what_is_made_is_the_same() -> None:
    copies, expected = Copies(), made()
    with OnHost("cpu", copies.fetch, copies.send):
        found = made()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert copies.fetched > 20
    assert copies.sent > 20


def test_a_write_comes_back_to_where_the_tensor_lies() -> None:
    copies, held = Copies(), torch.zeros(4, 4)
    address = held.data_ptr()
    with OnHost("cpu", copies.fetch, copies.send):
        same = held[1:3, 2:].add_(5)
        assert same.data_ptr() == address + 6 * 4
    assert held.sum() == 20
    assert held[1:3, 2:].eq(5).all()
    assert held.data_ptr() == address
