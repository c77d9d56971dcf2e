"""Traces as files: prompts as blocks, and labelled questions."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a block trace: equal numbers are equal blocks with equal prefixes."""

    blocks: tuple[int, ...]
    tokens: int
    answer: int = 0  # tokens
    at: float = 0.0  # seconds after the trace began


@dataclass(frozen=True, slots=True)
class Labelled:
    """A question and its label."""

    text: str
    intent: str


def read_blocks(path: Path) -> list[TraceRequest]:
    """Mooncake's format, one JSON object a line. Raises ValueError."""
    rows = (json.loads(line) for line in _text(path).splitlines() if line.strip())
    try:
        return [
            TraceRequest(
                blocks=tuple(map(int, row["hash_ids"])),
                tokens=int(row["input_length"]),
                answer=int(row.get("output_length", 0)),
                at=float(row.get("timestamp", 0)) / 1000,
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a block trace: {error}") from None


def read_labelled(path: Path, parts: Sequence[str] = ("test",)) -> list[Labelled]:
    """CLINC150's format: {part: [[text, intent], …]}. Raises ValueError."""
    try:
        found: Any = json.loads(_text(path))
        return [Labelled(str(text), str(intent)) for part in parts for text, intent in found[part]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a set of labelled questions: {error}") from None


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
