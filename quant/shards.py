"""Writes safetensors files: one part at a time, then parts joined into shards by copying bytes, never in memory."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch
from safetensors.torch import save_file

from quant.checkpoint.errors import BadFile

_METADATA: Final = {"format": "pt"}
_COPY_AT_ONCE: Final = 1 << 20  # bytes
_ALIGNMENT: Final = 8  # of a file's data


def write_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The file appears whole or not at all."""
    ready = path.with_name(path.name + ".writing")
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, ready, metadata=_METADATA)
    os.replace(ready, path)


def write_text(path: Path, text: str) -> None:
    ready = path.with_name(path.name + ".writing")
    ready.write_text(text, encoding="utf-8")
    os.replace(ready, path)


def join(parts: Sequence[Path], folder: Path, limit: int) -> None:
    """Joins parts, in order, into model files of at most `limit` bytes each (a larger part stays alone)."""
    bundles: list[list[Path]] = []
    size = 0
    for part in parts:
        length = part.stat().st_size
        if not bundles or size + length > limit:
            bundles.append([])
            size = 0
        bundles[-1].append(part)
        size += length
    weight_map: dict[str, str] = {}
    for number, bundle in enumerate(bundles, start=1):
        name = "model.safetensors" if len(bundles) == 1 else f"model-{number:05}-of-{len(bundles):05}.safetensors"
        weight_map |= dict.fromkeys(_concatenate(bundle, folder / name), name)
    if len(bundles) > 1:
        total = sum(part.stat().st_size for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _concatenate(parts: Sequence[Path], target: Path) -> tuple[str, ...]:
    """One safetensors file out of several; returns the names of its tensors."""
    pieces = sorted((piece for part in parts for piece in _pieces(part)), key=lambda piece: -piece.alignment)
    header: dict[str, object] = {"__metadata__": _METADATA}
    at = 0
    for piece in pieces:
        header[piece.name] = {**piece.entry, "data_offsets": [at, at + piece.size]}
        at += piece.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    ready = target.with_name(target.name + ".writing")
    with ready.open("wb") as out, ExitStack() as opened:
        out.write(struct.pack("<Q", len(text)) + text)
        files = {part: opened.enter_context(part.open("rb")) for part in parts}
        for piece in pieces:
            _copy(files[piece.part], piece, out)
    os.replace(ready, target)
    return tuple(piece.name for piece in pieces)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One tensor's bytes in a part. alignment: bytes of an element; files keep the widest first."""

    name: str
    entry: Mapping[str, object]
    part: Path
    start: int
    size: int
    alignment: int


def _pieces(part: Path) -> Iterator[_Piece]:
    """Yields the tensors of a file that this module wrote."""
    with part.open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8))
        header = json.loads(source.read(length))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        elements = max(1, math.prod(entry["shape"]))
        yield _Piece(name, entry, part, 8 + length + first, last - first, (last - first) // elements)


def _copy(source: BinaryIO, piece: _Piece, out: BinaryIO) -> None:
    source.seek(piece.start)
    left = piece.size
    while left:
        chunk = source.read(min(left, _COPY_AT_ONCE))
        if not chunk:
            raise BadFile(piece.part, "was cut short while it was read", "start again")
        out.write(chunk)
        left -= len(chunk)
