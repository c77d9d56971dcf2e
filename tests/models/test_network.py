"""The training network against transformers, on small random shapes."""

from __future__ import annotations

import pytest
import torch

from models.train.export import config
from models.train.network import Qwen3, Shape

SHAPES = [
    Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=96, head_dim=32, vocabulary=97, max_positions=64),
    Shape(hidden=48, layers=1, heads=3, kv_heads=3, intermediate=64, head_dim=16, vocabulary=64, rope_theta=500.0),
]


def randomised(shape: Shape) -> Qwen3:
    net = Qwen3(shape)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 1.0))
    return net.eval()


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_agrees_with_transformers(shape: Shape) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    net = randomised(shape)
    oracle = Qwen3ForCausalLM(Qwen3Config.from_dict({**config(shape, 2, 0), "dtype": "float32"})).float().eval()
    missing, unexpected = oracle.load_state_dict(net.state_dict(), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    oracle.tie_weights()
    ids = torch.randint(0, shape.vocabulary, (3, 40))
    want, got = oracle(ids).logits, net(ids)
    assert float((got - want).norm() / want.norm()) < 1e-5


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    net = randomised(SHAPES[0])
    ids = torch.randint(0, 97, (1, 30))
    changed = ids.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 97
    before, after = net(ids), net(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_dropout_works_in_training_alone() -> None:
    net = Qwen3(SHAPES[0], dropout=0.5)
    ids = torch.randint(0, 97, (1, 30))
    assert not torch.equal(net.train()(ids), net(ids))
    assert torch.equal(net.eval()(ids), net(ids))
