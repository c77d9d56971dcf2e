"""The measures by their definitions, in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quant import metrics


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    losses = metrics.negative_log_likelihood(torch.zeros(6, 50), torch.arange(6))
    assert metrics.perplexity(losses) == pytest.approx(50)


def test_losses_and_kl_by_hand(random):
    base, model = torch.randn(5, 7, generator=random), torch.randn(5, 7, generator=random)
    targets = torch.tensor([0, 6, 3, 3, 1])
    losses = metrics.negative_log_likelihood(base, targets)
    kl = metrics.kl_divergence(base, model)
    for row in range(5):
        p = [math.exp(v) for v in base[row].tolist()]
        q = [math.exp(v) for v in model[row].tolist()]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        assert float(losses[row]) == pytest.approx(-math.log(p[int(targets[row])]), rel=1e-4)
        assert float(kl[row]) == pytest.approx(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-3)
    assert not metrics.kl_divergence(base, base).any()


def test_agreement_counts_equal_best_tokens():
    base = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    model = torch.tensor([[0.0, 9.0], [0.0, 1.0]])
    assert metrics.agreement(base, model).tolist() == [True, False]


@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1), st.randoms())
def test_agreed_length_is_the_common_start(rows, shuffler):
    other = [[value if shuffler.random() < 0.7 else 2 - value for value in row] for row in rows]
    expected = [next((i for i in range(4) if a[i] != b[i]), 4) for a, b in zip(rows, other, strict=True)]
    assert metrics.agreed_length(torch.tensor(rows), torch.tensor(other)).tolist() == expected


def test_change_of_nothing_is_nothing(random):
    losses = torch.rand(40, generator=random)
    assert metrics.perplexity_change(losses, losses) == metrics.Interval(0.0, 0.0, 0.0)


def test_change_is_the_ratio_of_perplexities(random):
    base, model = torch.rand(40, generator=random), torch.rand(40, generator=random)
    change = metrics.perplexity_change(base, model)
    assert 1 + change.value == pytest.approx(metrics.perplexity(model) / metrics.perplexity(base))
    assert change.low < change.value < change.high


def test_windows_are_paired(random):
    """What both models find hard cancels: the interval is that of the differences, as the normal theory has it."""
    hard = torch.rand(400, generator=random) * 5
    difference = 0.01 + 0.002 * torch.randn(400, generator=random)
    change = metrics.perplexity_change(hard, hard + difference)
    half = 1.96 * float(difference.std()) / 20
    assert change.high - change.low == pytest.approx(2 * half, rel=0.15)
    assert change.low < 0.0101 < change.high


def test_the_interval_is_the_same_each_time(random):
    base, model = torch.rand(9, generator=random), torch.rand(9, generator=random)
    assert metrics.perplexity_change(base, model) == metrics.perplexity_change(base, model)
    assert metrics.perplexity_change(base, model) != metrics.perplexity_change(base, model, seed=1)
