"""A model folder on disk: its JSON files, and its safetensors shards as one TensorSource."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from quant.detect import detect
from quant.errors import BadFile
from quant.spec import QuantSpec

_INDEX: Final = "model.safetensors.index.json"
_JSON_LIMIT: Final = 64 << 20  # bytes; an index of a very large model has a few MiB
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class Folder:
    """Holds no file open: each tensor maps its file anew, so that what was read can leave memory with its tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.files = _shards(path)
        self._entries = {entry.name: entry for file in self.files for entry in _entries(path / file)}

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        entry = self._entries[name]
        if entry.kind not in _DTYPES:
            raise BadFile(entry.file.name, f"tensor {name} has the type {entry.kind}, which is not read")
        return _DTYPES[entry.kind]

    def tensor(self, name: str) -> torch.Tensor:
        with _open(self._entries[name].file) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def spec(self) -> QuantSpec | None:
        beside = self.path / "quant_config.json"
        return detect(self.config, read_json(beside) if beside.is_file() else None, self.names())

    def nbytes(self) -> int:
        return sum((self.path / file).stat().st_size for file in self.files)


def read_json(path: Path) -> dict[str, object]:
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise BadFile(path.name, f"larger than {_JSON_LIMIT >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(path.name, error.strerror or "cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(path.name, "is not JSON") from error
    if not isinstance(value, dict):
        raise BadFile(path.name, "holds no JSON object")
    return value


def _shards(path: Path) -> tuple[str, ...]:
    """File names, from the index where there is one; only names inside the folder."""
    if (path / _INDEX).is_file():
        weight_map = read_json(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BadFile(_INDEX, "has no weight_map")
        files = sorted({str(file) for file in weight_map.values()})
        if any(Path(file).name != file or not file.endswith(".safetensors") for file in files):
            raise BadFile(_INDEX, "names a file that is not a safetensors file of this folder")
        return tuple(files)
    found = tuple(sorted(file.name for file in path.glob("*.safetensors")))
    if not found:
        raise BadFile(path.name, "no *.safetensors here; other weight files are not read, convert them first")
    return found


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor in a file's header."""

    name: str
    file: Path
    kind: str
    shape: tuple[int, ...]


def _entries(path: Path) -> Iterator[_Entry]:
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118
            about = file.get_slice(name)
            yield _Entry(name, path, about.get_dtype(), tuple(about.get_shape()))


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")  # checks the header against the file's length
    except (OSError, SafetensorError) as error:
        raise BadFile(path.name, f"is not a whole safetensors file ({error})") from error
