"""The kernels' oracle against other ways to compute the same, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from engine.kernels import reference
from engine.kernels.attention import Heads
from engine.sampling.noise import seed_key


def doubles(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64)


def test_rms_norm() -> None:
    x, gain = doubles(3, 64), doubles(64)
    torch.testing.assert_close(reference.rms_norm(x, gain, 1e-3), functional.rms_norm(x, (64,), gain, 1e-3))


def test_gate_up_by_hand() -> None:
    x, gain, weight, bias = doubles(5), doubles(5), doubles(6, 5), doubles(6)
    scale = 1 / math.sqrt(sum(float(v) ** 2 for v in x) / 5 + 1e-6)
    rows = [
        sum(float(x[k]) * scale * float(gain[k]) * float(weight[n, k]) for k in range(5)) + float(bias[n])
        for n in range(6)
    ]
    expected = [rows[i] / (1 + math.exp(-rows[i])) * rows[i + 3] for i in range(3)]
    found = reference.gate_up(x, gain, 1e-6, weight, bias)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_linear_residual() -> None:
    before, x, weight, bias = doubles(2, 8), doubles(2, 4), doubles(8, 4), doubles(8)
    torch.testing.assert_close(
        reference.linear_residual(before, x, weight, bias), before + torch.einsum("bk,nk->bn", x, weight) + bias
    )


def test_rotation_is_a_complex_product() -> None:
    x, phase = doubles(4, 32), doubles(16)
    cos, sin = phase.cos(), phase.sin()
    angles = torch.stack((torch.cat((cos, cos)), torch.cat((-sin, sin))))
    turned = torch.complex(x[:, :16], x[:, 16:]) * torch.polar(torch.ones_like(phase), phase)
    torch.testing.assert_close(reference.rotate(x, angles), torch.cat((turned.real, turned.imag), -1))


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attend(heads: int, kv_heads: int, window: int | None) -> None:
    queries, keys, values = doubles(heads, 16), doubles(23, kv_heads, 16), doubles(23, kv_heads, 16)
    place = torch.arange(23)
    seen = (place > 22 - (window or 23))[None]
    expected = functional.scaled_dot_product_attention(
        queries[None, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], seen, enable_gqa=True
    )
    torch.testing.assert_close(reference.attend(queries, keys, values, window), expected[0, :, 0])


def test_paged() -> None:
    pool, pages = doubles(7, 2, 16, 8), torch.tensor([5, 0, 3, 6])
    found = reference.paged(pool, pages, 37)
    for token in (0, 15, 16, 31, 32, 36):
        assert torch.equal(found[token], pool[int(pages[token // 16]), :, token % 16])
    assert found.shape[0] == 37


def test_attention_row_takes_the_heads_apart() -> None:
    heads = Heads(4, 2, 8, True)
    qkv, gains = doubles(heads.rows), (doubles(8), doubles(8))
    still = torch.stack((torch.ones(8), torch.zeros(8))).double()
    queries, key, value = reference.attention_row(qkv, heads, gains, still, 1e-6)
    torch.testing.assert_close(queries[1], functional.rms_norm(qkv[8:16], (8,), gains[0], 1e-6))
    torch.testing.assert_close(key[1], functional.rms_norm(qkv[40:48], (8,), gains[1], 1e-6))
    assert torch.equal(value, qkv[48:].view(2, 8))


def noise(key: int, position: int, token: int) -> float:
    """As the kernels compute it, in whole numbers of Python's."""
    word = (1 << 64) - 1
    z = (key + position * 0x9E3779B97F4A7C15 + token * 0xD1B54A32D192ED03) & word
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & word
    z = (z ^ z >> 27) * 0x94D049BB133111EB & word
    z ^= z >> 31
    return -math.log(-math.log(((z >> 40) + 0.5) / 2**24))


def test_choose() -> None:
    logits = torch.randn(4, 50)
    temperature = torch.tensor([0.0, 1.0, 0.3, 7.0])
    keys, positions = torch.tensor([seed_key(seed) for seed in range(4)]), torch.tensor([3, 0, 77, 1 << 20])
    found = reference.choose(logits, temperature, keys, positions)
    assert int(found[0]) == int(logits[0].argmax())
    for row in (1, 2, 3):
        scores = [
            float(logits[row, token]) / float(temperature[row]) + noise(int(keys[row]), int(positions[row]), token)
            for token in range(50)
        ]
        assert int(found[row]) == scores.index(max(scores))
