"""The third step: measures the trained weights on held-out text, then writes the model folders with their cards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import torch
from safetensors.torch import load_file

from models.train import export, measure, tokens
from models.train.network import SHAPES, Qwen3
from models.train.prepare import TOKENIZER_FOLDER, TOKENS_FILE, Corpus, read_corpus
from models.train.run import DRAFT, TARGET

KINDS = {TARGET: "target", DRAFT: "draft"}


@dataclass(frozen=True)
class Figures:
    """Held-out losses by document, in nats and tokens; `agreement` is the share of equal first choices."""

    parameters: int
    weight_bytes: int
    documents: tuple[tuple[str, float, int], ...]
    agreement: float

    @property
    def loss(self) -> float:
        """Nats a predicted token."""
        return sum(nats for _, nats, _ in self.documents) / sum(count for _, _, count in self.documents)


def write_models(work: Path, fitted: Path, models: Path) -> None:
    corpus = read_corpus(work)
    stream = tokens.load(work / TOKENS_FILE)["heldout"]
    cpu = torch.device("cpu")
    target = export.read_network(fitted / f"{TARGET}.safetensors", SHAPES[TARGET], cpu)
    for name, shape in SHAPES.items():
        weights = fitted / f"{name}.safetensors"
        export.write_folder(models / name, weights, work / TOKENIZER_FOLDER, shape)
        net = target if name == TARGET else export.read_network(weights, shape, cpu)
        figures = figures_of(weights, net, target, stream, corpus.heldout_names)
        fit = json.loads((fitted / f"fit_{name}.json").read_text("utf-8"))
        (models / name / "README.md").write_text(card(name, figures, corpus, fit), "utf-8")


def figures_of(weights: Path, net: Qwen3, target: Qwen3, stream: tokens.Stream, names: list[str]) -> Figures:
    losses = measure.losses_by_document(net, stream)
    return Figures(
        parameters=sum(value.numel() for value in load_file(weights).values()),
        weight_bytes=weights.stat().st_size,
        documents=tuple((name, nats, count) for name, (nats, count) in zip(names, losses, strict=True)),
        agreement=1.0 if net is target else measure.agreement(target, net, stream),
    )


def card(name: str, figures: Figures, corpus: Corpus, fit: Mapping[str, Any]) -> str:
    outcome, shape = fit["outcome"], SHAPES[name]
    modules = "\n".join(
        f"| {document} | {count} | {nats / count:.3f} | {math.exp(nats / count):.2f} |"
        for document, nats, count in figures.documents
    )
    template = Template(resources.files("models.train").joinpath(f"card_{KINDS[name]}.md").read_text("utf-8"))
    shared = Template(resources.files("models.train").joinpath("card_corpus.md").read_text("utf-8"))
    values: dict[str, object] = {
        "parameters": f"{figures.parameters:,}",
        "megabytes": f"{figures.weight_bytes / 1e6:.1f}",
        "shape": f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} query and {shape.kv_heads} key/value "
        f"heads of {shape.head_dim}, intermediate {shape.intermediate}, vocabulary {shape.vocabulary}, tied head",
        "loss": f"{figures.loss:.3f}",
        "perplexity": f"{math.exp(figures.loss):.2f}",
        "bits": f"{figures.loss / math.log(2) * corpus.tokens['heldout'] / corpus.text_bytes['heldout']:.3f}",
        "agreement": f"{100 * figures.agreement:.1f} %",
        "device": fit["device"],
        "torch": fit["torch"],
        "steps": outcome["steps"],
        "best_step": outcome["best_step"],
        "seconds": f"{outcome['seconds']:.0f}",
        "seen": f"{outcome['tokens'] / 1e6:.0f}",
        "train_loss": f"{outcome['train_loss']:.3f}",
        "valid_loss": f"{min(nats for _, nats in outcome['valid_losses']):.3f}",
        "modules": modules,
        **_corpus_values(corpus),
    }
    return template.substitute(values, corpus=shared.substitute(values))


def _corpus_values(corpus: Corpus) -> dict[str, object]:
    return {
        "python": corpus.python,
        "digest": corpus.digest,
        "repeated": f"{100 * corpus.repeated_lines:.1f} %",
        **{f"{split}_files": corpus.documents[split] for split in tokens.SPLITS},
        **{f"{split}_tokens": f"{corpus.tokens[split]:,}" for split in tokens.SPLITS},
    }
