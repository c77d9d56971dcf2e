"""One model on one text, and where a base is given, how far it is from that base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from quant import metrics
from quant.decoder import Decoder
from quant.errors import CannotQuantize

_PROMPTS: Final = 16
_PROMPT_TOKENS: Final = 32
_ANSWER_TOKENS: Final = 32

Progress = Callable[[str, int, int], None]  # stage, done, of how many


@dataclass(frozen=True, slots=True)
class Comparison:
    """Against the base, which read the same windows. greedy: mean agreed length, of `greedy_of` tokens."""

    base_perplexity: float
    perplexity_change: metrics.Interval
    kl: float
    agreement: float
    greedy: float
    greedy_of: int

    def misses(self) -> tuple[str, ...]:
        """The bars that the model does not meet, in words."""
        bars = (
            ("perplexity", self.perplexity_change.value, metrics.PERPLEXITY_BAR, 1),
            ("KL", self.kl, metrics.KL_BAR, 1),
            ("agreement", self.agreement, metrics.AGREEMENT_BAR, -1),
        )
        return tuple(
            f"{name} {value:.4f}, bar {bar:.2f}" for name, value, bar, sign in bars if sign * value > sign * bar
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """tokens: how many were predicted."""

    windows: int
    tokens: int
    perplexity: float
    comparison: Comparison | None


@torch.inference_mode()
def evaluate(
    model: Path, windows: torch.Tensor, against: Path | None, progress: Progress, device: torch.device
) -> Evaluation:
    """windows: int [S, T] of the model's token ids. Both models are read a layer at a time."""
    if windows.shape[1] < 2:
        raise CannotQuantize("a window needs two tokens at least: the second is what the first predicts")
    decoder = Decoder.open(model, device)
    base = None if against is None else Decoder.open(against, device)
    if base is not None and base.architecture.vocab != decoder.architecture.vocab:
        raise CannotQuantize("the two models have vocabularies of different sizes: they cannot be compared")
    if int(windows.max()) >= decoder.architecture.vocab:
        raise CannotQuantize("the tokenizer has more tokens than the model")
    hidden = _hidden(decoder, windows, "model", progress)
    tokens = windows[:, 1:].numel()
    if base is None:
        losses = torch.stack([_loss(decoder.logits(row[:-1]), ids) for row, ids in zip(hidden, windows, strict=True)])
        return Evaluation(len(windows), tokens, metrics.perplexity(losses), None)
    base_hidden = _hidden(base, windows, "base", progress)
    scores = _Scores()
    for place in range(len(windows)):
        scores.add(base.logits(base_hidden[place, :-1]), decoder.logits(hidden[place, :-1]), windows[place])
        progress("compare", place + 1, len(windows))
    greedy, greedy_of = _greedy(decoder, base, windows, progress)
    return Evaluation(len(windows), tokens, metrics.perplexity(scores.losses()), scores.comparison(greedy, greedy_of))


class _Scores:
    """Sums over windows of what both models said."""

    def __init__(self) -> None:
        self._base: list[torch.Tensor] = []
        self._model: list[torch.Tensor] = []
        self._kl: list[torch.Tensor] = []
        self._agreement: list[torch.Tensor] = []

    def add(self, base: torch.Tensor, model: torch.Tensor, ids: torch.Tensor) -> None:
        self._base.append(_loss(base, ids))
        self._model.append(_loss(model, ids))
        self._kl.append(metrics.kl_divergence(base, model).mean().cpu())
        self._agreement.append(metrics.agreement(base, model).double().mean().cpu())

    def losses(self) -> torch.Tensor:
        return torch.stack(self._model)

    def comparison(self, greedy: float, greedy_of: int) -> Comparison:
        base = torch.stack(self._base)
        return Comparison(
            base_perplexity=metrics.perplexity(base),
            perplexity_change=metrics.perplexity_change(base, self.losses()),
            kl=float(torch.stack(self._kl).mean()),
            agreement=float(torch.stack(self._agreement).mean()),
            greedy=greedy,
            greedy_of=greedy_of,
        )


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits [T - 1, V] of a window's ids [T] -> its mean negative log-likelihood."""
    return metrics.negative_log_likelihood(logits, ids[1:].to(logits.device)).mean().cpu()


def _hidden(decoder: Decoder, windows: torch.Tensor, stage: str, progress: Progress) -> torch.Tensor:
    layers = decoder.architecture.layers
    return decoder.hidden(windows, lambda layer: progress(stage, layer + 1, layers))


def _greedy(decoder: Decoder, base: Decoder, windows: torch.Tensor, progress: Progress) -> tuple[float, int]:
    """The base writes greedily; the model reads that once, and would differ where its own choice is another."""
    prompts = windows[:_PROMPTS, : min(_PROMPT_TOKENS, windows.shape[1], base.architecture.positions // 2)]
    answer = min(_ANSWER_TOKENS, base.architecture.positions // 2)
    written = 0

    def pick(logits: torch.Tensor) -> torch.Tensor:
        nonlocal written
        written += 1
        progress("greedy", written, answer)
        return logits.argmax(1)

    both = base.generate(prompts, answer, pick)
    start = prompts.shape[1]
    chosen = decoder.logits(decoder.hidden(both)[:, start - 1 : -1]).argmax(2)
    return float(metrics.agreed_length(both[:, start:], chosen).double().mean()), answer
