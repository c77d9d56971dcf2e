"""Quantized checkpoints that are broken, or asked for what they are not: refused in one line that names the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import InvalidModel, Unsupported
from engine.worker.build import prepare
from tests.engine.quantized import (
    BASE,
    FAMILIES,
    Tensors,
    make,
    nothing,
    settings,
    write,
)


def test_eight_bits_on_top_of_four_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(Unsupported, match=r"holds awq-int4-g32 weights already; use auto") as caught:
        prepare(settings(tmp_path / "awq", quantization="int8"), nothing)
    assert "\n" not in str(caught.value)


Change = Callable[[dict[str, Any], Tensors], None]
UP = "model.layers.1.mlp.up_proj"
BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "missing scales": (lambda config, held: held.__delitem__(f"{UP}.scales"), (f"{UP}.scales", "no such tensor")),
    "missing layer": (
        lambda config, held: [held.pop(f"{UP}.{stem}") for stem in ("qweight", "qzeros", "scales")] and None,
        (f"{UP}.qweight is missing",),
    ),
    "shape": (
        lambda config, held: held.update({f"{UP}.qweight": held[f"{UP}.qweight"][:, :3].clone()}),
        (f"{UP}.qweight", "[64, 16]", "[64, 3]", "model.safetensors"),
    ),
    "type": (
        lambda config, held: held.update({f"{UP}.qzeros": held[f"{UP}.qzeros"].long()}),
        (f"{UP}.qzeros", "int32", "int64", "model.safetensors"),
    ),
    "infinite scale": (lambda config, held: held[f"{UP}.scales"].fill_(torch.inf), (f"{UP}.scales", "finite")),
    "group": (
        lambda config, held: config["quantization_config"].update(group_size=64),
        ("scales", "[1, 128]", "[2, 128]"),
    ),
    "plain beside packed": (
        lambda config, held: held.update({f"{UP}.weight": torch.zeros(128, 64)}),
        (f"{UP}.weight", "nothing beside"),
    ),
    "norm as integers": (
        lambda config, held: held.update({"model.norm.weight": torch.ones(64).int()}),
        ("model.norm.weight",),
    ),
    "surplus": (lambda config, held: held.update({"model.layers.9.x": torch.ones(1)}), ("model.layers.9.x",)),
    "no config": (lambda config, held: config.pop("quantization_config") and None, ("quantization_config", "qweight")),
    "gptq": (lambda config, held: config["quantization_config"].update(quant_method="gptq"), ("gptq", "AWQ version")),
    "nf4": (
        lambda config, held: config.update(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("nf4", "whippet quantize"),
    ),
    "fp8": (lambda config, held: config["quantization_config"].update(quant_method="fp8"), ("fp8", "quantize")),
    "bits": (lambda config, held: config["quantization_config"].update(bits=3), ("3 bits", "quantize")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    config = make(tmp_path)
    held = load_file(tmp_path / "awq" / "model.safetensors")
    change, words = BROKEN[name]
    change(config, held)
    folder = write(tmp_path / "broken", config, held)
    with pytest.raises(InvalidModel) as caught:
        prepare(settings(folder), nothing)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    assert str(folder) in message
    assert ";" in message  # fault; remedy
    for word in words:
        assert word in message


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_not_quantized(damage: float, tmp_path: Path) -> None:
    make(tmp_path)
    held = load_file(tmp_path / "plain" / "model.safetensors")
    held[f"{UP}.weight"][3, 5] = damage
    folder = write(tmp_path / "damaged", {**BASE, **FAMILIES["qwen3"]}, held)
    with pytest.raises(InvalidModel, match="NaN or infinity"):
        prepare(settings(folder, quantization="int8"), nothing)


def test_random_weights_that_fit_no_group_are_refused(tmp_path: Path) -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 48, "version": "gemm"}
    config = {**BASE, **FAMILIES["qwen3"], "quantization_config": section}
    folder = tmp_path / "dummy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match="group_size") as caught:
        prepare(settings(folder, load_format="dummy"), nothing)
    assert str(folder) in str(caught.value)
