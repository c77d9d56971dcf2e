"""What the card reports: loss, perplexity and how often the draft's first choice is the target's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.train.network import Qwen3
from models.train.tokens import Stream

WINDOW = 1024
BATCH = 8


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 products on CUDA; float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def plain_windows(stream: Stream, length: int) -> Iterator[Tensor]:
    """The stream cut every `length` ids, the last window shorter: batches [≤ BATCH, ≤ length]."""
    ids = torch.from_numpy(stream.ids.astype(np.int64))
    whole = len(ids) // length
    if whole:
        yield from torch.split(ids[: whole * length].view(whole, length), BATCH)
    if len(ids) - whole * length > 1:
        yield ids[None, whole * length :]


@torch.no_grad()
def summed_loss(net: Qwen3, stream: Stream, length: int = WINDOW) -> tuple[float, int]:
    """Nats and tokens: in each window every id but the first is predicted from those before it."""
    net.eval()
    device = next(net.parameters()).device
    nats, tokens = 0.0, 0
    for windows in plain_windows(stream, length):
        windows = windows.to(device)
        with autocast(device):
            logits = net(windows[:, :-1])
        nats += float(F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction="sum"))
        tokens += windows[:, 1:].numel()
    return nats, tokens


def losses_by_document(net: Qwen3, stream: Stream, length: int = WINDOW) -> list[tuple[float, int]]:
    """Nats and tokens of each document alone, its closing end-of-text among the predicted."""
    bounds = [*stream.starts.tolist(), len(stream.ids)]
    return [
        summed_loss(net, Stream(stream.ids[start:end], np.zeros(1, np.int64), 0), length)
        for start, end in itertools.pairwise(bounds)
    ]


def mean_loss(net: Qwen3, stream: Stream, length: int = WINDOW) -> float:
    nats, tokens = summed_loss(net, stream, length)
    return nats / tokens


@torch.no_grad()
def agreement(target: Qwen3, draft: Qwen3, stream: Stream, length: int = WINDOW) -> float:
    """Share of places at which both put the same token first, given the same true text."""
    target.eval()
    draft.eval()
    device = next(target.parameters()).device
    same, places = 0, 0
    for windows in plain_windows(stream, length):
        windows = windows.to(device)
        with autocast(device):
            hits = target(windows).argmax(-1) == draft(windows).argmax(-1)
        same, places = same + int(hits.sum()), places + hits.numel()
    return same / places
