"""Measures how much worse one model is than another, as pure functions of both models' outputs for the same text.

perplexity    exp of the mean negative log-likelihood a token
KL            mean over positions of KL(base || model), in nats
agreement     share of positions where both hold the same token most likely
greedy length how many tokens of the base's greedy answer the model would have written too, before the first other one
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

PERPLEXITY_BAR: Final = 0.02  # at most this share above the base
KL_BAR: Final = 0.02  # nats
AGREEMENT_BAR: Final = 0.97

_DRAWS: Final = 2000
_LEVEL: Final = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the ends of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def negative_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [T, V], targets int [T] -> [T], in nats."""
    chosen = logits.gather(1, targets.long().unsqueeze(1)).squeeze(1)
    return logits.logsumexp(1) - chosen


def perplexity(losses: torch.Tensor) -> float:
    """losses: mean negative log-likelihood of each window, all windows of one length."""
    return math.exp(float(losses.double().mean()))


def perplexity_change(base: torch.Tensor, model: torch.Tensor, seed: int = 0) -> Interval:
    """Relative change of perplexity over windows [W], resampled in pairs: both models read the same text."""
    difference = (model - base).double()
    draws = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, len(difference), (_DRAWS, len(difference)), generator=draws)
    means = difference[picks].mean(1)
    tail = (1 - _LEVEL) / 2
    ends = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(math.expm1(float(difference.mean())), math.expm1(float(ends[0])), math.expm1(float(ends[1])))


def kl_divergence(base: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of both -> KL(base || model) [T], in nats."""
    p, q = base.log_softmax(1), model.log_softmax(1)
    return (p.exp() * (p - q)).sum(1)


def agreement(base: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of both -> bool [T]."""
    return base.argmax(1) == model.argmax(1)


def agreed_length(base: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Token ids [S, T] of both -> how many agree before the first that does not, [S]."""
    return (base == model).long().cumprod(1).sum(1)
