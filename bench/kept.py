"""What it costs in quality to keep keys and values as fp8: a trained model reads text that it never saw, twice.

    python -m bench.kept --model models/demo

Windows of held-out modules (`bench.texts`), each read as one chunk, so that every token sees keys and values as they
are kept; arithmetic in --dtype both times. Prints the perplexities, the distance between the two distributions (KL, in
nats), how often their likeliest tokens are the same, and the largest key and value. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from tokenizers import Tokenizer

from bench import texts
from bench.about import device, revision
from engine.execution.step_state import Parts
from engine.model.attention import RowSpan, StepAttention
from engine.model.transformer import StepInput
from engine.settings import PAGE_SIZE, Device, Dtype, EngineSettings, KvDtype
from engine.worker.build import prepare
from quant import metrics


def read(parts: Parts, ids: torch.Tensor) -> torch.Tensor:
    """Logits [length - 1, vocabulary] of what follows each token of a window but the last."""
    places = torch.arange(len(ids), device=ids.device)
    span = RowSpan(0, len(ids), 0, list(range(-(-len(ids) // PAGE_SIZE))))
    windows = tuple(dict.fromkeys(parts.model.config.windows))
    attention = StepAttention([span], windows, parts.pool, ids.device)
    hidden = parts.model.forward(StepInput(ids, places, places, attention, None), parts.pool)
    return parts.model.logits(hidden[:-1])


def opened(given: argparse.Namespace, kept: KvDtype) -> Parts:
    """The model that keeps them so."""
    settings = EngineSettings(
        model=str(given.model),
        device=given.device,
        dtype=given.dtype,
        max_sequences=1,
        max_context=given.length,
        kv_dtype=kept,
    )
    return prepare(settings, lambda *_: None).parts


def windows_of(model: Path, length: int, most: int) -> torch.Tensor:
    """int64 [windows, length]."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [token for text in texts.modules().values() for token in tokenizer.encode(text).ids]
    count = min(most, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def largest(parts: Parts) -> list[float]:
    """Of the keys and of the values of the last window."""
    layers = range(parts.pool.shape.layers)
    pages = torch.arange(parts.pool.pages, device=parts.model.placement.device)
    return [max(float(parts.pool.gather(layer, pages)[part].abs().max()) for layer in layers) for part in (0, 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--windows", type=int, default=160, help="at most")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--revision", help="the commit, where git is not")
    given = parser.parse_args(argv)
    plain, narrow = opened(given, "auto"), opened(given, "fp8")
    losses: list[list[float]] = [[], []]
    distance = same = 0.0
    windows = windows_of(given.model, given.length, given.windows)
    with torch.inference_mode():
        for ids in windows.to(plain.model.placement.device):
            found = [read(parts, ids) for parts in (plain, narrow)]
            for held, logits in zip(losses, found, strict=True):
                held.append(float(metrics.negative_log_likelihood(logits, ids[1:]).mean()))
            distance += float(metrics.kl_divergence(*found).mean())
            same += float(metrics.agreement(*found).float().mean())
        most = largest(plain)
    base, changed = (torch.tensor(held, dtype=torch.float64) for held in losses)
    change = metrics.perplexity_change(base, changed)
    record = {
        "bench": "kept",
        "revision": given.revision or revision(),
        "device": device(),
        "model": given.model.name,
        "dtype": str(plain.model.placement.dtype).removeprefix("torch."),
        "tokens": windows[:, 1:].numel(),
        "perplexity": [round(metrics.perplexity(each), 4) for each in (base, changed)],
        "perplexity_change": [change.value, change.low, change.high],
        "kl": distance / len(windows),
        "agreement": same / len(windows),
        "largest": most,
    }
    for name in ("tokens", "perplexity", "perplexity_change", "kl", "agreement", "largest"):
        print(f"{name:>18} {record[name]}")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
