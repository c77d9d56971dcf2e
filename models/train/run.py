"""The second step, once a model: trains it and writes its weights and `fit_<name>.json`. The target comes first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from models.train import export, tokens
from models.train.fit import Loss, Recipe, borrow_embedding, distillation_loss, fit, next_token_loss
from models.train.network import SHAPES, Qwen3
from models.train.prepare import TOKENS_FILE

TARGET, DRAFT = "demo", "demo-draft"
RECIPES = {
    TARGET: Recipe(steps=6000, seconds=170.0, rate=3e-3, dropout=0.1),
    DRAFT: Recipe(steps=9000, seconds=110.0, rate=3e-3, dropout=0.0, batch_tokens=16384),
}


def tiny(recipe: Recipe) -> Recipe:
    """A few seconds of CPU: shows that every part runs, gives no useful model."""
    return replace(recipe, steps=6, batch_tokens=512, length=64, long_length=128, evaluations=2)


def run(name: str, recipe: Recipe, work: Path, fitted: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    streams = tokens.load(work / TOKENS_FILE)
    torch.manual_seed(recipe.seed)
    net = Qwen3(SHAPES[name], recipe.dropout).to(device)
    outcome = fit(net, streams["train"], streams["valid"], recipe, _loss_for(name, net, fitted))
    export.write_weights(net, fitted / f"{name}.safetensors")
    report = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "outcome": asdict(outcome),
    }
    (fitted / f"fit_{name}.json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")


def _loss_for(name: str, net: Qwen3, fitted: Path) -> Loss:
    if name == TARGET:
        return next_token_loss
    device = next(net.parameters()).device
    target = export.read_network(fitted / f"{TARGET}.safetensors", SHAPES[TARGET], device)
    borrow_embedding(net, target)
    return distillation_loss(target)
