"""Reads the header of one safetensors file, and checks it against the file's length."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from quant.checkpoint.errors import AGAIN, BadFile
from quant.checkpoint.regular import open_regular

MAX_HEADER_BYTES: Final = 16 << 20  # some 100,000 tensors; parsed, it takes ten times as much
DTYPES: Final = {
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
class TensorEntry:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    size: int  # bytes


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of the file by name. Raises BadFile. Nothing is allocated by what the header claims."""
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise BadFile(file, "truncated or not safetensors", AGAIN)
            header = json.loads(opened.read(length).decode())
    except FileNotFoundError:
        raise BadFile(file, "no such file", "download the model's weights") from None
    except OSError as error:
        raise BadFile(file, f"cannot be read ({error.strerror})", "check its permissions") from error
    except (ValueError, RecursionError):
        raise BadFile(file, "its safetensors header is corrupt", AGAIN) from None
    if not isinstance(header, dict):
        raise BadFile(file, "its safetensors header is corrupt", AGAIN)
    entries = {name: _entry(file, name, raw, 8 + length) for name, raw in header.items() if name != "__metadata__"}
    _check_layout(file, entries, 8 + length, size)
    return entries


def printable(name: str) -> str:
    """A name from a file, fit for one line of a message."""
    return repr(name[:80])


def _entry(file: Path, name: str, raw: Any, origin: int) -> TensorEntry:
    corrupt = BadFile(file, f"the header entry of {printable(name)} is corrupt", AGAIN)
    if not isinstance(raw, dict) or not isinstance(raw.get("dtype"), str):
        raise corrupt
    if raw["dtype"] not in DTYPES:
        fault = f"{printable(name)} has type {printable(raw['dtype'])}"
        raise BadFile(file, fault, f"use weights in one of {', '.join(DTYPES)}")
    shape, offsets = _naturals(raw.get("shape")), _naturals(raw.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise corrupt
    dtype = DTYPES[raw["dtype"]]
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise corrupt
    return TensorEntry(file, dtype, shape, origin + start, end - start)


def _naturals(value: Any) -> tuple[int, ...] | None:
    """A short list of sizes, or None if it is anything else."""
    if not isinstance(value, list) or len(value) > 8:
        return None
    sizes = tuple(item for item in value if type(item) is int and 0 <= item < 1 << 62)
    return sizes if len(sizes) == len(value) else None


def _check_layout(file: Path, entries: dict[str, TensorEntry], origin: int, size: int) -> None:
    end = origin
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.size)):
        if entry.start != end:
            raise BadFile(file, "its tensors overlap or leave gaps", AGAIN)
        end = entry.start + entry.size
    if end != size:
        fault = "truncated" if end > size else "longer than its header declares"
        raise BadFile(file, f"{fault} ({size} bytes, {end} expected)", AGAIN)
