"""The training loop: one schedule, bounded in steps and seconds, that keeps the step of the best validation loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from models.train.measure import autocast, mean_loss
from models.train.network import Qwen3
from models.train.tokens import Stream, Windows

Loss = Callable[[Tensor, Tensor], Tensor]  # windows [batch, length + 1], logits [batch, length, vocabulary] → scalar


@dataclass(frozen=True)
class Recipe:
    steps: int
    seconds: float
    rate: float
    dropout: float
    batch_tokens: int = 32768
    length: int = 1024
    long_length: int = 2048
    long_share: float = 0.2  # of the schedule, at its end
    warmup: int = 200
    decay: float = 0.1
    evaluations: int = 12
    seed: int = 7


@dataclass(frozen=True)
class Outcome:
    """What a run did; losses are nats a token, on `valid`."""

    steps: int
    tokens: int
    seconds: float
    train_loss: float
    valid_losses: tuple[tuple[int, float], ...]
    best_step: int


def next_token_loss(windows: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def distillation_loss(target: Qwen3, share: float = 0.9) -> Loss:
    """Cross-entropy against `share` of the target's distribution and, for the rest, the token that follows."""
    target.eval()

    def loss(windows: Tensor, logits: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(windows[:, :-1]).flatten(0, 1).float().softmax(dim=-1).mul_(share)
            following = windows[:, 1:].flatten()[:, None]
            wanted.scatter_add_(1, following, torch.full_like(following, 1 - share, dtype=wanted.dtype))
        return F.cross_entropy(logits.flatten(0, 1), wanted)

    return loss


@torch.no_grad()
def borrow_embedding(draft: Qwen3, target: Qwen3) -> None:
    """Starts the draft's embedding as the target's, seen in the fewer dimensions that keep its inner products best."""
    left, scale, _ = torch.linalg.svd(target.model.embed_tokens.weight, full_matrices=False)
    kept = draft.shape.hidden
    draft.model.embed_tokens.weight.copy_(left[:, :kept] * scale[:kept])


def rate_at(progress: float, step: int, recipe: Recipe) -> float:
    """Share of the peak rate: linear up over `warmup` steps, linear down to nothing at progress 1."""
    return min((step + 1) / recipe.warmup, 1.0) * max(1.0 - progress, 0.0)


def fit(net: Qwen3, train: Stream, valid: Stream, recipe: Recipe, loss: Loss) -> Outcome:
    """Trains `net` in place and leaves it at its best step. Whichever of steps and seconds runs out first ends it."""
    device = next(net.parameters()).device
    windows = Windows(train, device, recipe.seed)
    optimizer = _optimizer(net, recipe)
    best = {name: value.detach().clone() for name, value in net.state_dict().items()}
    valid_losses: list[tuple[int, float]] = []
    smoothed, tokens, step, progress = 0.0, 0, 0, 0.0
    begun = time.monotonic()
    with tqdm(total=recipe.steps, unit="step", mininterval=5.0) as bar:
        while progress < 1.0:
            length = recipe.long_length if progress >= 1.0 - recipe.long_share else recipe.length
            batch = windows.take(max(recipe.batch_tokens // length, 1), length)
            value = _step(net, optimizer, batch, loss, recipe.rate * rate_at(progress, step, recipe))
            tokens, step = tokens + batch.shape[0] * length, step + 1
            progress = max(step / recipe.steps, (time.monotonic() - begun) / recipe.seconds)
            if step % 20 == 0 or progress >= 1.0:  # reading the loss waits for the device
                smoothed = float(value) if smoothed == 0.0 else 0.8 * smoothed + 0.2 * float(value)
            if progress >= (len(valid_losses) + 1) / recipe.evaluations:
                valid_losses.append((step, mean_loss(net, valid, recipe.length)))
                tqdm.write(f"step {step}: train {smoothed:.4f}, valid {valid_losses[-1][1]:.4f}")
                if valid_losses[-1][1] == min(nats for _, nats in valid_losses):
                    best = {name: value.detach().clone() for name, value in net.state_dict().items()}
            bar.update()
    net.load_state_dict(best)
    best_step = min(valid_losses, key=lambda entry: entry[1])[0]
    return Outcome(step, tokens, time.monotonic() - begun, smoothed, tuple(valid_losses), best_step)


def _optimizer(net: Qwen3, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
    gains = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)


def _step(net: Qwen3, optimizer: torch.optim.AdamW, batch: Tensor, loss: Loss, rate: float) -> Tensor:
    net.train()
    for group in optimizer.param_groups:
        group["lr"] = rate
    with autocast(batch.device):
        value = loss(batch, net(batch[:, :-1]))
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(value)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return value.detach()
