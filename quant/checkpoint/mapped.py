"""Reads tensors from memory-mapped files, for any file format that yields a table of their positions."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch

from quant.checkpoint.errors import AGAIN, BadFile
from quant.checkpoint.header import TensorEntry
from quant.checkpoint.regular import open_regular

Progress = Callable[[int, int], None]  # bytes read, bytes in all


class MappedTensors:
    """Reads tensors by name from mapped files; a `TensorSource`. `close` unmaps the files."""

    def __init__(
        self, folder: Path, files: tuple[Path, ...], entries: Mapping[str, TensorEntry], progress: Progress | None
    ) -> None:
        """Maps no file yet. `folder` is the model's path, for error texts."""
        self.folder = folder
        self.files = files
        self._entries = entries
        self._maps: dict[Path, mmap.mmap] = {}
        self._progress = progress
        self._done = 0
        self._total = sum(entry.size for entry in entries.values())
        self._last: TensorEntry | None = None

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def file(self, name: str) -> Path:
        """Returns the path of the file that holds the tensor."""
        return self._entry(name).file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type that the tensor has in the file."""
        return self._entry(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a view of the mapped file. The next call releases the view's pages; reading the view after that reads
        the file again."""
        entry = self._entry(name)
        self._release()
        self._last = entry
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        mapped = self._map(entry.file)
        count = math.prod(entry.shape)
        return torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.start).view(entry.shape)

    def nbytes(self) -> int:
        """Returns the size of the weight files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def close(self) -> None:
        self._release()
        for mapped in self._maps.values():
            with contextlib.suppress(BufferError):  # a view still refers to the map, which is unmapped with that view
                mapped.close()
        self._maps.clear()

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self._entries[name]
        except KeyError:
            fault = f"no tensor {name}"
            raise BadFile(self.folder, fault, "the weights do not belong to this config") from None

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with open_regular(file) as opened:
                    # The map is private, because torch requires writable memory and the file must never be written.
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise BadFile(file, f"cannot be mapped ({error})", AGAIN) from error
        return self._maps[file]

    def _release(self) -> None:
        """Releases the pages of the last tensor, except those that it shares with its neighbours in the file."""
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
