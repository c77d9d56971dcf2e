"""The corpus as token arrays: one flat stream a split, where its documents start, and windows cut from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.train.chat import END_OF_TEXT
from models.train.corpus import Document, Split
from models.train.tokenizer import special_id

SPLITS: tuple[Split, ...] = ("train", "valid", "heldout")
SNAP_SHARE = 0.5  # of the windows near a document's start begin at it


@dataclass(frozen=True)
class Stream:
    """Token ids of all documents, each closed by end-of-text; `starts` are offsets; `text_bytes` their UTF-8 length."""

    ids: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]
    text_bytes: int


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Stream:
    end = special_id(tokenizer, END_OF_TEXT)
    parts: list[npt.NDArray[np.uint16]] = []
    for at in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch_fast([document.text for document in documents[at : at + 512]]):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    lengths = np.asarray([len(part) for part in parts], dtype=np.int64)
    return Stream(
        ids=np.concatenate(parts),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]),
        text_bytes=sum(len(document.text.encode("utf-8")) for document in documents),
    )


def save(path: Path, streams: dict[Split, Stream]) -> None:
    arrays: dict[str, npt.NDArray[np.generic]] = {}
    for split, stream in streams.items():
        arrays[f"{split}_ids"] = stream.ids
        arrays[f"{split}_starts"] = stream.starts
        arrays[f"{split}_bytes"] = np.asarray(stream.text_bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load(path: Path) -> dict[Split, Stream]:
    with np.load(path, allow_pickle=False) as arrays:
        return {
            split: Stream(
                ids=cast("npt.NDArray[np.uint16]", arrays[f"{split}_ids"]),
                starts=cast("npt.NDArray[np.int64]", arrays[f"{split}_starts"]),
                text_bytes=int(arrays[f"{split}_bytes"]),
            )
            for split in SPLITS
        }


def window_starts(stream: Stream, length: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One pass: a shuffled grid of windows of length + 1 ids, its phase random, some moved onto a document's start."""
    last = len(stream.ids) - length - 1
    if last < 0:
        raise ValueError(f"{len(stream.ids)} tokens are too few for windows of {length}")
    grid = np.arange(rng.integers(0, min(length, last + 1)), last + 1, length, dtype=np.int64)
    following = stream.starts[np.minimum(np.searchsorted(stream.starts, grid), len(stream.starts) - 1)]
    near = (following >= grid) & (following - grid < length // 2) & (following <= last)
    snapped = np.where(near & (rng.random(len(grid)) < SNAP_SHARE), following, grid)
    return rng.permutation(snapped)


def gather(ids: Tensor, starts: npt.NDArray[np.int64], length: int) -> Tensor:
    """Windows of length + 1 ids: [len(starts), length + 1]."""
    offsets = torch.from_numpy(starts).to(ids.device)[:, None] + torch.arange(length + 1, device=ids.device)
    return ids[offsets].long()


class Windows:
    """Endless training windows; `take` may ask for another length at any time, which begins a new pass."""

    def __init__(self, stream: Stream, device: torch.device, seed: int) -> None:
        self._stream = stream
        self._ids = torch.from_numpy(stream.ids.astype(np.int32)).to(device)
        self._rng = np.random.default_rng(seed)
        self._pass: Iterator[npt.NDArray[np.int64]] = iter(())
        self._shape = (0, 0)

    def take(self, batch: int, length: int) -> Tensor:
        if self._shape != (batch, length):
            self._shape, self._pass = (batch, length), iter(())
        starts = next(self._pass, None)
        if starts is None:
            order = window_starts(self._stream, length, self._rng)
            if len(order) < batch:
                raise ValueError(f"{len(order)} windows are too few for a batch of {batch}")
            self._pass = iter([order[at : at + batch] for at in range(0, len(order) - batch + 1, batch)])
            starts = next(self._pass)
        return gather(self._ids, starts, length)
