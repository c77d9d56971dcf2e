"""Converts pickled weights or a GGUF file to safetensors, one tensor at a time. The folder appears whole or not at
all."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from quant.checkpoint.check import check_folder
from quant.checkpoint.errors import AGAIN, BadFile
from quant.checkpoint.fields import MAX_INDEX_BYTES, read_json
from quant.checkpoint.formats import read_spec
from quant.checkpoint.gguf.file import gguf_file, is_gguf
from quant.checkpoint.header import DTYPES
from quant.checkpoint.named import misnamed
from quant.checkpoint.reading import load_config
from quant.checkpoint.safetensors import INDEX
from quant.checkpoint.tensors import HEAD
from quant.companions import copy_companions
from quant.errors import CannotQuantize
from quant.gguf_weights import GgufWeights
from quant.progress import Progress
from quant.torch_file import TorchFile

_SHARD_BYTES: Final = 5 * 10**9
_PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
_KINDS: Final = ("pytorch_model*.bin", "*.bin", "*.pth", "*.pt", "*.ckpt")
_TRAINING: Final = frozenset({"training_args.bin", "optimizer.bin", "scheduler.bin", "optimizer.pt", "scheduler.pt"})
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class _Holder(Protocol):
    """A file that holds tensors; `forget` releases the memory of the last one."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _TensorToWrite:
    name: str
    file: _Holder
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int  # bytes


class _Pickled:
    """The weights of a folder, in the order of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: dict[str, TorchFile] = {}
        for path in pickled_files(folder):
            file = TorchFile(path)
            for name in file.views:
                if name in self._held:
                    raise BadFile(path, f"{name[:80]!r} is also in {self.file(name).name}", "remove one of them")
                self._held[name] = file

    def names(self) -> Collection[str]:
        return self._held.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._held[name].views[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._held[name].tensor(name).dtype

    def file(self, name: str) -> Path:
        return self._held[name].path

    def parts(self) -> Iterator[_TensorToWrite]:
        """Yields the tensors to write. One that shares its numbers with another, or is a piece of it, gets its own."""
        return (
            _TensorToWrite(name, file, self.dtype(name), self.shape(name), file.nbytes(name))
            for name, file in self._held.items()
        )


def convert(source: Path, out: Path, progress: Progress) -> str:
    """Writes the folder `out` from a folder with pickled weights or from a GGUF file, and returns a summary for the
    user. The source is never written to."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CannotQuantize(f"{out} is there already: name a new folder")
    gguf = GgufWeights(source) if is_gguf(source) else None
    shards = _shards(_of_pickles(source) if gguf is None else _of_gguf(gguf), _SHARD_BYTES)
    size = sum(part.size for shard in shards for part in shard)
    work = out.resolve().with_name(f".{out.resolve().name}.converting")
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir(parents=True)
    try:
        if shutil.disk_usage(work).free < size:
            raise CannotQuantize(f"{out} needs {size >> 20:,} MiB, which its disk does not have")
        _write(shards, work, progress)
        _write_texts(source, work)
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    made = f"{sum(map(len, shards)):,} tensors, {size >> 20:,} MiB, {len(shards)} files in {out}\n"
    return made if gguf is None else f"{made}{gguf.costs}\n"


def _of_pickles(source: Path) -> list[_TensorToWrite]:
    config = load_config(source)
    weights = _Pickled(source)
    check_folder(weights, config, read_spec(source, weights.names()))
    tied = f"{HEAD}.weight" if config.tied_head else None  # the same numbers as the embedding, which files often repeat
    return [part for part in weights.parts() if part.name != tied]


def _of_gguf(weights: GgufWeights) -> list[_TensorToWrite]:
    parts = []
    for name in weights.names():
        dtype, shape = weights.dtype(name), weights.shape(name)
        parts.append(_TensorToWrite(name, weights, dtype, shape, math.prod(shape) * dtype.itemsize))
    return parts


def _write_texts(source: Path, folder: Path) -> None:
    """Writes the files other than weights: the config, the tokenizer and the chat templates."""
    if not is_gguf(source):
        copy_companions(source, folder)
        return
    for name, text in gguf_file(source).texts.items():
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(text)


def pickled_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of the index; else of the first kind that the folder has."""
    if refused := misnamed(folder):
        raise CannotQuantize(refused)
    if any(folder.glob("*.safetensors")):
        raise CannotQuantize(f"{folder} has safetensors already: serve it as it is")
    if (folder / _PICKLED_INDEX).exists():
        return _indexed(folder / _PICKLED_INDEX)
    for kind in _KINDS:
        files = sorted(file for file in folder.glob(kind) if file.name not in _TRAINING)
        if len(files) > 1 and kind != _KINDS[0]:
            raise CannotQuantize(f"{folder} has {files[0].name} and {files[1].name}: leave the one with the weights")
        if files:
            return tuple(files)
    raise BadFile(folder, "no pickled weights", "give a folder with pytorch_model.bin")


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index, AGAIN, MAX_INDEX_BYTES).get("weight_map")
    names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
    if not names or any(name != Path(name).name for name in names):
        raise BadFile(index, "weight_map must name files of this folder", AGAIN)
    return tuple(index.parent / name for name in names)


def _shards(parts: Sequence[_TensorToWrite], limit: int) -> list[list[_TensorToWrite]]:
    """Divides tensors into shards of at most `limit` bytes; a larger tensor stays alone."""
    shards: list[list[_TensorToWrite]] = []
    size = 0
    for part in parts:
        if not shards or size + part.size > limit:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.size
    return shards


def _write(shards: Sequence[Sequence[_TensorToWrite]], folder: Path, progress: Progress) -> None:
    total = sum(part.size for shard in shards for part in shard)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        for size in _write_shard(folder / name, shard):
            done += size
            progress("MiB written", done >> 20, total >> 20)
        weight_map |= dict.fromkeys((part.name for part in shard), name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(path: Path, shard: Sequence[_TensorToWrite]) -> Iterator[int]:
    """Yields the bytes of each tensor that is written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    ordered = sorted(shard, key=lambda part: -part.dtype.itemsize)  # largest elements first aligns all tensors
    for part in ordered:
        offsets = [at, at + part.size]
        header[part.name] = {"dtype": _NAMES[part.dtype], "shape": list(part.shape), "data_offsets": offsets}
        at += part.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for part in ordered:
            flat = part.file.tensor(part.name).contiguous().reshape(-1).view(torch.uint8)
            out.write(flat.numpy().data)
            del flat
            part.file.forget()
            yield part.size
        out.flush()
        with suppress(OSError):  # of a file system that cannot
            os.fsync(out.fileno())
