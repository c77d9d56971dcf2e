"""The tensors of a model folder: sharded safetensors, mapped into memory, checked before anything is allocated.

Nothing but safetensors is opened. Every fault is a BadFile.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import torch

from quant.checkpoint.errors import BadFile
from quant.checkpoint.fields import MAX_INDEX_BYTES, read_json
from quant.checkpoint.header import AGAIN, Entry, read_header
from quant.checkpoint.named import CONVERT, FROM_GGUF
from quant.checkpoint.regular import open_regular

Progress = Callable[[int, int], None]  # bytes read, bytes in all

INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Checkpoint:
    """A folder's tensors by name; a `TensorSource`. `close` drops the maps."""

    def __init__(self, folder: Path, progress: Progress | None = None) -> None:
        self.folder = folder
        self.files = weight_files(folder)
        self._entries: dict[str, Entry] = {}
        for file in self.files:
            for name, entry in read_header(file).items():
                if name in self._entries:
                    fault = f"{name} is also in {self._entries[name].file.name}"
                    raise BadFile(file, fault, "remove one of them")
                self._entries[name] = entry
        self._maps: dict[Path, mmap.mmap] = {}
        self._progress = progress
        self._done = 0
        self._total = sum(entry.size for entry in self._entries.values())
        self._last: Entry | None = None

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._entry(name).file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Its type in the file."""
        return self._entry(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the file. The next call gives its pages back; a view read after that reads the file again."""
        entry = self._entry(name)
        self._release()
        self._last = entry
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        mapped = self._map(entry.file)
        count = math.prod(entry.shape)
        return torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)

    def nbytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in self.files)

    def close(self) -> None:
        self._release()
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # a view is still held: the map goes with it
                mapped.close()
        self._maps.clear()

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            fault = f"no tensor {name}"
            raise BadFile(self.folder, fault, "the weights do not belong to this config") from None

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with open_regular(file) as opened:
                    # A private map: torch wants writable memory, the file is never written.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise BadFile(file, f"cannot be mapped ({error})", AGAIN) from error
        return self._maps[file]

    def _release(self) -> None:
        """Gives the last tensor's pages back, as far as they hold nothing else."""
        entry, self._last = self._last, None
        if entry is None:
            return
        self._done += entry.size
        if self._progress is not None:
            self._progress(self._done, self._total)
        first = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (entry.start + entry.size - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and entry.file in self._maps:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, first, length)


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
        raise BadFile(gguf[0], "cannot be served", f"it {FROM_GGUF}")
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
