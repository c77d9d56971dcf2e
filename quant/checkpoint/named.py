"""Recognises by names alone what cannot be a model. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_HUB: Final = re.compile(r"[\w-][\w.-]*/([\w-][\w.-]*)", re.ASCII)
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FOLDER: Final = "a folder with config.json, model*.safetensors and tokenizer.json, or a GGUF file"
CONVERT: Final = "`whippet convert FOLDER OUT` makes safetensors of them"


def misnamed(model: str | Path) -> str | None:
    """One line with what to do instead; None for what may be a model's folder, or is not there at all."""
    path = Path(model)
    if path.is_dir():
        return _only_gguf(path)
    if path.exists():
        return None if path.suffix.lower() == ".gguf" else f"{path} {_file(path)}"
    if hub := _HUB.fullmatch(str(model)):
        fetch = f"hf download {model} --local-dir {hub[1]}"
        return f"{path} is no folder here, and nothing is downloaded: `{fetch}`, then give {hub[1]}"
    return None


def _only_gguf(folder: Path) -> str | None:
    first = next(iter(sorted(folder.glob("*.gguf"))), None)
    if first is None or (folder / "config.json").exists():
        return None
    return f"{folder} has GGUF files and no config.json: give one of the files, such as {first}"


def _file(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _PICKLED:
        return f"is a file of pickled weights: give its folder, once {CONVERT}"
    if suffix == ".safetensors":
        return f"is one file of a model: give its folder, {path.parent}"
    return f"is no folder: give {FOLDER}"
