"""The tensors of a model folder: sharded safetensors, mapped into memory, checked before anything is allocated.

Each fault is an InvalidModel of one line that names the file and the remedy. Nothing but safetensors is opened.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import InvalidModel
from engine.model.fields import read_json

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

INDEX = "model.safetensors.index.json"
AGAIN = "download the file again"
MAX_HEADER_BYTES = 100 << 20
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DTYPES = {
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
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    size: int  # bytes


class Checkpoint:
    """A folder's tensors by name; a `TensorSource`. Closing it drops the maps."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        self.folder = folder
        self.files = weight_files(folder)
        self._entries: dict[str, Entry] = {}
        for file in self.files:
            for name, entry in read_header(file).items():
                if name in self._entries:
                    raise InvalidModel(f"{file}: {name} is also in {self._entries[name].file.name}; remove one of them")
                self._entries[name] = entry
        self._maps: dict[Path, mmap.mmap] = {}
        self._progress = progress
        self._done = 0
        self._total = sum(entry.size for entry in self._entries.values())
        self._last: Entry | None = None

    def names(self) -> Collection[str]:
        """Every tensor of the folder."""
        return self._entries.keys()

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._entry(name).file

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Its type in the file."""
        return self._entry(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file, good until the next call: then its pages are given back."""
        entry = self._entry(name)
        self._release()
        self._last = entry
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        mapped = self._map(entry.file)
        count = math.prod(entry.shape)
        return torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)

    def close(self) -> None:
        """Gives everything back."""
        self._release()
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # a view is still held: the map goes with it
                mapped.close()
        self._maps.clear()

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise InvalidModel(f"{self.folder}: no tensor {name}; the weights do not belong to this config") from None

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as opened:
                    # A private map: torch wants writable memory, the file is never written.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise InvalidModel(f"{file}: cannot be mapped ({error}); {AGAIN}") from error
        return self._maps[file]

    def _release(self) -> None:
        entry, self._last = self._last, None
        if entry is None:
            return
        self._done += entry.size
        if self._progress is not None:
            self._progress("weights", self._done, self._total)
        first = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (entry.start + entry.size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and entry.file in self._maps:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, first, length)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors of a folder, sorted by name: those of the index, else all."""
    if not folder.is_dir():
        raise InvalidModel(f"{folder}: no such folder; give the folder that holds config.json and model.safetensors")
    index = folder / INDEX
    if index.exists():
        return _indexed_files(index)
    files = tuple(sorted(folder.glob("model*.safetensors"))) or tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise InvalidModel(f"{folder / pickles[0]}: pickled weights are never loaded; convert them to safetensors")
    raise InvalidModel(f"{folder / 'model.safetensors'}: no such file; download the model's weights")


def _indexed_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidModel(f"{index}: weight_map is missing; {AGAIN}")
    names = set(weight_map.values())
    if not all(isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors") for name in names):
        raise InvalidModel(f"{index}: weight_map must name safetensors files of this folder; {AGAIN}")
    files = tuple(index.parent / name for name in sorted(names))
    for file in files:
        if not file.is_file():
            raise InvalidModel(f"{file}: no such file, though {INDEX} names it; download the missing shard")
    held: dict[str, str] = {name: file.name for file in files for name in read_header(file)}
    for tensor, name in weight_map.items():
        if held.get(tensor) != name:
            raise InvalidModel(f"{index.parent / name}: lacks tensor {tensor}, which {INDEX} places there; {AGAIN}")
    return files


def read_header(file: Path) -> dict[str, Entry]:
    """What one safetensors file says it holds, checked against its length."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise InvalidModel(f"{file}: truncated or not safetensors; {AGAIN}")
            header = json.loads(opened.read(length).decode())
    except FileNotFoundError:
        raise InvalidModel(f"{file}: no such file; download the model's weights") from None
    except OSError as error:
        raise InvalidModel(f"{file}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError):
        raise InvalidModel(f"{file}: its safetensors header is corrupt; {AGAIN}") from None
    if not isinstance(header, dict):
        raise InvalidModel(f"{file}: its safetensors header is corrupt; {AGAIN}")
    entries = {name: _entry(file, name, raw, 8 + length) for name, raw in header.items() if name != "__metadata__"}
    _check_layout(file, entries, 8 + length, size)
    return entries


def _entry(file: Path, name: str, raw: Any, origin: int) -> Entry:
    fault = f"{file}: the header entry of {_shown(name)} is corrupt; {AGAIN}"
    if not isinstance(raw, dict) or not isinstance(raw.get("dtype"), str):
        raise InvalidModel(fault)
    if raw["dtype"] not in DTYPES:
        known = ", ".join(DTYPES)
        raise InvalidModel(f"{file}: {_shown(name)} has type {_shown(raw['dtype'])}; use weights in one of {known}")
    shape, offsets = _naturals(raw.get("shape")), _naturals(raw.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise InvalidModel(fault)
    dtype = DTYPES[raw["dtype"]]
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise InvalidModel(fault)
    return Entry(file, dtype, shape, origin + start, end - start)


def _naturals(value: Any) -> tuple[int, ...] | None:
    """A short list of sizes, or None if it is anything else."""
    if not isinstance(value, list) or len(value) > 8:
        return None
    sizes = tuple(item for item in value if type(item) is int and 0 <= item < 1 << 62)
    return sizes if len(sizes) == len(value) else None


def _check_layout(file: Path, entries: dict[str, Entry], origin: int, size: int) -> None:
    end = origin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.size)):
        if entry.start != end:
            raise InvalidModel(f"{file}: its tensors overlap or leave gaps; {AGAIN}")
        end = entry.start + entry.size
    if end != size:
        fault = "truncated" if end > size else "longer than its header says"
        raise InvalidModel(f"{file}: {fault} ({size} bytes, {end} expected); {AGAIN}")


def _shown(name: str) -> str:
    """A name from the file, fit for one line of a message."""
    return repr(name[:80])


def check_tensors(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], ignored: Collection[str]) -> None:
    """Whether exactly these tensors are there, as plain numbers of these shapes."""
    names = set(checkpoint.names())
    for name, shape in expected.items():
        if name not in names:
            raise InvalidModel(f"{checkpoint.folder}: tensor {name} is missing; download all shards of the model")
        found = checkpoint.shape(name)
        if found != shape:
            where = checkpoint.file(name)
            raise InvalidModel(
                f"{where}: {name} has shape {list(found)}, config.json asks for {list(shape)}; "
                "use the config.json that belongs to the weights"
            )
        if not checkpoint.dtype(name).is_floating_point:
            raise InvalidModel(
                f"{checkpoint.file(name)}: {name} holds {checkpoint.dtype(name)}, not plain numbers; "
                "config.json lacks its quantization_config"
            )
    surplus = sorted(name for name in names - expected.keys() if not _harmless(name, ignored))
    if surplus:
        raise InvalidModel(
            f"{checkpoint.file(surplus[0])}: {_shown(surplus[0])} has no place in the model of config.json; "
            "use the config.json that belongs to the weights"
        )


def _harmless(name: str, ignored: Collection[str]) -> bool:
    return name in ignored or name.endswith("rotary_emb.inv_freq")
