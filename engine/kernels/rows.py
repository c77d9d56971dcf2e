"""Wrappers of `change`, `pick` and `finish`: the state of a batch's rows at fixed addresses and its changes from step
to step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from engine.kernels.build import Kernels
from engine.kernels.launch import Argument, Launch, Shape, prepare
from engine.kernels.linear import CHAIN
from engine.kernels.prefill import ProductParts
from engine.kernels.sampling import ROW_WORDS
from engine.kernels.tokens import MAX_STOPS

LEAVE, PAGES, ENTER, MOVE = range(4)  # operations of `change`
IDLE = 128  # flag of a ring entry, beside those of `tokens`
ENTER_WORDS = 10 + MAX_STOPS + ROW_WORDS  # of a row that enters, beside its pages
_CHANGE_THREADS, _PICK_THREADS, _PICK_EACH, _FINISH_THREADS = 128, 256, 16, 512


@dataclass(frozen=True, slots=True)
class RowStates:
    """A step advances the first rows."""

    token: torch.Tensor  # int32 [rows]: fed by the next step
    position: torch.Tensor  # int32 [rows]: of that token; -1 is an idle row
    length: torch.Tensor  # int32 [rows]: tokens whose keys the next step reads, its own included; 0 of an idle row
    last: torch.Tensor  # int32 [rows]: a token placed there is the row's last
    free_from: torch.Tensor  # int32 [rows]: the position from which a stop token may stand
    temperature: torch.Tensor  # float32 [rows]; 0 is greedy
    noise_key: torch.Tensor  # int64 [rows]: `engine.sampling.noise.seed_key`
    stops: torch.Tensor  # int32 [rows, 8]: tokens that end the row, -1 for none
    sampled: torch.Tensor  # int32 [rows, 16]: `sampling.SampledRow.packed`; zeros leave the choice to `pick`
    pages: torch.Tensor  # int32 [rows, most pages of a row]
    best: torch.Tensor  # int64 [rows], zero between steps

    def first(self, rows: int) -> RowStates:
        return RowStates(*(getattr(self, field.name)[:rows] for field in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    index: int  # among the row states
    token: int  # to be fed
    position: int  # of that token
    last: int
    free_from: int
    temperature: float
    noise_key: int
    stops: Sequence[int]
    sampled: bytes | None = None  # `sampling.SampledRow.packed`
    pages: Sequence[int] = ()

    def words(self) -> list[int]:
        return [
            ENTER,
            self.index,
            self.token,
            self.position,
            self.last,
            self.free_from,
            *struct.unpack("<i", struct.pack("<f", self.temperature)),
            *struct.unpack("<2i", struct.pack("<q", self.noise_key)),
            *self.stops,
            *[-1] * (MAX_STOPS - len(self.stops)),
            len(self.pages),
            *struct.unpack(f"<{ROW_WORDS}i", self.sampled or bytes(4 * ROW_WORDS)),
            *self.pages,
        ]


def packed_words(told: Sequence[Sequence[int]]) -> list[int]:
    offsets, at = [], len(told)
    for one in told:
        offsets.append(at)
        at += len(one)
    return [*offsets, *(word for one in told for word in one)]


@dataclass(frozen=True, slots=True)
class Report:
    number: torch.Tensor  # int32 [1]: of the last step
    ring: torch.Tensor  # int64 [entries, rows], pinned: number << 32 | flags << 24 | token


def allocate(rows: int, pages: int, device: torch.device) -> RowStates:
    def integers(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(size, value, dtype=dtype, device=device)

    return RowStates(
        token=integers(rows),
        position=integers(rows, value=-1),
        length=integers(rows),
        last=integers(rows),
        free_from=integers(rows),
        temperature=torch.zeros(rows, dtype=torch.float32, device=device),
        noise_key=integers(rows, dtype=torch.int64),
        stops=integers(rows, MAX_STOPS, value=-1),
        sampled=integers(rows, ROW_WORDS),
        pages=integers(rows, pages),
        best=integers(rows, dtype=torch.int64),
    )


def change(library: Kernels, states: RowStates, mail: torch.Tensor) -> Launch:
    """Applies one change (`times`: several), whose `mail` int32 is laid out as in `rows.cu`."""
    values: dict[str, Argument] = {
        "mail": mail,
        "token": states.token,
        "position": states.position,
        "length": states.length,
        "last": states.last,
        "free_from": states.free_from,
        "temperature": states.temperature,
        "noise_key": states.noise_key,
        "stops": states.stops,
        "sampled": states.sampled,
        "page_table": states.pages,
        "table_stride": states.pages.stride(0),
    }
    kernel = library.kernel("rows", "change", {"OP_VOCABULARY": 1, "OP_SLICES": 0})
    return prepare(kernel, Shape((1, 1, 1), _CHANGE_THREADS), values).alone()


def times(launch: Launch, changes: int) -> Launch:
    return replace(launch, shape=replace(launch.shape, grid=(changes, 1, 1)))


def pick(library: Kernels, logits: ProductParts, states: RowStates) -> Launch:
    """states.best = the best token of each row, logits [rows, vocabulary]."""
    rows, vocabulary = logits.data.shape[-2:]
    values: dict[str, Argument] = {
        "position": states.position,
        "free_from": states.free_from,
        "temperature": states.temperature,
        "noise_key": states.noise_key,
        "stops": states.stops,
        "best": states.best,
        "tokens": rows,
        **logits.values(),
    }
    kernel = library.kernel("rows", "pick", {"OP_VOCABULARY": vocabulary, "OP_SLICES": int(logits.split)})
    blocks = -(-vocabulary // (_PICK_THREADS * _PICK_EACH))
    return prepare(kernel, Shape((blocks, rows, 1), _PICK_THREADS), {**values, **CHAIN})


def finish(library: Kernels, states: RowStates, report: Report) -> Launch:
    values: dict[str, Argument] = {
        "best": states.best,
        "token": states.token,
        "position": states.position,
        "length": states.length,
        "last": states.last,
        "stops": states.stops,
        "number": report.number,
        "ring": report.ring,
        "ring_size": report.ring.shape[0],
        "ring_stride": report.ring.shape[1],
        "rows": states.token.shape[0],
    }
    kernel = library.kernel("rows", "finish", {"OP_VOCABULARY": 1, "OP_SLICES": 0})
    return prepare(kernel, Shape((1, 1, 1), _FINISH_THREADS), {**values, **CHAIN})
