"""A quantization under way: its finished layers lie in the output folder, so that a killed job can go on.

OUT/.partial/state.json                what the job is, and what each finished layer lost
OUT/.partial/layer-00000.safetensors   a finished layer, as it will be shipped
OUT/.partial/hidden-00001.safetensors  calibration text before layer 1: only the newest is kept
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from quant.checkpoint.config import CONFIG
from quant.checkpoint.fields import read_json
from quant.checkpoint.formats import BESIDE
from quant.checkpoint.safetensors import Checkpoint
from quant.companions import copy_companions
from quant.errors import CannotQuantize
from quant.shards import join, write_part, write_text

_SHARD_BYTES: Final = 4 << 30

Record = Mapping[str, Any]  # JSON


class QuantizeJob:
    """Every method leaves the folder in a state from which `Job.open` goes on."""

    def __init__(self, out: Path, state: dict[str, Any]) -> None:
        self._out = out
        self._work = out / ".partial"
        self._state = state

    @staticmethod
    def open(out: Path, key: str) -> QuantizeJob:
        """A new job, or the unfinished one of the same key. One of another key is in the way once a layer is done."""
        path = out / ".partial" / "state.json"
        if path.is_file():
            state: dict[str, Any] = read_json(path, "remove the folder and start again")
            if state.get("key") == key:
                return QuantizeJob(out, state)
            if state.get("layers") != [] or state.get("assembled"):
                raise CannotQuantize(
                    f"{out.name} holds an unfinished job of another model or other options: "
                    "repeat that one, or remove the folder"
                )
            shutil.rmtree(path.parent)  # it had not begun
        if out.exists() and (not out.is_dir() or any(entry != path.parent for entry in out.iterdir())):
            raise CannotQuantize(f"{out.name} is there already and is not an unfinished job: name a new folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        job = QuantizeJob(out, {"key": key, "layers": [], "assembled": False})
        job._save()
        return job

    @property
    def layers(self) -> tuple[Record, ...]:
        return tuple(self._state["layers"])

    @property
    def assembled(self) -> bool:
        return bool(self._state["assembled"])

    def noted(self, name: str) -> Any:
        """Returns what `note` stored, or None."""
        return self._state.get("notes", {}).get(name)

    def note(self, name: str, value: Any) -> None:
        self._state.setdefault("notes", {})[name] = value
        self._save()

    def kept(self, name: str) -> torch.Tensor | None:
        """A tensor that `keep` stored."""
        path = self._work / f"{name}.safetensors"
        return load_file(path)[name] if path.is_file() else None

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        write_part(self._work / f"{name}.safetensors", {name: tensor})

    def hidden(self) -> torch.Tensor | None:
        """Returns the next layer's input, where an earlier run got that far."""
        return self.kept(_hidden(len(self.layers)))

    def finish_layer(self, tensors: Mapping[str, torch.Tensor], hidden: torch.Tensor | None, record: Record) -> None:
        index = len(self.layers)
        write_part(self._work / _layer(index), tensors)
        if hidden is not None:
            self.keep(_hidden(index + 1), hidden)
        self._state["layers"].append(record)
        self._save()
        (self._work / f"{_hidden(index)}.safetensors").unlink(missing_ok=True)

    def assemble(self, rest: Mapping[str, torch.Tensor], source: Path, config: Record) -> None:
        """The model folder: shards, the source's other files, and the config last, which makes it a model."""
        write_part(self._work / "rest.safetensors", rest)
        parts = [self._work / "rest.safetensors", *(self._work / _layer(i) for i in range(len(self.layers)))]
        join(parts, self._out, _SHARD_BYTES)
        copy_companions(source, self._out, without=(CONFIG, BESIDE))
        write_text(self._out / CONFIG, json.dumps(config, indent=2) + "\n")
        self._state["assembled"] = True
        self._save()
        for part in parts:
            part.unlink()

    def assembled_elsewhere(self) -> None:
        self._state["assembled"] = True
        self._save()

    def close(self) -> None:
        shutil.rmtree(self._work)

    def _save(self) -> None:
        write_text(self._work / "state.json", json.dumps(self._state))


def job_key(source: Checkpoint, options: Record) -> str:
    """Identifies a job: the source's config, its files' sizes and times, and the options."""
    digest = hashlib.sha256((source.folder / CONFIG).read_bytes())
    for file in source.files:
        about = file.stat()
        digest.update(f"{file.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest.hexdigest()


def _layer(index: int) -> str:
    return f"layer-{index:05}.safetensors"


def _hidden(index: int) -> str:
    return f"hidden-{index:05}"
