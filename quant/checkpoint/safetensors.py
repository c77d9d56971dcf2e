"""The tensors of a model folder: sharded safetensors, mapped into memory, checked before anything is allocated.

Nothing but safetensors is opened. Every fault is a BadFile.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from quant.checkpoint.errors import AGAIN, BadFile
from quant.checkpoint.fields import MAX_INDEX_BYTES, read_json
from quant.checkpoint.header import TensorEntry, read_header
from quant.checkpoint.mapped import MappedTensors, Progress
from quant.checkpoint.named import CONVERT

INDEX: Final = "model.safetensors.index.json"
# Prefixes of the text part's tensors in a model that also takes images, and what replaces each.
TEXT_PREFIXES: Final = {"language_model.": "", "model.language_model.": "model."}
IMAGE_PREFIXES: Final = tuple(
    f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Checkpoint(MappedTensors):
    """A folder's tensors by name; a `TensorSource`. `close` drops the maps."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        files = weight_files(folder)
        entries: dict[str, TensorEntry] = {}
        for file in files:
            for name, entry in read_header(file).items():
                if name in entries:
                    raise BadFile(file, f"{name} is also in {entries[name].file.name}", "remove one of them")
                entries[name] = entry
        super().__init__(folder, files, _text_part(entries), progress)


def _text_part(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Returns the tensors of the text part of a model that also takes images, under the names that they have in a model
    of text alone. Returns the tensors of other models unchanged."""
    for prefix, instead in TEXT_PREFIXES.items():
        if any(name.startswith(prefix) for name in entries):
            kept = {name: entry for name, entry in entries.items() if not name.startswith(IMAGE_PREFIXES)}
            return {
                instead + name.removeprefix(prefix) if name.startswith(prefix) else name: entry
                for name, entry in kept.items()
            }
    return entries


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors of a folder, sorted by name: those of the index, else all."""
    if not folder.is_dir():
        raise BadFile(folder, "no such folder", "give the folder that holds config.json and model.safetensors")
    index = folder / INDEX
    if os.path.lexists(index):
        return _indexed_files(index)
    files = tuple(sorted(folder.glob("model*.safetensors"))) or tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise BadFile(folder / pickles[0], "pickled weights are never loaded", CONVERT)
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise BadFile(folder, "has GGUF files and no safetensors", f"give one of the files, such as {gguf[0].name}")
    raise BadFile(folder / "model.safetensors", "no such file", "download the model's weights")


def _indexed_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index, AGAIN, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFile(index, "weight_map is missing", AGAIN)
    names = set(map(str, weight_map.values()))
    if not all(name == Path(name).name and name.endswith(".safetensors") for name in names):
        raise BadFile(index, "weight_map must name safetensors files of this folder", AGAIN)
    files = tuple(index.parent / name for name in sorted(names))
    for file in files:
        if not file.exists():
            raise BadFile(file, f"no such file, though {INDEX} names it", "download the missing shard")
    held: dict[str, str] = {name: file.name for file in files for name in read_header(file)}
    for tensor, name in weight_map.items():
        if held.get(tensor) != name:
            raise BadFile(index.parent / str(name), f"lacks tensor {tensor}, which {INDEX} places there", AGAIN)
    return files
