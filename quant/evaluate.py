"""One model on one text, and where a base is given, how far it is from that base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from quant import metrics
from quant.checkpoint.rope import DynamicScaling
from quant.decoder import Decoder
from quant.errors import CannotQuantize
from quant.progress import Progress

_PROMPTS: Final = 16
_PROMPT_TOKENS: Final = 32
_ANSWER_TOKENS: Final = 32
_HIDDEN_BYTES: Final = 512 << 20  # of a model's hidden states: longer texts are read in turns
_LOGITS_AT_ONCE: Final = 1 << 23


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
    if isinstance(decoder.config.rope.scaling, DynamicScaling) and windows.shape[1] > decoder.config.max_context:
        raise CannotQuantize(
            f"windows of {windows.shape[1]} tokens are beyond the {decoder.config.max_context} positions "
            "that a model with dynamic rope scaling can be judged on: choose shorter ones"
        )
    base = None if against is None else Decoder.open(against, device)
    if base is not None and base.config.vocab_size != decoder.config.vocab_size:
        raise CannotQuantize("the two models have vocabularies of different sizes: they cannot be compared")
    if int(windows.max()) >= decoder.config.vocab_size:
        raise CannotQuantize("the tokenizer has more tokens than the model")
    scores = _Scores()
    at_once = max(1, _HIDDEN_BYTES // (4 * windows.shape[1] * decoder.config.hidden_size))
    chunks = [windows[first : first + at_once] for first in range(0, len(windows), at_once)]
    for index, chunk in enumerate(chunks):
        heard = _Heard(progress, index, len(chunks))
        hidden = _hidden(decoder, chunk, "model", heard)
        base_hidden = None if base is None else _hidden(base, chunk, "base", heard)
        for row, ids in enumerate(chunk):
            scores.add(_window(decoder, hidden[row], base, None if base_hidden is None else base_hidden[row], ids))
            progress("compare", index * at_once + row + 1, len(windows))
    comparison = None
    if base is not None:
        comparison = scores.comparison(*_greedy(decoder, base, windows, progress))
    return Evaluation(len(windows), windows[:, 1:].numel(), metrics.perplexity(scores.losses()), comparison)


@dataclass(frozen=True, slots=True)
class _Heard:
    progress: Progress
    chunk: int
    chunks: int

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.progress(phase, self.chunk * total + done, self.chunks * total)


@dataclass(frozen=True, slots=True)
class _Window:
    """Means over one window. Without a base the last three are 0."""

    loss: float
    base_loss: float
    kl: float
    agreement: float


class _Scores:
    def __init__(self) -> None:
        self._found: list[_Window] = []

    def add(self, window: _Window) -> None:
        self._found.append(window)

    def losses(self) -> torch.Tensor:
        return self._all([window.loss for window in self._found])

    def comparison(self, greedy: float, greedy_of: int) -> Comparison:
        base = self._all([window.base_loss for window in self._found])
        return Comparison(
            base_perplexity=metrics.perplexity(base),
            perplexity_change=metrics.perplexity_change(base, self.losses()),
            kl=float(self._all([window.kl for window in self._found]).mean()),
            agreement=float(self._all([window.agreement for window in self._found]).mean()),
            greedy=greedy,
            greedy_of=greedy_of,
        )

    def _all(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)


def _window(
    decoder: Decoder, hidden: torch.Tensor, base: Decoder | None, base_hidden: torch.Tensor | None, ids: torch.Tensor
) -> _Window:
    """hidden [T, H] of ids [T]. Logits are made for a few positions at a time."""
    at_once = max(1, _LOGITS_AT_ONCE // decoder.config.vocab_size)
    totals = torch.zeros(4, dtype=torch.float64)
    for first in range(0, len(ids) - 1, at_once):
        positions = slice(first, min(first + at_once, len(ids) - 1))
        targets = ids[first + 1 : positions.stop + 1].to(hidden.device)
        logits = decoder.logits(hidden[positions])
        totals[0] += float(metrics.negative_log_likelihood(logits, targets).double().sum())
        if base is None or base_hidden is None:
            continue
        expected = base.logits(base_hidden[positions])
        totals[1] += float(metrics.negative_log_likelihood(expected, targets).double().sum())
        totals[2] += float(metrics.kl_divergence(expected, logits).double().sum())
        totals[3] += float(metrics.agreement(expected, logits).sum())
    return _Window(*(totals / (len(ids) - 1)).tolist())


def _hidden(decoder: Decoder, windows: torch.Tensor, phase: str, progress: Progress) -> torch.Tensor:
    return decoder.hidden(windows, lambda done, total: progress(phase, done, total))


def _greedy(decoder: Decoder, base: Decoder, windows: torch.Tensor, progress: Progress) -> tuple[float, int]:
    """The base writes greedily; the model reads that once, and would differ where its own choice is another."""
    prompts = windows[:_PROMPTS, : min(_PROMPT_TOKENS, windows.shape[1], base.config.max_context // 2)]
    answer = min(_ANSWER_TOKENS, base.config.max_context // 2)
    written = 0

    def pick(logits: torch.Tensor) -> torch.Tensor:
        nonlocal written
        written += 1
        progress("greedy", written, answer)
        return logits.argmax(1)

    both = base.generate(prompts, answer, pick)
    start = prompts.shape[1]
    hidden = decoder.hidden(both)[:, start - 1 : -1]
    chosen = torch.stack([decoder.logits(row).argmax(1) for row in hidden])
    return float(metrics.agreed_length(both[:, start:], chosen).double().mean()), answer
